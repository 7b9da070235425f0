"""One recipe three ways: BF16, fixed INT8, GNMR, from the same adapters and data order; then a table.

    python eval/three_ways.py recipes/quickstart.yaml --out runs/quickstart [section.key=value ...]

Each way is a run of `hf_gnmr.train` in a separate process.  Step times are not taken from those runs (a machine's speed
drifts between them) but afterwards in one process, alternating the sides step by step on the same batches; the ratios are
medians over rounds of the time against fixed INT8 in the same round, with their quartiles.  `gnmr` uses the active sets
that its run chose, and pays for reading norms, deciding and switching.

One seed is no evidence about quality: the table shows what happened, not what is better.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import add_save_option, command_line, save_result
from transformers import DataCollatorForSeq2Seq

from hf_gnmr.backends import Int8Backend
from hf_gnmr.backends.bf16_cpu import REASON, float32_kernels
from hf_gnmr.backends.units import find_units
from hf_gnmr.config import ConfigError
from hf_gnmr.control.gnmr import Controller
from hf_gnmr.files import read_json, write_json, write_text
from hf_gnmr.run.data import encode, load_rows
from hf_gnmr.run.emulated import kernels
from hf_gnmr.run.models import add_adapters, load_base, load_tokenizer, model_source
from hf_gnmr.run.recipe import find_recipe, load_recipe
from hf_gnmr.run.sections import Recipe
from hf_gnmr.terminal import error_line
from hf_gnmr.trace.file import read_trace
from hf_gnmr.training.gradients import GradientNorms

WAYS: dict[str, list[str]] = {"bf16": ["backend.name=none"], "int8": ["trigger.name=none"], "gnmr": []}
"""The ways, and what each changes in the recipe."""
NAMES = {"bf16": "BF16", "int8": "INT8", "gnmr": "GNMR INT8/BF16"}
TIMED = ["int8", "gnmr", "bf16", "all"]
"""Sides of the step times; `all`: INT8 with every layer lifted."""


def main() -> int:
    options = parser().parse_intermixed_args()
    try:
        recipe = load_recipe(find_recipe(options.recipe), options.overrides)
        if recipe.lora is None:
            raise ConfigError(f"{options.recipe}: lora: expected a section with an adapter, got none")
    except ConfigError as error:
        print(error_line(error), file=sys.stderr)
        return 2
    emulated, line = kernels(recipe)
    print(line, flush=True)
    with float32_kernels(emulated):
        status = three_ways(recipe, emulated, options)
    print(line, flush=True)
    return status


def three_ways(recipe: Recipe, emulated: bool, options: argparse.Namespace) -> int:
    """Train, time, and print the table; returns the exit status."""
    started = time.perf_counter()
    if not options.table_only:
        for number, way in enumerate(WAYS, start=1):
            print(f"\n=== {number} of {len(WAYS)}: {NAMES[way]} ({time.perf_counter() - started:.0f} s so far)", flush=True)
            status = train(way, emulated, options, chosen=recipe.run.bf16_products == "auto")
            if status:
                print(f"error: the {NAMES[way]} run ended with status {status}", file=sys.stderr)
                return status
    out = options.out
    payload: dict[str, Any] = {"runs": {way: read_run(out / way) for way in WAYS}, "step_time_ratios": {}}
    write_text(out / "table.md", table(payload) + "\n")
    if options.rounds:
        print(f"\n=== step times, {options.rounds} rounds ({time.perf_counter() - started:.0f} s so far)", flush=True)
        payload["step_time_ratios"] = step_time_ratios(recipe, out, options.rounds)
    text = table(payload)
    write_text(out / "table.md", text + "\n")
    write_json(out / "table.json", payload)
    print(f"\n{text}\n\nFiles: {out}/table.md, table.json; each run (trace, summary, adapter) in {out}/bf16, int8, gnmr")
    print(f"{time.perf_counter() - started:.0f} s in all")
    if options.save:
        seed = recipe.training.get("seed", 42)
        save_result(options.save, bench="three_ways", command=command_line(), seed=seed, payload=payload)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", required=True, type=Path, help="folder for the three runs and the table")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the step-time comparison (default 10; 0: none)")
    parser.add_argument("--overwrite", action="store_true", help="move earlier runs in --out aside")
    parser.add_argument("--table-only", action="store_true", help="no training: read the runs that are in --out")
    add_save_option(parser)
    return parser


def train(way: str, emulated: bool, options: argparse.Namespace, *, chosen: bool) -> int:
    """Train one way in a separate process, with this one's choice of kernels for BF16 products; returns its exit status.

    Args:
        way: one of `WAYS`.
        emulated: whether BF16 products run by float32 kernels.
        options: the command line.
        chosen: whether this process chose so, and not the recipe; the other one then says so.
    """
    command = [sys.executable, "-m", "hf_gnmr.train", options.recipe, *options.overrides, *WAYS[way]]
    command += [f"run.bf16_products={'float32' if emulated else 'native'}"]
    command += [f"training.output_dir={options.out / way}", "run.resume=false"]
    command += [f"run.overwrite={'true' if options.overwrite else 'false'}"]
    reason = {REASON: "as chosen for all ways alike (eval/three_ways.py)"} if chosen else {}
    return subprocess.run(command, check=False, env={**os.environ, **reason}).returncode


def read_run(folder: Path) -> dict[str, Any]:
    """A run's figures: summary, results, mean training loss of its last five steps."""
    figures = {**read_json(folder / "summary.json"), **read_json(folder / "results.json")}
    losses = [line["loss"] for line in read_trace(folder / "trace.jsonl").steps if line["loss"] is not None]
    figures["losses"] = losses
    figures["last_losses"] = statistics.mean(losses[-5:]) if losses else None
    return figures


