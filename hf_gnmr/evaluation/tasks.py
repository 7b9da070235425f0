"""The four evaluation tasks, on local files or the Hub: lm-eval's own definitions, and token perplexity beside them.

| name | scored by | local files in the data folder |
|---|---|---|
| `gsm8k` | lm-eval: generation, exact match by two filters | `gsm8k/test*.jsonl`, `gsm8k/train.jsonl` for the shots |
| `mmlu`, `mmlu:SUBJECT` | lm-eval: multiple choice by log-likelihood | `mmlu/test*.jsonl`, `mmlu/dev.jsonl` for the shots |
| `hellaswag` | lm-eval: continuation log-likelihood, plain and by length | `hellaswag/validation*.jsonl` |
| `wikitext` | lm-eval: word and byte perplexity by page | `wikitext2/test.raw`, else `wikitext2/validation.raw` |
| `wikitext_tokens` | ours (`eval/tasks/`): perplexity by token over fixed blocks | the same |

Rows have the fields of the public data sets: `question`, `answer`; `question`, `subject`, `choices`, `answer` (0 to 3);
`activity_label`, `ctx_a`, `ctx_b`, `endings`, `label`. The data folder `builtin` is a handful of rows that the project makes
itself: they show that everything runs, and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ConfigError

NAMES = ("gsm8k", "mmlu", "hellaswag", "wikitext", "wikitext_tokens")
BUILTIN = "builtin"
FILES = {
    "gsm8k": {"test": "gsm8k/test*.jsonl", "train": "gsm8k/train.jsonl"},
    "mmlu": {"test": "mmlu/test*.jsonl", "dev": "mmlu/dev.jsonl"},
    "hellaswag": {"validation": "hellaswag/validation*.jsonl"},
    "wikitext": {"test": "wikitext2/test.raw|wikitext2/validation.raw"},
    "wikitext_tokens": {"test": "wikitext2/test.raw|wikitext2/validation.raw"},
}


@dataclass(frozen=True)
class Request:
    """One task as asked for."""

    name: str
    """One of NAMES."""
    subject: str | None = None
    """MMLU's subject; None: all that the file has."""

    @property
    def label(self) -> str:
        """As asked for."""
        return self.name if self.subject is None else f"{self.name}:{self.subject}"


def parse_tasks(names: list[str]) -> list[Request]:
    """Tasks from the command line.

    Raises:
        ConfigError: a name that is not known, or one given twice.
    """
    requests = []
    for text in names:
        name, colon, subject = text.partition(":")
        if name not in NAMES or (colon and (name != "mmlu" or not subject)):
            raise ConfigError(f"--tasks {text}: {', '.join(NAMES)} or mmlu:SUBJECT is allowed")
        requests.append(Request(name, subject or None))
    twice = next((r.label for i, r in enumerate(requests) if r in requests[:i]), None)
    if twice is not None:
        raise ConfigError(f"--tasks {twice}: given twice")
    return requests


def data_files(request: Request, folder: Path) -> dict[str, Path]:
    """The local files of a task, by split.

    Raises:
        ConfigError: one is missing; file and option are named.
    """
    found = {}
    for split, patterns in FILES[request.name].items():
        matches = next((m for pattern in patterns.split("|") if (m := sorted(folder.glob(pattern)))), [])
        if not matches:
            raise ConfigError(f"--data {folder}: no {patterns.replace('|', ' or ')} in it, which {request.label} needs")
        if len(matches) > 1:
            raise ConfigError(f"--data {folder}: {', '.join(m.name for m in matches)} all match {patterns}: leave one")
        found[split] = matches[0]
    return found


def rows_of(file: Path) -> list[dict[str, Any]]:
    """JSON lines; a file that is not such raises ConfigError."""
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON lines: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{file} holds no rows, or lines that are no JSON objects")
    return rows


