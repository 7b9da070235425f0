"""The cost bench's arithmetic, and that the census reports the stores' memory to the byte."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch
from conftest import load_int8, save_llama, with_lora

EVAL = pathlib.Path(__file__).parents[2] / "eval"
sys.path.insert(0, str(EVAL))

import cost_bench  # noqa: E402
import cost_memory  # noqa: E402

from hf_gnmr.backends.bnb.int8 import Int8Backend  # noqa: E402
from hf_gnmr.backends.units import find_units  # noqa: E402


@pytest.mark.parametrize("kind", ["host", "host, fp16 checkpoint", "slots", "device", "dequantize"])
def test_the_census_reports_the_tensors_a_store_holds_to_the_byte(kind, tmp_path, monkeypatch):
    if kind == "slots":
        monkeypatch.setattr("hf_gnmr.backends.bnb.int8.is_accelerator", lambda device: True)
    folder = save_llama(tmp_path / "llama", dtype=torch.float16 if "fp16" in kind else torch.bfloat16)
    model = with_lora(load_int8(folder))
    backend = Int8Backend(model, find_units(model), recovery=kind if kind in ("device", "dequantize") else "host")
    backend.reserve(2)
    backend.apply(backend.recoverable & [True, False, True])
    counted = cost_memory.store_tensors(backend)
    reported = backend.resident_bytes + (backend.store.slot_bytes if kind == "slots" else 0)
    assert counted == reported
    assert (reported > 0) == (kind not in ("host", "dequantize"))
    backend.remove()


@pytest.mark.parametrize(
    ("copies", "kernels", "share"),
    [
        ([(0, 10)], [(5, 20)], 0.5),
        ([(0, 10), (20, 30)], [(0, 4), (2, 6), (25, 26)], 7 / 20),
        ([], [(0, 1)], None),
    ],
)
def test_shares_of_copies_under_kernels(copies, kernels, share):
    assert cost_bench.covered(copies, kernels) == (None if share is None else pytest.approx(share))


def test_an_interval_contains_its_median():
    figures = cost_bench.interval([1.0, 1.1, 0.9, 1.0, 5.0])
    assert figures["low"] <= figures["median"] == 1.0 <= figures["high"]


@pytest.mark.slow
def test_the_whole_bench_on_a_tiny_model(tiny, tmp_path):
    sizes = ["--rounds", "4", "--tokens", "16"]
    command = [sys.executable, str(EVAL / "cost.py"), "--model", tiny, "--out", str(tmp_path), *sizes]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    table = (tmp_path / "cost.md").read_text()
    rows = ("on / fixed INT8", "get_total_norm", "| device |", "| bf16 |", "| 100,000 |")
    assert [row for row in rows if row not in table] == []