def step_time_ratios(recipe: Recipe, out: Path, rounds: int) -> dict[str, Any]:
    """Seconds of a whole optimizer step of each side against fixed INT8, in one process, sides alternating."""
    chosen = [line["active"] for line in read_trace(out / "gnmr" / "trace.jsonl").steps] or [[]]
    stepper = Stepper(recipe, chosen[-rounds:], rounds)
    seconds: dict[str, list[float]] = {side: [] for side in TIMED}
    for number, batch in enumerate(stepper.batches):
        for side in TIMED[number % 4 :] + TIMED[: number % 4]:
            taken = stepper.step(side, batch)
            if number:  # the first round warms up
                seconds[side].append(taken)
        print(f"  round {number} of {rounds}", end="\r", flush=True)
    print()
    stepper.switch.remove()
    ratios: dict[str, Any] = {}
    for side in TIMED:
        against = [a / b for a, b in zip(seconds[side], seconds["int8"], strict=True)]
        quartiles = statistics.quantiles(against, n=4) if len(against) > 1 else [against[0]] * 3
        ratios[side] = {"median": statistics.median(against), "quartiles": [quartiles[0], quartiles[2]]}
    ratios["median_seconds_int8"] = statistics.median(seconds["int8"])
    return ratios


class Stepper:
    """The recipe's model in BF16 and in switchable INT8, with optimizers and one batch a round (and one to warm up).

    Args:
        chosen: active sets of the GNMR run, which `gnmr` replays in a cycle.
    """

    def __init__(self, recipe: Recipe, chosen: list[list[int]], rounds: int) -> None:
        self.recipe = recipe
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        seed = recipe.training.get("seed", 42)
        source = model_source(recipe.model)
        tokenizer = load_tokenizer(source, recipe.model)
        size = recipe.training.get("per_device_train_batch_size", 8)
        rows, _ = load_rows(recipe.data, seed)
        encoded, _ = encode(rows[: size * (rounds + 1)], tokenizer, recipe.data.max_length)
        collate: Callable[..., Any] = DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100)
        self.batches = [
            collate([encoded[i % len(encoded)] for i in range(k, k + size)]).to(self.device)
            for k in range(0, size * (rounds + 1), size)
        ]
        self.models: dict[str, tuple[Any, torch.optim.Optimizer]] = {}
        for backend in ("none", "int8"):
            assert recipe.lora is not None  # `main` has checked it
            model = add_adapters(load_base(source, recipe.model, backend), recipe.lora, seed).to(self.device).train()
            model.config.use_cache = False
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
            self.models[backend] = (model, optimizer)
        model = self.models["int8"][0]
        self.units = find_units(model, recipe.model.layers)
        options = recipe.backend.options if recipe.backend.name == Int8Backend.name else None
        self.switch = Int8Backend(model, self.units, options)
        self.controller = Controller(
            len(self.units), recipe.gnmr, total_steps=10 * rounds, recoverable=self.switch.recoverable
        )
        self.replayed = itertools.cycle(chosen)

    def step(self, side: str, batch: dict[str, Any]) -> float:
        """Seconds of an optimizer step."""
        model, optimizer = self.models["none" if side == "bf16" else "int8"]
        norms = GradientNorms(model, self.units) if side == "gnmr" else None
        self._lift(side)
        synchronise(self.device)
        start = time.perf_counter()
        bf16 = self.recipe.training.get("bf16")
        with torch.autocast(self.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = model(**batch).loss
        loss.backward()
        if norms is not None:
            reading = norms.read()
            assert reading is not None  # a backward has just run
            self.switch.apply(self.controller.step(reading.norms, reading.seen).active)
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronise(self.device)
        seconds = time.perf_counter() - start
        if norms is not None:
            norms.remove()
        return seconds

    def _lift(self, side: str) -> None:
        """The active set that a side's step begins with; BF16 has nothing to switch."""
        if side == "bf16":
            return
        active = self.switch.recoverable.copy()
        if side != "all":
            active[:] = False
        if side == "gnmr":
            active[next(self.replayed)] = True
        self.switch.apply(active)


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def table(payload: dict[str, Any]) -> str:
    """The result in Markdown: figures as rows, ways as columns."""
    runs, ratios = payload["runs"], payload["step_time_ratios"]

    def figure(key: str, form: str = "{:.4f}") -> list[str]:
        return ["–" if runs[way].get(key) is None else form.format(runs[way][key]) for way in WAYS]

    def ratio(way: str) -> str:
        if way not in ratios:
            return "–"
        low, high = ratios[way]["quartiles"]
        return f"{ratios[way]['median']:.3f} ({low:.3f} to {high:.3f})"

    def weights(way: str) -> str:
        run = runs[way]
        return "BF16 throughout" if way == "bf16" else f"{run['bytes_low']:,} / {run['bytes_recovery']:,}"

    def lifted(way: str) -> str:
        layers = runs[way]["steps_on_recovery_by_layer"]
        by_steps = sorted(layers.items(), key=lambda item: -item[1])
        return ", ".join(f"{layer}: {steps}" for layer, steps in by_steps) or "none"

    memory = "peak_device_bytes" if "peak_device_bytes" in runs["int8"] else "peak_process_bytes"
    rows = [
        ("training loss, mean of last 5 steps", figure("last_losses")),
        ("held-out loss", figure("eval_loss")),
        ("exact match", figure("exact_match", "{:.1%}")),
        ("evaluated on", figure("evaluated_on", "{}")),
        ("promotion ratio", figure("promotion_ratio", "{:.2%}")),
        ("hit-maxO rate", figure("hit_max_o_rate", "{:.2%}")),
        ("switches", figure("switches", "{}")),
        ("layers lifted (layer: steps)", [lifted(way) for way in WAYS]),
        ("weight bytes, low-cost / recovery path", [weights(way) for way in WAYS]),
        ("peak bytes added by recovery (ΔM)", figure("peak_recovery_bytes", "{:,}")),
        ("resident bytes of the recovery store", figure("resident_bytes", "{:,}")),
        (memory.replace("_", " "), figure(memory, "{:,}")),
        ("controller share of a step", figure("controller_share", "{:.3%}")),
        ("step time against INT8, median (quartiles)", [ratio(way) for way in WAYS]),
    ]
    lines = ["| | " + " | ".join(NAMES.values()) + " |", "|---|" + "---|" * len(WAYS)]
    lines += [f"| {name} | " + " | ".join(values) + " |" for name, values in rows if set(values) != {"–"}]
    if "all" in ratios:
        lines.append(f"\nStep time with every layer lifted, against INT8: {ratio('all')}.")
    lines.append("\nOne seed: the table shows what happened in these runs; it is no evidence that one way is better.")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
