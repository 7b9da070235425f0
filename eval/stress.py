"""Low-precision pre-training as a grid: triggers x thresholds x maxO x formats x seeds, resumable, and the tables of it.

    python eval/stress.py recipes/activation_small.yaml [section.key=value ...] --out runs/stress --seeds 1 2 3 \\
        --formats int:2:8 --arms none all gnmr:1.5:1.3 random:1.5:1.3 gsnr jacobian static
    python eval/stress.py recipes/lowbit_small.yaml --out runs/blocks --formats lowbit:4:8 --max-o 1 2 \\
        --arms none all exact gnmr:1.5-1.1:1.5 random:1.5-1.1:1.5

An arm is a trigger: `none`, `all`, `exact` (nothing quantised), `gsnr`, `jacobian`, `static`, `gnmr:ALPHA:BETA`, and three
controls: `random:ALPHA:BETA`, which draws as many units as the GNMR run of those thresholds, that seed and that maxO lifted
in the mean; `random:RATIO`, which draws that share of the units (for triggers that always fill maxO); and `listed:ARM`,
which lifts as many units as that arm did in the mean, always those that it lifted most.  Against `random` an arm shows what
its choice of units is worth, against `listed` what its choice of steps is.  `listed:PATTERN` (`listed:*.down_proj`) lifts
the units of that name for good.  ALPHA is a constant, or INIT-ALPHA for the recipe's two stages; BETA may be `off`.
A format is KIND:LOW:RECOVERY in bits: `float` and `int` are saved activations, `lowbit` and `fp8` products (`fp8:8:16`).

Runs of one seed start from the same weights and see the same data in the same order, so differences are taken seed by
seed; their standard errors are those of the paired differences.  A finished run is not run again; what a broken-off one
has left is moved aside (NAME.1, NAME.2, …) when it is run anew, its log is kept.  A run that another process is at is left
to it.  `--workers 2` runs two single-thread trainings side by side; step times are not taken from them but, with `--times`,
in one process, alternating the arms.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import itertools
import json
import math
import multiprocessing
import os
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TextIO

from step_times import step_times
from stress_tables import Arm, Job, gap_closed, markdown, paired, rows_of, stages, t_quantile

__all__ = ["gap_closed", "main", "paired", "t_quantile"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--arms", nargs="+", default=["none", "all", "gnmr:1.5:1.3", "random:1.5:1.3"])
    parser.add_argument("--max-o", nargs="+", type=int, help="default: the recipe's")
    parser.add_argument("--formats", nargs="+", metavar="KIND:LOW:RECOVERY", help="default: the recipe's")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--times", type=int, default=0, metavar="ROUNDS", help="measure step times in so many rounds")
    parser.add_argument("--table-only", action="store_true", help="no training: the table of the runs that are there")
    options = parser.parse_intermixed_args()
    from hf_gnmr.config import ConfigError

    failed = 0
    try:
        if options.workers < 1:
            raise ConfigError(f"--workers {options.workers}: 1 and above is allowed")
        options.formats = options.formats or [format_of(options.recipe, options.overrides)]
        jobs = grid(options)
        if not options.table_only:
            check(options, jobs)
            failed = run_all(options, jobs)
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    runs = {job: figures for job in jobs if (figures := read(options, job)) is not None}
    times = {}
    if options.times:
        from hf_gnmr.run.recipe import find_recipe, load_recipe

        timed = [*options.overrides, *format_overrides(options.formats[0])]
        times = step_times(load_recipe(find_recipe(options.recipe), timed), options.times)
    table = {"rows": rows_of(runs), "runs": {job.name: figures for job, figures in runs.items()}, "step_times": times}
    text = markdown(table, options, len(jobs))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "stress.md").write_text(text + "\n", encoding="utf-8")
    (options.out / "stress.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
    print(text)
    return 1 if failed else 0


def grid(options: argparse.Namespace) -> list[Job]:
    """All runs, seeds outermost, so that an interrupted grid has whole seeds; each control after what it is matched to."""
    from hf_gnmr.config import ConfigError

    arms = [arm_of(text) for text in options.arms]
    arms.sort(key=lambda arm: arm.trigger in ("random", "listed"))
    for text, arm in zip(options.arms, map(arm_of, options.arms), strict=True):
        model = _model(arm)
        if model is not None and model not in arms:
            raise ConfigError(f"--arms {text} needs {':'.join([model.trigger, *(model.thresholds or ())])}")
    jobs = []
    for seed, form, arm in itertools.product(options.seeds, options.formats, arms):
        for max_o in [None] if arm.free_of_max_o or options.max_o is None else options.max_o:
            jobs.append(Job(arm, form, max_o, seed))
    folders: dict[str, Job] = {}
    for job in jobs:
        if folders.setdefault(job.name, job) != job:
            raise ConfigError(f"--arms {job.arm.label}: its runs would have the folders of {folders[job.name].arm.label}'s")
    return list(dict.fromkeys(jobs))


def arm_of(text: str) -> Arm:
    """An arm from its words.

    Raises:
        ConfigError: no such arm.
    """
    from hf_gnmr.config import ConfigError
    from hf_gnmr.control.triggers import TRIGGERS

    name, *thresholds = text.split(":")
    if name == "listed":
        if thresholds[:1] and thresholds[0] in ("gnmr", "gsnr", "jacobian"):  # those that choose anew each step
            return Arm(name, of=arm_of(":".join(thresholds)))
        if len(thresholds) == 1 and re.search(r"[*?\[]|\w\.\D", thresholds[0]):
            return Arm(name, units=thresholds[0])
        raise ConfigError(
            f"--arms {text}: listed:gnmr:ALPHA:BETA, listed:gsnr, listed:jacobian, or a pattern such as listed:*.down_proj"
        )
    takes = name in ("gnmr", "random")
    wrong = len(thresholds) != (2 if takes else 0) and (name, len(thresholds)) != ("random", 1)
    if name not in (*TRIGGERS, "exact") or wrong:
        raise ConfigError(
            f"--arms {text}: {', '.join(TRIGGERS)}, exact; gnmr with :ALPHA:BETA, random with that or :RATIO, "
            "listed with :ARM or :PATTERN"
        )
    try:
        numbers = [float(part) for i, t in enumerate(thresholds) if (i, t) != (1, "off") for part in stages(t)]
    except ValueError:
        raise ConfigError(f"--arms {text}: numbers, INIT-ALPHA or (for β) off are allowed") from None
    if len(thresholds) == 1:
        return Arm(name, ratio=numbers[0])
    return Arm(name, (thresholds[0], thresholds[1]) if thresholds else None)


def overrides_of(job: Job, options: argparse.Namespace) -> list[str]:
    """What a job changes in the recipe."""
    arm = job.arm
    changes = [
        *options.overrides,
        f"training.output_dir={options.out / job.name}",
        f"training.seed={job.seed}",
        "run.resume=false",
        *format_overrides(job.form),
        "training.disable_tqdm=true",
        f"trigger.name={'none' if arm.trigger == 'exact' else arm.trigger}",
    ]
    if arm.trigger == "exact":  # the plain model: nothing is switched, norms are traced
        changes = [c for c in changes if not c.startswith(("backend.", "trigger."))] + ["backend.name=none"]
    changes += (arm.of or arm).overrides()
    if job.max_o is not None:
        changes.append(f"gnmr.max_o={job.max_o}")
    if arm.trigger == "random":
        changes.append(f"trigger.seed={job.seed}")
    if arm.units is not None:
        changes.append(f"trigger.units={json.dumps([arm.units])}")
    if arm.ratio is not None:
        changes.append(f"trigger.promotion_ratio={arm.ratio}")
    twin = _twin(job)
    if twin is not None:
        changes.append(f"trigger.trace={options.out / twin.name / 'trace.jsonl'}")
    if arm.trigger == "static" and not any(o.startswith("trigger.warmup") for o in options.overrides):
        changes.append("trigger.warmup=0.05")  # 500 of the paper's 10,000 and more steps
    if arm.trigger != "static":
        changes = [c for c in changes if not c.startswith(("trigger.warmup", "trigger.share"))]
    if arm.trigger != "random":
        changes = [c for c in changes if not c.startswith("trigger.hold")]
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
    name = "lowbit" if kind == "lowbit" else "activation"
    return [*given, f"backend.name={name}", *([] if kind == "lowbit" else [f"backend.format={kind}"])]


def format_of(recipe_name: str, overrides: list[str]) -> str:
    """The format of a recipe itself."""
    from hf_gnmr.config import ConfigError
    from hf_gnmr.run.recipe import find_recipe, load_recipe

    backend = load_recipe(find_recipe(recipe_name), overrides).backend
    if backend.name not in ("activation", "lowbit", "fp8"):
        raise ConfigError(f"{recipe_name} has backend {backend.name!r}: the grid is for activation, lowbit and fp8")
    if backend.name == "fp8":
        return "fp8:8:16"
    kind = "lowbit" if backend.name == "lowbit" else backend.format
    return f"{kind}:{backend.bits_low}:{backend.bits_recovery}"


def check(options: argparse.Namespace, jobs: list[Job]) -> None:
    """Every job's recipe and options, before the first one runs."""
    from hf_gnmr.run.plan import architecture
    from hf_gnmr.run.plan_activations import base_on_meta, seats_on_meta
    from hf_gnmr.run.recipe import SCRATCH, find_recipe, load_recipe
    from hf_gnmr.training.options import Options

    base = None
    for job in jobs:
        recipe = load_recipe(find_recipe(options.recipe), overrides_of(job, options))
        Options(trigger=recipe.trigger.name, trigger_options=recipe.trigger.options(), **recipe.backend.options())
        first = job.seed == options.seeds[0] and _twin(job) is None  # a seed chooses no units; a twin has no trace yet
        if first and recipe.model.name == SCRATCH:  # the units are known: lists, ratios and maxO must fit them
            base = base_on_meta(recipe, architecture(recipe)[0]) if base is None else base
            seats_on_meta(recipe, base)


