"""What the paper's theory asks of a trace, and what to do about the answer: ``hf-gnmr diagnose TRACE``.

* Theorem 1's controller-efficacy condition: π_b = Pr(R ≥ 1 one step later | b was selected), set against the rate of units
  that were not selected.  Selections come in runs, so the interval of all units together is a bootstrap over blocks of
  steps; those of single units are Wilson's, as if selections were independent.
* Theorem 2: the measured exceedance of GNMR against its bound.  The theorem names a constant c > 0 and not its value, so the
  largest c with which the bound holds on this trace is given, for the mean over units and for each unit by itself; κ_b is
  the ψ₁ norm of n / mean(n) − 1.
* How the history's mean settles, and whether norms drift away from it.
* Overlap of GNMR's and ΔGNMR's triggers; units that are always or never chosen; oscillation.

All of it is from the recorded norms and choices: a selected unit ran its recovery path in the next step.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import ConfigError
from ..control.controller import Floats
from ..files import plain
from .bounds import block_interval, bound_terms, largest_c, psi1, wilson
from .file import TraceError
from .metrics import by_unit, exceedance
from .replay import recorded_config, replay
from .series import Series, read_series, run_lengths

THRESHOLDS = (1.1, 1.25, 1.5, 2.0, 3.0)
DRIFT = 1.5
"""Factor between the first and the last tenth's norms that counts as drift."""
FEW = 30
"""Selections below which no rate is told."""


@dataclass
class Finding:
    """One question, its answer in numbers, and what to do."""

    name: str
    figures: dict[str, Any]
    says: str
    advice: str


def diagnose(series: Series) -> list[Finding]:
    """All findings of a trace.

    Raises:
        ConfigError: a trace with no step that counts, or no recoverable unit.
    """
    if not series.counted.any() or not series.recoverable.any():
        raise ConfigError(f"{series.path}: no step that counts or no recoverable unit: there is nothing to diagnose")
    units = by_unit(series)
    return [
        efficacy(series),
        concentration_bound(series),
        history_mean(series),
        overlap(series, units),
        chosen(series, units),
        oscillation(series),
    ]


def by_thresholds(series: Series) -> bool:
    """Whether the run chose by R and locks, so that these are what to turn."""
    return bool(series.header["trigger"] == "gnmr")


def efficacy(series: Series) -> Finding:
    """Theorem 1's condition."""
    mask = series.recoverable
    pairs = series.adjacent & series.counted[:-1] & series.counted[1:]
    selected = (series.triggered[:-1] & series.active[1:])[pairs][:, mask]
    after = (series.risk[1:] >= 1.0)[pairs][:, mask]
    hits, number = int((selected & after).sum()), int(selected.sum())
    others, base = int((~selected).sum()), int((~selected & after).sum())
    low, high = block_interval((selected & after).sum(axis=1), selected.sum(axis=1))
    names = [n for n, there in zip(series.names, mask.tolist(), strict=True) if there]
    units = [
        {
            "name": name,
            "selections": int(s.sum()),
            "still_above": (above := int((s & a).sum())),
            "interval": wilson(above, int(s.sum())),
        }
        for name, s, a in zip(names, selected.T, after.T, strict=True)
        if s.any()
    ]
    rate = hits / number if number else None
    elsewhere = base / others if others else None
    figures = {
        "selections": number,
        "pi": rate,
        "interval": [low, high],
        "rate_when_not_selected": elsewhere,
        "units": units,
    }
    if rate is None or number < FEW:
        return Finding(
            "controller efficacy (Theorem 1)",
            figures,
            f"{number} selections: too few to tell",
            "Lower α, or trace more steps, before anything is concluded.",
        )
    says = (
        f"π = {rate:.1%} (95%: {low:.1%} to {high:.1%}) of {number} selections were still above the threshold one step "
        f"later; of units that were not selected {0.0 if elsewhere is None else elsewhere:.1%} were above it"
    )
    if not by_thresholds(series):
        advice = "This run did not choose by R: it says how long spikes last, not how well thresholds work."
    elif elsewhere is not None and low <= elsewhere:
        advice = "A selection predicts nothing about the next step: raise α and β, or hold the random control against it."
    elif rate < 0.3:
        advice = "Most spikes are over when the recovery path runs; hold the random control against this before trusting it."
    else:
        advice = "The condition holds: a selected unit is likelier than others to be at risk when its recovery path runs."
    return Finding("controller efficacy (Theorem 1)", figures, says, advice)


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
    kappas = np.array([psi1(column[there]) for column, there in zip(norms.T, finite.T, strict=True)])
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
    told = ", ".join(f"α {r['alpha']:g}: {r['measured']:.2%} measured, bound {r['bound']:.2%}" for r in table)
    middle, worst = _median(kappas), float(np.nanmax(kappas))
    says = (
        f"κ is {middle:.2f} (median) to {worst:.2f}; the bound holds up to c = {largest:.2g} for the mean over units, up to "
        f"{of_each:.2g} for each by itself; mean over units: {told}"
    )
    if worst > 1:
        advice = "Norms of some unit are heavy-tailed or drift (κ above 1): calibrate on a trace, and trust no formula."
    elif largest < 0.05:
        advice = "The tail is heavier than the bound's shape: take thresholds from the measured exceedance."
    else:
        advice = "Norms concentrate as the theorem asks: with a long history a fixed α is conservative, so let α_init > α."
    return Finding("exceedance bound (Theorem 2)", figures, says, advice)


