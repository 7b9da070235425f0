"""Pre-training from a recipe: sizes, the small run, resuming, perplexity by token budget, what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from conftest import SMALL
from safetensors.torch import load_file

from hf_gnmr.cli import main as cli
from hf_gnmr.run.plan import plan
from hf_gnmr.run.recipe import find_recipe, load_recipe
from hf_gnmr.train import main as train


def small(folder, *overrides, status=0):
    assert train([*SMALL, f"training.output_dir={folder}", *overrides]) == status


@pytest.mark.parametrize(
    ("name", "parameters", "units", "tokens"),
    [
        ("60m", 58.07, 56, 1.3e9),
        ("130m", 134.11, 84, 2.6e9),
        ("350m", 367.97, 168, 7.8e9),
        ("1_3b", 1339.08, 168, 13.1e9),
    ],
)
def test_the_papers_sizes(name, parameters, units, tokens):
    recipe = load_recipe(find_recipe(f"activation_{name}"))
    figures = plan(recipe, processes=4)
    assert round(figures["parameters"] / 1e6, 2) == parameters and figures["trainable_parameters"] == figures["parameters"]
    assert figures["units"] == units and figures["global_batch"] == 512
    assert figures["steps"] * 512 * 256 == pytest.approx(tokens, rel=1e-3)
    assert 1.9 < figures["saved_bytes"]["recovery"] / figures["saved_bytes"]["low"] < 2
    assert recipe.training["warmup_steps"] == 0.1 and recipe.training["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}


def test_plan_counts_what_a_run_counts(tmp_path, capsys):
    folder = tmp_path / "run"
    small(folder, "trigger.name=none")
    figures = plan(load_recipe(find_recipe(SMALL[0]), [*SMALL[1:], "trigger.name=none"]))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["peak_saved_bytes"] == figures["saved_bytes"]["low"] and summary["units"] == figures["units"] == 14
    half = plan(load_recipe(find_recipe(SMALL[0]), [*SMALL[1:], "training.bf16=true"]))["saved_bytes"]
    assert half["16 bits"] * 2 == figures["saved_bytes"]["16 bits"] and half["low"] == figures["saved_bytes"]["low"]
    weights = load_file(folder / "model.safetensors")
    assert sum(w.numel() for w in weights.values()) == figures["parameters"]
    assert cli(["plan", *SMALL, "--device-memory", "10kB"]) == 1
    assert "does not fit" in capsys.readouterr().err


def test_a_small_run_and_its_perplexities(tmp_path):
    folder = tmp_path / "run"
    small(folder, "gnmr.alpha=0.9")
    results = json.loads((folder / "results.json").read_text())
    assert [e["step"] for e in results["evaluations"]] == [3, 6]
    assert [e["tokens"] for e in results["evaluations"]] == [3 * 16 * 128, 6 * 16 * 128]
    assert results["eval_perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    assert results["eval_loss"] == pytest.approx(results["evaluations"][-1]["loss"], rel=1e-5)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["backend"] == "activation" and summary["promotion_ratio"] > 0
    recipe = load_recipe(folder / "recipe.yaml")
    assert recipe.lora is None and recipe.training["learning_rate"] == 2.5e-3 and recipe.gnmr.beta == 1.3
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert len(AutoTokenizer.from_pretrained(folder)) == 259
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    small(folder, "gnmr.alpha=0.9", status=2)
    small(folder, "gnmr.alpha=0.9", "run.resume=auto", status=2)  # no checkpoint to resume


def test_modes_start_from_the_same_weights_and_see_the_same_data(tmp_path):
    losses = {}
    for name, overrides in (
        ("plain", ["backend.name=none"]),
        ("exact", ["trigger.name=all", "backend.bits_recovery=16"]),
        ("low", ["trigger.name=none"]),
    ):
        small(tmp_path / name, *overrides)
        losses[name] = [json.loads(line)["loss"] for line in (tmp_path / name / "trace.jsonl").read_text().splitlines()[1:]]
    assert losses["plain"] == losses["exact"], "16 bits are the plain model, bit for bit"
    assert losses["low"][0] == losses["plain"][0] and losses["low"][1:] != losses["plain"][1:]
    plain, exact = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "exact"))
    assert all(torch.equal(plain[n], exact[n]) for n in plain)


def test_resumed_after_a_break(tmp_path):
    common = [
        "training.save_strategy=steps",
        "training.save_steps=2",
        "training.lr_scheduler_type=constant",
        "training.lr_scheduler_kwargs={}",
        "training.warmup_steps=0",
    ]
    small(tmp_path / "straight", *common)
    small(tmp_path / "cut", *common, "training.max_steps=4")
    small(tmp_path / "cut", *common, "run.resume=auto")
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("straight", "cut"))
    assert all(torch.equal(whole[n], resumed[n]) for n in whole)
    straight, cut = ((tmp_path / name / "trace.jsonl").read_text().splitlines()[1:] for name in ("straight", "cut"))
    assert [json.loads(line)["active"] for line in straight] == [json.loads(line)["active"] for line in cut]
    small(tmp_path / "cut", *common, "run.resume=auto")  # finished: nothing to do
    for name in ("results.json", "summary.json", "model.safetensors"):
        (tmp_path / "cut" / name).unlink()
    small(tmp_path / "cut", *common, "run.resume=auto")  # all steps done, its last files not written
    again = load_file(tmp_path / "cut" / "model.safetensors")
    assert all(torch.equal(whole[n], again[n]) for n in whole) and (tmp_path / "cut" / "results.json").is_file()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.name=/gone.txt"], "no such file"),
        (["data.streaming=true"], "local text is read whole"),
        (["data.eval_split=validation"], "local text has no splits"),
        (["data.text=null"], "data.documents"),
        (["data.generate_rows=4"], "text has no answers"),
        (["model.tokenizer=null"], "needs model.architecture"),
        (["model.architecture=null"], "needs model.architecture"),
        (["model.architecture={model_type: llamma}"], "model.architecture"),
        (["model.architecture={model_type: llama, vocab_size: 100}"], "expected at least 259"),
        (["backend.name=int8"], "a quantised base cannot be trained"),
        (["backend.bits_low=3"], "bits_low=3: expected 4, 6"),
        (["backend.unit=head"], "unit='head'"),
        (["trigger.name=random"], "promotion_ratio or trace"),
        (["trigger.share=0.5"], "trigger.share=0.5 belongs to trigger.name='static'"),
        (["model.dtype=float16"], "model.dtype"),
        (["lora.r=4"], "lora: false"),
        (["data.eval_rows=100000"], "has only"),
        (["gnmr.max_o=99"], "max_o=99: expected at most 14"),
        (["training.gradient_checkpointing=true"], "checkpointing keeps no activation"),
        (["backend.recovery=device"], "belongs to backend.name='int8'"),
    ],
)
def test_errors_are_reported_before_anything_is_written(tmp_path, capsys, overrides, message):
    small(tmp_path / "run", *overrides, status=2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "trace.jsonl").exists()
