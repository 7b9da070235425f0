"""Low-precision pre-training as a grid: triggers x thresholds x maxO x formats x seeds, resumable, and the tables of it.

    python eval/stress.py recipes/activation_small.yaml [section.key=value ...] --out runs/stress --seeds 1 2 3 \\
        --formats int:2:8 --arms none all gnmr:1.5:1.3 random:1.5:1.3 gsnr jacobian static
    python eval/stress.py recipes/lowbit_small.yaml --out runs/blocks --formats lowbit:4:8 --max-o 1 2 \\
        --arms none all exact gnmr:1.5-1.1:1.5 random:1.5-1.1:1.5

An arm is a trigger: `none`, `all`, `exact` (nothing quantised), `gsnr`, `jacobian`, `static`, `gnmr:ALPHA:BETA`, and three
controls: `random:ALPHA:BETA`, which draws as many units as the GNMR run of those thresholds, that seed and that maxO lifted
on average; `random:RATIO`, which draws that share of the units (for triggers that always fill maxO); and `listed:ARM`,
which lifts as many units as that arm did on average, always those that it lifted most.  Against `random` an arm shows what
its choice of units is worth, against `listed` what its choice of steps is worth.  `listed:PATTERN` (`listed:*.down_proj`)
lifts the units whose names match throughout.  ALPHA is a constant, or INIT-ALPHA for the recipe's two stages; BETA may
be `off`.
A format is KIND:LOW:RECOVERY in bits: `float` and `int` are saved activations, `lowbit` and `fp8` products (`fp8:8:16`).

Runs of one seed start from the same weights and see the same data in the same order, so differences are taken seed by
seed; their standard errors are those of the paired differences.  A finished run is not run again.  What an interrupted run
left is moved aside (NAME.1, NAME.2, …) when it is run again; its log is kept.  A run that another process is running is
left to it.  `--workers 2` runs two single-thread trainings side by side; step times are not taken from them but,
with `--times`, in one process, alternating the arms.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from arms import Job, Study, arm_of, format_of, format_overrides, overrides_of
from grid import read, run_all
from results import add_save_option, command_line, save_result
from step_times import step_times
from stress_tables import rows_of, table

from hf_gnmr.config import ConfigError
from hf_gnmr.files import write_text
from hf_gnmr.run.plan_figures import architecture, base_on_meta, options_of, seats_on_meta
from hf_gnmr.run.recipe import SCRATCH, find_recipe, load_recipe
from hf_gnmr.terminal import error_line

__all__ = ["main", "table"]


def main() -> int:
    options = parser().parse_intermixed_args()
    study = Study(options.recipe, options.overrides, options.out)
    failed = 0
    try:
        if options.workers < 1:
            raise ConfigError(f"--workers {options.workers}: expected 1 or more")
        formats = options.formats or [format_of(study.recipe, study.overrides)]
        jobs = jobs_of(options.arms, formats, options.max_o, options.seeds)
        if not options.table_only:
            check(study, jobs)
            failed = run_all(study, jobs, options.workers)
        runs = {job: figures for job in jobs if (figures := read(study, job)) is not None}
    except ConfigError as error:
        print(error_line(error), file=sys.stderr)
        return 2
    times = {}
    if options.times:
        timed = load_recipe(find_recipe(study.recipe), [*study.overrides, *format_overrides(formats[0])])
        times = step_times(timed, options.times)
    grid = {"rows": rows_of(runs), "runs": {job.name: figures for job, figures in runs.items()}, "step_times": times}
    payload: dict[str, Any] = {**grid, "jobs": len(jobs), "timed_format": formats[0], "timed_rounds": options.times}
    text = table(payload)
    study.out.mkdir(parents=True, exist_ok=True)
    write_text(study.out / "stress.md", text + "\n")
    write_text(study.out / "stress.json", json.dumps(grid, indent=1))
    print(text)
    if options.save:
        save_result(options.save, bench="stress", command=command_line(), seed=options.seeds, payload=payload)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
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
    parser.add_argument("--table-only", action="store_true", help="no training: the table of the runs that are finished")
    add_save_option(parser)
    return parser


def jobs_of(names: list[str], formats: list[str], max_o: list[int] | None, seeds: list[int]) -> list[Job]:
    """All runs: seeds outermost, so that an interrupted grid has whole seeds; each control after the arm it is matched to.

    Args:
        names: arms as on the command line.
        max_o: None: the recipe's.

    Raises:
        ConfigError: not an arm, a control without the arm it is matched to, or two arms with the same folders.
    """
    arms = [arm_of(text) for text in names]
    for text, arm in zip(names, arms, strict=True):
        if arm.matched is not None and arm.matched not in arms:
            raise ConfigError(f"--arms {text} needs {':'.join([arm.matched.trigger, *(arm.matched.thresholds or ())])}")
    arms.sort(key=lambda arm: arm.trigger in ("random", "listed"))
    jobs = []
    for seed, form, arm in itertools.product(seeds, formats, arms):
        for limit in [None] if arm.free_of_max_o or max_o is None else max_o:
            jobs.append(Job(arm, form, limit, seed))
    folders: dict[str, Job] = {}
    for job in jobs:
        if folders.setdefault(job.name, job) != job:
            raise ConfigError(f"--arms {job.arm.label}: its runs would have the folders of {folders[job.name].arm.label}'s")
    return list(dict.fromkeys(jobs))


def check(study: Study, jobs: list[Job]) -> None:
    """Check every job's recipe and options before the first one runs.

    Raises:
        ConfigError: settings that cannot be used.
    """
    base = None
    for job in jobs:
        recipe = load_recipe(find_recipe(study.recipe), overrides_of(job, study))
        options_of(recipe)
        # The units of a model built from scratch are known: lists, ratios and maxO must fit them. Seeds choose no units, so
        # one is enough; a matched control has no trace to read yet.
        if job.seed == jobs[0].seed and job.matched is None and recipe.model.name == SCRATCH:
            base = base_on_meta(recipe, architecture(recipe)[0]) if base is None else base
            seats_on_meta(recipe, base)


if __name__ == "__main__":
    sys.exit(main())
