"""What control and each store of recovery weights cost, in time and memory: one command, a table and JSON.

    OMP_NUM_THREADS=2 python eval/cost.py --model models/smollm2-135m --out runs/cost-smollm2
    OMP_NUM_THREADS=2 python eval/cost.py --model builtin --out runs/cost-builtin

Sides alternate within one process, step by step on the same batch, their order rotated from round to round; figures are
medians of paired ratios with a bootstrap interval (95%). Memory is measured in a separate process for each way. The same
script runs on a GPU: times are then taken around device synchronisation, memory from the allocator, and the overlap of
copies with kernels from a profiler trace.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from controller_cost import UNITS, milliseconds
from cost_bench import Bench, copy_overlap, interval, paired
from cost_memory import WAYS, measure_memory, memory_of
from cost_tables import table
from results import add_save_option, command_line, save_result

from hf_gnmr import GNMRConfig
from hf_gnmr.control.gnmr import Controller
from hf_gnmr.control.monitor import Bools
from hf_gnmr.files import write_text
from hf_gnmr.run.environment import machine
from hf_gnmr.training.gradients import GradientNorms, Reading

CONTROLLER_STEPS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin", help="a folder, a Hub id, or builtin (default)")
    parser.add_argument("--out", type=Path, required=True, help="folder for cost.json and cost.md")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--memory-of", choices=WAYS, help=argparse.SUPPRESS)  # in a separate process
    add_save_option(parser)
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(memory_of(options.memory_of, options)))
        return
    parts: dict[str, Any] = {}
    about = {"command": " ".join(["python", *sys.argv]), "seed": options.seed, "machine": machine()}
    for part in options.parts:
        print(f"{part} ...", flush=True)
        parts[part] = PARTS[part](options)
    options.out.mkdir(parents=True, exist_ok=True)
    write_text(options.out / "cost.json", json.dumps({**about, **parts}, indent=2) + "\n")
    text = table(parts)
    write_text(options.out / "cost.md", text + "\n")
    print(text)
    if options.save:
        save_result(options.save, bench="cost", command=command_line(), seed=options.seed, payload=parts)


def measure_control(options: argparse.Namespace) -> dict[str, Any]:
    """Control off, switching disabled and control on, at the active sets that GNMR chose earlier; and fixed INT8."""
    bench = Bench(options)
    config = GNMRConfig(alpha_init_fraction=0.0)
    chosen, max_o = chosen_by_gnmr(bench, config, options.rounds + 2)
    bench.switch.reserve(max_o)

    none = bench.mask([])
    control: list[float] = []
    shares: list[float] = []

    def run(side: str, i: int) -> float:
        active, following = chosen[i], chosen[i + 1]
        bench.switch.apply(none if side == "int8" else active)
        reader = GradientNorms(bench.model, bench.units) if side in ("watched", "on") else None
        controller = Controller(len(bench.units), config)
        start = bench.clock()
        bench.forward_backward(i)
        spent = 0.0
        if reader is not None:
            reading = read(reader)
            begun = time.perf_counter()
            controller.step(reading.norms, reading.seen)
            if side == "on":
                bench.switch.apply(following)
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
        "max_o": max_o,
        "mean_active": float(np.mean([c.sum() for c in chosen[: options.rounds]])),
        "mean_switches": float(np.mean(switches[: options.rounds])),
        "step_seconds": statistics.median(times["off"]),
        "control_ms": interval([1e3 * s for s in control]),
        "control_share": interval(shares),
        "switching disabled / off": paired(times, "watched", "off"),
        "on / off": paired(times, "on", "off"),
        "on / fixed INT8": paired(times, "on", "int8"),
    }


def chosen_by_gnmr(bench: Bench, config: GNMRConfig, steps: int) -> tuple[list[Bools], int]:
    """The active sets that GNMR chooses in so many steps, none of which is lifted yet; and maxO."""
    controller = Controller(len(bench.units), config)
    reader = GradientNorms(bench.model, bench.units)
    chosen = []
    for i in range(steps):
        bench.forward_backward(i)
        chosen.append(controller.step(read(reader).norms).active)
        bench.update()
    reader.remove()
    return chosen, controller.max_o


def read(reader: GradientNorms) -> Reading:
    """The norms of the step's backward.

    Raises:
        RuntimeError: no backward has run.
    """
    reading = reader.read()
    if reading is None:
        raise RuntimeError("expected gradient norms after a backward, got none")
    return reading


def measure_norms(options: argparse.Namespace) -> dict[str, Any]:
    """Reading the norms per unit against torch's total norm over the same gradients, both up to a number on the host."""
    bench = Bench(options)
    reader = GradientNorms(bench.model, bench.units)
    bench.forward_backward(0)
    read(reader)
    gradients = [p.grad for p in reader.parameters if p.grad is not None]
    times: dict[str, list[float]] = {"ours": [], "floor": []}

    def per_unit() -> None:
        reader.after_reduction()
        read(reader)

    def total() -> None:
        torch.nn.utils.get_total_norm(gradients).item()

    sides: dict[str, Callable[[], None]] = {"ours": per_unit, "floor": total}
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
    """A step with every unit lifted, by store: what decoding and dequantising cost against plain weights."""
    benches = {recovery: Bench(options, recovery) for recovery in ("host", "device", "dequantize")}
    times: dict[str, list[float]] = {recovery: [] for recovery in benches}
    for bench in benches.values():
        bench.switch.reserve(len(bench.units))
        bench.switch.apply(bench.switch.recoverable)
    names = list(benches)
    for i in range(-1, options.rounds):
        for name in names[i % 3 :] + names[: i % 3]:
            bench = benches[name]
            start = bench.clock()
            bench.step(max(i, 0))
            if i >= 0:
                times[name].append(bench.clock() - start)
    return {f"{name} / host": paired(times, name, "host") for name in names[1:]}