def history_mean(series: Series) -> Finding:
    """How the running mean settles, and drift."""
    steps = series.step[series.counted]
    norms = series.norms[series.counted][:, series.recoverable]
    finite = np.where(np.isfinite(norms), norms, np.nan)
    finite = finite[:, np.nansum(finite, axis=0) > 0]
    if finite.shape[1] == 0:
        return Finding("history mean", {}, "no finite norm above 0", "Mend what makes the gradients so first.")
    with np.errstate(invalid="ignore", divide="ignore"):
        running = np.nancumsum(finite, axis=0) / np.maximum(np.cumsum(np.isfinite(finite), axis=0), 1)
        off = np.abs(running / running[-1] - 1)
    wrong = [np.flatnonzero(~(column <= 0.1)) for column in off.T]
    within = [int(steps[min(len(steps) - 1, last[-1] + 1 if len(last) else 0)]) for last in wrong]
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
        advice = "Units drift apart, and one α is strict for some and lax for others: lean on β, which looks δ steps back."
    elif fell > rose:
        advice = "Norms fall: late GNMR is set against a mean that is too high and rarely triggers; lower α, or lean on β."
    else:
        advice = "Norms grow: late GNMR stays above 1 and triggers for no cause of its own; raise α, or lean on β."
    return Finding("history mean", figures, says, advice)


def overlap(series: Series, units: list[dict[str, Any]]) -> Finding:
    """Which of the two scores triggers."""
    kinds = ("by_gnmr", "by_delta_gnmr", "by_both", "not_finite")
    only_gnmr, only_delta, both, broken = (sum(u[kind] for u in units) for kind in kinds)
    total = sum(u["triggers"] for u in units)
    figures = {"triggers": total, "by_gnmr": only_gnmr, "by_delta_gnmr": only_delta, "by_both": both, "not_finite": broken}
    says = f"{total} triggers: {only_gnmr} by GNMR alone, {only_delta} by ΔGNMR alone, {both} by both, {broken} not finite"
    if not by_thresholds(series):
        advice = f"This run chose by {series.header['trigger']}: thresholds took no part."
    elif total < FEW:
        advice = "Too few to tell the two apart."
    elif np.isnan(series.beta[series.counted]).all():
        advice = "Δ-GNMR is off: sudden jumps of a unit whose norm is low on the whole go unseen."
    elif only_delta < 0.02 * total:
        advice = "ΔGNMR adds next to nothing: lower β, or switch it off."
    elif only_gnmr < 0.02 * total:
        advice = "GNMR adds next to nothing: lower α, or let ΔGNMR work alone with a high α."
    else:
        advice = "Each sees what the other does not: keep both."
    return Finding("overlap of the triggers", figures, says, advice)


