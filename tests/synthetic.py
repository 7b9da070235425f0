"""Traces written by the real controller from norms of a known kind: no model, milliseconds."""

from __future__ import annotations

import json

import numpy as np

from hf_gnmr.config import GNMRConfig
from hf_gnmr.control.triggers import make_trigger
from hf_gnmr.trace.file import TraceWriter


def stationary(steps, units, seed=0, spikes=0.02):
    """Norms around a level per unit, with occasional spikes of two steps; (steps, units)."""
    generator = np.random.default_rng(seed)
    level = generator.uniform(0.1, 3.0, units)
    norms = level * generator.gamma(20.0, 1 / 20.0, (steps, units))
    where = generator.random((steps, units)) < spikes / 2
    where[1:] |= where[:-1]
    return norms * np.where(where, generator.uniform(2.0, 5.0, (steps, units)), 1.0)


def write_trace(
    path,
    norms,
    *,
    trigger="gnmr",
    options=None,
    total_steps=None,
    skipped=(),
    seen=None,
    signal=None,
    bytes_added=100,
    recoverable=None,
    missing=(),
    **settings,
):
    """A trace as a run with these norms would have written it; returns its path."""
    steps, units = norms.shape
    config = GNMRConfig(**settings)
    controller = make_trigger(
        trigger, units, config, total_steps=total_steps or steps, options=options, recoverable=recoverable
    )
    header = {
        "units": [
            {
                "index": i,
                "layer": i,
                "name": f"model.layers.{i}",
                "recoverable": bool(controller.recoverable[i]),
                "bytes_low": 50,
                "bytes_recovery": 100,
                "bytes_added": bytes_added,
            }
            for i in range(units)
        ],
        "config": config.to_dict(),
        "max_o": controller.max_o,
        "trigger": trigger,
        "backend": "int8",
        "trigger_options": controller.options_dict(),
        "census": {"recovery_bytes_bound": 1000, "resident_bytes": 0, "path": "made up"},
        "run_id": "x",
        "total_steps": total_steps or steps,
    }
    writer = TraceWriter(path, header)
    for step in range(1, steps + 1):
        row = norms[step - 1]
        observed = np.ones(units, dtype=bool) if seen is None else seen[step - 1]
        active = controller.active.copy()
        reason = "loss scaler skipped the update" if step in skipped else None
        measured = None if signal is None else signal[step - 1]
        decision = None if reason else controller.step(row, observed, measured)

        def of(values, observed=observed):
            return [v if o else None for v, o in zip(values.tolist(), observed.tolist(), strict=True)]

        record = {
            "step": step,
            "loss": 5.0 / step**0.3,
            "grad_norm": float(np.sqrt(np.square(row[observed]).sum())),
            "norms": of(row),
            "gnmr": of(decision.gnmr) if decision else None,
            "delta_gnmr": of(decision.delta_gnmr) if decision else None,
            "risk": decision.risk.tolist() if decision else None,
            "alpha": decision.alpha if decision else None,
            "beta": decision.beta if decision else None,
            "triggered": np.flatnonzero(decision.triggered).tolist() if decision else [],
            "active": np.flatnonzero(active).tolist(),  # during the step, not `decision.active`
            "micro_batches": 1,
            "skipped": reason,
            "update_withheld": False,
            "step_ms": 100.0,
            "controller_ms": 0.5,
            "recovery_bytes": bytes_added * int(active.sum()),
        }
        if measured is not None:
            record["signal"] = measured.tolist()
        if step not in missing:
            writer.write(record)
    writer.close()
    return path


def lifted_by(trigger, steps):
    """The active sets of so many steps."""
    active = []
    for _ in range(steps):
        active.append(np.flatnonzero(trigger.active).tolist())
        trigger.step(np.ones(trigger.num_units))
    return active


BREAKAGES = [
    ("line", "active", [77]),
    ("line", "active", None),
    ("header", "units", "x"),
    ("header", "config", None),
    ("header", "config", {"fidelity_warmup": "half"}),
    ("unit", "recoverable", None),
    ("file", "", "no trace\n"),
    ("file", "", ""),
]
"""Where a trace is broken, and the value that breaks it: arguments of `break_trace`."""


def break_trace(path, where, key, value):
    """Put `value` under `key` in a line, the header or a unit of a trace, or in place of the whole file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    target = {"line": lines[7], "header": lines[0], "unit": lines[0]["units"][1], "file": {}}[where]
    target[key] = value
    path.write_text(value if where == "file" else "".join(json.dumps(line) + "\n" for line in lines))
