"""Results belong to one model and one set of items: what is evaluated again, and what is not."""

from __future__ import annotations

import argparse
import json
import shutil

import pytest

pytest.importorskip("lm_eval")

from evaluation_runs import STORED, copied, evaluate, no_model_is_built, result

from hf_gnmr.cli import main as cli
from hf_gnmr.evaluation.plan import settings_of
from hf_gnmr.evaluation.tasks import Request

pytest_plugins = ["evaluation_runs"]
pytestmark = pytest.mark.usefixtures("inside_tmp_path")
TOKENS = ["wikitext_tokens"]
GIVEN = {"limit": 2, "dtype": "bfloat16", "data": "builtin", "shots": 0, "max_gen_tokens": 8}
GIVEN |= {"block": 32, "stride": None, "chat_template": False, "batch_size": 8}


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("gsm8k", ["chat_template", "batch_size", "shots", "max_gen_tokens"]),
        ("mmlu", ["chat_template", "batch_size", "shots", "softmax_dtype"]),
        ("hellaswag", ["chat_template", "batch_size", "softmax_dtype"]),
        ("wikitext", ["chat_template", "batch_size", "softmax_dtype"]),
        ("wikitext_tokens", ["block", "stride"]),
    ],
)
def test_a_key_has_the_options_that_a_task_depends_on(task, names):
    settings = settings_of(Request(task), argparse.Namespace(**GIVEN))
    assert list(settings) == ["task", "limit", "dtype", "files", "lm_eval", *names]
    expected = {**GIVEN, "softmax_dtype": "float32"}
    assert {name: settings[name] for name in names} == {name: expected[name] for name in names}


@pytest.mark.parametrize(("task", "new"), [("hellaswag", ["batch_size", "softmax_dtype"]), ("wikitext_tokens", [])])
def test_the_key_of_a_stored_result_is_today_s_except_for_how_items_are_scored(task, new):
    """A log-likelihood of version 0.1.0 was rounded to BF16: it does not count as the same result."""
    key = json.loads((STORED / "recovery" / f"{task}.json").read_text())["key"]
    settings = settings_of(Request(task), argparse.Namespace(**{**GIVEN, "block": None}))
    assert [name for name in settings if name not in key] == new
    for name in new:
        del settings[name]
    assert list(key)[-len(settings) :] == list(settings)
    assert {**settings, "lm_eval": key["lm_eval"]} == {name: key[name] for name in settings}


def test_what_is_finished_is_not_evaluated_again_and_the_rest_is(runs, capsys, monkeypatch):
    tasks = ["hellaswag", "wikitext_tokens"]
    evaluate(runs / "gnmr", tasks=tasks)
    file = runs / "gnmr" / "eval" / "low" / "hellaswag.json"
    before = file.read_bytes()
    (runs / "gnmr" / "eval" / "low" / "wikitext_tokens.json").unlink()
    capsys.readouterr()
    evaluate(runs / "gnmr", tasks=tasks)
    out = capsys.readouterr().out
    assert "hellaswag: already evaluated" in out and "wikitext_tokens ..." in out and file.read_bytes() == before
    no_model_is_built(monkeypatch)
    evaluate(runs / "gnmr", tasks=tasks)
    monkeypatch.undo()
    evaluate(runs / "gnmr", "--limit", "2", tasks=["hellaswag"])
    assert (runs / "gnmr" / "eval" / "low" / "hellaswag.1.json").read_bytes() == before, "other settings lose nothing"


def test_results_are_never_those_of_another_model(runs, tiny_lm, tmp_path, capsys):
    evaluate(runs / "bf16", "--output", tmp_path / "out", tasks=TOKENS)
    evaluate(tiny_lm, "--output", tmp_path / "out", tasks=TOKENS, status=2)
    assert "is the result of" in capsys.readouterr().err
    evaluate("nowhere/model", status=2)
    assert "no folder nowhere/model here, and no such model" in capsys.readouterr().err
    run = copied(runs / "bf16", tmp_path / "run")
    evaluate(run, tasks=TOKENS)
    before = result(run / "eval", "recovery", "wikitext_tokens")
    shutil.copy(runs / "nothing-bf16" / "adapter_model.safetensors", run)
    evaluate(run, tasks=TOKENS)
    after = result(run / "eval", "recovery", "wikitext_tokens")
    assert after["per_item"] != before["per_item"] and after["adapter_effect"] == 0.0, "another adapter, another evaluation"
    assert (run / "eval" / "recovery" / "wikitext_tokens.1.json").exists()
    assert "ADAPTER WITHOUT EFFECT" in capsys.readouterr().out


def test_another_adapter_configuration_is_another_model(runs, tmp_path, capsys):
    run = copied(runs / "gnmr", tmp_path / "run")
    evaluate(run, tasks=["wikitext_tokens", "hellaswag"])
    before = result(run / "eval", "low", "wikitext_tokens")["metrics"]
    config = json.loads((run / "adapter_config.json").read_text())
    (run / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1}))
    capsys.readouterr()
    evaluate(run, tasks=TOKENS)
    assert "already evaluated" not in capsys.readouterr().out
    assert result(run / "eval", "low", "wikitext_tokens")["metrics"] != before
    assert cli(["compare", str(run)]) == 0
    out = capsys.readouterr().out
    assert "model 1 of 2" in out and "model 2 of 2" in out, "one row per model"


def test_a_run_that_was_moved_keeps_its_results_and_a_copy_is_another_row(runs, tmp_path, capsys):
    run = copied(runs / "gnmr", tmp_path / "run")
    evaluate(run, tasks=TOKENS)
    shutil.move(run, tmp_path / "moved")
    capsys.readouterr()
    evaluate(tmp_path / "moved", tasks=TOKENS)
    assert "already evaluated" in capsys.readouterr().out
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    assert cli(["compare", str(tmp_path / "moved"), str(tmp_path / "copy")]) == 0
    out = capsys.readouterr().out
    assert "| moved (low) |" in out and "| copy (low) |" in out


def test_a_trial_does_not_cost_a_full_result(runs, tmp_path, capsys, monkeypatch):
    run = copied(runs / "gnmr", tmp_path / "run")
    evaluate(run)
    evaluate(run, "--limit", "2")
    assert "n 2" in capsys.readouterr().out.split("In brackets")[-1]
    no_model_is_built(monkeypatch)
    evaluate(run)
    assert "already evaluated" in (out := capsys.readouterr().out) and "hellaswag acc: n 8" in out
    evaluate(run, "--limit", "2")
    monkeypatch.undo()
    evaluate(run, run, status=2)
    assert "given twice" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"cut', "[]", '{"key": 3}'], ids=["cut", "list", "foreign"])
def test_a_result_that_cannot_be_read_is_set_aside(runs, tmp_path, capsys, text):
    run = copied(runs / "bf16", tmp_path / "run")
    file = run / "eval" / "recovery" / "wikitext_tokens.json"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    evaluate(run, "--limit", "1", "--block", "16", tasks=TOKENS)
    assert "cannot be read (cut?): it is set aside" in capsys.readouterr().out
    assert result(run / "eval", "recovery", "wikitext_tokens")["n"] == 1
    assert file.with_name("wikitext_tokens.1.json").read_text() == text
