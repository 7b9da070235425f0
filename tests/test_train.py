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
from safetensors.torch import load_file

from hf_gnmr.cli import main as cli
from hf_gnmr.models import add_adapters, load_base
from hf_gnmr.recipe import LoraSection, ModelSection, load_recipe
from hf_gnmr.trace import read_trace
from hf_gnmr.train import checkpoint_to_resume, final_answer, main


def refused(capsys, *arguments):
    """The one-line error of a run that must not start, before the model is loaded."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


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
    ours, theirs = (read_trace(folder / "trace.jsonl").steps for folder in (run, tmp_path / "again"))
    assert [line["norms"] for line in ours] == [line["norms"] for line in theirs], "the resolved recipe is the run"
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
        "gnmr": [], "none": ["trigger.name=none"], "all": ["trigger.name=all"], "bf16": ["backend.name=none"]
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
    assert main([recipe_file, f"training.output_dir={tmp_path / 'second'}", f"lora.init_adapter={first}",
                 "training.learning_rate=0", "training.max_steps=1"]) == 0
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (first, tmp_path / "second"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    other = ["lora.target_modules=[q_proj]", f"training.output_dir={tmp_path / 'third'}"]
    assert main([recipe_file, f"lora.init_adapter={first}", *other]) == 2
    assert "does not fit: 0 tensors missing, 36 unexpected" in capsys.readouterr().err


def test_an_output_folder_that_holds_a_run(recipe_file, tmp_path, capsys):
    assert main([recipe_file]) == 0
    before = (tmp_path / "run" / "trace.jsonl").read_bytes()
    error = refused(capsys, recipe_file)
    assert "holds a run already" in error and "run.resume=auto" in error and "run.overwrite=true" in error
    assert (tmp_path / "run" / "trace.jsonl").read_bytes() == before
    assert main([recipe_file, "run.overwrite=true"]) == 0
    assert (tmp_path / "run.1" / "trace.jsonl").read_bytes() == before, "the old run is moved aside, not lost"


def test_resume_takes_the_last_whole_checkpoint(recipe_file, tmp_path):
    straight = ["training.output_dir=" + str(tmp_path / "straight")]
    assert main([recipe_file, *straight]) == 0
    saving = ["training.save_strategy=steps", "training.save_steps=2", "run.resume=auto"]
    assert main([recipe_file, *saving]) == 0
    run = tmp_path / "run"
    (run / "checkpoint-6" / "trainer_state.json").unlink()  # as if killed while saving
    (run / "checkpoint-9").mkdir()
    assert checkpoint_to_resume(load_recipe(recipe_file, saving), str(run)).endswith("checkpoint-4")
    assert main([recipe_file, *saving]) == 0
    resumed, whole = read_trace(run / "trace.jsonl").steps, read_trace(tmp_path / "straight" / "trace.jsonl").steps
    keys = ("step", "loss", "norms", "gnmr", "delta_gnmr", "active", "triggered")
    assert [[line[k] for k in keys] for line in resumed] == [[line[k] for k in keys] for line in whole]


def test_what_is_wrong_is_told_before_the_model_is_loaded(recipe_file, tmp_path, capsys):
    for override, message in (
        ("gnmr.max_o=1.5", "gnmr.max_o=1.5"),
        ("backend.name=fp8", "backend='fp8': one of 'int8', 'none'"),
        ("trigger.name=gsnrr", "trigger='gsnrr'"),
        ("backend.recovery=disk", "recovery='disk'"),
        ("backend.eval_path=both", "eval_path='both'"),
        ("data.name=/gone/rows.jsonl", "no such file"),
        ("model.name=/gone/model", "model.name='/gone/model': no such folder"),
        ("data.prompt=ask", "no column 'ask'"),
        ("training.eval_strategy=steps", "needs data.eval_rows above 0"),
        ("run.resume=/gone/checkpoint-3", "not a whole checkpoint"),
        ("training.save_strategy=sometimes", "training.save_strategy='sometimes'"),
    ):
        assert message in refused(capsys, recipe_file, override), override
        assert not (tmp_path / "run" / "trace.jsonl").exists()


def test_max_o_above_the_layers_is_told_in_one_line(recipe_file, capsys):
    assert main([recipe_file, "gnmr.max_o=4"]) == 2
    assert "error: max_o=4: the model has 3 recoverable units" in capsys.readouterr().err


def test_final_answers():
    assert final_answer(" 3 + 4 = 7\n#### 7", "####") == "7"
    assert final_answer("#### 1,200 \nmore", "####") == "1200"
    assert final_answer("no marker", "####") is None
    assert final_answer(" yes ", "") == "yes"


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
        [*command, *launcher[1:], str(file)], capture_output=True, text=True, timeout=300, env={**os.environ, "PATH": path},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(read_trace(tmp_path / "run" / "trace.jsonl").steps) == 6


def test_command_line_help_and_unknown_commands(capsys):
    for arguments, status in ((["--help"], 0), (["train", "--help"], 0), (["nope"], 2), ([], 2)):
        with pytest.raises(SystemExit) as stop:
            cli(arguments)
        assert stop.value.code == status
    assert cli(["import-gguf", "/gone.gguf", "/tmp/never"]) == 2
    assert "/gone.gguf: no such file" in capsys.readouterr().err
