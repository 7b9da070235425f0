"""What the page of a long run costs: time to read, replay and draw, its size, and how soon a browser shows it.

    python eval/report_cost.py [--steps 100000] [--units 40]

The trace is made by the controller from norms with spikes. A browser is tried where `chromium` or `google-chrome` is found.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hf_gnmr.config import GNMRConfig
from hf_gnmr.control.gnmr import Controller
from hf_gnmr.trace.calibrate import calibrate
from hf_gnmr.trace.diagnose import diagnose
from hf_gnmr.trace.file import TraceWriter
from hf_gnmr.trace.replay import differences, replay
from hf_gnmr.trace.report import page
from hf_gnmr.trace.series import read_series


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--units", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        write(trace, options.steps, options.units)
        print(f"{options.steps:,} steps of {options.units} units, {trace.stat().st_size / 1e6:,.0f} MB of trace\n")
        series = timed("read", lambda: read_series(trace))
        timed("replay, same thresholds' scores", lambda: replay(series, {"alpha": 1.3}))
        timed("replay, another δ", lambda: replay(series, {"delta": 8}))
        timed("replay of the record, compared", lambda: differences(series))
        timed("diagnose", lambda: diagnose(series))
        timed("calibrate an exceedance", lambda: calibrate(series, "exceedance", 0.01))
        text = timed("page", lambda: page([series], ["a long run"]))
        print(f"\npage: {len(text.encode()) / 1e6:.2f} MB")
        file = Path(folder) / "report.html"
        file.write_text(text, encoding="utf-8")
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            print("no browser here: the time to open was not measured")
            return
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            f"--user-data-dir={folder}/profile",
            "--window-size=1100,3000",
            f"--screenshot={folder}/shot.png",
            file.as_uri(),
        ]
        timed("browser: start, open, draw, quit", lambda: subprocess.run(command, capture_output=True, check=True))


def write(path: Path, steps: int, units: int) -> None:
    """A trace as a run leaves it."""
    generator = np.random.default_rng(0)
    config = GNMRConfig(alpha=1.5, alpha_init_fraction=0.0, max_o=0.25)
    controller = Controller(units, config, total_steps=steps)
    rows = [
        {
            "index": i,
            "layer": i,
            "name": f"model.layers.{i}",
            "recoverable": True,
            "bytes_low": 1,
            "bytes_recovery": 2,
            "bytes_added": 2,
        }
        for i in range(units)
    ]
    writer = TraceWriter(
        path,
        {
            "units": rows,
            "config": config.to_dict(),
            "max_o": controller.max_o,
            "trigger": "gnmr",
            "trigger_options": {},
            "backend": "int8",
            "census": {"path": "made up"},
            "run_id": "x",
            "total_steps": steps,
        },
    )
    for step in range(1, steps + 1):
        norms = generator.gamma(20.0, 1 / 20.0, units) * np.where(generator.random(units) < 0.01, 3.0, 1.0)
        active = controller.active
        decision = controller.step(norms)
        writer.write(
            {
                "step": step,
                "loss": 5.0 * step**-0.1,
                "grad_norm": float(np.linalg.norm(norms)),
                "norms": norms.tolist(),
                "gnmr": decision.gnmr.tolist(),
                "delta_gnmr": decision.delta_gnmr.tolist(),
                "risk": decision.risk.tolist(),
                "alpha": decision.alpha,
                "beta": decision.beta,
                "triggered": np.flatnonzero(decision.triggered).tolist(),
                "active": np.flatnonzero(active).tolist(),
                "micro_batches": 1,
                "skipped": None,
                "update_withheld": False,
                "step_ms": 100.0,
                "controller_ms": 0.1,
                "recovery_bytes": 2 * int(active.sum()),
            }
        )
    writer.close()


def timed(name: str, work: Callable[[], Any]) -> Any:
    """The result; the time is printed."""
    start = time.perf_counter()
    result = work()
    print(f"{name}: {time.perf_counter() - start:.2f} s", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
