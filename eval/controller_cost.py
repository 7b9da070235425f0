"""What one decision costs, by the number of units, on one core.

    OMP_NUM_THREADS=1 python eval/controller_cost.py

Norms are drawn log-normally with a spike now and then, so that triggers, locks and the cap are all at work.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from hf_gnmr import Controller, GNMRConfig


def milliseconds(units: int, steps: int) -> list[float]:
    """Time of each of `steps` decisions over `units` units, after a warm-up."""
    controller = Controller(units, GNMRConfig(max_o=0.25, alpha_init_fraction=0))
    generator = np.random.default_rng(0)
    times = []
    for step in range(steps + 10):
        norms = generator.lognormal(0.0, 0.3, units)
        norms[generator.random(units) < 0.01] *= 10
        start = time.perf_counter()
        controller.step(norms)
        if step >= 10:
            times.append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    print("| units | median ms | quartiles | µs a unit |\n|---|---|---|---|")
    for units in (10, 100, 1_000, 10_000, 100_000):
        times = milliseconds(units, options.steps)
        low, median, high = statistics.quantiles(times, n=4)
        print(f"| {units:,} | {median:.3f} | {low:.3f} to {high:.3f} | {1e3 * median / units:.3f} |")


if __name__ == "__main__":
    main()