def chosen(series: Series, units: list[dict[str, Any]]) -> Finding:
    """Units that are always, or never, on the recovery path."""
    units = [u for u in units if u["recoverable"] and u["share_on_recovery"] is not None]
    always = [u["name"] for u in units if u["share_on_recovery"] > 0.9]
    never = [u["name"] for u in units if u["steps_on_recovery"] == 0]
    taken = sorted((u["steps_on_recovery"] for u in units), reverse=True)
    top = sum(taken[: max(1, len(taken) // 10)]) / sum(taken) if sum(taken) else None
    figures = {"always": always, "never": never, "share_of_the_busiest_tenth": top}
    says = f"{len(always)} of {len(units)} units nearly always on the recovery path, {len(never)} never"
    says += "" if top is None else f"; the busiest tenth of them has {top:.0%} of all lifted steps"
    if not by_thresholds(series) and top is not None:
        advice = f"This run chose by {series.header['trigger']}: that is where its lifts went."
    elif top is None:
        advice = "Nothing was lifted: lower α, or this run has no need of it."
    elif always:
        advice = f"Lift {', '.join(always[:3])} for good (they take seats from the others), or raise α."
    elif top > 0.5 and len(units) >= 20:
        advice = "The same few units are lifted: hold the trigger static against this one."
    else:
        advice = "The seats go round."
    return Finding("units always or never chosen", figures, says, advice)


def oscillation(series: Series) -> Finding:
    """Units that leave and come back."""
    lengths, gaps = [], []
    last: dict[int, int] = {}
    for unit, first, length in run_lengths(series.active, series.adjacent):
        lengths.append(length)
        if unit in last:
            gaps.append(first - last[unit])
        last[unit] = first + length
    once = sum(n == 1 for n in lengths)
    back = sum(g <= 2 for g in gaps)
    figures = {"runs": len(lengths), "of_one_step": once, "back_within_two_steps": back}
    says = (
        f"{len(lengths)} runs on the recovery path: {once} of a single step, {back} begin within two steps of the unit's "
        "last one"
    )
    if len(lengths) < FEW:
        advice = "Too few to tell."
    elif not by_thresholds(series):
        advice = f"This run chose by {series.header['trigger']}: locks took no part."
    elif back > 0.3 * len(lengths):
        advice = _longer_locks(series, figures)
    elif once > 0.9 * len(lengths):
        advice = "Nearly every choice lasts a single step: is T_lock 0? A spike that is over within a step may need none."
    else:
        advice = "No flicker to speak of."
    return Finding("oscillation", figures, says, advice)


def _longer_locks(series: Series, figures: dict[str, Any]) -> str:
    """What replays with longer locks would switch, against the recorded T_lock; adds it to `figures`."""
    now = recorded_config(series).t_lock
    figures["switches_per_lifted_step"] = {}
    for t_lock in (now, now + 1, now + 2):
        found = replay(series, {"t_lock": t_lock})
        lifted = int(found.active.sum())
        switches = found.figures(series)["switches"]
        figures["switches_per_lifted_step"][str(t_lock)] = switches / lifted if lifted else None
    rates = figures["switches_per_lifted_step"]
    first, last = rates[str(now)], rates[str(now + 2)]
    told = ", ".join(f"T_lock {t}: {rate:.2f}" for t, rate in rates.items() if rate is not None)
    if first and last is not None and last < 0.8 * first:
        return f"Choices flicker; a longer T_lock would calm them (replayed switches per lifted step, {told})."
    return f"Choices flicker, and a longer T_lock would hardly calm them (replayed switches per lifted step, {told})."


def _median(values: Floats) -> float:
    return float(np.nanmedian(values))


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (2: something to mend)."""
    parser = argparse.ArgumentParser(prog="hf-gnmr diagnose", description="What the theory asks of a trace.")
    parser.add_argument("trace", help="trace.jsonl, or the folder of a run")
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    options = parser.parse_args(argv)
    try:
        series = read_series(options.trace, strict=False)
        findings = diagnose(series)
    except (ConfigError, TraceError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    series.warn()
    if options.json:
        print(json.dumps(plain([vars(f) for f in findings]), indent=2))
    else:
        for f in findings:
            print(f"{f.name}\n  {f.says}\n  -> {f.advice}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
