"""How a run chose its units: overlap of the scores' triggers, units always or never chosen, oscillation; for `diagnose`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .finding import FEW, Finding, by_thresholds
from .replay import recorded_config, replay
from .series import Series, run_lengths


def overlap(series: Series, units: list[dict[str, Any]]) -> Finding:
    """Which of the two scores triggers."""
    kinds = ("by_gnmr", "by_delta_gnmr", "by_both", "not_finite")
    only_gnmr, only_delta, both, broken = (sum(u[kind] for u in units) for kind in kinds)
    total = sum(u["triggers"] for u in units)
    figures = {"triggers": total, "by_gnmr": only_gnmr, "by_delta_gnmr": only_delta, "by_both": both, "not_finite": broken}
    says = f"{total} triggers: {only_gnmr} by GNMR alone, {only_delta} by ΔGNMR alone, {both} by both, {broken} not finite"
    if not by_thresholds(series):
        advice = f"This run chose by {series.header['trigger']}: thresholds played no part."
    elif total < FEW:
        advice = "Too few to compare the two."
    elif np.isnan(series.beta[series.counted]).all():
        advice = "Δ-GNMR is off: sudden jumps of a unit whose norm is low overall go unnoticed."
    elif only_delta < 0.02 * total:
        advice = "ΔGNMR adds next to nothing: lower β, or switch it off."
    elif only_gnmr < 0.02 * total:
        advice = "GNMR adds next to nothing: lower α, or let ΔGNMR work alone with a high α."
    else:
        advice = "Each catches what the other misses: keep both."
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
    says += "" if top is None else f"; the busiest tenth of them accounts for {top:.0%} of all lifted steps"
    if not by_thresholds(series) and top is not None:
        advice = f"This run chose by {series.header['trigger']}: its lifts follow from that."
    elif top is None:
        advice = "Nothing was lifted: lower α, or this run does not need recovery."
    elif always:
        advice = f"Lift {', '.join(always[:3])} permanently (they take seats from the others), or raise α."
    elif top > 0.5 and len(units) >= 20:
        advice = "The same few units are lifted: compare with the trigger static."
    else:
        advice = "The seats rotate among the units."
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
        f"{len(lengths)} runs on the recovery path: {once} of a single step, {back} within two steps of the unit's "
        "previous one"
    )
    if len(lengths) < FEW:
        advice = "Too few to conclude anything."
    elif not by_thresholds(series):
        advice = f"This run chose by {series.header['trigger']}: locks played no part."
    elif back > 0.3 * len(lengths):
        advice = _longer_locks(series, figures)
    elif once > 0.9 * len(lengths):
        advice = "Nearly every choice lasts a single step: is T_lock 0? A spike that is over within a step may need no lock."
    else:
        advice = "No notable flicker."
    return Finding("oscillation", figures, says, advice)


def _longer_locks(series: Series, figures: dict[str, Any]) -> str:
    """Switches in replays with longer locks, compared with the recorded T_lock; adds them to `figures`."""
    now = recorded_config(series).t_lock
    figures["switches_per_lifted_step"] = {}
    for t_lock in (now, now + 1, now + 2):
        replayed = replay(series, {"t_lock": t_lock})
        lifted = int(replayed.active.sum())
        switches = replayed.figures(series)["switches"]
        figures["switches_per_lifted_step"][str(t_lock)] = switches / lifted if lifted else None
    rates = figures["switches_per_lifted_step"]
    first, last = rates[str(now)], rates[str(now + 2)]
    comparison = ", ".join(f"T_lock {t}: {rate:.2f}" for t, rate in rates.items() if rate is not None)
    if first and last is not None and last < 0.8 * first:
        return f"Choices flicker; a longer T_lock would calm them (replayed switches per lifted step, {comparison})."
    return f"Choices flicker, and a longer T_lock would hardly calm them (replayed switches per lifted step, {comparison})."
