"""Tasks: what an entry says, names on the command line, and what it takes to add one."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("lm_eval")

from evaluation_runs import no_model_is_built, result

from hf_gnmr.cli import main as cli
from hf_gnmr.config import ConfigError
from hf_gnmr.evaluation.tasks import OPTIONS, TASKS, Request, Task, default_tasks, parse_tasks

pytest_plugins = ["evaluation_runs"]

GSM8K = {"question": "1+1?", "answer": "2"}
MMLU = {"question": "?", "subject": "a", "choices": ["1", "2", "3", "4"], "answer": 0}
HELLASWAG = {"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["a", "b"], "label": "1"}


def test_names_and_their_order():
    assert default_tasks() == list(TASKS) == ["gsm8k", "mmlu", "hellaswag", "wikitext", "wikitext_tokens"]
    assert all(task.name == name for name, task in TASKS.items())


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("shots", ["gsm8k", "mmlu"]),
        ("chat_template", ["gsm8k", "mmlu", "hellaswag"]),
        ("block", ["wikitext_tokens"]),
        ("stride", ["wikitext_tokens"]),
        ("max_gen_tokens", ["gsm8k"]),
    ],
)
def test_an_option_applies_to_its_tasks(option, names):
    assert option in OPTIONS
    assert [task.name for task in TASKS.values() if task.takes(option)] == names


def test_requests_are_parsed_in_order():
    requests = parse_tasks(["mmlu:philosophy", "gsm8k", "mmlu"])
    assert requests == [Request("mmlu", "philosophy"), Request("gsm8k"), Request("mmlu")]
    assert [request.label for request in requests] == ["mmlu:philosophy", "gsm8k", "mmlu"]
    assert requests[0].task is TASKS["mmlu"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["arc"], "--tasks arc: expected gsm8k, mmlu, hellaswag, wikitext, wikitext_tokens or mmlu:SUBJECT"),
        (["mmlu:"], "--tasks mmlu:: expected"),
        (["gsm8k:sums"], "--tasks gsm8k:sums: expected"),
        (["gsm8k", "mmlu", "gsm8k"], "--tasks gsm8k: given twice"),
    ],
)
def test_other_names_are_refused(names, message):
    with pytest.raises(ConfigError, match=message):
        parse_tasks(names)


@pytest.mark.parametrize(
    ("task", "row", "error"),
    [
        ("gsm8k", GSM8K, None),
        ("gsm8k", {"question": "?"}, "no answer"),
        ("gsm8k", {}, "no question, answer"),
        ("gsm8k", {**GSM8K, "question": 3}, "question=3: expected a text"),
        ("mmlu", MMLU, None),
        ("mmlu", {**MMLU, "answer": 3}, None),
        ("mmlu", {**MMLU, "answer": 4}, "answer=4: expected 0 to 3"),
        ("mmlu", {**MMLU, "answer": True}, "answer=True: expected 0 to 3"),
        ("mmlu", {**MMLU, "answer": "C"}, "answer='C': expected 0 to 3"),
        ("mmlu", {**MMLU, "choices": ["1", "2"]}, "choices=['1', '2']: expected a list of 4 texts"),
        ("hellaswag", HELLASWAG, None),
        ("hellaswag", {**HELLASWAG, "label": ""}, "label='': expected 0 to 1"),
        ("hellaswag", {**HELLASWAG, "endings": ["a"]}, "endings=['a']: expected a list of 2 or more texts"),
        ("wikitext", {"page": " = A = \n"}, None),
    ],
)
def test_rows_are_checked(task, row, error):
    assert TASKS[task].row_error(row) == error


# -- one more task ---------------------------------------------------------------------------------------------------------


def wrong_in_arc(row):
    labels = row["choices"].get("label", [])
    return None if row["answerKey"] in labels else f"answerKey={row['answerKey']!r}: expected one of {', '.join(labels)}"


ARC = Task(
    name="arc_challenge",
    files={"test": ("arc/test*.jsonl",), "train": ("arc/train.jsonl",)},
    fields=("question", "choices", "answerKey"),
    check=wrong_in_arc,
    shots_from="train",
    chat_template=True,
    default=False,
)


@pytest.fixture
def arc(tmp_path, monkeypatch):
    """A data folder for ARC, which is a task as long as the test runs."""
    monkeypatch.setitem(TASKS, ARC.name, ARC)
    row = {"question": "What melts ice?", "choices": {"text": ["Heat", "Cold"], "label": ["A", "B"]}, "answerKey": "A"}
    (tmp_path / "arc").mkdir()
    (tmp_path / "arc" / "test.jsonl").write_text("".join(json.dumps(row | {"answerKey": key}) + "\n" for key in "AB"))
    (tmp_path / "arc" / "train.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_an_entry_is_all_that_a_task_of_lm_eval_takes(arc, tiny_lm, capsys):
    command = ["eval", tiny_lm, "--data", str(arc), "--output", str(arc / "out"), "--tasks", "arc_challenge", "--offline"]
    assert cli([*command, "--shots", "1", "--block", "8"]) == 0
    out = capsys.readouterr().out
    assert (
        "--block does not apply to arc_challenge" in out and "arc_challenge acc_norm: n 2, shots 1, arc/test.jsonl (" in out
    )
    scored = result(arc / "out", "recovery", "arc_challenge")
    assert scored["per_item"]["acc"].keys() == {"arc_challenge/0", "arc_challenge/1"}
    assert scored["metrics"]["acc"] == 0.5, "one model, the same question, both answers"
    assert scored["key"]["shots"] == 1 and scored["key"]["files"].keys() == {"arc/test.jsonl", "arc/train.jsonl"}
    assert cli([*command, "--shots", "1"]) == 0
    assert "arc_challenge: already evaluated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "builtin"], "--data builtin: arc_challenge has no built-in rows"),
        (["--data", "{arc}", "--shots", "2"], "--shots 2: arc_challenge has 1 examples to show"),
        (["--data", "{arc}/arc"], "no arc/test*.jsonl in it, which arc_challenge needs"),
    ],
)
def test_what_an_entry_lacks_is_refused_by_its_name(arc, tiny_lm, capsys, monkeypatch, arguments, message):
    no_model_is_built(monkeypatch)
    assert cli(["eval", tiny_lm, *(a.format(arc=arc) for a in arguments), "--tasks", "arc_challenge", "--offline"]) == 2
    assert message in capsys.readouterr().err
    assert "arc_challenge" not in default_tasks()


def test_its_rows_are_checked(arc, tiny_lm, capsys):
    file = arc / "arc" / "test.jsonl"
    file.write_text(file.read_text().replace('"answerKey": "B"', '"answerKey": "C"'))
    assert cli(["eval", tiny_lm, "--data", str(arc), "--tasks", "arc_challenge", "--offline"]) == 2
    assert "test.jsonl, row 2: answerKey='C': expected one of A, B" in capsys.readouterr().err
