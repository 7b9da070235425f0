"""What one decision costs, by the number of units, on one core.

    OMP_NUM_THREADS=1 python eval/controller_cost.py

Norms are drawn log-normally with occasional spikes, so that triggers, locks and the cap all take part.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from results import add_save_option, command_line, save_result

from hf_gnmr import Controller, GNMRConfig

UNITS = (10, 100, 1_000, 10_000, 100_000)
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    add_save_option(parser)
    options = parser.parse_args()
    payload = measure(options.steps)
    print(table(payload))
    if options.save:
        save_result(options.save, bench="controller_cost", command=command_line(), seed=SEED, payload=payload)


def measure(steps: int) -> dict[str, Any]:
    """Quartiles of a decision's time in milliseconds, by the number of units."""
    rows = []
    for units in UNITS:
        low, median, high = statistics.quantiles(milliseconds(units, steps), n=4)
        rows.append({"units": units, "low": low, "median": median, "high": high})
    return {"steps": steps, "milliseconds": rows}


def milliseconds(units: int, steps: int) -> list[float]:
    """Time of each of `steps` decisions over `units` units, after a warm-up of ten."""
    controller = Controller(units, GNMRConfig(max_o=0.25, alpha_init_fraction=0))
    generator = np.random.default_rng(SEED)
    times = []
    for step in range(steps + 10):
        norms = generator.lognormal(0.0, 0.3, units)
        norms[generator.random(units) < 0.01] *= 10
        start = time.perf_counter()
        controller.step(norms)
        if step >= 10:
            times.append(1e3 * (time.perf_counter() - start))
    return times


def table(payload: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = ["| units | median ms | quartiles | µs a unit |", "|---|---|---|---|"]
    for row in payload["milliseconds"]:
        units, median = row["units"], row["median"]
        lines.append(f"| {units:,} | {median:.3f} | {row['low']:.3f} to {row['high']:.3f} | {1e3 * median / units:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