def measure_switching(options: argparse.Namespace) -> dict[str, Any]:
    """Latency of a switch a layer, and steps in which none, one, 10% and all of the lifted units are replaced by others."""
    figures: dict[str, Any] = {}
    for recovery in ("host", "device", "dequantize"):
        bench = Bench(options, recovery)
        lifted = GNMRConfig().resolve_max_o(len(bench.units))
        bench.switch.reserve(lifted)
        cuda = bench.device.type == "cuda"
        latency, allocated = switch_latency(bench, lifted)
        times = replacement_times(bench, lifted, max(4, options.rounds // 3))
        figures[recovery] = {
            "lifted": lifted,
            "latency_ms_a_layer": interval([1e3 * t for t in latency]),
            "latency_ms_a_layer_mean": 1e3 * statistics.fmean(latency),
            **({"allocated_bytes_a_switch": allocated} if cuda else {}),
            **{f"{name} / none": paired(times, name, "none") for name in times if name != "none"},
        }
        if cuda:
            figures[recovery]["copies_under_kernels"] = copy_overlap(bench, lifted)
        bench.switch.remove()
        del bench
        gc.collect()
    return figures


def switch_latency(bench: Bench, lifted: int) -> tuple[list[float], int]:
    """Seconds a layer of switches, the first ones left out, and the most device bytes that one of them allocated."""
    count, cuda = len(bench.units), bench.device.type == "cuda"
    latency, allocated = [], 0
    for i in range(40 * count):
        before = torch.cuda.memory_allocated() if cuda else 0
        start = bench.clock()
        # One unit is lifted and one lowered; with maxO slots its pages or its slot pass to another unit.
        bench.lift(i, lifted)
        latency.append((bench.clock() - start) / 2)
        allocated = max(allocated, (torch.cuda.memory_allocated() if cuda else 0) - before)
    return latency[count:], allocated


def replacement_times(bench: Bench, lifted: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step before which none, one, 10% and all of the lifted units are replaced."""
    count = len(bench.units)
    replaced = {"none": 0, "one": 1, "10%": max(1, round(count / 10)), "all": lifted}
    names = list(replaced)
    times: dict[str, list[float]] = {name: [] for name in names}
    first = 0
    for i in range(-1, rounds):
        for name in names[i % 4 :] + names[: i % 4]:
            bench.lift(first, lifted)
            bench.step(max(i, 0))  # so that the lifted units' weights are in place
            first = (first + replaced[name]) % count
            start = bench.clock()
            bench.lift(first, lifted)
            bench.step(max(i, 0))
            seconds = bench.clock() - start
            if i >= 0:
                times[name].append(seconds)
    return times


def measure_controller(options: argparse.Namespace) -> dict[str, Any]:
    """A decision's time by the number of units."""
    return {f"{units:,}": interval(milliseconds(units, CONTROLLER_STEPS)) for units in UNITS}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "control": measure_control,
    "norms": measure_norms,
    "stores": measure_stores,
    "switching": measure_switching,
    "memory": measure_memory,
    "controller": measure_controller,
}


if __name__ == "__main__":
    main()
