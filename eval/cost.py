"""What control and each store of recovery weights cost, in time and memory: one command, a table and JSON.

    OMP_NUM_THREADS=2 python eval/cost.py --model models/smollm2-135m --out runs/cost-smollm2
    OMP_NUM_THREADS=2 python eval/cost.py --model builtin --out runs/cost-builtin

Sides are alternated within one process, step by step on the same batch, their order turned from round to round; figures are
medians of paired ratios with a bootstrap interval (95%). Memory is measured in a process of its own for each way. The same
script runs on a GPU: times are then taken around device synchronisation, memory from the allocator, and the overlap of
copies with kernels from a profiler trace.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from controller_cost import milliseconds

from hf_gnmr import GNMRConfig
from hf_gnmr.backends.bnb.int8 import Int8Backend
from hf_gnmr.backends.bnb.originals import Original
from hf_gnmr.backends.bnb.pages import file_backed
from hf_gnmr.backends.units import find_units
from hf_gnmr.control.gnmr import Controller
from hf_gnmr.run.environment import machine
from hf_gnmr.run.models import add_adapters, load_base, model_source
from hf_gnmr.run.recipe import LoraSection, ModelSection
from hf_gnmr.training.gradients import GradientNorms

PARTS = ("control", "norms", "stores", "switching", "memory", "controller")
WAYS = ("bf16", "int8", "host", "device", "dequantize")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin", help="a folder, a Hub id, or builtin (default)")
    parser.add_argument("--out", type=Path, required=True, help="folder for cost.json and cost.md")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)  # the process of its own
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(memory_of(options.memory_of, options)))
        return
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "seed": options.seed,
        "machine": machine(),
    }
    for part in options.parts:
        print(f"{part} ...", flush=True)
        results[part] = globals()[f"measure_{part}"](options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cost.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    table = "\n".join(tables(results))
    (options.out / "cost.md").write_text(table + "\n", encoding="utf-8")
    print(table)


# -- a model, batches, a step -----------------------------------------------------------------------------------------


class Bench:
    """A LoRA model over an 8-bit (or BF16) base and a fixed list of batches."""

    def __init__(self, options: argparse.Namespace, recovery: str | None = "host") -> None:
        section = ModelSection(name=options.model)
        base = load_base(model_source(section), section, "none" if recovery is None else "int8")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = add_adapters(base, LoraSection(lora_dropout=0.0), options.seed).to(self.device).train()
        self.model.config.use_cache = False
        self.units = find_units(self.model)
        self.backend = None if recovery is None else Int8Backend(self.model, self.units, recovery=recovery)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)
        generator = torch.Generator().manual_seed(options.seed)
        size = (options.rounds + 8, options.batch_size, options.tokens)
        self.batches = torch.randint(3, base.config.vocab_size, size, generator=generator).to(self.device)

    def forward_backward(self, i: int) -> None:
        ids = self.batches[i % len(self.batches)]
        self.model(input_ids=ids, labels=ids).loss.backward()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def mask(self, units: Sequence[int]) -> np.ndarray:
        active = np.zeros(len(self.units), dtype=bool)
        active[list(units)] = True
        return active


def interval(values: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Median with a 95% bootstrap interval."""
    samples = np.array(values)
    draws = np.random.default_rng(seed).choice(samples, (2000, len(samples)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return {"median": float(np.median(samples)), "low": float(low), "high": float(high)}


def paired(times: dict[str, list[float]], side: str, against: str) -> dict[str, float]:
    return interval([a / b for a, b in zip(times[side], times[against], strict=True)])


# -- parts -------------------------------------------------------------------------------------------------------------


def measure_control(options: argparse.Namespace) -> dict[str, Any]:
    """Control off, switching disabled and control on, at the active sets that GNMR chose in steps before; and fixed INT8."""
    bench = Bench(options)
    assert bench.backend is not None
    config = GNMRConfig(alpha_init_fraction=0.0)
    chooser = Controller(len(bench.units), config)
    norms = GradientNorms(bench.model, bench.units)
    chosen: list[np.ndarray] = []
    for i in range(options.rounds + 2):
        bench.forward_backward(i)
        reading = norms.read()
        assert reading is not None
        chosen.append(chooser.step(reading.norms).active)
        bench.update()
    norms.remove()
    bench.backend.reserve(chooser.max_o)

    none = bench.mask([])
    control: list[float] = []
    shares: list[float] = []

    def run(side: str, i: int) -> float:
        active, following = chosen[i], chosen[i + 1]
        bench.backend.apply(none if side == "int8" else active)
        watching = side in ("watched", "on")
        reader = GradientNorms(bench.model, bench.units) if watching else None
        controller = Controller(len(bench.units), config)
        start = bench.clock()
        bench.forward_backward(i)
        spent = 0.0
        if reader is not None:
            reading = reader.read()
            begun = time.perf_counter()
            controller.step(reading.norms)
            if side == "on":
                bench.backend.apply(following)
            spent = reading.seconds + time.perf_counter() - begun
        bench.update()
        seconds = bench.clock() - start
        if side == "on":
            control.append(spent)
            shares.append(spent / seconds)
        if reader is not None:
            reader.remove()
        return seconds

    sides = ["off", "watched", "on", "int8"]
    times: dict[str, list[float]] = {side: [] for side in sides}
    for i in range(-1, options.rounds):
        for side in sides[i % 4 :] + sides[: i % 4]:
            seconds = run(side, max(i, 0))
            if i >= 0:
                times[side].append(seconds)
    switches = [int((a != b).sum()) for a, b in itertools.pairwise(chosen)]
    return {
        "units": len(bench.units),
        "max_o": chooser.max_o,
        "mean_active": float(np.mean([c.sum() for c in chosen[: options.rounds]])),
        "mean_switches": float(np.mean(switches[: options.rounds])),
        "step_seconds": statistics.median(times["off"]),
        "control_ms": interval([1e3 * s for s in control]),
        "control_share": interval(shares),
        "switching disabled / off": paired(times, "watched", "off"),
        "on / off": paired(times, "on", "off"),
        "on / fixed INT8": paired(times, "on", "int8"),
    }


def measure_norms(options: argparse.Namespace) -> dict[str, Any]:
    """Reading the norms per unit against torch's total norm over the same gradients, both up to a number on the host."""
    bench = Bench(options)
    reader = GradientNorms(bench.model, bench.units)
    bench.forward_backward(0)
    reader.read()
    gradients = [p.grad for p in reader.parameters if p.grad is not None]
    times: dict[str, list[float]] = {"ours": [], "floor": []}

    def ours() -> None:
        reader._after_reduction()
        assert reader.read() is not None

    def floor() -> None:
        torch.nn.utils.get_total_norm(gradients).item()

    sides: dict[str, Callable[[], None]] = {"ours": ours, "floor": floor}
    for i in range(220):
        for side in ("ours", "floor") if i % 2 else ("floor", "ours"):
            start = bench.clock()
            sides[side]()
            if i >= 20:
                times[side].append(bench.clock() - start)
    return {
        "tensors": len(gradients),
        "ours_ms": interval([1e3 * t for t in times["ours"]]),
        "floor_ms": interval([1e3 * t for t in times["floor"]]),
        "ours / floor": paired(times, "ours", "floor"),
    }


def measure_stores(options: argparse.Namespace) -> dict[str, Any]:
    """A step with every unit lifted, by store: what decoding and dequantising cost against weights that are at hand."""
    benches = {recovery: Bench(options, recovery) for recovery in ("host", "device", "dequantize")}
    times: dict[str, list[float]] = {recovery: [] for recovery in benches}
    for bench in benches.values():
        assert bench.backend is not None
        bench.backend.reserve(len(bench.units))
        bench.backend.apply(bench.backend.recoverable)
    names = list(benches)
    for i in range(-1, options.rounds):
        for name in names[i % 3 :] + names[: i % 3]:
            bench = benches[name]
            start = bench.clock()
            bench.forward_backward(max(i, 0))
            bench.update()
            if i >= 0:
                times[name].append(bench.clock() - start)
    return {f"{name} / host": paired(times, name, "host") for name in names[1:]}


def measure_switching(options: argparse.Namespace) -> dict[str, Any]:
    """Latency of a switch a layer, and steps in which none, one, 10% and all of the lifted units make way for others."""
    found = {}
    for recovery in ("host", "device", "dequantize"):
        bench = Bench(options, recovery)
        assert bench.backend is not None
        count = len(bench.units)
        lifted = GNMRConfig().resolve_max_o(count)
        bench.backend.reserve(lifted)
        cuda = bench.device.type == "cuda"
        latency, allocated = [], 0
        for i in range(40 * count):
            before = torch.cuda.memory_allocated() if cuda else 0
            start = bench.clock()
            # One unit comes and one goes; with maxO slots its pages or its slot go to another one.
            bench.backend.apply(bench.mask([(i + k) % count for k in range(lifted)]))
            latency.append((bench.clock() - start) / 2)
            allocated = max(allocated, (torch.cuda.memory_allocated() if cuda else 0) - before)
        replaced = {"none": 0, "one": 1, "10%": max(1, round(count / 10)), "all": lifted}
        times: dict[str, list[float]] = {name: [] for name in replaced}
        rounds, first = max(4, options.rounds // 3), 0
        for i in range(-1, rounds):
            names = list(replaced)
            for name in names[i % 4 :] + names[: i % 4]:
                bench.backend.apply(bench.mask([(first + k) % count for k in range(lifted)]))
                bench.forward_backward(max(i, 0))  # so that what is lifted is there
                bench.update()
                first = (first + replaced[name]) % count
                start = bench.clock()
                bench.backend.apply(bench.mask([(first + k) % count for k in range(lifted)]))
                bench.forward_backward(max(i, 0))
                bench.update()
                seconds = bench.clock() - start
                if i >= 0:
                    times[name].append(seconds)
        found[recovery] = {
            "lifted": lifted,
            "latency_ms_a_layer": interval([1e3 * t for t in latency[count:]]),
            "latency_ms_a_layer_mean": 1e3 * statistics.fmean(latency[count:]),
            **({"allocated_bytes_a_switch": allocated} if cuda else {}),
            **{f"{name} / none": paired(times, name, "none") for name in list(replaced)[1:]},
        }
        if cuda:
            found[recovery]["copies_under_kernels"] = copy_overlap(bench, lifted)
        bench.backend.remove()
        del bench
        gc.collect()
    return found


def copy_overlap(bench: Bench, lifted: int) -> float | None:
    """Share of host-to-device copy time that lies under running kernels, from a profiler trace of steps with new units."""
    from torch.profiler import ProfilerActivity, profile

    assert bench.backend is not None
    count = len(bench.units)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for i in range(4):
            bench.backend.apply(bench.mask([(i * lifted + k) % count for k in range(lifted)]))
            bench.forward_backward(i)
            bench.update()
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["HtoD" in event.name].append((event.time_range.start, event.time_range.end))
    return covered(spans[True], spans[False])


def covered(spans: Sequence[tuple[float, float]], by: Sequence[tuple[float, float]]) -> float | None:
    """Share of the length of `spans` that lies within `by`."""
    merged: list[list[float]] = []
    for start, end in sorted(by):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    total = sum(end - start for start, end in spans)
    inside = sum(max(0.0, min(end, b) - max(start, a)) for start, end in spans for a, b in merged)
    return inside / total if total else None


def measure_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Each way in a process of its own."""
    found = {}
    for way in WAYS:
        command = [
            sys.executable,
            __file__,
            "--model",
            options.model,
            "--out",
            str(options.out),
            "--memory-of",
            way,
            "--batch-size",
            str(options.batch_size),
            "--tokens",
            str(options.tokens),
            "--rounds",
            "4",
        ]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[way] = json.loads(output.splitlines()[-1])
    for way in ("host", "device", "dequantize"):
        base, ours = found["int8"], found[way]
        ours["over_int8"] = ours["memory"] - base["memory"]
    return found


def memory_of(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Memory of one way while it trains with maxO units lifted, others each step: the most of the readings after each step
    on a CPU, the allocator's peak on a GPU."""
    bench = Bench(options, {"bf16": None, "int8": "dequantize"}.get(way, way))
    count = len(bench.units)
    max_o = GNMRConfig().resolve_max_o(count) if way not in ("bf16", "int8") else 0
    if bench.backend is not None:
        bench.backend.reserve(max_o)
    most, files = 0, 0
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for i in range(options.rounds):
        if bench.backend is not None:
            bench.backend.apply(bench.mask([(i * max_o + k) % count for k in range(max_o)]))
        bench.forward_backward(i)
        bench.update()
        anonymous, of_files = process_memory()
        most, files = max(most, anonymous), max(files, of_files)
    tensors = {id(p): p for p in [*bench.model.parameters(), *bench.model.buffers()]}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    return {
        "memory": torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else most,
        "file_pages": files,
        "model_tensors": sum(storages.values()),
        "store_tensors": store_tensors(bench),
        "bound": 0 if bench.backend is None else bench.backend.recovery_bytes_bound(max_o),
        "resident": 0 if bench.backend is None else bench.backend.resident_bytes,
        "told": 0 if bench.backend is None else bench.backend.resident_bytes + bench.backend.census().get("slot_bytes", 0),
        "max_o": max_o,
    }


def store_tensors(bench: Bench) -> int:
    """Bytes of the tensors that the store holds in the device's (a CPU's anonymous) memory, counted one by one."""
    store = getattr(bench.backend, "store", None)
    seen: dict[int, int] = {}
    for holder in gc.get_referents(store.__dict__) if store is not None else []:
        _collect(holder, seen, 0)
    return sum(seen.values())


def _collect(value: Any, seen: dict[int, int], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and file_backed([value])[0]:
            return  # pages of the checkpoint, no memory of ours
        storage = value.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, Original):
        _collect(value.weight, seen, depth)
    elif isinstance(value, torch.nn.Module) or depth > 4:
        return
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, seen, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, seen, depth + 1)
    elif type(value).__module__.startswith("hf_gnmr"):
        _collect(value.__dict__, seen, depth + 1)


def process_memory() -> tuple[int, int]:
    """Anonymous and file-backed resident bytes of this process, freed memory given back first; Linux only."""
    gc.collect()
    if platform.system() != "Linux":
        return 0, 0
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return 1024 * int(found["RssAnon"].split()[0]), 1024 * int(found["RssFile"].split()[0])


def measure_controller(options: argparse.Namespace) -> dict[str, Any]:
    """A decision's time by the number of units."""
    return {f"{units:,}": interval(milliseconds(units, 200)) for units in (10, 100, 1_000, 10_000, 100_000)}


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> list[str]:
    """The results as Markdown."""

    def span(value: dict[str, float], form: str = "{:.4f}") -> str:
        return f"{form.format(value['median'])} ({form.format(value['low'])} to {form.format(value['high'])})"

    lines = []
    if "control" in results:
        c = results["control"]
        lines += [
            f"{c['units']} units, maxO {c['max_o']}, on average {c['mean_active']:.1f} lifted and {c['mean_switches']:.1f} "
            f"switched a step; a step takes {c['step_seconds']:.2f} s",
            "",
            "| control | median (95% interval) |",
            "|---|---|",
            f"| its timers, ms a step | {span(c['control_ms'], '{:.2f}')} |",
            f"| its timers over step time | {span(c['control_share'], '{:.3%}')} |",
        ]
        lines += [f"| {name} | {span(c[name])} |" for name in c if " / " in name] + [""]
    if "norms" in results:
        n = results["norms"]
        lines += [
            f"| norms of {n['tensors']} gradients | median (95% interval) |",
            "|---|---|",
            f"| per unit, ms | {span(n['ours_ms'], '{:.3f}')} |",
            f"| `torch.nn.utils.get_total_norm`, ms | {span(n['floor_ms'], '{:.3f}')} |",
            f"| ratio | {span(n['ours / floor'], '{:.2f}')} |",
            "",
        ]
    if "stores" in results:
        lines += ["| a step with every unit lifted | median (95% interval) |", "|---|---|"]
        lines += [f"| {name} | {span(value, '{:.3f}')} |" for name, value in results["stores"].items()] + [""]
    if "switching" in results:
        lines += ["| store | ms a layer switched | one / none replaced | 10% / none | all / none |", "|---|---|---|---|---|"]
        for store, s in results["switching"].items():
            ratios = " | ".join(span(s[f"{share} / none"], "{:.3f}") for share in ("one", "10%", "all"))
            lines.append(f"| {store} | {span(s['latency_ms_a_layer'])} | {ratios} |")
        lines.append("")
    if "memory" in results:
        lines += [
            "| way | anonymous, MB | over INT8 | bound + resident | file pages | model's tensors | store's tensors, bytes | "
            "census |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for way, m in results["memory"].items():
            over = f"{m['over_int8'] / 1e6:.1f}" if "over_int8" in m else ""
            lines.append(
                f"| {way} | {m['memory'] / 1e6:.1f} | {over} | {(m['bound'] + m['resident']) / 1e6:.1f} | "
                f"{m['file_pages'] / 1e6:.1f} | {m['model_tensors'] / 1e6:.1f} | {m['store_tensors']:,} | {m['told']:,} |"
            )
        lines.append("")
    if "controller" in results:
        lines += ["| units | ms a decision |", "|---|---|"]
        lines += [f"| {units} | {span(value, '{:.3f}')} |" for units, value in results["controller"].items()]
    return lines


if __name__ == "__main__":
    main()
