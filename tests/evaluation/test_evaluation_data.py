"""A task's data: the layouts of the public data sets, broken files, subjects, shots."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval")

from evaluation_runs import SHARED, no_model_is_built

from hf_gnmr.cli import main as cli
from hf_gnmr.config import ConfigError
from hf_gnmr.evaluation.data import check_shots, fingerprint, splits_of, text_of
from hf_gnmr.evaluation.harness import harness_tasks
from hf_gnmr.evaluation.smoke import smoke_text
from hf_gnmr.evaluation.tasks import Request, parse_tasks

pytest_plugins = ["evaluation_runs"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gsm8k", {"gsm8k": 200}),
        ("mmlu:philosophy", {"mmlu_philosophy": 311}),
        ("hellaswag", {"hellaswag": 500}),
        ("wikitext", {"wikitext": 60}),
    ],
)
def test_the_layouts_of_public_data(name, expected):
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}")
    tasks = harness_tasks(parse_tasks([name])[0], str(SHARED))
    assert {name: len(list(task.eval_docs)) for name, task in tasks.items()} == expected


@pytest.fixture
def data(tmp_path):
    """A data folder with few-shot files, and one HellaSwag row without the fields it needs."""
    row = '{"question": "?", "answer": %s, "subject": "a", "choices": ["1", "2", "3", "4"]}\n'
    for split in ("mmlu/dev.jsonl", "gsm8k/train.jsonl", "hellaswag/validation.jsonl"):
        (tmp_path / split).parent.mkdir(exist_ok=True)
        (tmp_path / split).write_text(row % ('"1"' if "gsm8k" in split else "1"))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("mmlu/test.jsonl", '{"question": "?", "choices": [], "answer": 0}\n', "row 1: no subject"),
        ("hellaswag/validation.jsonl", "", "got no rows"),
        ("gsm8k/test.jsonl", "[1]\n", "expected a JSON object"),
        ("wikitext2/test.raw", b"\xff\xfe\x00", "cannot be read as text"),
        ("mmlu/test.jsonl", '{"question": "", "subject": "a", "choices": ["1", "2"], "answer": 0}\n', "a list of 4 texts"),
        ("mmlu/test.jsonl", '{"question": "", "subject": "a", "choices": [1, 2, 3, 4], "answer": "C"}\n', "answer='C'"),
        (
            "hellaswag/validation.jsonl",
            '{"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["a", "b"], "label": ""}\n',
            "label=''",
        ),
        ("gsm8k/test.jsonl", '{"question": 3, "answer": "1"}\n', "question=3: expected a text"),
        ("hellaswag/validation2.jsonl", "{}", "all match hellaswag/validation*.jsonl: leave one"),
    ],
)
def test_broken_data_are_reported_before_the_model_is_loaded(tiny_lm, data, capsys, monkeypatch, file, text, message):
    (data / file).parent.mkdir(exist_ok=True)
    (data / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    no_model_is_built(monkeypatch)
    task = file.split("/")[0].replace("wikitext2", "wikitext")
    assert cli(["eval", tiny_lm, "--data", str(data), "--tasks", task]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wikitext", "wikitext_tokens"])
def test_the_test_text_is_preferred_to_the_validation_text(tmp_path, name):
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "validation.raw").write_text(" = Other = \n")
    assert list(fingerprint(Request(name), str(tmp_path))) == ["wikitext2/validation.raw"]
    (tmp_path / "wikitext2" / "test.raw").write_text(smoke_text())
    assert list(fingerprint(Request(name), str(tmp_path))) == ["wikitext2/test.raw"]
    assert splits_of(Request(name), str(tmp_path)) == splits_of(Request(name), "builtin")
    assert text_of(Request(name), str(tmp_path)) == text_of(Request(name), "builtin") == smoke_text()


def test_a_subject_has_its_rows_only():
    splits = splits_of(Request("mmlu", "sums"), "builtin")
    assert {split: len(rows) for split, rows in splits.items()} == {"test": 6, "dev": 6}
    assert {row["subject"] for rows in splits.values() for row in rows} == {"sums"}
    with pytest.raises(
        ConfigError, match="--tasks mmlu:xyz: expected one of the subjects of the built-in rows: differences, sums"
    ):
        splits_of(Request("mmlu", "xyz"), "builtin")


def test_on_the_hub_there_is_nothing_to_read():
    assert splits_of(Request("gsm8k"), None) is None
    assert fingerprint(Request("gsm8k"), None) == {"data": "Hub"}


@pytest.mark.parametrize(("name", "available"), [("gsm8k", 8), ("mmlu", 6), ("mmlu:sums", 6)])
def test_shots_are_counted_where_they_come_from(name, available):
    request = parse_tasks([name])[0]
    splits = splits_of(request, "builtin")
    check_shots(request, splits, available)
    with pytest.raises(ConfigError, match=f"--shots {available + 1}: {name} has {available} examples to show"):
        check_shots(request, splits, available + 1)


def test_shots_that_do_not_apply_are_not_counted():
    check_shots(Request("hellaswag"), splits_of(Request("hellaswag"), "builtin"), 99)
    with pytest.raises(ConfigError, match="--shots -1: expected 0 or more"):
        check_shots(Request("hellaswag"), None, -1)
