"""`hf-gnmr plan`: the paper's 13B figures, the same bytes as a real run's census, and what does not fit."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import load_bf16, load_int8, save_llama, trace_lines

from hf_gnmr.cli import main as cli
from hf_gnmr.config import ConfigError
from hf_gnmr.run.plan import in_words, plan
from hf_gnmr.run.recipe import find_recipe, load_recipe
from hf_gnmr.train import main as train


def test_the_papers_13b_setting(capsys):
    figures = plan(load_recipe(find_recipe("llama2_13b_lora")), processes=2, rows=7473)
    ways = figures["ways"]
    assert round(ways["bf16"]["weights"] / 1e9, 1) == 26.0
    assert round(ways["int8"]["weights"] / 1e9, 1) in (13.3, 13.4)
    assert round(ways["host_gpu"]["recovery"] / 1e9, 1) == 6.3
    assert (figures["units"], figures["max_o"]) == (40, 10) and figures["trainable_parameters"] == 31_293_440
    assert figures["checkpoint_cast_to_bf16"], "LLaMA-2's files are float16"
    assert ways["host_gpu"]["moved"] == 10 * figures["unit_bytes"]
    assert ways["host_cpu"]["recovery"] == 40 * figures["unit_bytes"]
    assert figures["global_batch"] == 32 and figures["steps"] == 3 * 234  # ceil(ceil(7473 / 8) / 4)
    words = in_words(figures)
    assert "26.03" in words and "13.35" in words and "6.34" in words and "<- this recipe" in words


def test_the_same_bytes_as_a_runs_census(recipe_file, tmp_path, capsys):
    overrides = ["gnmr.max_o=2", "training.use_cpu=true", "lora.layers_to_transform=[0,2]", "lora.target_modules=[q_proj]"]
    figures = plan(load_recipe(recipe_file, overrides))
    assert train([recipe_file, *overrides]) == 0
    header, _ = trace_lines(tmp_path / "run")
    census = header["census"]
    way = figures["ways"][figures["way"]]
    assert figures["way"] == "host_cpu" and way["recovery"] == census["recovery_bytes_bound"]
    assert figures["trainable_parameters"] == census["trainable_parameters_in_units"]
    assert figures["units"] == census["units"] == 2 and figures["steps"] == 6
    assert figures["unit_bytes"] == header["units"][0]["bytes_recovery"]
    model = load_bf16(load_recipe(recipe_file).model.name)
    assert figures["parameters"] == sum(p.numel() for p in model.parameters())
    in_layers = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = sum(2 * p.numel() for p in model.parameters()) - sum(2 * p.numel() for p in in_layers)
    assert figures["ways"]["int8"]["weights"] == others + sum(p.numel() + 4 * p.shape[0] for p in in_layers)


def test_biases_and_every_unit_lifted_are_counted(recipe_file, tmp_path):
    tokens = {"vocab_size": 288, "eos_token_id": 2, "bos_token_id": 1}
    folder = save_llama(tmp_path / "biased", attention_bias=True, mlp_bias=True, **tokens)
    overrides = [f"model.name={folder}", "training.use_cpu=true"]
    figures = plan(load_recipe(recipe_file, [*overrides, "trigger.name=all"]))
    real = sum(p.numel() * p.element_size() for p in load_int8(folder).parameters())
    rows = sum(p.shape[0] for n, p in load_int8(folder).named_parameters() if p.dtype == torch.int8)
    assert figures["ways"]["int8"]["weights"] == real + 4 * rows
    assert figures["ways"][figures["way"]]["recovery"] == 3 * figures["unit_bytes"] and figures["most_lifted"] == 3


@pytest.mark.parametrize(
    ("trigger", "lifted"),
    [
        (["trigger.name=static", "trigger.warmup=2"], 3),
        (["trigger.name=random", "trigger.promotion_ratio=0.1"], 1),
        (["trigger.name=listed", "trigger.units=['*.0', '*.2']"], 2),
        (["trigger.name=listed", "trigger.units=['*']", "trigger.promotion_ratio=0.1"], 1),
    ],
)
def test_how_many_units_each_trigger_lifts_at_most(recipe_file, trigger, lifted):
    assert plan(load_recipe(recipe_file, ["training.use_cpu=true", *trigger]))["most_lifted"] == lifted


def test_a_list_that_matches_no_unit_is_refused(recipe_file):
    with pytest.raises(ConfigError, match="units='layers.9' matches no unit"):
        plan(load_recipe(recipe_file, ["trigger.name=listed", "trigger.units=[layers.9]"]))


def test_a_budget_and_what_does_not_fit(recipe_file, capsys):
    assert cli(["plan", recipe_file, "gnmr.max_o=0.25", "backend.max_recovery_memory=150KB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_o"] == 2
    assert cli(["plan", recipe_file, "--device-memory", "100KB"]) == 1
    error = capsys.readouterr().err
    assert "does not fit: INT8, recovery=host" in error and "more than --device-memory 100KB (100,000)" in error
    assert cli(["plan", recipe_file, "--device-memory", "1GB", "backend.recovery=device"]) == 0
    assert "INT8, recovery=device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.name=nobody/nothing"], "its configuration cannot be loaded"),
        (["model.name=nobody/x", "model.architecture={model_type: nosuch}"], "model.architecture="),
        (["--device-memory", "lots"], "--device-memory='lots'"),
        (["backend.max_recovery_memory=1KB", "gnmr.max_o=0.25"], "is below one unit"),
        (["backend.max_recovery_memory=1MB"], "give only one of them"),
        (["backend.max_recovery_memory=1MB", "gnmr.max_o=0.25", "backend.recovery=device"], "units add no memory here"),
        (["gnmr.fidelity_warmup=0.5", "training.use_cpu=false"], "lifts all 3 units"),
        (["gnmr.max_o=9"], "max_o=9: expected at most 3"),
        (["lora.target_modules=[nothing]"], "lora (target_modules=['nothing'])"),
    ],
)
def test_errors_are_reported(recipe_file, capsys, arguments, message):
    assert cli(["plan", recipe_file, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_architecture_that_is_not_the_models_is_refused_by_the_run(recipe_file, capsys):
    assert train([recipe_file, "model.architecture={model_type: llama, hidden_size: 65}"]) == 2
    assert "model.architecture.hidden_size=65" in capsys.readouterr().err
