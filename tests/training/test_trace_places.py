"""Where a training writes its trace: refused before the model is touched, and never in two processes at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import load_int8, place, trace_lines, with_lora
from transformers import TrainerCallback

from hf_gnmr import ConfigError, GNMRCallback, GNMRSession, SetupError

SETTINGS = {"max_o": 1, "alpha": 0.9, "alpha_init_fraction": 0.0}


@pytest.mark.parametrize("kind", ["folder", "fifo", "link to a device", "recipe", "below a file"])
def test_a_trace_path_that_cannot_be_a_trace_is_refused_at_construction(tmp_path, kind):
    path = place(tmp_path, kind)
    before = os.lstat(tmp_path / "place")
    with pytest.raises(ConfigError, match="trace_path: .*place"):
        GNMRCallback(trace_path=path)
    assert os.path.samestat(os.lstat(tmp_path / "place"), before)


@pytest.mark.parametrize("path", ["/dev/null", "", "."])
def test_so_are_devices_and_names_of_no_file(path):
    with pytest.raises(ConfigError, match="trace_path: "):
        GNMRCallback(trace_path=path)


@pytest.mark.parametrize("kind", ["folder", "fifo", "link to a device"])
def test_the_default_place_is_checked_before_the_model_is_touched(tmp_path, trainer_for, tiny, kind):
    (tmp_path / "run").mkdir()
    place(tmp_path, kind).rename(tmp_path / "run" / "trace.jsonl")
    model = with_lora(load_int8(tiny))
    with pytest.raises(ConfigError, match="output_dir: .*trace.jsonl is a"):
        trainer_for(model, GNMRCallback(**SETTINGS)).train()
    with pytest.raises(ConfigError, match="output_dir: .*trace.jsonl is a"):
        GNMRSession(None, total_steps=3, output_dir=tmp_path / "run")
    assert not model._forward_hooks and not list((tmp_path / "run").glob("trace.*.jsonl"))


HOLDER = """
import sys
from pathlib import Path
from hf_gnmr.trace.lock import hold
hold(Path(sys.argv[1]))
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path):
    """A trace that another process is writing."""
    trace = tmp_path / "run" / "trace.jsonl"
    trace.parent.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(trace)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "holds\n"
    yield process.pid
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("by_path", [False, True])
def test_a_second_training_on_one_trace_is_refused(held, trainer_for, tiny, tmp_path, by_path):
    options = {"trace_path": tmp_path / "run" / "trace.jsonl"} if by_path else {}
    model = with_lora(load_int8(tiny))
    with pytest.raises(SetupError, match=rf"is being written by another run \(pid {held} on"):
        trainer_for(model, GNMRCallback(**SETTINGS, **options)).train()
    assert not model._forward_hooks and [file.name for file in (tmp_path / "run").glob("*") if file.is_file()] in (
        [],
        [".trace.jsonl.lock"],
    )


@pytest.mark.parametrize("overrides", [["run.resume=auto"], []], ids=["resumed", "fresh"])
def test_a_second_run_of_a_recipe_in_one_folder_is_refused_in_one_line(held, recipe_file, capsys, overrides):
    from hf_gnmr.train import main

    assert main([recipe_file, *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and f"another run (pid {held} on" in error


class Vandal(TrainerCallback):
    """Deletes the trace after the third step."""

    def __init__(self, trace):
        self.trace = trace

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.trace.unlink()


def test_a_trace_deleted_during_a_training_loses_no_step(trainer_for, tiny, tmp_path):
    run = tmp_path / "run"
    callbacks = [GNMRCallback(**SETTINGS), Vandal(run / "trace.jsonl")]
    with pytest.warns(UserWarning, match="was deleted or moved away during the run"):
        trainer_for(with_lora(load_int8(tiny)), *callbacks).train()
    header, lines = trace_lines(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert json.loads((run / "summary.json").read_text())["run_id"] == header["run_id"]
    assert sorted(file.name for file in run.iterdir()) == ["summary.json", "trace.jsonl"], "the lock's file is gone"


def step(session, model):
    ids = torch.arange(1, 9)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    session.observe()
    session.decide()
    model.zero_grad()


def test_two_traces_in_one_folder_keep_both_summaries(tmp_path, tiny, trainer_for):
    for name in ("a", "b"):
        callback = GNMRCallback(**SETTINGS, trace_path=tmp_path / "run" / f"{name}.jsonl")
        trainer_for(with_lora(load_int8(tiny)), callback, max_steps=1).train()
    runs = [json.loads((tmp_path / "run" / name).read_text())["run_id"] for name in ("summary.1.json", "summary.json")]
    headers = [json.loads((tmp_path / "run" / f"{n}.jsonl").read_text().splitlines()[0])["run_id"] for n in ("a", "b")]
    assert runs == headers


@pytest.mark.parametrize("how", ["deleted", "truncated"])
def test_a_trace_that_is_lost_after_the_last_step_is_written_again_before_the_summary(tmp_path, tiny, how, capsys):
    model = with_lora(load_int8(tiny)).train()
    session = GNMRSession(model, **SETTINGS, output_dir=tmp_path / "run")
    for _ in range(3):
        step(session, model)
    trace = tmp_path / "run" / "trace.jsonl"
    if how == "deleted":
        trace.unlink()
    else:
        lines = trace.read_bytes().splitlines(keepends=True)
        trace.write_bytes(b"".join(lines[:3]))
    with pytest.warns(UserWarning, match=f"was {how}"):
        summary = session.close()
    assert "GNMR: after the last step: " in capsys.readouterr().out
    assert len(trace_lines(tmp_path / "run")[1]) == (3 if how == "deleted" else 2) and summary is not None
