"""Low-precision pre-training as a grid: triggers x thresholds x maxO x formats x seeds, resumable, and the tables of it.

    python eval/stress.py recipes/activation_small.yaml [section.key=value ...] --out runs/stress --seeds 1 2 3 \\
        --formats int:2:8 --arms none all gnmr:1.5:1.3 random:1.5:1.3 gsnr jacobian static
    python eval/stress.py recipes/lowbit_small.yaml --out runs/blocks --formats lowbit:4:8 --max-o 1 2 \\
        --arms none all exact gnmr:1.5-1.1:1.5 random:1.5-1.1:1.5

An arm is a trigger: `none`, `all`, `exact` (nothing quantised), `gsnr`, `jacobian`, `static`, `gnmr:ALPHA:BETA`, and two
controls: `random:ALPHA:BETA`, which draws as many units as the GNMR run of those thresholds, that seed and that maxO lifted
in the mean, and `random:RATIO`, which draws that share of the units (for triggers that always fill maxO).  ALPHA is a
constant, or INIT-ALPHA for the recipe's two stages; BETA may be `off`.  A format is KIND:LOW:RECOVERY in bits: `float` and
`int` are saved activations, `lowbit` and `fp8` products (`fp8:8:16`).

Runs of one seed start from the same weights and see the same data in the same order, so differences are taken seed by
seed; their standard errors are those of the paired differences.  A finished run is not run again.  `--workers 2` runs two
single-thread trainings side by side; step times are not taken from them but, with `--times`, in one process, alternating
the arms.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

import numpy as np

FREE_OF_MAX_O = ("none", "all", "exact", "static")
"""Arms that are the same whatever maxO is."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to choose units."""

    trigger: str
    thresholds: tuple[str, str] | None = None
    """ALPHA and BETA as they were given."""
    ratio: float | None = None

    @property
    def label(self) -> str:
        if self.thresholds is not None:
            return f"{self.trigger} {'/'.join(self.thresholds)}"
        return self.trigger if self.ratio is None else f"{self.trigger} {self.ratio:g}"

    def overrides(self) -> list[str]:
        """The thresholds in a recipe's words."""
        if self.thresholds is None:
            return []
        alpha, beta = self.thresholds
        init, dash, final = alpha.partition("-")
        stages = [f"gnmr.alpha_init={init}", f"gnmr.alpha={final}"] if dash else [f"gnmr.alpha={alpha}"]
        # A recipe that has two stages has one here, where one is asked for.
        stages += [] if dash else ["gnmr.alpha_init_fraction=0.0"]
        return [*stages, f"gnmr.beta={'null' if beta == 'off' else beta}"]