FIELDS = {
    "gsm8k": ("question", "answer"),
    "mmlu": ("question", "subject", "choices", "answer"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
}
"""What each row must have."""


def text_of(data: str | None) -> str:
    """WikiText-2 as one text, for token perplexity: a local file's as it is."""
    if data == BUILTIN:
        from .smoke import smoke_text

        return smoke_text()
    if data is not None:
        return _read(data_files(Request("wikitext_tokens"), Path(data))["test"])
    from datasets import load_dataset

    return "".join(load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")["text"])


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as text: {error}") from error


def file_hash(file: Path) -> str:
    """Of a file's contents, as results are known by."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def fingerprint(request: Request, data: str | None) -> dict[str, str]:
    """The files a task reads, with a hash of each; what it reads otherwise."""
    if data is None or data == BUILTIN:
        return {"data": "Hub" if data is None else BUILTIN}
    return {f"{file.parent.name}/{file.name}": file_hash(file) for file in data_files(request, Path(data)).values()}


def pages(text: str) -> list[str]:
    """WikiText's articles: each begins at a heading of the first level, a line `` = Title = ``."""
    starts = [m.start() for m in re.finditer(r"(?m)^ = (?!=).+(?<! =) = ?$", text)] or [0]
    bounds = [*starts, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds) if text[a:b].strip()]


def splits_of(request: Request, data: str | None) -> dict[str, list[dict[str, Any]]] | None:
    """A task's rows by split; None: lm-eval fetches them from the Hub."""
    if data is None:
        return None
    if data == BUILTIN:
        from .smoke import smoke_rows

        return _of_subject(request, smoke_rows(request.name), "the built-in rows")
    files = data_files(request, Path(data))
    if request.name.startswith("wikitext"):
        return {"test": [{"page": page} for page in pages(_read(files["test"]))]}
    rows = {split: rows_of(file) for split, file in files.items()}
    for split, found in rows.items():
        for number, row in enumerate(found, 1):
            missing = [name for name in FIELDS[request.name] if name not in row]
            if missing:
                raise ConfigError(f"{files[split]}, row {number}: no {', '.join(missing)}")
            wrong = _wrong(request.name, row)
            if wrong is not None:
                raise ConfigError(f"{files[split]}, row {number}: {wrong}")
    return _of_subject(request, rows, str(files.get("test")))


def _of_subject(request: Request, rows: dict[str, list[dict[str, Any]]], where: str) -> dict[str, list[dict[str, Any]]]:
    """Of MMLU's rows those of the subject that was asked for."""
    if request.subject is None:
        return rows
    found = {split: [row for row in part if row["subject"] == request.subject] for split, part in rows.items()}
    if not found["test"]:
        there = sorted({row["subject"] for row in rows["test"]})
        raise ConfigError(f"--tasks {request.label}: {where} has the subjects {', '.join(there)}")
    return found


def _wrong(task: str, row: dict[str, Any]) -> str | None:
    """What is wrong with a row's values, in words; None: nothing."""
    if task == "gsm8k":
        texts = [name for name in FIELDS[task] if not isinstance(row[name], str)]
        return f"{texts[0]}={row[texts[0]]!r}: a text is allowed" if texts else None
    options, answer, names = (
        (row["choices"], row["answer"], ("choices", "answer"))
        if task == "mmlu"
        else (row["endings"], row["label"], ("endings", "label"))
    )
    if not isinstance(options, list) or (len(options) != 4 if task == "mmlu" else len(options) < 2):
        return f"{names[0]}={options!r}: a list of {'4' if task == 'mmlu' else '2 or more'} texts is allowed"
    number = str(answer)  # HellaSwag's public labels are texts
    if isinstance(answer, bool) or not number.isdigit() or int(number) >= len(options):
        return f"{names[1]}={answer!r}: 0 to {len(options) - 1} is allowed"
    return None


def harness_tasks(request: Request, data: str | None) -> dict[str, Any]:
    """lm-eval's task objects for `request` (one a subject for MMLU), by name.

    Raises:
        ConfigError: files or subjects that are not there.
    """
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    manager = _manager()
    splits = splits_of(request, data)
    if request.name != "mmlu":
        names = {request.name: splits}
    elif splits is None:
        names = dict.fromkeys(
            name
            for name in manager.all_tasks
            if re.fullmatch(r"mmlu_[a-z_]+", name)
            and (request.subject is None or name == f"mmlu_{request.subject}")
            and "default" in str(getattr(manager.task_index[name], "yaml_path", ""))
            and "dataset_name" in load_yaml(manager.task_index[name].yaml_path, resolve_func=False)  # a subject, no group
        )
        if not names:
            raise ConfigError(f"--tasks {request.label}: lm-eval has no such MMLU subject")
    else:
        subjects = sorted({row["subject"] for row in splits["test"]})
        names = {
            f"mmlu_{subject}": {split: [row for row in rows if row["subject"] == subject] for split, rows in splits.items()}
            for subject in subjects
        }
    found = {}
    for name, rows in names.items():
        entry = manager.task_index.get(name)
        if entry is not None:
            config = load_yaml(entry.yaml_path, resolve_func=True)
        elif request.name == "mmlu" and rows is not None:  # a subject of the user's own, asked as the others are
            config = load_yaml(manager.task_index["mmlu_philosophy"].yaml_path, resolve_func=True)
            subject = name.removeprefix("mmlu_").replace("_", " ")
            description = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
            config |= {"task": name, "task_alias": subject, "description": description}
        else:
            raise ConfigError(f"--tasks {request.label}: lm-eval has no task {name}")
        if rows is not None:
            config = {k: v for k, v in config.items() if k not in ("dataset_path", "dataset_name")}
            config["custom_dataset"] = _as_dataset(rows)
            for split in ("training_split", "validation_split", "test_split", "fewshot_split"):
                if config.get(split) is not None and config[split] not in rows:
                    config[split] = None
        found[name] = ConfigurableTask(config=config)
    return found


@functools.cache
def _manager() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()  # reads every definition that lm-eval has: seconds


def _as_dataset(rows: dict[str, list[dict[str, Any]]]) -> Callable[..., Any]:
    from datasets import Dataset

    made = {split: Dataset.from_list(found) for split, found in rows.items()}
    return lambda **ignored: made


@functools.cache
def own_task(name: str) -> Any:
    """The module of a task of ours, in ``eval/tasks``; an installed package has it in ``hf_gnmr/eval_tasks``."""
    package = Path(__file__).parents[1]
    folders = (package / "eval_tasks", package.parent / "eval" / "tasks")
    file = next(folder / f"{name}.py" for folder in folders if (folder / f"{name}.py").is_file())
    spec = importlib.util.spec_from_file_location(f"hf_gnmr.eval_tasks.{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
