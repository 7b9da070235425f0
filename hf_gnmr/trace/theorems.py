"""The conditions of the paper's theorems on a trace; for `diagnose`.

* Theorem 1's controller-efficacy condition: π_b = Pr(R ≥ 1 one step later | b was selected), compared with the rate of units
  that were not selected.  Selections come in runs, so the interval over all units is a bootstrap over blocks of steps; those
  of single units are Wilson's, as if selections were independent.
* Theorem 2: the measured exceedance of GNMR and its bound.  The theorem names a constant c > 0 but not its value, so the
  largest c with which the bound holds on this trace is reported, for the mean over units and for each unit separately; κ_b
  is the ψ₁ norm of n / mean(n) − 1.
* How the history's mean settles, and whether norms drift away from it.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from ..control.controller import Bools, Floats
from .bounds import block_interval, bound_terms, largest_c, psi1, wilson
from .finding import FEW, Finding, by_thresholds
from .metrics import exceedance
from .series import Series

THRESHOLDS = (1.1, 1.25, 1.5, 2.0, 3.0)
DRIFT = 1.5
"""Factor between the norms of the first and the last tenth that counts as drift."""


def efficacy(series: Series) -> Finding:
    """Theorem 1's controller-efficacy condition: π, compared with the rate of units that were not selected."""
    mask = series.recoverable
    pairs = series.adjacent & series.counted[:-1] & series.counted[1:]
    selected = (series.triggered[:-1] & series.active[1:])[pairs][:, mask]
    after = (series.risk[1:] >= 1.0)[pairs][:, mask]
    number, others = int(selected.sum()), int((~selected).sum())
    rate = int((selected & after).sum()) / number if number else None
    elsewhere = int((~selected & after).sum()) / others if others else None
    low, high = block_interval((selected & after).sum(axis=1), selected.sum(axis=1))
    names = [name for name, able in zip(series.names, mask.tolist(), strict=True) if able]
    figures = {
        "selections": number,
        "pi": rate,
        "interval": [low, high],
        "rate_when_not_selected": elsewhere,
        "units": _efficacy_by_unit(names, selected, after),
    }
    if rate is None or number < FEW:
        return Finding(
            "controller efficacy (Theorem 1)",
            figures,
            f"{number} selections: too few for a rate",
            "Lower α, or trace more steps, before drawing conclusions.",
        )
    says = (
        f"π = {rate:.1%} (95%: {low:.1%} to {high:.1%}) of {number} selections were still above the threshold one step "
        f"later; of units that were not selected, {0.0 if elsewhere is None else elsewhere:.1%} were"
    )
    if not by_thresholds(series):
        advice = "This run did not choose by R: the rate shows how long spikes last, not how well thresholds work."
    elif elsewhere is not None and low <= elsewhere:
        advice = "A selection predicts nothing about the next step: raise α and β, or compare with the random control."
    elif rate < 0.3:
        advice = "Most spikes are over when the recovery path runs: compare with the random control before trusting it."
    else:
        advice = "The condition holds: a selected unit is likelier than others to be at risk when its recovery path runs."
    return Finding("controller efficacy (Theorem 1)", figures, says, advice)


def _efficacy_by_unit(names: list[str], selected: Bools, after: Bools) -> list[dict[str, Any]]:
    """Selections of each unit that had one, and how many of them were still above the threshold one step later.

    Args:
        names: (U,).
        selected, after: (P, U), P pairs of consecutive steps: selected after the first, above the threshold in the second.
    """
    selections, still_above = selected.sum(axis=0).tolist(), (selected & after).sum(axis=0).tolist()
    return [
        {"name": name, "selections": number, "still_above": above, "interval": wilson(above, number)}
        for name, number, above in zip(names, selections, still_above, strict=True)
        if number
    ]


