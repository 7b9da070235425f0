"""The cost bench's own arithmetic, and that the census tells the stores' memory to the byte."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import load_int8, save_llama, with_lora

EVAL = pathlib.Path(__file__).parents[2] / "eval"
sys.path.insert(0, str(EVAL))

import cost  # noqa: E402

from hf_gnmr.backends.bnb.int8 import Int8Backend  # noqa: E402
from hf_gnmr.backends.units import find_units  # noqa: E402


@pytest.mark.parametrize("kind", ["host", "host, fp16 checkpoint", "slots", "device", "dequantize"])
def test_the_census_tells_the_tensors_a_store_holds_to_the_byte(kind, tmp_path, monkeypatch):
    if kind == "slots":
        monkeypatch.setattr("hf_gnmr.backends.bnb.int8.is_accelerator", lambda device: True)
    folder = save_llama(tmp_path / "llama", dtype=torch.float16 if "fp16" in kind else torch.bfloat16)
    model = with_lora(load_int8(folder))
    backend = Int8Backend(model, find_units(model), recovery=kind if kind in ("device", "dequantize") else "host")
    backend.reserve(2)
    backend.apply(backend.recoverable & [True, False, True])
    held = cost.store_tensors(SimpleNamespace(backend=backend))
    told = backend.resident_bytes + (backend.store.slot_bytes if kind == "slots" else 0)
    assert held == told
    assert (told > 0) == (kind not in ("host", "dequantize"))
    backend.remove()


def test_shares_of_copies_under_kernels():
    assert cost.covered([(0, 10)], [(5, 20)]) == 0.5
    assert cost.covered([(0, 10), (20, 30)], [(0, 4), (2, 6), (25, 26)]) == pytest.approx(7 / 20)
    assert cost.covered([], [(0, 1)]) is None


def test_an_interval_holds_its_median():
    found = cost.interval([1.0, 1.1, 0.9, 1.0, 5.0])
    assert found["low"] <= found["median"] == 1.0 <= found["high"]


@pytest.mark.slow
def test_the_whole_bench_on_a_tiny_model(tiny, tmp_path):
    sizes = ["--rounds", "4", "--tokens", "16"]
    command = [sys.executable, str(EVAL / "cost.py"), "--model", tiny, "--out", str(tmp_path), *sizes]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    table = (tmp_path / "cost.md").read_text()
    for row in ("on / fixed INT8", "get_total_norm", "| device |", "| bf16 |", "| 100,000 |"):
        assert row in table
