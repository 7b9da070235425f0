"""The figures of a run, from its trace and nothing else; and those of a single step, for a logger."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np

from .controller import Bools, Decision
from .trace import Trace


def summarise(trace: Trace, last_step: int | None = None) -> dict[str, Any]:
    """The figures that a run reports.

    Steps that were no step for the controller (`skipped`) enter none of the shares; switches and dwell run over all
    lines, since the active set stays in force during a skipped step, and stop where lines are missing.

    Args:
        trace: the trace as read.
        last_step: the step at which the run ended, so that lines missing at the end are counted; None: not known.

    Returns:
        plain JSON values. A share without a denominator (no recoverable unit, no step, maxO 0) is None.
    """
    header, lines = trace.header, trace.steps
    recoverable = [unit["index"] for unit in header["units"] if unit["recoverable"]]
    counted = [line for line in lines if line["skipped"] is None]
    active_units = sum(len(line["active"]) for line in counted)
    pairs = len(counted) * len(recoverable)
    max_o = header["max_o"]
    step_ms = sum(line["step_ms"] for line in lines)
    controller_ms = sum(line["controller_ms"] for line in lines)
    lifted = Counter(unit for line in counted for unit in line["active"])
    return {
        "steps": len(lines),
        "skipped_steps": len(lines) - len(counted),
        "missing_steps": sum(b["step"] - a["step"] - 1 for a, b in itertools.pairwise(lines)) + _cut_off(lines, last_step),
        "non_finite_steps": sum(
            any(n is not None and not math.isfinite(float(n)) for n in line["norms"]) for line in lines
        ),
        "withheld_updates": sum(bool(line.get("update_withheld")) for line in lines),
        "backend": header["backend"],
        "trigger": header["trigger"],
        "units": len(header["units"]),
        "recoverable_units": len(recoverable),
        "max_o": max_o,
        "promotion_ratio": _share(active_units, pairs),
        "hit_max_o_rate": (
            _share(sum(len(line["active"]) == max_o for line in counted), len(counted)) if max_o and recoverable else None
        ),
        "gnmr_exceedance": _exceedance(counted, recoverable, "gnmr", "alpha"),
        "delta_gnmr_exceedance": _exceedance(counted, recoverable, "delta_gnmr", "beta"),
        "switches": sum(
            len(set(a["active"]) ^ set(b["active"]))
            for a, b in itertools.pairwise(lines)
            if b["step"] == a["step"] + 1
        ),
        "dwell": _dwell(lines, len(header["units"])),
        "steps_on_recovery_by_layer": {
            str(header["units"][unit]["layer"]): count for unit, count in sorted(lifted.items())
        },
        "peak_saved_bytes": max((line["saved_bytes"] for line in lines if "saved_bytes" in line), default=None),
        "trigger_bytes": header["census"].get("trigger_bytes", 0),
        "gss_max": max(global_spike_scores(trace), default=None),
        "peak_recovery_bytes": max((line["recovery_bytes"] for line in lines), default=0),
        "recovery_bytes_bound": _bound(header, lines),
        "resident_bytes": header["census"].get("resident_bytes", 0),
        "bytes_low": sum(unit["bytes_low"] for unit in header["units"]),
        "bytes_recovery": sum(unit["bytes_recovery"] for unit in header["units"]),
        "step_ms": _share(step_ms, len(lines)),
        "controller_ms": _share(controller_ms, len(lines)),
        "controller_share": _share(controller_ms, step_ms),
        "first_loss": lines[0]["loss"] if lines else None,
        "last_loss": lines[-1]["loss"] if lines else None,
        "trace_cut": trace.cut,
    }


def step_scalars(decision: Decision, active: Bools, recoverable: int) -> dict[str, float]:
    """One step's figures for a logger: maxima over finite scores, and the units on the recovery path during the step."""
    finite = np.isfinite(decision.gnmr)  # of a unit that was not seen: nan
    return {
        "gnmr/max": float(decision.gnmr[finite].max(initial=0.0)),
        "gnmr/delta_max": float(decision.delta_gnmr[finite].max(initial=0.0)),
        "gnmr/not_finite": int((~finite & decision.seen).sum()),
        "gnmr/triggered": int(decision.triggered.sum()),
        "gnmr/active": int(active.sum()),
        "gnmr/promotion": float(active.sum() / recoverable) if recoverable else 0.0,
    }


def global_spike_scores(trace: Trace) -> list[float]:
    """GSS of each step: the total gradient norm over its mean over the whole run (Huang et al., arXiv 2501.06842).

    A diagnostic of a finished run and no trigger: it looks ahead, and says nothing of single units. Steps whose norm is
    not finite are left out.
    """
    norms = [float(line["grad_norm"]) for line in trace.steps if line["skipped"] is None]
    finite = [n for n in norms if math.isfinite(n)]
    mean = sum(finite) / len(finite) if finite else 0.0
    return [n / mean for n in finite] if mean else []


def _bound(header: dict[str, Any], lines: list[dict[str, Any]]) -> int:
    """The most that maxO units can add, in bytes; what is counted per token times the most tokens seen."""
    bound = header["census"].get("recovery_bytes_bound", 0)
    if header["census"].get("bytes_per_token"):
        bound *= max((line.get("saved_tokens", 0) for line in lines), default=0)
    return int(bound)


def _cut_off(lines: list[dict[str, Any]], last_step: int | None) -> int:
    """How many steps the run did after the last line."""
    return 0 if last_step is None else max(0, last_step - (lines[-1]["step"] if lines else 0))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _exceedance(lines: list[dict[str, Any]], units: list[int], score: str, threshold: str) -> float | None:
    """Share of (recoverable unit, step) pairs whose score reaches the threshold in force at that step."""
    scores = [
        (line[score][unit], line[threshold]) for line in lines if line[threshold] is not None for unit in units
    ]
    seen = [(float(value), limit) for value, limit in scores if value is not None]
    return _share(sum(value >= limit for value, limit in seen), len(seen))


def _dwell(lines: list[dict[str, Any]], units: int) -> dict[str, Any]:
    """Lengths of the runs of consecutive active steps of a unit: how many of each length, mean and longest."""
    lengths: Counter[int] = Counter()
    running = [0] * units
    last = None
    for line in [*lines, {"active": [], "step": None}]:
        active = set(line["active"])
        gap = last is not None and line["step"] != last + 1
        last = line["step"]
        for unit in range(units):
            if gap and running[unit]:
                lengths[running[unit]] += 1
                running[unit] = 0
            if unit in active:
                running[unit] += 1
            elif running[unit]:
                lengths[running[unit]] += 1
                running[unit] = 0
    runs = sum(lengths.values())
    return {
        "runs": runs,
        "mean": _share(sum(length * count for length, count in lengths.items()), runs),
        "longest": max(lengths, default=0),
        "counts": {str(length): count for length, count in sorted(lengths.items())},
    }
