"""One recipe three ways: BF16, fixed INT8, GNMR, from the same adapters and data order; then a table.

    python eval/three_ways.py recipes/quickstart.yaml --out runs/quickstart [section.key=value ...]

Each way is a run of `hf_gnmr.train` in a process of its own.  Step times are not taken from those runs (a machine's speed
drifts between them) but afterwards in one process, alternating the sides step by step on the same batches; the ratios are
medians over rounds of the time against fixed INT8 in the same round, with their quartiles.  `gnmr` takes the active sets
that its run chose, and pays for reading norms, deciding and switching.

One seed says nothing about quality: the table shows what happened, not what is better.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import DataCollatorForSeq2Seq

from hf_gnmr.backends import Int8Backend
from hf_gnmr.backends.units import find_units
from hf_gnmr.control.gnmr import Controller
from hf_gnmr.files import write_json
from hf_gnmr.run.data import encode, load_rows
from hf_gnmr.run.models import add_adapters, load_base, load_tokenizer, model_source
from hf_gnmr.run.recipe import find_recipe, load_recipe
from hf_gnmr.trace.file import read_trace
from hf_gnmr.training.gradients import GradientNorms

WAYS = {"bf16": ["backend.name=none"], "int8": ["trigger.name=none"], "gnmr": []}
NAMES = {"bf16": "BF16", "int8": "INT8", "gnmr": "GNMR INT8/BF16"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", required=True, help="folder for the three runs and the table")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the step-time comparison (default 10; 0: none)")
    parser.add_argument("--overwrite", action="store_true", help="move earlier runs in --out aside")
    parser.add_argument("--table-only", action="store_true", help="no training: read the runs that are in --out")
    options = parser.parse_intermixed_args()
    out = Path(options.out)
    started = time.perf_counter()
    for number, (way, changes) in enumerate(WAYS.items(), start=1):
        if options.table_only:
            continue
        print(f"\n=== {number} of {len(WAYS)}: {NAMES[way]} ({time.perf_counter() - started:.0f} s so far)", flush=True)
        command = [sys.executable, "-m", "hf_gnmr.train", options.recipe, *options.overrides, *changes]
        command += [f"training.output_dir={out / way}", "run.resume=false"]
        command += [f"run.overwrite={'true' if options.overwrite else 'false'}"]
        status = subprocess.run(command, check=False).returncode
        if status:
            print(f"error: the {NAMES[way]} run ended with status {status}", file=sys.stderr)
            return status
    runs = {way: read_run(out / way) for way in WAYS}
    ratios = {}
    (out / "table.md").write_text(markdown(runs, ratios) + "\n", encoding="utf-8")
    if options.rounds:
        print(f"\n=== step times, {options.rounds} rounds ({time.perf_counter() - started:.0f} s so far)", flush=True)
        ratios = step_time_ratios(options.recipe, options.overrides, out, options.rounds)
    table = markdown(runs, ratios)
    (out / "table.md").write_text(table + "\n", encoding="utf-8")
    write_json(out / "table.json", {"runs": runs, "step_time_ratios": ratios})
    print(f"\n{table}\n\nFiles: {out}/table.md, table.json; each run (trace, summary, adapter) in {out}/bf16, int8, gnmr")
    print(f"{time.perf_counter() - started:.0f} s in all")
    return 0


def read_run(folder: Path) -> dict:
    """A run's figures: summary, results, mean training loss of its last five steps."""
    figures = {**json.loads((folder / "summary.json").read_text()), **json.loads((folder / "results.json").read_text())}
    losses = [line["loss"] for line in read_trace(folder / "trace.jsonl").steps if line["loss"] is not None]
    figures["losses"] = losses
    figures["last_losses"] = statistics.mean(losses[-5:]) if losses else None
    return figures


