"""``hf-gnmr plan RECIPE``: the memory and steps that a recipe needs, without loading weights, as a table or as JSON.

Activations are not included: they depend on batch, length and checkpointing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..config import ConfigError, SetupError, integer, parse_bytes
from ..terminal import TRACEBACK, TRACEBACK_HELP, cleaned, refused
from .emulated import kernels
from .plan_figures import plan
from .recipe import find_recipe, load_recipe

MAX_NUMBER = 10**12
"""Of `--processes` and `--rows`."""
RUN_FILES = (
    "trace*.jsonl", "environment*.json", "summary*.json", "results.json", "adapter_*", "model*.safetensors*", "checkpoint-*",
)  # fmt: skip
"""Beside a recipe, they show that it is a run's own, which may come from someone else."""

__all__ = ["in_words", "main", "plan"]


def _of_a_run(path: Path) -> bool:
    """Whether a recipe, or the file that it links to, lies in the folder of a run."""
    folders = {path.parent, path.resolve().parent}
    return any(True for folder in folders for pattern in RUN_FILES for _ in folder.glob(pattern))


@cleaned
def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (1: does not fit, 2: something to fix)."""
    parser = argparse.ArgumentParser(prog="hf-gnmr plan", description="Show what a recipe needs; loads no weights.")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--device-memory", metavar="SIZE", help="fail if the recipe's own way of storing the base does not fit, e.g. 24GB"
    )
    parser.add_argument("--processes", type=int, default=1, help="number of processes in the run, for the number of steps")
    parser.add_argument("--rows", type=int, help="number of training rows, if the data set is not available")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--trust-remote-code", action="store_true", help="permit it to the recipe in a run's folder")
    parser.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)
    options = parser.parse_intermixed_args(argv)
    try:
        limit = None if options.device_memory is None else parse_bytes("--device-memory", options.device_memory)
        for name in ("processes", "rows"):
            value = getattr(options, name)
            if value is not None:
                integer(f"--{name}", value, 1, most=MAX_NUMBER)
        path = find_recipe(options.recipe)
        recipe = load_recipe(path, options.overrides)
        if recipe.model.trust_remote_code and not options.trust_remote_code and _of_a_run(path):
            raise ConfigError(
                f"{options.recipe} is the recipe of a run and asks to run code that comes with {recipe.model.name}: give "
                "--trust-remote-code if you trust the author of that code and of the recipe"
            )
        figures = plan(recipe, processes=options.processes, rows=options.rows)
    except (ConfigError, SetupError) as error:
        return refused(error)
    if recipe.adapted and not options.json:
        print(kernels(recipe)[1])
    print(json.dumps(figures, indent=2) if options.json else in_words(figures))
    way = figures["ways"][figures["way"]] if "ways" in figures else {"name": "this recipe", **figures}
    need = way["device_bytes"]
    if limit is not None and need > limit:
        print(
            f"does not fit: {way['name']} needs {need:,} bytes before activations, {need - limit:,} more than "
            f"--device-memory {options.device_memory} ({limit:,})",
            file=sys.stderr,
        )
        return 1
    return 0


def in_words(figures: dict[str, Any]) -> str:
    """The figures as a table, in decimal GB or MB; as lines if there is only one way to hold the model."""
    if "ways" not in figures:
        return activations_in_words(figures)
    unit, size_of = ("GB", 1e9) if figures["ways"]["bf16"]["weights"] >= 1e9 else ("MB", 1e6)

    def amount(size: int | None) -> str:
        return "?" if size is None else f"{size / size_of:.2f}"

    lines = [
        *head_in_words(figures),
        f"{figures['units']} units, {figures['recoverable_units']} recoverable, the largest {amount(figures['unit_bytes'])} "
        f"{unit} of BF16; {seats_in_words(figures)}",
        f"adapters {amount(figures['adapter_bytes'])} {unit}, gradients {amount(figures['gradient_bytes'])} {unit}, "
        f"optimizer state ({figures['optimizer']}) {amount(figures['optimizer_bytes'])} {unit}",
        "",
        f"{f'{unit} (decimal), before activations':38} {'weights':>8} {'recovery':>9} {'total':>8} {'host':>8} "
        f"{'moved per step':>14}",
    ]
    for key, way in figures["ways"].items():
        mark = "  <- this recipe" if key == figures["way"] else ""
        lines.append(
            f"{way['name']:38} {amount(way['weights']):>8} {amount(way['recovery']):>9} {amount(way['device_bytes']):>8} "
            f"{amount(way['host_bytes']):>8} {amount(way['moved']):>14}{mark}"
        )
    lines += [
        "",
        f"recovery: at most what {figures['most_lifted'] or figures['max_o']} lifted units add",
        "moved per step: from host to device in the worst case, when all lifted units change; host: anonymous memory",
    ]
    lines += [f"{way['name']}: {way['note']}" for way in figures["ways"].values() if way["note"]]
    if figures["optimizer_bytes"] is None:
        lines.append("the size of this optimizer's state is not known here and not included in the totals")
    return "\n".join(lines)


def seats_in_words(figures: dict[str, Any]) -> str:
    """maxO, and how many units can be lifted if the trigger does not keep to it."""
    free = "" if figures["most_lifted"] == figures["max_o"] else f", at most {figures['most_lifted']} lifted at a time"
    return f"maxO {figures['max_o']}{free}"


def head_in_words(figures: dict[str, Any]) -> list[str]:
    """The first lines of every plan."""
    steps = "not known (give --rows)" if figures["steps"] is None else f"{figures['steps']:,}"
    return [
        f"{figures['parameters']:,} parameters, {figures['trainable_parameters']:,} trainable",
        f"architecture: {figures['architecture']}",
        f"global batch {figures['global_batch']} on {figures['processes']} process(es); steps: {steps}",
    ]


def activations_in_words(figures: dict[str, Any]) -> str:
    """The figures as lines, in decimal MB."""

    def amount(size: int | None) -> str:
        return "not known" if size is None else f"{size / 1e6:,.2f} MB"

    lines = [
        *head_in_words(figures),
        f"{figures['units']} units ({' to '.join(dict.fromkeys(figures['unit_names']))}); {seats_in_words(figures)}",
        f"weights {amount(figures['weight_bytes'])}, gradients {amount(figures['gradient_bytes'])}, optimizer state "
        f"{amount(figures['optimizer_bytes'])}",
    ]
    if figures["saved_bytes"]:
        kept = ", ".join(f"{amount(size)} ({name})" for name, size in figures["saved_bytes"].items())
        lines.append(
            f"inputs of projections kept for the backward of a micro-batch of {figures['micro_batch_tokens']:,} tokens: "
            f"{kept}; other activations are not included"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