def run_all(options: argparse.Namespace, jobs: list[Job]) -> int:
    """Run what is not there yet; returns how many failed."""
    options.out.mkdir(parents=True, exist_ok=True)
    left = [job for job in jobs if read(options, job) is None]
    total, started = len(left), time.perf_counter()
    print(f"{len(jobs)} runs, {total} of them to do", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    running: dict[Future[dict], tuple[Job, ProcessPoolExecutor]] = {}
    done = failed = 0
    with contextlib.ExitStack() as stack:
        # A pool a worker: one that is killed (for its memory, or by hand) takes its own run with it and no other one.
        idle = [stack.enter_context(worker()) for _ in range(options.workers)]
        while left or running:
            under_way = [*left, *(job for job, _ in running.values())]
            for job in [job for job in left if _twin(job) not in under_way]:
                if not idle:
                    break
                left.remove(job)
                twin = _twin(job)
                if twin is not None and read(options, twin) is None:
                    done, failed = done + 1, failed + 1
                    print(f"{done}/{total} {job.name}: FAILED: {twin.name}, its model, is not there", flush=True)
                    continue
                pool = idle.pop()
                running[pool.submit(run, options, job)] = job, pool
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                job, pool = running.pop(future)
                done += 1
                try:
                    said = f"loss {future.result().get('eval_loss', math.nan):.4f}"
                except BusyError as error:
                    said = f"left to the other process that is at it ({error})"
                except Exception as error:  # one run that fails must not cost the others
                    failed += 1
                    said = f"FAILED: {type(error).__name__}: {error}"
                    if isinstance(error, BrokenProcessPool):
                        said = "FAILED: its process was killed (out of memory?)"
                        pool = stack.enter_context(worker())
                idle.append(pool)
                each = (time.perf_counter() - started) / done
                rest = f"{each:.0f} s a run, {each * (total - done):.0f} s left"
                print(f"{done}/{total} {job.name}: {said} ({rest})", flush=True)
    return failed


def worker() -> ProcessPoolExecutor:
    """A process for runs, which ends with this one, whatever ends it."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_end_with, initargs=(os.getpid(),))


def _end_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # an orphan would go on writing where the next grid begins the run anew

    threading.Thread(target=watch, daemon=True).start()


def _model(arm: Arm) -> Arm | None:
    """The arm that a control is matched to."""
    if arm.trigger == "random" and arm.thresholds is not None:
        return Arm("gnmr", arm.thresholds)
    return arm.of


def _twin(job: Job) -> Job | None:
    """The run that a control needs the trace of."""
    model = _model(job.arm)
    if model is None:
        return None
    return dataclasses.replace(job, arm=model)


def run(options: argparse.Namespace, job: Job) -> dict:
    """One training in this process, its output in the folder's log; the figures of one that is there by now.

    Raises:
        BusyError: another process is at it.
    """
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    from hf_gnmr.run.recipe import find_recipe, load_recipe
    from hf_gnmr.train import train

    folder = options.out / job.name
    # A run that was broken off is moved aside by the training, as any other one.
    recipe = load_recipe(find_recipe(options.recipe), [*overrides_of(job, options), "run.overwrite=true"])
    with folder.with_name(folder.name + ".log").open("a", encoding="utf-8") as log:
        _lock(log, folder)
        there = read(options, job)
        if there is not None:  # another process has done it meanwhile
            return there
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            results = train(recipe)
    for weights in folder.glob("model*.safetensors"):  # gigabytes over a grid; the figures are what is wanted
        weights.unlink()
    return results


class BusyError(Exception):
    """A run that another process is at."""


def _lock(log: TextIO, folder: Path) -> None:
    """Hold the run's log for as long as it is open; what an ending worker holds is waited for."""
    for last in (False, False, False, False, True):
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if last:
                raise BusyError(folder.name) from None
            time.sleep(0.5)


def read(options: argparse.Namespace, job: Job) -> dict | None:
    """A finished run's figures; None: it is not finished, or its trace does not have all of its steps.

    Raises:
        ConfigError: the folder holds a run of other settings, finished or not.
    """
    from hf_gnmr.config import ConfigError
    from hf_gnmr.run.recipe import find_recipe, load_recipe

    folder = options.out / job.name
    if not (folder / "recipe.yaml").is_file():
        return None
    wanted, there = (
        dataclasses.asdict(recipe)
        for recipe in (
            load_recipe(find_recipe(options.recipe), overrides_of(job, options)),
            load_recipe(folder / "recipe.yaml"),
        )
    )
    for recipe in (wanted, there):
        recipe["training"].pop("output_dir")
        recipe["trigger"].pop("trace")
        recipe.pop("run")
    for section in wanted:
        if wanted[section] != there[section]:
            raise ConfigError(f"{folder} holds a run whose section {section} has other settings: give another --out")
    if not (folder / "results.json").is_file() or not (folder / "summary.json").is_file():
        return None
    figures = {**json.loads((folder / "summary.json").read_text()), **json.loads((folder / "results.json").read_text())}
    asked = wanted["training"].get("max_steps", -1)
    if figures["missing_steps"] or (asked > 0 and figures["steps"] != asked):
        return None
    return {**figures, "lifted": lifted_kinds(folder)}


def lifted_kinds(folder: Path) -> dict[str, float]:
    """Shares of the lifted (unit, step) pairs, the largest first: by kind of projection, by number of layer or expert."""
    from hf_gnmr.trace.file import read_trace

    trace = read_trace(folder / "trace.jsonl")
    kinds = [re.sub(r".*?(\w+(?:\.\d+)?)$", r"\1", unit["name"]) for unit in trace.header["units"]]
    counts = Counter(kinds[unit] for line in trace.steps for unit in line["active"])
    return {kind: count / counts.total() for kind, count in counts.most_common()}


if __name__ == "__main__":
    sys.exit(main())
