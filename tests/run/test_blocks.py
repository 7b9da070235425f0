"""Block-level recipes: the sizes of the paper's settings, the small siblings trained through the command line."""

from __future__ import annotations

import json
import re

import pytest
import torch
from conftest import trace_lines
from safetensors.torch import load_file

from hf_gnmr.backends import BACKENDS
from hf_gnmr.cli import main as cli
from hf_gnmr.run.plan import plan
from hf_gnmr.run.recipe import RecipeError, find_recipe, load_recipe
from hf_gnmr.train import main as train

FEW = [
    "training.max_steps=4",
    "training.eval_strategy=no",
    "data.documents=300",
    "data.eval_rows=8",
    "data.max_length=64",
    "training.per_device_train_batch_size=4",
    "training.logging_steps=1",
    "training.disable_tqdm=true",
]


@pytest.mark.parametrize("kind", ["fp8", "lowbit"])
@pytest.mark.parametrize(
    ("name", "parameters", "units", "max_o", "tokens", "rate"),
    [
        ("130m", 134.11, 12, 3, 2.6e9, 1e-3),
        ("350m", 367.97, 24, 6, 7.8e9, 5e-4),
        ("1_3b", 1340.70, 24, 6, 13.1e9, 5e-4),
        ("3b", 2685.83, 32, 8, 28.8e9, 3e-4),
    ],
)
def test_deepseek_style_sizes(kind, name, parameters, units, max_o, tokens, rate):
    recipe = load_recipe(find_recipe(f"{kind}_{name}"))
    figures = plan(recipe, processes=4)
    assert round(figures["parameters"] / 1e6, 2) == parameters
    assert (figures["units"], figures["max_o"], figures["global_batch"]) == (units, max_o, 512)
    assert figures["steps"] * 512 * 256 == pytest.approx(tokens, rel=1e-3) and recipe.training["learning_rate"] == rate
    gnmr = recipe.gnmr
    assert (gnmr.alpha_init, gnmr.alpha_init_fraction, gnmr.alpha) == (1.5, 0.025, 1.1)
    assert gnmr.beta == (None if kind == "fp8" else 1.5) and recipe.backend.name == kind
    assert kind == "fp8" or (recipe.backend.options.bits_low, recipe.backend.options.bits_recovery) == (6, 8)


def test_mixture_and_pangu_class():
    moe, pangu = (load_recipe(find_recipe(name)) for name in ("moe_3_7b", "pangu_1b"))
    figures = plan(moe, processes=4)
    assert figures["parameters"] == 9_532_457_984, "what the paper's dimensions give in this class, not 3.7B"
    assert (figures["units"], figures["global_batch"]) == (192, 32) and moe.gnmr.fidelity_warmup == 0.05
    assert (moe.gnmr.alpha, moe.gnmr.beta, moe.data.max_length, moe.training["learning_rate"]) == (0.9, None, 4096, 5e-5)
    figures = plan(pangu, processes=4)
    assert round(figures["parameters"] / 1e9, 2) == 1.16 and (figures["units"], figures["max_o"]) == (26, 6)
    assert figures["global_batch"] * 4096 * figures["steps"] == pytest.approx(4e9, rel=1e-3)
    assert (pangu.gnmr.alpha, pangu.backend.options.bits_low, pangu.training["learning_rate"]) == (0.4, 4, 2e-3)
    for recipe in (moe, pangu):
        assert recipe.training["lr_scheduler_type"] == "cosine" and not recipe.training["lr_scheduler_kwargs"]


@pytest.mark.parametrize("name", ["fp8_small", "lowbit_small", "moe_small", "pangu_small"])
def test_small_siblings_train(name, tmp_path, capsys):
    folder = tmp_path / "run"
    assert train([name, *FEW, f"training.output_dir={folder}"]) == 0
    out = capsys.readouterr().out
    assert ("SIMULATED" if name in ("lowbit_small", "pangu_small") else "EMULATED") in out
    header, lines = trace_lines(folder)
    results = json.loads((folder / "results.json").read_text())
    assert len(lines) == 4 and all(line["loss"] > 0 for line in lines) and results["eval_perplexity"] > 1
    weights = load_file(folder / "model.safetensors")
    assert all(torch.isfinite(w).all() for w in weights.values())
    if name == "moe_small":
        names = [unit["name"] for unit in header["units"]]
        assert len(names) == 24 and re.fullmatch(r"model\.layers\.2\.mlp\.experts\.7", names[-1])
        assert lines[0]["active"] == list(range(24)), "the fidelity warm-up: one of four steps"
        assert 0 < len(lines[2]["active"]) <= header["max_o"] == 6
    if name == "pangu_small":
        assert header["max_o"] == 1 and all(len(line["active"]) == 1 for line in lines[1:]), "α 0.4: always full"


def test_all_is_the_plain_training_bit_for_bit(tmp_path):
    same_model = f"model.architecture={load_recipe(find_recipe('fp8_small')).model.architecture}"
    runs = {
        "plain": ["fp8_small", "backend.name=none"],
        "lifted": ["fp8_small", "trigger.name=all"],
        "fp8": ["fp8_small", "trigger.name=none"],
        "lowbit": ["lowbit_small", "trigger.name=all", same_model],
    }
    results = {}
    for name, arguments in runs.items():
        assert train([arguments[0], *FEW, *arguments[1:], f"training.output_dir={tmp_path / name}"]) == 0
        losses = [line["loss"] for line in trace_lines(tmp_path / name)[1]]
        results[name] = losses, load_file(tmp_path / name / "model.safetensors")
    for a, b in (("plain", "lifted"), ("fp8", "lowbit")):
        assert results[a][0] == results[b][0]
        assert all(torch.equal(results[a][1][key], results[b][1][key]) for key in results[a][1])
    assert results["plain"][0] != results["fp8"][0]


def test_plan_of_products_under_lora_and_of_auto(capsys):
    assert cli(["plan", "quickstart", "backend.name=lowbit"]) == 0
    assert "INT8" not in capsys.readouterr().out
    sizes = "vocab_size: 288, hidden_size: 120, num_attention_heads: 4, num_hidden_layers: 1"
    odd = f"model.architecture={{model_type: llama, {sizes}}}"
    assert cli(["plan", "fp8_small", odd]) == 0, "auto: emulated if the device has no FP8"
    assert cli(["plan", "fp8_small", odd, "backend.emulate=false"]) == 2
    assert "multiples of 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "backend", "unit"),
    [
        ("lowbit_130m", "none", None),
        ("moe_small", "lowbit", "expert"),  # a kind of unit that both backends have
        ("moe_small", "activation", None),  # which has no such kind
    ],
)
def test_another_backend_removes_the_old_ones_options(name, backend, unit):
    section = load_recipe(find_recipe(name), [f"backend.name={backend}"]).backend
    assert section.options == BACKENDS[backend].Options(**({"unit": unit} if unit else {}))


def test_another_backend_in_an_extending_recipe_removes_the_old_ones_options(tmp_path):
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {find_recipe('fp8_small').resolve()}\nbackend: {{name: lowbit, bits_low: 6}}\n")
    options = load_recipe(child).backend.to_dict()
    assert options["bits_low"] == 6 and "emulate" not in options


def test_another_backends_options_are_refused_if_given_by_hand(tmp_path):
    folder = tmp_path / "run"
    assert train(["lowbit_small", "backend.name=fp8", "backend.bits_low=6", f"training.output_dir={folder}"]) == 2
    with pytest.raises(RecipeError, match=r"backend\.emulate='maybe'"):
        load_recipe(find_recipe("fp8_small"), ["backend.emulate=maybe"])
