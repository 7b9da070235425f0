"""Whole runs through the command line."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from conftest import load_bf16, trace_lines
from peft import PeftModel
from runs import refused
from safetensors.torch import load_file

from hf_gnmr.run.models import add_adapters, load_base
from hf_gnmr.run.recipe import LoraSection, ModelSection
from hf_gnmr.trace.file import read_trace
from hf_gnmr.train import main


def test_a_run_leaves_every_file_it_promises(recipe_file, tmp_path, tiny_lm, capsys):
    assert main([recipe_file, "data.eval_rows=4", "data.generate_rows=2", "data.max_new_tokens=4"]) == 0
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    results = json.loads((run / "results.json").read_text())
    environment = json.loads((run / "environment.json").read_text())
    assert summary["steps"] == 6 and summary["backend"] == "int8"
    assert results["eval_rows"] == 4 and 0 <= results["exact_match"] <= 1 and results["peak_process_bytes"] > 1e6
    assert environment["packages"]["torch"] == torch.__version__ and environment["seed"] == 0
    assert environment["data"]["rows"] == 36
    assert main([str(run / "recipe.yaml"), f"training.output_dir={tmp_path / 'again'}"]) == 0
    first, again = (read_trace(folder / "trace.jsonl").steps for folder in (run, tmp_path / "again"))
    assert [line["norms"] for line in first] == [line["norms"] for line in again], "the resolved recipe is the run"
    PeftModel.from_pretrained(load_bf16(tiny_lm), run)
    out = capsys.readouterr().out
    assert "max_o: 1" in out and "runs on: cpu" in out and "36 rows" in out


def test_the_modes_start_from_the_same_adapters_and_see_the_same_data(recipe_file, tmp_path, tiny_lm):
    section, lora = ModelSection(tiny_lm), LoraSection(r=4)
    adapters = {}
    for backend in ("int8", "none"):
        model = add_adapters(load_base(tiny_lm, section, backend), lora, seed=5)
        adapters[backend] = {n: p for n, p in model.named_parameters() if "lora_" in n}
    assert adapters["int8"].keys() == adapters["none"].keys() and adapters["int8"]
    for name, p in adapters["int8"].items():
        assert torch.equal(p, adapters["none"][name]) and p.dtype == torch.float32
        assert (p.abs().max() > 0) == (".lora_A." in name)
    losses = {}
    for mode, overrides in {
        "gnmr": [],
        "none": ["trigger.name=none"],
        "all": ["trigger.name=all"],
        "bf16": ["backend.name=none"],
    }.items():
        out = tmp_path / mode
        assert main([recipe_file, f"training.output_dir={out}", "training.bf16=true", *overrides]) == 0
        header, lines = trace_lines(out)
        losses[mode] = [line["loss"] for line in lines]
        assert header["backend"] == ("none" if mode == "bf16" else "int8")
    assert losses["all"][0] == losses["bf16"][0], "B is zero: with every unit lifted the first loss is the BF16 model's"
    assert losses["none"][0] == losses["gnmr"][0] and losses["none"][0] != losses["bf16"][0]
    assert max(abs(a - b) for a, b in zip(losses["none"], losses["bf16"], strict=True)) < 0.05


def test_adapters_from_a_folder(recipe_file, tmp_path, tiny_lm, capsys):
    first = tmp_path / "first"
    assert main([recipe_file, f"training.output_dir={first}"]) == 0
    assert (
        main(
            [
                recipe_file,
                f"training.output_dir={tmp_path / 'second'}",
                f"lora.init_adapter={first}",
                "training.learning_rate=0",
                "training.max_steps=1",
            ]
        )
        == 0
    )
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (first, tmp_path / "second"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    other = ["lora.target_modules=[q_proj]", f"training.output_dir={tmp_path / 'third'}"]
    assert main([recipe_file, f"lora.init_adapter={first}", *other]) == 2
    assert "does not fit: 0 tensors missing, 36 unexpected" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main([recipe_file, f"lora.init_adapter={tmp_path / 'empty'}", *other]) == 2
    assert "does not fit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gnmr.max_o=1.5", "gnmr.max_o=1.5"),
        ("backend.name=fp9", "backend.name='fp9': expected one of 'int8', 'activation', 'fp8', 'lowbit', 'none'"),
        ("backend.name=fp8", "no FP8 product on cpu"),
        ("trigger.name=gsnrr", "trigger.name='gsnrr'"),
        ("backend.recovery=disk", "recovery='disk'"),
        ("backend.eval_path=both", "eval_path='both'"),
        ("data.name=/gone/rows.jsonl", "no such file"),
        ("model.name=/gone/model", "model.name='/gone/model': no such folder"),
        ("data.prompt=ask", "no column 'ask'"),
        ("training.eval_strategy=steps", "needs data.eval_rows above 0"),
        ("training.fsdp=full_shard", "fsdp partitions the gradients"),
        ("training.optim=galore_adamw_layerwise", "uses up each gradient"),
        ("training.resume_from_checkpoint=x", "use run.resume"),
        ("training.do_train=false", "a recipe is for training"),
        ("data.eval_split=test", "needs data.eval_rows above 0"),
        ("data.prompt='{question'", "not a template"),
        ("data.prompt='{question:d}'", "cannot be filled"),
        ("gnmr.max_o=4", "expected at most 3, the model's decoder layers"),
        ("lora.layers_to_transform=[0, 7]", "expected layers from 0 to 2"),
        ("run.resume=/gone/checkpoint-3", "expected a complete checkpoint"),
        ("training.save_strategy=sometimes", "training.save_strategy='sometimes'"),
    ],
)
def test_errors_are_reported_before_the_model_is_loaded(recipe_file, tmp_path, capsys, override, message):
    assert message in refused(capsys, recipe_file, override)
    assert not (tmp_path / "run" / "trace.jsonl").exists()


def test_dropout_does_not_depend_on_how_the_model_was_loaded(recipe_file, tmp_path, monkeypatch):
    runs = []
    for draws in (0, 7):

        def loading(*arguments, draws=draws):
            torch.rand(draws)
            return load_base(*arguments)

        monkeypatch.setattr("hf_gnmr.run.prepare.load_base", loading)
        out = tmp_path / str(draws)
        assert main([recipe_file, f"training.output_dir={out}", "lora.lora_dropout=0.2", "training.max_steps=3"]) == 0
        runs.append([line["norms"] for line in trace_lines(out)[1]])
    assert runs[0] == runs[1]


def test_label_smoothing_has_a_loss_in_the_trace_of_our_trainer(recipe_file, tmp_path):
    saving = ["training.save_strategy=steps", "training.save_steps=6"]
    assert main([recipe_file, *saving, "training.label_smoothing_factor=0.1", "training.gradient_accumulation_steps=2"]) == 0
    state = json.loads((tmp_path / "run" / "checkpoint-6" / "trainer_state.json").read_text())
    logged = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert [line["loss"] for line in trace_lines(tmp_path / "run")[1]] == pytest.approx(logged, abs=2e-3)


@pytest.mark.slow
def test_one_recipe_three_ways(recipe_file, tmp_path):
    script = pathlib.Path(__file__).parents[2] / "eval" / "three_ways.py"
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, script, recipe_file, "--out", out, "--rounds", "11", "training.max_steps=2", "data.eval_rows=4"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    table = (out / "table.md").read_text()
    for row in ("held-out loss", "promotion ratio", "hit-maxO", "switches", "weight bytes", "step time against INT8"):
        assert f"| {row}" in table
    ratios = json.loads((out / "table.json").read_text())["step_time_ratios"]
    assert ratios["int8"]["median"] == 1.0 and ratios["bf16"]["median"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable, "-m", "hf_gnmr.train"],
        ["hf-gnmr", "train"],
        ["accelerate", "launch", "--cpu", "-m", "hf_gnmr.train"],
        ["torchrun", "--nproc_per_node", "1", "-m", "hf_gnmr.train"],
        ["accelerate", "launch", "--cpu", "--no_python"],
    ],
    ids=["python -m", "hf-gnmr", "accelerate", "torchrun", "recipe itself"],
)
def test_every_way_to_launch(recipe_file, tmp_path, launcher):
    file = pathlib.Path(recipe_file)
    file.write_text("#!/usr/bin/env -S hf-gnmr train\n" + file.read_text())
    file.chmod(0o755)
    command = [str(pathlib.Path(sys.executable).parent / launcher[0]) if "/" not in launcher[0] else launcher[0]]
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        [*command, *launcher[1:], str(file)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PATH": path},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(read_trace(tmp_path / "run" / "trace.jsonl").steps) == 6
