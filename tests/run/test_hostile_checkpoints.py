"""Checkpoints, traces and run folders from outside: nothing waits for a pipe, grows with a name, or runs code unasked."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from safetensors.torch import save_file

from hf_gnmr import last_checkpoint
from hf_gnmr.backends.bf16_cpu import float32_kernels
from hf_gnmr.run.plan import main as plan
from hf_gnmr.trace.file import TraceWriter
from hf_gnmr.training.whole import damage


def checkpoint(folder):
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({}, folder / name)
    save_file({"weight": torch.zeros(1)}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["rng_state.pth", "rng_state_0.pth", "extra.pth", "extra.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_regular_file_makes_a_checkpoint_unusable(tmp_path, name, kind):
    folder = checkpoint(tmp_path / "checkpoint-2")
    place = folder / name
    place.unlink(missing_ok=True)
    {"fifo": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](place)
    assert "expected a regular file" in damage(folder)
    checkpoint(tmp_path / "checkpoint-1")
    with pytest.warns(UserWarning, match="checkpoint-2 is not complete"):
        assert last_checkpoint(tmp_path).name == "checkpoint-1"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("rank", ["99999999999", "9" * 200, "1"])
def test_the_number_in_a_file_name_takes_no_memory(tmp_path, rank):
    folder = checkpoint(tmp_path / "checkpoint-2")
    torch.save({}, folder / f"rng_state_{rank}.pth")
    assert damage(folder) == "no rng_state_0.pth, but those of other processes"


def test_all_ranks_are_whole(tmp_path):
    folder = checkpoint(tmp_path / "checkpoint-2")
    for rank in range(3):
        torch.save({}, folder / f"rng_state_{rank}.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert damage(folder) is None and last_checkpoint(tmp_path) == folder


@pytest.mark.parametrize("sign", ["results.json", "adapter_config.json", "model.safetensors", "checkpoint-3"])
@pytest.mark.parametrize("linked", [False, True])
def test_plan_trusts_no_recipe_beside_the_files_of_a_run(tmp_path, capsys, sign, linked):
    run = tmp_path / "run"
    run.mkdir()
    (run / sign).write_text("{}")
    recipe = run / "recipe.yaml"
    recipe.write_text(f"model: {{name: {run}, trust_remote_code: true}}\ndata: {{name: builtin}}\n")
    if linked:
        link = tmp_path / "mine.yaml"
        link.symlink_to(recipe)
        recipe = link
    assert plan([str(recipe)]) == 2
    assert "give --trust-remote-code if you trust the author" in capsys.readouterr().err


def test_a_deep_header_is_not_this_runs(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"schema":' + "[" * 100_000 + "]" * 100_000 + "}\n")
    header = dict.fromkeys(("run_id", "units", "config", "max_o", "trigger", "backend"), 1)
    writer = TraceWriter(trace, header, resume_after=1)
    writer.close()
    assert not writer.continued and writer.set_aside == tmp_path / "trace.1.jsonl"


@pytest.mark.parametrize("enabled", [True, False])
def test_products_of_two_dtypes_are_an_error_on_every_cpu(enabled):
    a, b = torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, 4)
    with float32_kernels(enabled):
        for product in (lambda: a @ b, lambda: b @ a, lambda: torch.addmm(b, a, a), lambda: torch.bmm(a[None], b[None])):
            with pytest.raises(RuntimeError):
                product()
