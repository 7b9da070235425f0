"""The evaluation tasks. An entry of `TASKS` is all that the rest of the program knows about a task.

| name | scored by | local files in the data folder |
|---|---|---|
| `gsm8k` | lm-eval: generation, exact match by two filters | `gsm8k/test*.jsonl`, `gsm8k/train.jsonl` for the shots |
| `mmlu`, `mmlu:SUBJECT` | lm-eval: multiple choice by log-likelihood | `mmlu/test*.jsonl`, `mmlu/dev.jsonl` for the shots |
| `hellaswag` | lm-eval: continuation log-likelihood, plain and by length | `hellaswag/validation*.jsonl` |
| `wikitext` | lm-eval: word and byte perplexity by page | `wikitext2/test.raw`, else `wikitext2/validation.raw` |
| `wikitext_tokens` | our own function (`eval/tasks/`): token perplexity over fixed blocks | the same |

Rows have the fields of the public data sets. To add a task that lm-eval defines, add an entry under lm-eval's name for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..config import ConfigError
from ..terminal import shown
from . import smoke
from .rows import INDEX, Row, Splits, json_lines, wikitext_rows

OPTIONS = ("shots", "chat_template", "block", "stride", "max_gen_tokens")
"""Command-line options that apply to some tasks only, see `Task.takes`."""


@dataclass(frozen=True)
class Subjects:
    """How lm-eval divides a task by the `subject` of its rows: one definition per subject."""

    definition: str
    """The name of a subject's definition in lm-eval, with ``{subject}``."""
    group: str
    """The folder of lm-eval that holds these definitions; variants of the task have others."""
    template: str
    """The definition that a custom subject borrows: one that only the user's files have."""
    description: str
    """The first line of a custom subject's prompts, with ``{subject}``."""


@dataclass(frozen=True)
class Task:
    """One task: where its rows come from, what a row must hold, which options apply, and who scores it."""

    name: str
    """On the command line, and lm-eval's name of its definition."""
    files: Mapping[str, tuple[str, ...]]
    """Glob patterns in the data folder by split; of several patterns the first with a match counts. The first split is
    scored."""
    read: Callable[[Path], list[Row]] = json_lines
    fields: tuple[str, ...] = ()
    """Required in every row."""
    check: Callable[[Row], str | None] | None = None
    """What is wrong with the values of a row that has all fields; None: nothing."""
    builtin: Callable[[], Splits] | None = None
    """Rows for ``--data builtin``; None: the task has none, and refuses it."""
    shots_from: str | None = None
    """The split of the few-shot examples; None: --shots does not apply. With subjects, an item gets the examples of
    its own subject."""
    subjects: Subjects | None = None
    """For a task that also takes the form NAME:SUBJECT; its rows have a field `subject`."""
    generates: bool = False
    """Whether the model writes answers, so that --max-gen-tokens applies."""
    chat_template: bool = False
    """Whether --chat-template changes its prompts."""
    own_module: str | None = None
    """The module in ``eval/tasks`` that scores it by token, in blocks of --block and --stride; None: lm-eval scores it."""
    hub_text: tuple[str, str] | None = None
    """With `own_module`: data set and configuration on the Hub."""
    default: bool = True
    """Whether it is evaluated where --tasks is not given."""

    @property
    def by_lm_eval(self) -> bool:
        return self.own_module is None

    @property
    def scored_split(self) -> str:
        return next(iter(self.files))

    def takes(self, option: str) -> bool:
        """Whether one of `OPTIONS` applies."""
        return {
            "shots": self.shots_from is not None,
            "chat_template": self.chat_template,
            "block": not self.by_lm_eval,
            "stride": not self.by_lm_eval,
            "max_gen_tokens": self.generates,
        }[option]

    def row_error(self, row: Row) -> str | None:
        """What is wrong with a row; None: nothing."""
        missing = [field for field in self.fields if field not in row]
        if missing:
            return f"no {', '.join(missing)}"
        return None if self.check is None else self.check(row)


def text_error(row: Row, fields: tuple[str, ...]) -> str | None:
    """What is wrong with a row whose `fields` are to be texts; None: nothing."""
    wrong = next((field for field in fields if not isinstance(row[field], str)), None)
    return None if wrong is None else f"{wrong}={shown(row[wrong])}: expected a text"