def step_time_ratios(recipe_name: str, overrides: list[str], out: Path, rounds: int) -> dict:
    """Seconds of a whole optimizer step of each side against fixed INT8, in one process, sides alternating."""
    recipe = load_recipe(find_recipe(recipe_name), overrides)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seed = recipe.training.get("seed", 42)
    source = model_source(recipe.model)
    tokenizer = load_tokenizer(source, recipe.model)
    size = recipe.training.get("per_device_train_batch_size", 8)
    rows, _ = load_rows(recipe.data, seed)
    encoded, _ = encode(rows[: size * (rounds + 1)], tokenizer, recipe.data.max_length)
    collate = DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100)
    batches = [
        collate([encoded[i % len(encoded)] for i in range(k, k + size)]).to(device)
        for k in range(0, size * (rounds + 1), size)
    ]

    sides = {}
    for backend in ("none", "int8"):
        model = add_adapters(load_base(source, recipe.model, backend), recipe.lora, seed).to(device).train()
        model.config.use_cache = False
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
        sides[backend] = (model, optimizer)
    model = sides["int8"][0]
    units = find_units(model, recipe.model.layers)
    switch = Int8Backend(model, units, recovery=recipe.backend.recovery, recovery_source=recipe.backend.recovery_source)
    controller = Controller(len(units), recipe.gnmr, total_steps=10 * rounds, recoverable=switch.recoverable)
    none, every = switch.recoverable & False, switch.recoverable.copy()
    chosen = [line["active"] for line in read_trace(out / "gnmr" / "trace.jsonl").steps] or [[]]
    replay = itertools.cycle(chosen[-rounds:])

    def step(side: str, batch: dict) -> float:
        model, optimizer = sides["none" if side == "bf16" else "int8"]
        norms = GradientNorms(model, units) if side == "gnmr" else None
        if side != "bf16":
            active = none.copy()
            if side == "gnmr":
                active[next(replay)] = True
            switch.apply(every if side == "all" else active)
        synchronise(device)
        start = time.perf_counter()
        half = torch.autocast(device.type, torch.bfloat16) if recipe.training.get("bf16") else contextlib.nullcontext()
        with half:
            loss = model(**batch).loss
        loss.backward()
        if norms is not None:
            decision = controller.step(norms.read().norms)
            switch.apply(decision.active)
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        synchronise(device)
        seconds = time.perf_counter() - start
        if norms is not None:
            norms.remove()
        return seconds

    order = ["int8", "gnmr", "bf16", "all"]
    seconds = {side: [] for side in order}
    for number, batch in enumerate(batches):
        for side in order[number % 4 :] + order[: number % 4]:
            taken = step(side, batch)
            if number:  # the first round warms up
                seconds[side].append(taken)
        print(f"  round {number} of {rounds}", end="\r", flush=True)
    print()
    switch.remove()
    result = {}
    for side in order:
        against = [a / b for a, b in zip(seconds[side], seconds["int8"], strict=True)]
        quartiles = statistics.quantiles(against, n=4) if len(against) > 1 else [against[0]] * 3
        result[side] = {"median": statistics.median(against), "quartiles": [quartiles[0], quartiles[2]]}
    result["median_seconds_int8"] = statistics.median(seconds["int8"])
    return result


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def markdown(runs: dict, ratios: dict) -> str:
    """The table: figures as rows, ways as columns."""

    def figure(key: str, form: str = "{:.4f}") -> list[str]:
        return ["–" if runs[way].get(key) is None else form.format(runs[way][key]) for way in WAYS]

    def ratio(way: str) -> str:
        r = ratios.get(way)
        return "–" if r is None else f"{r['median']:.3f} ({r['quartiles'][0]:.3f} to {r['quartiles'][1]:.3f})"

    def weights(way: str) -> str:
        run = runs[way]
        return "BF16 throughout" if way == "bf16" else f"{run['bytes_low']:,} / {run['bytes_recovery']:,}"

    def lifted(way: str) -> str:
        layers = runs[way]["steps_on_recovery_by_layer"]
        most = sorted(layers.items(), key=lambda item: -item[1])
        return ", ".join(f"{layer}: {steps}" for layer, steps in most) or "none"

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
