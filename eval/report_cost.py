"""What the page of a long run costs: time to read, replay and draw it, its size, and how soon a browser shows it.

    python eval/report_cost.py [--steps 100000] [--units 40]

The controller makes the trace from norms with spikes. Opening the page is timed where `chromium` or `google-chrome` is
installed.
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
from typing import Any, TypeVar

import numpy as np
from results import add_save_option, command_line, save_result

from hf_gnmr.config import GNMRConfig
from hf_gnmr.control.gnmr import Controller
from hf_gnmr.trace.calibrate import calibrate
from hf_gnmr.trace.diagnose import diagnose
from hf_gnmr.trace.file import TraceWriter
from hf_gnmr.trace.replay import differences, replay
from hf_gnmr.trace.report import page
from hf_gnmr.trace.series import read_series

SEED = 0
Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--units", type=int, default=40)
    add_save_option(parser)
    options = parser.parse_args()
    payload = measure(options.steps, options.units)
    print(table(payload))
    if options.save:
        save_result(options.save, bench="report_cost", command=command_line(), seed=SEED, payload=payload)


def measure(steps: int, units: int) -> dict[str, Any]:
    """Seconds of each piece of work, and the sizes of trace and page in bytes; progress goes to stderr."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Result]) -> Result:
        start = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - start
        print(f"{name}: {seconds[name]:.2f} s", file=sys.stderr, flush=True)
        return result

    with tempfile.TemporaryDirectory() as folder:
        trace, file = Path(folder) / "trace.jsonl", Path(folder) / "report.html"
        write_trace(trace, steps, units)
        series = timed("read", lambda: read_series(trace))
        timed("replay, same thresholds' scores", lambda: replay(series, {"alpha": 1.3}))
        timed("replay, another δ", lambda: replay(series, {"delta": 8}))
        timed("replay of the record, compared", lambda: differences(series))
        timed("diagnose", lambda: diagnose(series))
        timed("calibrate an exceedance", lambda: calibrate(series, "exceedance", 0.01))
        text = timed("page", lambda: page([series], ["a long run"]))
        file.write_text(text, encoding="utf-8")
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is not None:
            command = browser_command(browser, Path(folder), file)
            timed("browser: start, open, draw, quit", lambda: subprocess.run(command, capture_output=True, check=True))
        return {
            "steps": steps,
            "units": units,
            "trace_bytes": trace.stat().st_size,
            "page_bytes": len(text.encode()),
            "seconds": seconds,
            "browser": browser is not None,
        }


def browser_command(browser: str, folder: Path, page_file: Path) -> list[str]:
    """Open a page, draw it and quit."""
    return [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={folder}/profile",
        "--window-size=1100,3000",
        f"--screenshot={folder}/shot.png",
        page_file.as_uri(),
    ]


def table(payload: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        f"{payload['steps']:,} steps of {payload['units']} units: {payload['trace_bytes'] / 1e6:,.0f} MB of trace, "
        f"a page of {payload['page_bytes'] / 1e6:.2f} MB.",
        "",
        "| work | seconds |",
        "|---|---|",
        *(f"| {name} | {seconds:.2f} |" for name, seconds in payload["seconds"].items()),
    ]
    if not payload["browser"]:
        lines += ["", "No browser was found: the time to open the page was not measured."]
    return "\n".join(lines)


def write_trace(path: Path, steps: int, units: int) -> None:
    """A trace as a run leaves it."""
    generator = np.random.default_rng(SEED)
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
            "census": {"path": "synthetic"},
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


if __name__ == "__main__":
    main()
