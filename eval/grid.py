"""Runs of a grid (`stress.py`): worker processes, one process a run, and the figures of finished runs."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import multiprocessing
import os
import re
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TextIO

from arms import Job, Study, overrides_of

from hf_gnmr.config import ConfigError
from hf_gnmr.files import read_json
from hf_gnmr.run.recipe import find_recipe, load_recipe
from hf_gnmr.trace.file import read_trace


@dataclasses.dataclass
class Progress:
    """Counts runs and prints one line for each."""

    total: int
    done: int = 0
    failed: int = 0
    started: float = dataclasses.field(default_factory=time.perf_counter)

    def report(self, job: Job, outcome: str) -> None:
        """A run that has ended."""
        self.done += 1
        each = (time.perf_counter() - self.started) / self.done
        rest = f"{each:.0f} s a run, {each * (self.total - self.done):.0f} s left"
        print(f"{self.done}/{self.total} {job.name}: {outcome} ({rest})", flush=True)

    def fail(self, job: Job, why: str) -> None:
        """A run that has failed."""
        self.failed += 1
        self.report(job, f"FAILED: {why}")


def run_all(study: Study, jobs: list[Job], workers: int) -> int:
    """Run the jobs that are not finished yet; returns how many failed."""
    study.out.mkdir(parents=True, exist_ok=True)
    waiting = [job for job in jobs if read(study, job) is None]
    print(f"{len(jobs)} runs, {len(waiting)} of them to do", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    progress = Progress(len(waiting))
    running: dict[Future[dict[str, Any]], tuple[Job, ProcessPoolExecutor]] = {}
    with contextlib.ExitStack() as stack:
        # One pool a worker: a worker that is killed (for its memory, or by hand) takes only its own run with it.
        idle = [stack.enter_context(worker()) for _ in range(workers)]
        while waiting or running:
            unfinished = [*waiting, *(job for job, _ in running.values())]
            for job in [job for job in waiting if job.matched not in unfinished]:
                if not idle:
                    break
                waiting.remove(job)
                if job.matched is not None and read(study, job.matched) is None:
                    progress.fail(job, f"{job.matched.name}, which it is matched to, is not finished")
                    continue
                pool = idle.pop()
                running[pool.submit(run, study, job)] = job, pool
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                job, pool = running.pop(future)
                try:
                    progress.report(job, f"loss {future.result().get('eval_loss', math.nan):.4f}")
                except BusyError as error:
                    progress.report(job, f"left to the other process that is running it ({error})")
                except BrokenProcessPool:
                    progress.fail(job, "its process was killed (out of memory?)")
                    pool = stack.enter_context(worker())
                except Exception as error:  # one run that fails must not cost the others
                    progress.fail(job, f"{type(error).__name__}: {error}")
                idle.append(pool)
    return progress.failed


def worker() -> ProcessPoolExecutor:
    """A process for runs that ends when this one does, however that happens."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_end_with, initargs=(os.getpid(),))


def _end_with(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)  # an orphan would keep writing where the next grid starts the run again

    threading.Thread(target=watch, daemon=True).start()


def run(study: Study, job: Job) -> dict[str, Any]:
    """One training in this process, its output in the run's log; returns the figures of the run, whoever finished it.

    Raises:
        BusyError: another process is running it.
    """
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    from hf_gnmr.train import train

    folder = study.out / job.name
    # The training moves an interrupted run aside, as it does with any other.
    recipe = load_recipe(find_recipe(study.recipe), [*overrides_of(job, study), "run.overwrite=true"])
    with folder.with_name(folder.name + ".log").open("a", encoding="utf-8") as log:
        lock(log, folder)
        figures = read(study, job)
        if figures is not None:  # another process has finished it meanwhile
            return figures
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            results = train(recipe)
    for weights in folder.glob("model*.safetensors"):  # gigabytes over a grid, of which only the figures are used
        weights.unlink()
    return results


class BusyError(Exception):
    """Another process is running it."""


def lock(log: TextIO, folder: Path) -> None:
    """Hold the run's log for as long as it is open; a worker that is ending is given two seconds to release it.

    Raises:
        BusyError: another process holds it.
    """
    for last in (False, False, False, False, True):
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if last:
                raise BusyError(folder.name) from None
            time.sleep(0.5)


def read(study: Study, job: Job) -> dict[str, Any] | None:
    """A finished run's figures; None: it is not finished, or steps are missing from its trace.

    Raises:
        ConfigError: the folder holds a run with other settings, finished or not.
    """
    folder = study.out / job.name
    if not (folder / "recipe.yaml").is_file():
        return None
    expected = load_recipe(find_recipe(study.recipe), overrides_of(job, study)).to_dict()
    recorded = load_recipe(folder / "recipe.yaml").to_dict()
    for recipe in (expected, recorded):
        recipe["training"].pop("output_dir")
        recipe["trigger"].pop("trace", None)
        recipe.pop("run")
    for section in expected:
        if expected[section] != recorded[section]:
            raise ConfigError(f"{folder} holds a run with other settings in section {section}: choose another --out")
    if not (folder / "results.json").is_file() or not (folder / "summary.json").is_file():
        return None
    figures = {**read_json(folder / "summary.json"), **read_json(folder / "results.json")}
    steps = expected["training"].get("max_steps", -1)
    if figures["missing_steps"] or (steps > 0 and figures["steps"] != steps):
        return None
    return {**figures, "lifted": lifted_kinds(folder)}


def lifted_kinds(folder: Path) -> dict[str, float]:
    """Shares of the lifted (unit, step) pairs, the largest first: by kind of projection, by number of layer or expert."""
    trace = read_trace(folder / "trace.jsonl")
    kinds = [re.sub(r".*?(\w+(?:\.\d+)?)$", r"\1", unit["name"]) for unit in trace.header["units"]]
    counts = Counter(kinds[unit] for line in trace.steps for unit in line["active"])
    return {kind: count / counts.total() for kind, count in counts.most_common()}
