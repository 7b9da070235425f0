"""Memory of each way to train, for `cost.py`: of the process, of the model's and the store's tensors, and as reported."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from cost_bench import Bench

from hf_gnmr import GNMRConfig
from hf_gnmr.backends.bnb.int8 import Int8Backend
from hf_gnmr.backends.bnb.originals import Original
from hf_gnmr.backends.bnb.pages import file_backed

WAYS = ("bf16", "int8", "host", "device", "dequantize")
STORES = {"bf16": None, "int8": "dequantize"}
"""Store of recovery weights, of the ways that are not named after theirs; None: no 8-bit base."""


def measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Each way in a separate process, which `cost.py --memory-of WAY` runs."""
    figures = {}
    for way in WAYS:
        command = [
            sys.executable,
            str(Path(__file__).with_name("cost.py")),
            *("--model", options.model),
            *("--out", str(options.out)),
            *("--memory-of", way),
            *("--batch-size", str(options.batch_size)),
            *("--tokens", str(options.tokens)),
            *("--rounds", "4"),
        ]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        figures[way] = json.loads(output.splitlines()[-1])
    for way in ("host", "device", "dequantize"):
        figures[way]["over_int8"] = figures[way]["memory"] - figures["int8"]["memory"]
    return figures


def memory_of(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Memory of one way, in bytes, while it trains with maxO units lifted, different ones in each step: on a CPU the largest
    reading after a step, on a GPU the allocator's peak."""
    bench = Bench(options, STORES.get(way, way))
    max_o = GNMRConfig().resolve_max_o(len(bench.units)) if way not in ("bf16", "int8") else 0
    if bench.backend is not None:
        bench.backend.reserve(max_o)
    peak_anonymous, peak_files = 0, 0
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for i in range(options.rounds):
        if bench.backend is not None:
            bench.lift(i * max_o, max_o)
        bench.step(i)
        anonymous, files = process_memory()
        peak_anonymous, peak_files = max(peak_anonymous, anonymous), max(peak_files, files)
    tensors = {id(p): p for p in [*bench.model.parameters(), *bench.model.buffers()]}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    return {
        "memory": torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else peak_anonymous,
        "file_pages": peak_files,
        "model_tensors": sum(storages.values()),
        "store_tensors": store_tensors(bench.backend),
        "bound": 0 if bench.backend is None else bench.backend.recovery_bytes_bound(max_o),
        "resident": 0 if bench.backend is None else bench.backend.resident_bytes,
        "reported": 0
        if bench.backend is None
        else bench.backend.resident_bytes + bench.backend.census().get("slot_bytes", 0),
        "max_o": max_o,
    }


def store_tensors(backend: Int8Backend | None) -> int:
    """Bytes of the tensors that the store holds in the device's (a CPU's anonymous) memory, counted one by one."""
    store = getattr(backend, "store", None)
    storages: dict[int, int] = {}
    for holder in gc.get_referents(store.__dict__) if store is not None else []:
        _collect(holder, storages, 0)
    return sum(storages.values())


def _collect(value: Any, storages: dict[int, int], depth: int) -> None:
    """Enter the storages that `value` reaches, as address to bytes."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and file_backed([value])[0]:
            return  # the checkpoint's pages, not allocated by the store
        storage = value.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, Original):
        _collect(value.weight, storages, depth)
    elif isinstance(value, torch.nn.Module) or depth > 4:
        return
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, storages, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, storages, depth + 1)
    elif type(value).__module__.startswith("hf_gnmr"):
        _collect(value.__dict__, storages, depth + 1)


def process_memory() -> tuple[int, int]:
    """Anonymous and file-backed resident bytes, after freed memory was returned to the system; (0, 0) off Linux."""
    gc.collect()
    if platform.system() != "Linux":
        return 0, 0
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    resident = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return 1024 * int(resident["RssAnon"].split()[0]), 1024 * int(resident["RssFile"].split()[0])