def concentration_bound(series: Series) -> Finding:
    """Theorem 2's bound on the exceedance of GNMR."""
    mask, rows = series.recoverable, series.counted
    norms, gnmr = series.norms[rows][:, mask], series.gnmr[rows][:, mask]
    finite = np.isfinite(norms)
    counts = finite.sum(axis=0).astype(np.float64)
    with np.errstate(invalid="ignore"):
        enough = (counts > 1) & (np.where(finite, norms, 0.0).sum(axis=0) > 0)
    if not enough.any():
        return Finding("exceedance bound (Theorem 2)", {}, "no unit has two finite norms above 0", "Trace more steps.")
    norms, gnmr, finite, counts = norms[:, enough], gnmr[:, enough], finite[:, enough], counts[enough]
    kappas = np.array([psi1(column[usable]) for column, usable in zip(norms.T, finite.T, strict=True)])
    late = np.cumsum(finite, axis=0) > 1  # an observation with a history
    table, largest, of_each = [], math.inf, math.inf
    for threshold in THRESHOLDS:
        scores, limit = np.where(late, gnmr, np.nan), np.full(len(gnmr), threshold)
        measured = exceedance(scores, limit) or 0.0
        largest = min(largest, largest_c(measured, threshold, kappas, counts))
        for unit in range(len(kappas)):
            share = exceedance(scores[:, unit : unit + 1], limit) or 0.0
            if of_each > 0 and share > sum(bound_terms(min(of_each, 1e6), threshold, kappas[[unit]], counts[[unit]])):
                of_each = largest_c(share, threshold, kappas[[unit]], counts[[unit]])
        table.append({"alpha": threshold, "measured": measured})
    for row in table:
        first, second = bound_terms(largest, row["alpha"], kappas, counts) if math.isfinite(largest) else (0.0, 0.0)
        row |= {"bound": min(1.0, first + second), "first_term": first, "second_term": second}
    figures = {
        "kappa_median": _median(kappas),
        "kappa_max": float(np.nanmax(kappas)),
        "largest_c": largest,
        "largest_c_of_each_unit": of_each,
        "table": table,
    }
    comparison = ", ".join(f"α {r['alpha']:g}: {r['measured']:.2%} measured, bound {r['bound']:.2%}" for r in table)
    middle, worst = _median(kappas), float(np.nanmax(kappas))
    says = (
        f"κ is {middle:.2f} (median) to {worst:.2f}; the bound holds up to c = {largest:.2g} for the mean over units, up to "
        f"{of_each:.2g} for each unit separately; mean over units: {comparison}"
    )
    if worst > 1:
        advice = (
            "The norms of at least one unit are heavy-tailed or drift (κ above 1): calibrate on a trace, not by a formula."
        )
    elif largest < 0.05:
        advice = "The tail is heavier than the bound's shape: derive thresholds from the measured exceedance."
    else:
        advice = (
            "Norms concentrate as the theorem requires: with a long history a fixed α is conservative, so set α_init > α."
        )
    return Finding("exceedance bound (Theorem 2)", figures, says, advice)


def history_mean(series: Series) -> Finding:
    """How the history's running mean settles, and whether norms drift away from it."""
    steps = series.step[series.counted]
    norms = series.norms[series.counted][:, series.recoverable]
    finite = np.where(np.isfinite(norms), norms, np.nan)
    finite = finite[:, np.nansum(finite, axis=0) > 0]
    if finite.shape[1] == 0:
        return Finding("history mean", {}, "no finite norm above 0", "Fix the cause of these gradients first.")
    with np.errstate(invalid="ignore", divide="ignore"):
        running = np.nancumsum(finite, axis=0) / np.maximum(np.cumsum(np.isfinite(finite), axis=0), 1)
        off = np.abs(running / running[-1] - 1)
    outside = [np.flatnonzero(~(column <= 0.1)) for column in off.T]
    within = [int(steps[min(len(steps) - 1, last[-1] + 1 if len(last) else 0)]) for last in outside]
    tenth = max(1, len(finite) // 10)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore")  # a unit without a finite norm in a tenth has no drift
        drift = np.nanmean(finite[-tenth:], axis=0) / np.nanmean(finite[:tenth], axis=0)
    drift = drift[np.isfinite(drift) & (drift > 0)]
    if len(drift) == 0:
        return Finding("history mean", {}, "no unit has finite norms at both ends of the run", "Trace more steps.")
    moved = float(np.mean((drift < 1 / DRIFT) | (drift > DRIFT)))
    settled, middle = _median(np.array(within, dtype=float)), _median(drift)
    least, most = float(np.nanmin(drift)), float(np.nanmax(drift))
    figures = {
        "steps_until_within_10_percent": {"median": settled, "worst": max(within)},
        "drift": {"median": middle, "least": least, "most": most, "share_of_units": moved},
    }
    says = (
        f"the history's mean stays within 10% of its last value from step {settled:.0f} on (worst unit: {max(within)} of "
        f"{steps[-1]}); norms of the last tenth are {middle:.2f} × those of the first (from {least:.2f} to {most:.2f}; "
        f"{moved:.0%} of the units beyond a factor of {DRIFT:g})"
    )
    fell, rose = float(np.mean(drift < 1 / DRIFT)), float(np.mean(drift > DRIFT))
    if moved < 0.1:
        advice = "Little drift: one α serves the whole run."
    elif min(fell, rose) >= 0.1:
        advice = "Units drift apart, and one α is strict for some and lax for others: rely on β, which looks δ steps back."
    elif fell > rose:
        advice = "Norms fall: late GNMR is relative to a mean that is too high and rarely triggers; lower α, or rely on β."
    else:
        advice = "Norms grow: late GNMR stays above 1 and triggers without a spike; raise α, or rely on β."
    return Finding("history mean", figures, says, advice)


def _median(values: Floats) -> float:
    return float(np.nanmedian(values))
