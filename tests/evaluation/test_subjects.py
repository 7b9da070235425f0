"""What is evaluated: runs, checkpoints, adapters and base models, and what identifies them."""

from __future__ import annotations

import json
import shutil

import pytest
from conftest import SMALL, byte_tokenizer, load_bf16, save_llama

pytest.importorskip("lm_eval")

from evaluation_runs import copied, evaluate, result

from hf_gnmr.evaluation.subjects import folder_for, identity_of, resolve
from hf_gnmr.train import main as train

pytest_plugins = ["evaluation_runs"]
pytestmark = pytest.mark.usefixtures("inside_tmp_path")
TOKENS = ["wikitext_tokens"]


@pytest.mark.parametrize(("run", "precision", "int8"), [("gnmr", "low", True), ("bf16", "recovery", False)])
def test_a_run_is_evaluated_on_the_path_it_was_trained_on(runs, run, precision, int8):
    subject = resolve(str(runs / run), None, None)
    assert (subject.precision, subject.int8) == (precision, int8)
    assert folder_for(subject) == runs / run / "eval"
    assert identity_of(subject, precision)["recovery"] == (["host", None] if int8 else None)


@pytest.mark.parametrize(("precision", "int8"), [(None, False), ("recovery", False), ("low", True), ("final", True)])
def test_without_a_recipe_the_precision_decides(tiny_lm, precision, int8):
    subject = resolve(tiny_lm, None, precision)
    assert subject.int8 is int8 and subject.adapter is None and subject.place == tiny_lm
    assert folder_for(subject).parts[0] == "eval-results"


def test_an_unfinished_run_is_refused(runs, tmp_path, capsys):
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "recipe.yaml").write_text((runs / "gnmr" / "recipe.yaml").read_text())
    evaluate(unfinished, status=2)
    assert "the run is not finished" in capsys.readouterr().err


def test_an_adapter_of_a_run_is_an_adapter_with_its_base(runs, tmp_path, capsys):
    other = save_llama(tmp_path / "other", vocab_size=288, hidden_size=32, eos_token_id=2, bos_token_id=1)
    byte_tokenizer().save_pretrained(other)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_bytes((runs / "bf16" / name).read_bytes())
    evaluate(adapter, "--base", other, status=2)
    assert "does not fit" in capsys.readouterr().err
    evaluate(adapter, "--output", tmp_path / "out", tasks=TOKENS)
    evaluate(runs / "bf16", tasks=TOKENS)
    folders = (tmp_path / "out", runs / "bf16" / "eval")
    of_adapter, of_run = (result(folder, "recovery", "wikitext_tokens")["per_item"] for folder in folders)
    assert of_adapter == of_run


def test_a_checkpoint_of_a_run_is_that_run_at_its_step(runs, tmp_path, capsys):
    run = tmp_path / "run"
    overrides = [f"training.output_dir={run}", "training.save_strategy=steps", "training.save_steps=3"]
    assert train([str(runs / "small.yaml"), *overrides]) == 0
    steps = [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()[1:]]
    third = next(s["active"] for s in steps if s["step"] == 3)
    evaluate(run / "checkpoint-3", "--precision", "final", tasks=TOKENS)
    evaluate(run / "checkpoint-3", run, tasks=TOKENS)
    out = capsys.readouterr().out
    assert f"INT8 with layers {third} in BF16" in out and out.count("bitsandbytes INT8 everywhere, bfloat16 beside it.") == 2
    figures = [result(f / "eval", "low", "wikitext_tokens")["metrics"] for f in (run / "checkpoint-3", run)]
    assert figures[0] != figures[1], "other adapters"


def test_a_base_that_was_moved_can_be_given(runs, tiny_lm, tmp_path, capsys):
    moved = tmp_path / "moved"
    shutil.copytree(tiny_lm, moved)
    run = copied(runs / "bf16", tmp_path / "run")
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace(str(tiny_lm), "models/not-here"))
    evaluate(run, status=2, tasks=TOKENS)
    assert "models/not-here" in capsys.readouterr().err
    evaluate(run, "--base", moved, tasks=TOKENS)
    assert f"trained over models/not-here, and put over {moved}" in capsys.readouterr().out
    evaluate(runs / "bf16", tasks=TOKENS)
    of_moved, of_run = (result(f / "eval", "recovery", "wikitext_tokens")["per_item"] for f in (run, runs / "bf16"))
    assert of_moved == of_run


def test_adapters_that_add_virtual_tokens_are_refused(tiny_lm, tmp_path, capsys):
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    peft.get_peft_model(load_bf16(tiny_lm), config).save_pretrained(tmp_path / "adapter")
    evaluate(tmp_path / "adapter", status=2)
    assert "a PROMPT_TUNING adapter adds virtual tokens" in capsys.readouterr().err


def test_a_model_whose_weights_were_all_trained(tmp_path, capsys):
    assert train([*SMALL, f"training.output_dir={tmp_path / 'run'}"]) == 0
    evaluate(tmp_path / "run", "--output", tmp_path / "out", "--block", "64", tasks=TOKENS)
    scored = result(tmp_path / "out", "recovery", "wikitext_tokens")
    assert scored["adapter_effect"] is None and scored["metrics"]["token_perplexity"] > 1
    evaluate(tmp_path / "run", "--base", "x", status=2)
    assert "needs no base" in capsys.readouterr().err


def test_a_broken_adapter_configuration_is_named(runs, tmp_path, capsys):
    run = copied(runs / "bf16", tmp_path / "run")
    (run / "recipe.yaml").unlink()
    (run / "adapter_config.json").write_text('{"cut')
    evaluate(run, status=2)
    assert "adapter_config.json cannot be read as JSON" in capsys.readouterr().err