def choice_error(row: Row, options: str, answer: str, exactly: int | None = None) -> str | None:
    """What is wrong with a multiple-choice row; None: nothing.

    Args:
        row: as read.
        options: the field with the list of options.
        answer: the field with the right one's index, a number or (HellaSwag's public labels) a text of digits.
        exactly: how many options there must be; None: 2 or more.
    """
    listed, index = row[options], row[answer]
    if not isinstance(listed, list) or (len(listed) < 2 if exactly is None else len(listed) != exactly):
        return f"{options}={shown(listed)}: expected a list of {exactly or '2 or more'} texts"
    if isinstance(index, bool) or not INDEX.fullmatch(str(index)) or int(str(index)) >= len(listed):
        return f"{answer}={shown(index)}: expected 0 to {len(listed) - 1}"
    return None


WIKITEXT = {"test": ("wikitext2/test.raw", "wikitext2/validation.raw")}
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="gsm8k",
            files={"test": ("gsm8k/test*.jsonl",), "train": ("gsm8k/train.jsonl",)},
            fields=("question", "answer"),
            check=partial(text_error, fields=("question", "answer")),
            builtin=smoke.word_problems,
            shots_from="train",
            generates=True,
            chat_template=True,
        ),
        Task(
            name="mmlu",
            files={"test": ("mmlu/test*.jsonl",), "dev": ("mmlu/dev.jsonl",)},
            fields=("question", "subject", "choices", "answer"),
            check=partial(choice_error, options="choices", answer="answer", exactly=4),
            builtin=smoke.choices,
            shots_from="dev",
            subjects=Subjects(
                definition="mmlu_{subject}",
                group="default",
                template="mmlu_philosophy",
                description="The following are multiple choice questions (with answers) about {subject}.\n\n",
            ),
            chat_template=True,
        ),
        Task(
            name="hellaswag",
            files={"validation": ("hellaswag/validation*.jsonl",)},
            fields=("activity_label", "ctx_a", "ctx_b", "endings", "label"),
            check=partial(choice_error, options="endings", answer="label"),
            builtin=smoke.continuations,
            chat_template=True,
        ),
        Task(name="wikitext", files=WIKITEXT, read=wikitext_rows, builtin=smoke.articles),
        Task(
            name="wikitext_tokens",
            files=WIKITEXT,
            read=wikitext_rows,
            builtin=smoke.articles,
            own_module="wikitext_tokens",
            hub_text=("Salesforce/wikitext", "wikitext-2-raw-v1"),
        ),
    )
}
"""All tasks by name, in the order of the default list."""


def default_tasks() -> list[str]:
    """What is evaluated where --tasks is not given."""
    return [task.name for task in TASKS.values() if task.default]


def names_taking(option: str) -> str:
    """The tasks that one of `OPTIONS` applies to, for help texts."""
    return ", ".join(task.name for task in TASKS.values() if task.takes(option))


def subject_forms() -> list[str]:
    """``mmlu:SUBJECT``, and so for every task with subjects."""
    return [f"{task.name}:SUBJECT" for task in TASKS.values() if task.subjects is not None]


@dataclass(frozen=True)
class Request:
    """One task as requested."""

    name: str
    """A key of `TASKS`."""
    subject: str | None = None
    """One subject of a task that has them; None: all in its file."""

    @property
    def task(self) -> Task:
        return TASKS[self.name]

    @property
    def label(self) -> str:
        """As on the command line."""
        return self.name if self.subject is None else f"{self.name}:{self.subject}"


def parse_tasks(names: list[str]) -> list[Request]:
    """Tasks from the command line.

    Raises:
        ConfigError: an unknown name, or the same task twice.
    """
    requests = []
    for text in names:
        name, colon, subject = text.partition(":")
        if name not in TASKS or (colon and (TASKS[name].subjects is None or not subject)):
            raise ConfigError(f"--tasks {text}: expected {', '.join(TASKS)} or {' or '.join(subject_forms())}")
        requests.append(Request(name, subject or None))
    repeated = next((request.label for i, request in enumerate(requests) if request in requests[:i]), None)
    if repeated is not None:
        raise ConfigError(f"--tasks {repeated}: given twice")
    return requests
