"""The figures of a run, computed from its trace alone, and those of a single step, for a logger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..control.controller import Bools, Decision, Floats
from . import fields
from .file import Trace
from .series import Series, run_lengths, series_of


def summarise(trace: Trace | Series, last_step: int | None = None) -> dict[str, Any]:
    """The figures of a run's summary.

    Steps that the controller did not count (`skipped`) enter none of the shares; switches and dwell cover all lines, since
    the active set stays in force during a skipped step, but do not extend across missing lines.

    Args:
        trace: the trace as read.
        last_step: the step at which the run ended, so that lines missing at the end are counted; None: not known.

    Returns:
        plain JSON values, those of `fields.SCALARS` included. A share without a denominator (no recoverable unit, no step,
        maxO 0) is None.
    """
    series = series_of(trace) if isinstance(trace, Trace) else trace
    header, mask = series.header, series.recoverable
    units, max_o = header["units"], header["max_o"]
    counted = series.counted
    lifted = series.active[counted].sum(axis=0)
    by_layer: Counter[str] = Counter()
    for unit, count in zip(units, lifted.tolist(), strict=True):
        if count:
            by_layer[str(unit["layer"])] += count
    figures: dict[str, Any] = {
        "steps": len(series),
        "skipped_steps": int((~counted).sum()),
        "missing_steps": int((np.diff(series.step) - 1).sum()) + _cut_off(series, last_step),
        "non_finite_steps": int((~np.isfinite(series.norms) & series.seen).any(axis=1).sum()),
        "backend": header["backend"],
        "trigger": header["trigger"],
        "units": len(units),
        "recoverable_units": int(mask.sum()),
        "max_o": max_o,
        **decision_figures(
            series.active[counted],
            series.gnmr[counted],
            series.delta_gnmr[counted],
            series.alpha[counted],
            series.beta[counted],
            mask,
            max_o,
        ),
        "switches": int((series.active[1:] ^ series.active[:-1])[series.adjacent].sum()),
        "dwell": dwell(series.active, series.adjacent),
        "steps_on_recovery_by_layer": dict(by_layer),
        "trigger_bytes": header["census"].get("trigger_bytes", 0),
        "recovery_bytes_bound": _bound(series),
        "resident_bytes": header["census"].get("resident_bytes", 0),
        "bytes_low": sum(unit["bytes_low"] for unit in units),
        "bytes_recovery": sum(unit["bytes_recovery"] for unit in units),
        "controller_share": _share(float(np.nansum(series.controller_ms)), float(np.nansum(series.step_ms))),
        "trace_cut": series.cut,
    }
    return fields.placed(figures, _of_scalars(series))


def _of_scalars(series: Series) -> Iterator[tuple[str, Any, str | None]]:
    """Key, value and key to follow of each figure that depends on one scalar field."""
    for scalar in fields.SCALARS:
        for figure in scalar.figures:
            yield figure.key, figure.reduction(series.columns[scalar.column], series.counted), figure.after


def decision_figures(
    active: Bools, gnmr: Floats, delta_gnmr: Floats, alpha: Floats, beta: Floats, recoverable: Bools, max_o: int
) -> dict[str, float | None]:
    """Shares over the steps that count: promotion ratio, hit-maxO rate, exceedances.

    Args:
        active, gnmr, delta_gnmr: (S, U).
        alpha, beta: (S,): thresholds in force; nan where off.
        recoverable: (U,).
        max_o: seats.
    """
    steps, units = len(active), int(recoverable.sum())
    return {
        "promotion_ratio": _share(int(active.sum()), steps * units),
        "hit_max_o_rate": _share(int((active.sum(axis=1) == max_o).sum()), steps) if max_o and units else None,
        "gnmr_exceedance": exceedance(gnmr[:, recoverable], alpha),
        "delta_gnmr_exceedance": exceedance(delta_gnmr[:, recoverable], beta),
    }


def exceedance(scores: Floats, threshold: Floats) -> float | None:
    """Share of (unit, step) pairs whose score reaches the threshold in force at that step.

    Args:
        scores: (S, U); nan where a unit was not seen, which is no pair.
        threshold: (S,); nan where there is none, which is no pair.
    """
    pairs = ~np.isnan(scores) & ~np.isnan(threshold)[:, None]
    return _share(int((scores >= threshold[:, None])[pairs].sum()), int(pairs.sum()))


def dwell(active: Bools, adjacent: Bools) -> dict[str, Any]:
    """Runs of consecutive active steps of a unit: how many of each length, their mean and the longest."""
    lengths = Counter(length for _, _, length in run_lengths(active, adjacent))
    runs = sum(lengths.values())
    return {
        "runs": runs,
        "mean": _share(sum(length * count for length, count in lengths.items()), runs),
        "longest": max(lengths, default=0),
        "counts": {str(length): count for length, count in sorted(lengths.items())},
    }


def step_scalars(decision: Decision, active: Bools, recoverable: int) -> dict[str, float]:
    """One step's figures for a logger: maxima over finite scores, and the units on the recovery path.

    Args:
        decision: made at the end of the step.
        active: (U,): units on the recovery path *during* the step (`decision.active` is the set for the next one).
        recoverable: number of recoverable units.
    """
    finite = np.isfinite(decision.gnmr)  # nan for a unit that was not seen
    return {
        "gnmr/max": float(decision.gnmr[finite].max(initial=0.0)),
        "gnmr/delta_max": float(decision.delta_gnmr[finite].max(initial=0.0)),
        "gnmr/not_finite": int((~finite & decision.seen).sum()),
        "gnmr/triggered": int(decision.triggered.sum()),
        "gnmr/active": int(active.sum()),
        "gnmr/promotion": float(active.sum() / recoverable) if recoverable else 0.0,
    }


def by_unit(series: Series) -> list[dict[str, Any]]:
    """One row per unit: what triggered it and how often, and how long it was on the recovery path.

    Triggers are counted by cause: GNMR ≥ α, ΔGNMR ≥ β, both, or a norm that is not finite.
    """
    rows = series.counted
    gnmr, delta, triggered = series.gnmr[rows], series.delta_gnmr[rows], series.triggered[rows]
    norms, lifted = series.norms[rows], series.active[rows].sum(axis=0)
    with np.errstate(invalid="ignore"):
        over_alpha = gnmr >= series.alpha[rows][:, None]
        over_beta = delta >= series.beta[rows][:, None]
    broken = np.isinf(gnmr) & np.isinf(delta)
    runs: list[list[int]] = [[] for _ in series.names]
    for unit, _, length in run_lengths(series.active, series.adjacent):
        runs[unit].append(length)
    switched = (series.active[1:] ^ series.active[:-1])[series.adjacent].sum(axis=0)
    table = []
    for i, unit in enumerate(series.header["units"]):
        hit, finite = triggered[:, i], gnmr[:, i][np.isfinite(gnmr[:, i])]
        table.append(
            {
                "unit": i,
                "name": unit["name"],
                "layer": unit["layer"],
                "recoverable": bool(unit["recoverable"]),
                "triggers": int(hit.sum()),
                "by_gnmr": int((hit & over_alpha[:, i] & ~over_beta[:, i] & ~broken[:, i]).sum()),
                "by_delta_gnmr": int((hit & over_beta[:, i] & ~over_alpha[:, i]).sum()),
                "by_both": int((hit & over_alpha[:, i] & over_beta[:, i] & ~broken[:, i]).sum()),
                "not_finite": int((hit & broken[:, i]).sum()),
                "steps_on_recovery": int(lifted[i]),
                "share_on_recovery": _share(int(lifted[i]), len(norms)),
                "switches": int(switched[i]),
                "mean_dwell": _share(sum(runs[i]), len(runs[i])),
                "mean_norm": _mean(norms[:, i]),
                "max_gnmr": float(finite.max()) if len(finite) else None,
            }
        )
    return table


def switches_by_step(series: Series) -> Floats:
    """How many units changed path from each line to the next, one value per pair of consecutive steps."""
    return (series.active[1:] ^ series.active[:-1])[series.adjacent].sum(axis=1).astype(np.float64)


def share_active(series: Series) -> Floats:
    """Share of the recoverable units on the recovery path during each line's step, (S,)."""
    return series.active.sum(axis=1) / max(1, int(series.recoverable.sum()))


def exceedance_curve(series: Series, thresholds: Floats) -> dict[str, list[float | None]]:
    """Share of (recoverable unit, step) pairs that reach each of `thresholds`, for GNMR and ΔGNMR."""
    mask, rows = series.recoverable, series.counted
    return {
        name: [exceedance(scores[rows][:, mask], np.full(int(rows.sum()), t)) for t in thresholds.tolist()]
        for name, scores in (("gnmr", series.gnmr), ("delta_gnmr", series.delta_gnmr))
    }


def _bound(series: Series) -> int:
    """The most that maxO units can add, in bytes; per-token figures are multiplied by the most tokens seen."""
    census = series.header["census"]
    bound = census.get("recovery_bytes_bound", 0)
    return int(bound * (fields.peak(series.saved_tokens) or 0)) if census.get("bytes_per_token") else int(bound)


def _cut_off(series: Series, last_step: int | None) -> int:
    """How many steps the run took after the last line."""
    return 0 if last_step is None else max(0, last_step - (int(series.step[-1]) if len(series) else 0))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Floats) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None
