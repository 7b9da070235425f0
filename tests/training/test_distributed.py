"""The number of processes; two gloo ranks on the CPU: one decision, that of one process with the same global batch, and
files from rank 0 only."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import trace_lines

from hf_gnmr.trace.file import read_trace
from hf_gnmr.training.distributed import is_distributed, world_size

BIN = pathlib.Path(sys.executable).parent

WATCHED = """
import json, os, sys
from pathlib import Path
from hf_gnmr import train
from hf_gnmr.training import session

decide = session.GNMRSession.decide

def recorded(self, **kwargs):
    decision = decide(self, **kwargs)
    with open(Path(os.environ["DECISIONS"]) / f"rank{os.environ.get('RANK', 0)}.jsonl", "a") as file:
        file.write(json.dumps([decision.gnmr.tolist(), decision.active.tolist(), self.scalars()]) + "\\n")
    return decision

session.GNMRSession.decide = recorded
sys.exit(train.main())
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def torchrun(ranks):
    return ["torchrun", "--nproc_per_node", str(ranks), "--master_port", free_port()]


def launch(command, script, arguments, **environment):
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run(
        [BIN / command[0], *command[1:], *script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout + result.stderr


def test_without_a_process_group_there_is_one_process():
    assert not is_distributed() and world_size() == 1


def test_a_process_group_gives_the_number_of_processes(monkeypatch):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert is_distributed() and world_size() == 1
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
        assert world_size() == 3
    finally:
        torch.distributed.destroy_process_group()
    assert not is_distributed() and world_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_ranks_decide_as_one_process_with_the_same_global_batch(recipe_file, tmp_path, checkpointing):
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    common = [recipe_file, "lora.lora_dropout=0", "gnmr.max_o=2", "training.gradient_accumulation_steps=2"]
    if checkpointing:
        common += ["training.gradient_checkpointing=true", "training.gradient_checkpointing_kwargs={use_reentrant: false}"]
    runs = {}
    for name, command, settings in (
        ("one", ["python"], ["training.per_device_train_batch_size=4"]),
        ("two", torchrun(2), ["training.per_device_train_batch_size=2", "training.ddp_backend=gloo"]),
    ):
        (tmp_path / f"{name}-decisions").mkdir()
        out = launch(
            command,
            [str(script)],
            [*common, *settings, f"training.output_dir={tmp_path / name}"],
            DECISIONS=str(tmp_path / f"{name}-decisions"),
        )
        assert out.count("GNMR: 3 units") == 1 and "WORLD SIZE 1" not in out
        runs[name] = read_trace(tmp_path / name / "trace.jsonl").steps
    one, two = runs["one"], runs["two"]
    norms = [np.array([line["norms"] for line in lines], dtype=float) for lines in (one, two)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=2e-2)  # 8-bit products depend on the rows beside
    np.testing.assert_allclose(norms[0][0], norms[1][0], rtol=1e-5)
    assert [line["active"] for line in one] == [line["active"] for line in two]
    assert any(line["active"] for line in one)
    ranks = [(tmp_path / "two-decisions" / f"rank{rank}.jsonl").read_text() for rank in (0, 1)]
    assert ranks[0] == ranks[1] and len(ranks[0].splitlines()) == 6, "every rank decides the same, bit for bit"
    assert [json.loads(line)[1] for line in ranks[0].splitlines()][:-1] == [
        [unit in line["active"] for unit in range(3)] for line in two[1:]
    ]
    assert (tmp_path / "two" / "summary.json").exists()
    assert not list((tmp_path / "two").glob("trace.*.jsonl")), "files come from rank 0 only"


@pytest.mark.slow
def test_the_example_loop_on_two_ranks(tiny_lm, rows_file, tmp_path):
    example = pathlib.Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
    arguments = ["--model", tiny_lm, "--data", rows_file, "--steps", "4"]
    launch(torchrun(2), [str(example)], [*arguments, "--output-dir", str(tmp_path / "two")], ACCELERATE_USE_CPU="true")
    assert [line["micro_batches"] for line in read_trace(tmp_path / "two" / "trace.jsonl").steps] == [2] * 4
    assert not list((tmp_path / "two").glob("trace.*.jsonl"))


@pytest.mark.slow
def test_a_world_size_that_did_not_come_about_is_reported(recipe_file, tmp_path):
    out = launch(["accelerate", "launch", "--cpu", "--num_processes", "2", "-m"], ["hf_gnmr.train"], [recipe_file])
    assert "WORLD SIZE 1: a launcher appears to have been asked for several processes" in out
    assert "torchrun --nproc_per_node" in out


@pytest.mark.slow
def test_the_launchers_cpu_configuration(recipe_file, tmp_path):
    config = pathlib.Path(__file__).parents[2] / "recipes" / "accelerate" / "cpu.yaml"
    out = launch(["accelerate", "launch", "--config_file", str(config), "-m"], ["hf_gnmr.train"], [recipe_file])
    assert "WORLD SIZE" not in out and len(read_trace(tmp_path / "run" / "trace.jsonl").steps) == 6


@pytest.mark.slow
@pytest.mark.parametrize("trigger", ["jacobian", "gsnr", "random"])
def test_two_ranks_choose_the_same_projections(tmp_path, trigger):
    """Gains are measured on each rank's own activations and added up; the others are the same on every rank anyway."""
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    run = tmp_path / "run"
    arguments = [
        "activation_small",
        f"training.output_dir={run}",
        "training.max_steps=5",
        "training.eval_strategy=no",
        "data.eval_rows=0",
        "data.documents=200",
        "training.per_device_train_batch_size=4",
        "training.use_cpu=true",
        "training.ddp_backend=gloo",
        f"trigger.name={trigger}",
        "training.disable_tqdm=true",
        "gnmr.max_o=3",
        *(["trigger.promotion_ratio=0.1"] if trigger == "random" else []),
    ]
    launch(torchrun(2), [str(script)], arguments, DECISIONS=str(tmp_path))
    ranks = [[json.loads(line) for line in (tmp_path / f"rank{r}.jsonl").read_text().splitlines()] for r in range(2)]
    assert len(ranks[0]) == 5 and [d[1] for d in ranks[0]] == [d[1] for d in ranks[1]]
    assert any(any(d[1]) for d in ranks[0])
    np.testing.assert_allclose([d[0] for d in ranks[0]], [d[0] for d in ranks[1]], rtol=1e-6)


UNEQUAL = """
import json
import sys
import torch
from conftest import load_int8, token_rows, with_lora
from transformers import Trainer, TrainerCallback, TrainingArguments
from hf_gnmr import GNMRCallback

tiny, run, trigger, case = sys.argv[1:]
ROW = {k: torch.tensor(v)[None] for k, v in token_rows(1)[0].items()}


class Probe(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if case == "probe" and state.is_world_process_zero:
            model(**ROW).loss.backward()
            model.zero_grad()


class Constant(Trainer):
    calls = 0

    def training_step(self, *args, **kwargs):
        self.calls += 1
        if case == "constant" and self.args.process_index == 1 and self.calls == 5:  # step 3, the first of two
            return torch.tensor(1.0)
        return super().training_step(*args, **kwargs)


arguments = TrainingArguments(
    output_dir=run, use_cpu=True, report_to=[], max_steps=5, save_strategy="no", per_device_train_batch_size=2, seed=0,
    gradient_accumulation_steps=2, logging_steps=1, disable_tqdm=True, ddp_backend="gloo", ddp_timeout=60,
    ddp_find_unused_parameters=False, learning_rate=1e-4,
)
callback = GNMRCallback(trigger=trigger, max_o=1, alpha_init_fraction=0.0)
Constant(with_lora(load_int8(tiny)), arguments, train_dataset=token_rows(), callbacks=[Probe(), callback]).train()
with open(f"{run}/choice{arguments.process_index}.json", "w") as file:  # ranks' output may be mixed within a line
    json.dump(callback.decision.active.tolist(), file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["constant", "probe"])
@pytest.mark.parametrize("trigger", ["gnmr", "jacobian", "gsnr"])
def test_ranks_may_run_different_numbers_of_backward_passes(tiny, tmp_path, trigger, case):
    """A batch that one rank skips is a short window for all; a probe of one rank leaves no mark. No collective is missed."""
    script = tmp_path / "unequal.py"
    script.write_text(UNEQUAL)
    path = os.pathsep.join([str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    launch(torchrun(2), [script], [tiny, str(tmp_path / "run"), trigger, case], PYTHONPATH=path)
    choices = [json.loads((tmp_path / "run" / f"choice{rank}.json").read_text()) for rank in (0, 1)]
    assert choices[0] == choices[1] and len(choices[0]) == 3
    skipped = [line["skipped"] for line in trace_lines(tmp_path / "run")[1]]
    expected = "1 backward passes in a window of 2 micro-batches" if case == "constant" else None
    assert skipped == [None, None, expected, None, None]