@dataclasses.dataclass(frozen=True)
class Job:
    """One run."""

    arm: Arm
    form: str
    max_o: int | None
    seed: int

    @property
    def name(self) -> str:
        parts = [self.form.replace(":", "-"), *([] if self.max_o is None else [f"maxo{self.max_o}"])]
        return "_".join([*parts, self.arm.label.replace(" ", "-").replace("/", "-"), f"seed{self.seed}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--arms", nargs="+", default=["none", "all", "gnmr:1.5:1.3", "random:1.5:1.3"])
    parser.add_argument("--max-o", nargs="+", type=int, help="default: the recipe's")
    parser.add_argument("--formats", nargs="+", default=["float:4:8"], metavar="KIND:LOW:RECOVERY")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--times", type=int, default=0, metavar="ROUNDS", help="measure step times in so many rounds")
    parser.add_argument("--table-only", action="store_true", help="no training: the table of the runs that are there")
    options = parser.parse_intermixed_args()
    from hf_gnmr.config import ConfigError

    try:
        jobs = grid(options)
        if not options.table_only:
            check(options, jobs)
            run_all(options, jobs)
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    runs = {job: figures for job in jobs if (figures := read(options, job)) is not None}
    times = step_times(options) if options.times else {}
    table = {"rows": rows_of(runs), "runs": {job.name: figures for job, figures in runs.items()}, "step_times": times}
    text = markdown(table, options, len(jobs))
    (options.out / "stress.md").write_text(text + "\n", encoding="utf-8")
    (options.out / "stress.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
    print(text)
    return 0


def grid(options: argparse.Namespace) -> list[Job]:
    """All runs, seeds outermost, so that an interrupted grid has whole seeds; each control after what it is matched to."""
    from hf_gnmr.config import ConfigError
    from hf_gnmr.triggers import TRIGGERS

    arms = []
    for text in options.arms:
        name, *thresholds = text.split(":")
        takes = name in ("gnmr", "random")
        wrong = len(thresholds) != (2 if takes else 0) and (name, len(thresholds)) != ("random", 1)
        if name not in (*TRIGGERS, "exact") or wrong:
            raise ConfigError(
                f"--arms {text}: {', '.join(TRIGGERS)}, exact; gnmr with :ALPHA:BETA, random with that or :RATIO"
            )
        try:
            numbers = [float(part) for t in thresholds if t != "off" for part in t.split("-")]
        except ValueError:
            raise ConfigError(f"--arms {text}: numbers, INIT-ALPHA or off are allowed") from None
        if len(thresholds) == 1:
            arms.append(Arm(name, ratio=numbers[0]))
        else:
            arms.append(Arm(name, (thresholds[0], thresholds[1]) if thresholds else None))
    arms.sort(key=lambda arm: arm.trigger == "random")
    for arm in arms:
        if arm.trigger == "random" and arm.thresholds and Arm("gnmr", arm.thresholds) not in arms:
            at = ":".join(arm.thresholds)
            raise ConfigError(f"--arms random:{at} needs gnmr:{at}")
    jobs = []
    for seed, form, arm in itertools.product(options.seeds, options.formats, arms):
        for max_o in [None] if arm.trigger in FREE_OF_MAX_O or options.max_o is None else options.max_o:
            jobs.append(Job(arm, form, max_o, seed))
    return jobs


def overrides_of(job: Job, options: argparse.Namespace) -> list[str]:
    """What a job changes in the recipe."""
    arm = job.arm
    changes = [
        *options.overrides, f"training.output_dir={options.out / job.name}", f"training.seed={job.seed}", "run.resume=false",
        *format_overrides(job.form),
        "training.disable_tqdm=true", f"trigger.name={'none' if arm.trigger == 'exact' else arm.trigger}",
    ]
    if arm.trigger == "exact":  # the plain model: nothing is switched, norms are traced
        changes = [c for c in changes if not c.startswith(("backend.", "trigger."))] + ["backend.name=none"]
    changes += arm.overrides()
    if job.max_o is not None:
        changes.append(f"gnmr.max_o={job.max_o}")
    if arm.trigger == "random":
        changes.append(f"trigger.seed={job.seed}")
        twin = _twin(job)
        changes.append(
            f"trigger.promotion_ratio={arm.ratio}" if twin is None
            else f"trigger.trace={options.out / twin.name / 'trace.jsonl'}"
        )
    if arm.trigger == "static" and not any(o.startswith("trigger.warmup") for o in options.overrides):
        changes.append("trigger.warmup=0.05")  # 500 of the paper's 10,000 and more steps
    if arm.trigger != "static":
        changes = [c for c in changes if not c.startswith(("trigger.warmup", "trigger.share"))]
    return changes


def format_overrides(form: str) -> list[str]:
    """A format in a recipe's words.

    Raises:
        ConfigError: not KIND:LOW:RECOVERY.
    """
    from hf_gnmr.config import ConfigError

    kind, *bits = form.split(":")
    if len(bits) != 2 or kind not in ("float", "int", "lowbit", "fp8") or (kind == "fp8" and bits != ["8", "16"]):
        raise ConfigError(f"--formats {form}: float, int or lowbit, with :LOW:RECOVERY in bits, or fp8:8:16, is allowed")
    if kind == "fp8":
        return ["backend.name=fp8"]
    given = [f"backend.bits_low={bits[0]}", f"backend.bits_recovery={bits[1]}"]
    return [*given, "backend.name=lowbit"] if kind == "lowbit" else [*given, f"backend.format={kind}"]


def check(options: argparse.Namespace, jobs: list[Job]) -> None:
    """Every job's recipe and options, before the first one runs."""
    from hf_gnmr.options import Options
    from hf_gnmr.recipe import find_recipe, load_recipe

    for job in jobs:
        recipe = load_recipe(find_recipe(options.recipe), overrides_of(job, options))
        Options(trigger=recipe.trigger.name, trigger_options=recipe.trigger.options(), **recipe.backend.options())


def run_all(options: argparse.Namespace, jobs: list[Job]) -> None:
    """Run what is not there yet."""
    options.out.mkdir(parents=True, exist_ok=True)
    left = [job for job in jobs if read(options, job) is None]
    total, started = len(left), time.perf_counter()
    print(f"{len(jobs)} runs, {total} of them to do", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        running: dict = {}
        done = 0
        while left or running:
            while left and len(running) < options.workers:
                ready = next((j for j in left if _twin(j) not in [*left, *running.values()]), None)
                if ready is None:
                    break
                left.remove(ready)
                running[pool.submit(run, options.recipe, overrides_of(ready, options), options.out / ready.name)] = ready
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                job = running.pop(future)
                done += 1
                try:
                    loss = future.result().get("eval_loss", math.nan)
                except Exception as error:  # one run that fails must not cost the others
                    print(f"{done}/{total} {job.name} FAILED: {type(error).__name__}: {error}", flush=True)
                    continue
                each = (time.perf_counter() - started) / done
                rest = f"{each:.0f} s a run, {each * (total - done):.0f} s left"
                print(f"{done}/{total} {job.name}: loss {loss:.4f} ({rest})", flush=True)


def _twin(job: Job) -> Job | None:
    """The run that a control needs the trace of."""
    if job.arm.trigger != "random" or job.arm.thresholds is None:
        return None
    return dataclasses.replace(job, arm=Arm("gnmr", job.arm.thresholds))


def run(recipe_name: str, overrides: list[str], folder: Path) -> dict:
    """One training in this process, its output in the folder's log."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    from hf_gnmr.recipe import find_recipe, load_recipe
    from hf_gnmr.train import train

    if folder.exists():  # a run that was broken off
        shutil.rmtree(folder)
    partial = folder.with_name(folder.name + ".log")
    with partial.open("w", encoding="utf-8") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        results = train(load_recipe(find_recipe(recipe_name), overrides))
    for weights in folder.glob("model*.safetensors"):  # gigabytes over a grid; the figures are what is wanted
        weights.unlink()
    return results


def read(options: argparse.Namespace, job: Job) -> dict | None:
    """A finished run's figures; None: it is not finished.

    Raises:
        ConfigError: the folder holds a run of other settings.
    """
    from hf_gnmr.config import ConfigError
    from hf_gnmr.recipe import find_recipe, load_recipe

    folder = options.out / job.name
    if not (folder / "results.json").is_file() or not (folder / "summary.json").is_file():
        return None
    wanted, there = (
        dataclasses.asdict(recipe)
        for recipe in (
            load_recipe(find_recipe(options.recipe), overrides_of(job, options)), load_recipe(folder / "recipe.yaml")
        )
    )
    for recipe in (wanted, there):
        recipe["training"].pop("output_dir")
        recipe["trigger"].pop("trace")
    for section in wanted:
        if wanted[section] != there[section]:
            raise ConfigError(f"{folder} holds a run whose section {section} has other settings: give another --out")
    figures = {**json.loads((folder / "summary.json").read_text()), **json.loads((folder / "results.json").read_text())}
    return {**figures, "lifted": lifted_kinds(folder)}


def lifted_kinds(folder: Path) -> dict[str, float]:
    """Shares of the lifted (unit, step) pairs, the largest first: by kind of projection, by number of layer or expert."""
    from hf_gnmr.trace import read_trace

    trace = read_trace(folder / "trace.jsonl")
    kinds = [re.sub(r".*?(\w+(?:\.\d+)?)$", r"\1", unit["name"]) for unit in trace.header["units"]]
    counts = Counter(kinds[unit] for line in trace.steps for unit in line["active"])
    return {kind: count / counts.total() for kind, count in counts.most_common()}


def rows_of(runs: dict[Job, dict]) -> list[dict]:
    """One row an arm, format and maxO."""
    cells: dict[tuple, dict[int, dict]] = {}
    for job, figures in runs.items():
        cells.setdefault((job.form, job.max_o, job.arm), {})[job.seed] = figures

    def losses(form: str, max_o: int | None, arm: Arm) -> dict[int, float]:
        found = cells.get((form, max_o, arm)) or cells.get((form, None, arm)) or {}
        return {seed: float(f["eval_loss"]) for seed, f in found.items()}

    rows = []
    for (form, max_o, arm), by_seed in cells.items():
        ours = losses(form, max_o, arm)
        low, high = losses(form, None, Arm("none")), losses(form, None, Arm("all"))
        control = losses(form, max_o, Arm("random", arm.thresholds)) if arm.trigger == "gnmr" else {}
        finite = [loss for loss in ours.values() if math.isfinite(loss)]

        def mean(key: str, by_seed: dict = by_seed) -> float | None:
            values = [f[key] for f in by_seed.values() if f.get(key) is not None]
            return statistics.mean(values) if values else None

        rows.append({
            "format": form, "max_o": max_o, "arm": arm.label, "seeds": sorted(ours), "diverged": len(ours) - len(finite),
            "loss": statistics.mean(finite) if finite else None,
            "loss_sd": statistics.stdev(finite) if len(finite) > 1 else None,
            "perplexity": statistics.mean(map(_exp, finite)) if finite else None,
            "perplexity_sd": statistics.stdev(map(_exp, finite)) if len(finite) > 1 else None,
            "against_none": None if arm.trigger == "none" else paired(ours, low),
            "against_all": None if arm.trigger == "all" else paired(ours, high),
            "against_random": paired(ours, control),
            "gap_closed": gap_closed(ours, low, high), "lifted": _mean_shares([f["lifted"] for f in by_seed.values()]),
            "hit_max_o_rate": None if arm.trigger in FREE_OF_MAX_O else mean("hit_max_o_rate"),
            **{key: mean(key) for key in (
                "promotion_ratio", "gnmr_exceedance", "delta_gnmr_exceedance", "controller_share",
                "peak_saved_bytes", "peak_recovery_bytes", "trigger_bytes", "gss_max",
            )},
        })
    return rows


def _mean_shares(shares: list[dict[str, float]]) -> dict[str, float]:
    kinds = {kind for found in shares for kind in found}
    means = {kind: statistics.mean(found.get(kind, 0.0) for found in shares) for kind in kinds}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _exp(loss: float) -> float:
    return math.inf if loss > 700 else math.exp(loss)


def paired(ours: dict[int, float], theirs: dict[int, float]) -> dict | None:
    """Difference of losses seed by seed: mean, its standard error, seeds, and the effect that would have been seen.

    `detectable`: what a two-sided t test at 5% finds with 80% power: 2.8 standard errors with many seeds, 5.4 with three.
    """
    seeds = [s for s in ours if s in theirs and math.isfinite(ours[s]) and math.isfinite(theirs[s])]
    differences = [ours[s] - theirs[s] for s in seeds]
    if not differences:
        return None
    free = len(differences) - 1
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if free else None
    return {
        "mean": statistics.mean(differences), "stderr": error, "seeds": len(seeds),
        "detectable": None if error is None else (t_quantile(0.975, free) + t_quantile(0.8, free)) * error,
        "better": sum(d < 0 for d in differences),
    }


def t_quantile(p: float, free: int) -> float:
    """Of Student's t, from its distribution function by bisection."""

    def below(t: float) -> float:
        x = np.linspace(0, t, 2001)
        density = np.exp(math.lgamma((free + 1) / 2) - math.lgamma(free / 2)) / math.sqrt(free * math.pi)
        return 0.5 + float(np.trapezoid(density * (1 + x * x / free) ** (-(free + 1) / 2), x))

    low, high = 0.0, 1000.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < p else (low, middle)
    return low


def gap_closed(ours: dict[int, float], low: dict[int, float], high: dict[int, float]) -> dict | None:
    """(ppl_low - ppl) / (ppl_low - ppl_recovery) of the means over seeds, with the spread of a bootstrap over seeds."""
    seeds = [s for s in ours if s in low and s in high]
    table = np.array([[_exp(d[s]) for d in (low, ours, high)] for s in seeds])
    if len(seeds) == 0 or not np.isfinite(table).all():
        return None

    def share(rows: np.ndarray) -> np.ndarray:
        means = rows.mean(axis=-2)
        with np.errstate(divide="ignore", invalid="ignore"):
            return (means[..., 0] - means[..., 1]) / (means[..., 0] - means[..., 2])

    value = float(share(table))
    if len(seeds) < 3:
        return {"value": value, "low": None, "high": None}
    drawn = np.random.default_rng(0).integers(0, len(seeds), (2000, len(seeds)))
    below, above = np.nanquantile(share(table[drawn]), [0.025, 0.975])
    return {"value": value, "low": float(below), "high": float(above)}


def step_times(options: argparse.Namespace) -> dict[str, dict]:
    """Time and memory of a whole optimizer step of each arm, alternating on one model and equal batches.

    Times are against the plain model's in the same round. Memory is what the process grows by, at its peak, over what it
    holds with model and optimizer (Linux; start with MALLOC_MMAP_THRESHOLD_=131072, or freed blocks hide in it).
    """
    import torch

    from hf_gnmr.models import build_from_scratch, scratch_tokenizer
    from hf_gnmr.packing import text_blocks
    from hf_gnmr.recipe import find_recipe, load_recipe
    from hf_gnmr.session import GNMRSession
    from hf_gnmr.triggers import TRIGGERS

    torch.set_num_threads(1)
    recipe = load_recipe(find_recipe(options.recipe), [*options.overrides, *format_overrides(options.formats[0])])
    tokenizer = scratch_tokenizer(recipe.model)
    model = build_from_scratch(recipe.model, 0).train()
    model.config.use_cache = False
    blocks, _, _ = text_blocks(recipe.data, tokenizer)
    size = recipe.training["per_device_train_batch_size"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    more = {
        "random": {"promotion_ratio": 0.03},
        "static": {"warmup": 1},
    }

    def one(arm: str, number: int, session: GNMRSession | None) -> float:
        ids = torch.stack([blocks[(number * size + i) % len(blocks)]["input_ids"] for i in range(size)])
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        if session is not None:
            session.observe()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if session is not None:
            session.decide()
        optimizer.zero_grad()
        return time.perf_counter() - start

    sides = ["plain", *TRIGGERS]
    ratios: dict[str, list[float]] = {side: [] for side in sides}
    grown: dict[str, list[float]] = {side: [] for side in sides}
    one("plain", 0, None)  # the optimizer's state is there from now on
    with contextlib.redirect_stdout(None):
        for round_ in range(options.times):
            seconds = {}
            for side in sides:
                session = None
                gc.collect()
                before = _resident_peak(reset=True)
                if side != "plain":
                    session = GNMRSession(
                        model, recipe.gnmr, total_steps=1000, trigger=side, trigger_options=more.get(side, {}),
                        **recipe.backend.options(),
                    )
                steps = [one(side, 4 * round_ + i, session) for i in range(4)]
                seconds[side] = min(steps[1:])
                grown[side].append(_resident_peak() - before)
                if session is not None:
                    session.detach()
            for side in sides:
                ratios[side].append(seconds[side] / seconds["plain"])
    return {
        side: {
            **dict(zip(("low", "median", "high"), (float(q) for q in np.quantile(r, [0.25, 0.5, 0.75])), strict=True)),
            "peak_bytes": float(np.median(grown[side])),
        }
        for side, r in ratios.items()
    }


def _resident_peak(reset: bool = False) -> float:
    """Peak resident bytes of this process since the last reset, which sets it to what is resident now; nan off Linux."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return math.nan
    return 1024 * float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def markdown(table: dict, options: argparse.Namespace, wanted: int) -> str:
    """The grid's tables."""

    def number(value: float | None, digits: int = 4) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.2%}"

    def difference(d: dict | None) -> str:
        if d is None:
            return "–"
        error = "" if d["stderr"] is None else f" ± {d['stderr']:.4f}"
        seen = "" if d["stderr"] is None else f"; {d['detectable']:.4f} detectable"
        return f"{d['mean']:+.4f}{error} ({d['better']} of {d['seeds']} lower{seen})"

    def gap(g: dict | None) -> str:
        if g is None:
            return "–"
        return f"{g['value']:.0%}" + ("" if g["low"] is None else f" ({g['low']:.0%} to {g['high']:.0%})")

    def table_of(columns: list[str], cells: list[list[str]]) -> list[str]:
        return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells)]

    rows = table["rows"]
    first = [[r["format"], "recipe" if r["max_o"] is None else str(r["max_o"]), r["arm"]] for r in rows]
    quality = [
        [
            f"{len(r['seeds'])}{', ' + str(r['diverged']) + ' diverged' if r['diverged'] else ''}",
            f"{number(r['perplexity'], 3)} ({number(r['perplexity_sd'], 3)})",
            f"{number(r['loss'])} ({number(r['loss_sd'])})",
            *(difference(r[f"against_{name}"]) for name in ("none", "all", "random")), gap(r["gap_closed"]),
        ]
        for r in rows
    ]
    control = [
        [
            share(r["promotion_ratio"]), share(r["hit_max_o_rate"]), share(r["gnmr_exceedance"]),
            share(r["delta_gnmr_exceedance"]),
            *("–" if r[k] is None else f"{r[k]:,.0f}" for k in ("peak_saved_bytes", "peak_recovery_bytes", "trigger_bytes")),
            share(r["controller_share"]),
            ", ".join(f"{kind} {part:.0%}" for kind, part in list(r["lifted"].items())[:4]) or "–",
        ]
        for r in rows
    ]
    lines = table_of(
        ["format", "maxO", "arm", "seeds", "perplexity (sd)", "loss (sd)", "loss − none", "loss − all", "loss − random",
         "gap closed"],
        [a + b for a, b in zip(first, quality, strict=True)],
    )
    lines += [
        "", "± is the standard error of the difference paired by seed; detectable: the effect that a t test at 5% finds "
        "with 80% power. Gap closed: (ppl none − ppl) / (ppl none − ppl all) of the means, 95% of a bootstrap over seeds.",
        "",
    ]
    lines += table_of(
        ["format", "maxO", "arm", "promotion ratio", "hit-maxO", "GNMR ≥ α", "ΔGNMR ≥ β", "saved bytes, peak", "ΔM, peak",
         "trigger's state, bytes", "control", "lifted, by kind"],
        [a + b for a, b in zip(first, control, strict=True)],
    )
    if table["step_times"]:
        lines += [
            "", f"Step time against the plain model ({options.formats[0]}, {options.times} rounds, one thread), median "
            "(quartiles):", "",
        ]
        for side, t in table["step_times"].items():
            grown = "" if math.isnan(t["peak_bytes"]) else f"; the process grows by {t['peak_bytes'] / 1e6:.1f} MB"
            lines.append(f"* {side}: {t['median']:.3f} ({t['low']:.3f} to {t['high']:.3f}){grown}")
    there = len(table["runs"])
    if there < wanted:
        lines += ["", f"{wanted - there} of {wanted} runs are not there yet."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
