"""The tables of a grid of runs (`stress.py`): differences paired by seed, gaps closed, what the controller did."""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

import numpy as np
from arms import Arm, Job

MEANS = (
    "promotion_ratio",
    "gnmr_exceedance",
    "delta_gnmr_exceedance",
    "controller_share",
    "peak_saved_bytes",
    "peak_recovery_bytes",
    "trigger_bytes",
    "gss_max",
)
"""Figures of runs whose mean over seeds is given."""

Cells = dict[tuple[str, "int | None", Arm], dict[int, dict[str, Any]]]
"""Figures by format, maxO and arm, then by seed."""


def rows_of(runs: dict[Job, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each arm, format and maxO."""
    cells: Cells = {}
    for job, figures in runs.items():
        cells.setdefault((job.form, job.max_o, job.arm), {})[job.seed] = figures

    def losses(form: str, max_o: int | None, arm: Arm) -> dict[int, float]:
        by_seed = cells.get((form, max_o, arm)) or cells.get((form, None, arm)) or {}
        return {seed: float(figures["eval_loss"]) for seed, figures in by_seed.items()}

    rows = []
    for (form, max_o, arm), by_seed in cells.items():
        by_arm = losses(form, max_o, arm)
        low, high = losses(form, None, Arm("none")), losses(form, None, Arm("all"))
        listed = losses(form, max_o, Arm("listed", of=arm))
        finite = [loss for loss in by_arm.values() if math.isfinite(loss)]

        def mean(key: str, by_seed: dict[int, dict[str, Any]] = by_seed) -> float | None:
            values = [figures[key] for figures in by_seed.values() if figures.get(key) is not None]
            return statistics.mean(values) if values else None

        rows.append(
            {
                "format": form,
                "max_o": max_o,
                "arm": arm.label,
                "seeds": sorted(by_arm),
                "diverged": len(by_arm) - len(finite),
                "loss": statistics.mean(finite) if finite else None,
                "loss_sd": statistics.stdev(finite) if len(finite) > 1 else None,
                "perplexity": statistics.mean(map(_exp, finite)) if finite else None,
                "perplexity_sd": statistics.stdev(map(_exp, finite)) if len(finite) > 1 else None,
                "against_none": None if arm.trigger == "none" else paired(by_arm, low),
                "against_all": None if arm.trigger == "all" else paired(by_arm, high),
                "against_random": paired(by_arm, _control(cells, form, max_o, arm)),
                "against_listed": paired(by_arm, listed),
                "gap_closed": gap_closed(by_arm, low, high),
                "lifted": _mean_shares([figures["lifted"] for figures in by_seed.values()]),
                "hit_max_o_rate": None if arm.free_of_max_o else mean("hit_max_o_rate"),
                **{key: mean(key) for key in MEANS},
            }
        )
    return rows


def _control(cells: Cells, form: str, max_o: int | None, arm: Arm) -> dict[int, float]:
    """Losses with the units drawn at random that `arm` is compared with: those matched to its thresholds, or those of a
    ratio within 2% of its promotion ratio."""
    if arm.trigger == "random":
        return {}
    thresholds = (arm.of or arm).thresholds
    matched = cells.get((form, max_o, Arm("random", thresholds))) if thresholds else None
    if matched is None:
        ratio = statistics.mean(figures.get("promotion_ratio") or 0.0 for figures in cells[form, max_o, arm].values())
        drawn = {
            other.ratio: by_seed
            for (other_form, other_max_o, other), by_seed in cells.items()
            # A ratio is drawn alike under every maxO that allows it.
            if other_form == form and other.ratio is not None and (other_max_o == max_o or arm.free_of_max_o)
        }
        near = min(drawn, key=lambda r: abs(r - ratio), default=None)
        matched = drawn[near] if near is not None and abs(near - ratio) <= 0.02 * ratio else {}
    return {seed: float(figures["eval_loss"]) for seed, figures in matched.items()}


def _mean_shares(shares: list[dict[str, float]]) -> dict[str, float]:
    kinds = {kind for by_kind in shares for kind in by_kind}
    means = {kind: statistics.mean(by_kind.get(kind, 0.0) for by_kind in shares) for kind in kinds}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _exp(loss: float) -> float:
    return math.inf if loss > 700 else math.exp(loss)


def paired(losses: dict[int, float], reference: dict[int, float]) -> dict[str, Any] | None:
    """Difference of losses seed by seed: mean, its standard error, seeds, and the detectable effect.

    `detectable`: what a two-sided t test at 5% finds with about 80% power: 2.8 standard errors with many seeds, 5.4 with
    three (there it is 77%).  `diverged`: seeds without a finite loss where the reference has one; they count as not lower.
    """
    diverged = sum(
        seed in reference and math.isfinite(reference[seed]) and not math.isfinite(loss) for seed, loss in losses.items()
    )
    seeds = [s for s in losses if s in reference and math.isfinite(losses[s]) and math.isfinite(reference[s])]
    differences = [losses[s] - reference[s] for s in seeds]
    if not differences:
        return None
    free = len(differences) - 1
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if free else None
    return {
        "mean": statistics.mean(differences),
        "stderr": error,
        "seeds": len(seeds),
        "detectable": None if error is None else (t_quantile(0.975, free) + t_quantile(0.8, free)) * error,
        "better": sum(d < 0 for d in differences),
        "diverged": diverged,
    }


@functools.cache
def t_quantile(p: float, free: int) -> float:
    """Quantile of Student's t with `free` degrees of freedom, by bisection of its distribution function."""

    def below(t: float) -> float:
        x = np.linspace(0, t, 2001)
        density = np.exp(math.lgamma((free + 1) / 2) - math.lgamma(free / 2)) / math.sqrt(free * math.pi)
        return 0.5 + float(np.trapezoid(density * (1 + x * x / free) ** (-(free + 1) / 2), x))

    low, high = 0.0, 1000.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < p else (low, middle)
    return low


def gap_closed(losses: dict[int, float], low: dict[int, float], high: dict[int, float]) -> dict[str, float] | None:
    """(ppl_low - ppl) / (ppl_low - ppl_recovery) of the means over seeds, with its 95% interval (Fieller's, paired by seed).

    None where no gap is established: a t test at 5% does not distinguish it from zero, so that the ratio could be anything.
    With two seeds it rarely does, with one never.
    """
    seeds = [s for s in losses if s in low and s in high]
    table = np.array([[_exp(d[s]) for d in (low, losses, high)] for s in seeds])
    if len(seeds) < 2 or not np.isfinite(table).all():
        return None
    closed, gap = table[:, 0] - table[:, 1], table[:, 0] - table[:, 2]
    (v, c), (_, w) = np.cov(closed, gap) / len(seeds)
    a, b, t2 = closed.mean(), gap.mean(), t_quantile(0.975, len(seeds) - 1) ** 2
    # The ratios r that a t test of closed - r gap does not reject: r² (b² - t² w) - 2 r (a b - t² c) + a² - t² v <= 0.
    square, linear, constant = b * b - t2 * w, a * b - t2 * c, a * a - t2 * v
    if b <= 0 or square <= 0:
        return None
    root = math.sqrt(max(0.0, linear * linear - square * constant))
    return {"value": float(a / b), "low": float((linear - root) / square), "high": float((linear + root) / square)}


def table(payload: dict[str, Any]) -> str:
    """The grid's tables in Markdown: quality, control, and step times where they were measured."""
    rows = payload["rows"]
    arms = [f"`{r['arm']}`" if set("*_[") & set(r["arm"]) else r["arm"] for r in rows]
    first = [[r["format"], "recipe" if r["max_o"] is None else str(r["max_o"]), a] for r, a in zip(rows, arms, strict=True)]
    quality = [a + b for a, b in zip(first, map(_quality, rows), strict=True)]
    control = [a + b for a, b in zip(first, map(_control_figures, rows), strict=True)]
    lines = [
        *_table_of(QUALITY, quality),
        "",
        "± is the standard error of the difference paired by seed; detectable: the effect that a t test at 5% finds "
        "with about 80% power. Random: as many units, drawn again in each step; listed: as many, always those the arm "
        "lifted most. Gap closed: (ppl none − ppl) / (ppl none − ppl all) of the means, 95% by Fieller's method.",
        "",
        *_table_of(CONTROL, control),
    ]
    if payload["step_times"]:
        lines += [
            "",
            f"Step time against the plain model ({payload['timed_format']}, {payload['timed_rounds']} rounds, one thread), "
            "median (quartiles):",
            "",
        ]
        for side, t in payload["step_times"].items():
            growth = "" if math.isnan(t["peak_bytes"]) else f"; the process grows by {t['peak_bytes'] / 1e6:.1f} MB"
            lines.append(f"* {side}: {t['median']:.3f} ({t['low']:.3f} to {t['high']:.3f}){growth}")
    finished = len(payload["runs"])
    if finished < payload["jobs"]:
        lines += ["", f"{payload['jobs'] - finished} of {payload['jobs']} runs are not finished."]
    return "\n".join(lines)


FIRST = ["format", "maxO", "arm"]
QUALITY = [
    *FIRST,
    "seeds",
    "perplexity (sd)",
    "loss (sd)",
    "loss − none",
    "loss − all",
    "loss − random",
    "loss − listed",
    "gap closed",
]
CONTROL = [
    *FIRST,
    "promotion ratio",
    "hit-maxO",
    "GNMR ≥ α",
    "ΔGNMR ≥ β",
    "saved bytes, peak",
    "ΔM, peak",
    "trigger's state, bytes",
    "control",
    "lifted, by kind",
]


def _table_of(columns: list[str], cells: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells)]


def _quality(row: dict[str, Any]) -> list[str]:
    return [
        f"{len(row['seeds'])}{', ' + str(row['diverged']) + ' diverged' if row['diverged'] else ''}",
        f"{_number(row['perplexity'], 3)} ({_number(row['perplexity_sd'], 3)})",
        f"{_number(row['loss'])} ({_number(row['loss_sd'])})",
        *(_difference(row[f"against_{name}"]) for name in ("none", "all", "random", "listed")),
        _gap(row["gap_closed"]),
    ]


def _control_figures(row: dict[str, Any]) -> list[str]:
    sizes = (row["peak_saved_bytes"], row["peak_recovery_bytes"], row["trigger_bytes"])
    return [
        _share(row["promotion_ratio"]),
        _share(row["hit_max_o_rate"]),
        _share(row["gnmr_exceedance"]),
        _share(row["delta_gnmr_exceedance"]),
        *("–" if size is None else f"{size:,.0f}" for size in sizes),
        _share(row["controller_share"]),
        ", ".join(f"{kind} {part:.0%}" for kind, part in list(row["lifted"].items())[:4]) or "–",
    ]


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def _difference(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return "–"
    error = "" if figures["stderr"] is None else f" ± {figures['stderr']:.4f}"
    detectable = "" if figures["stderr"] is None else f"; {figures['detectable']:.4f} detectable"
    diverged = f", {figures['diverged']} diverged" if figures["diverged"] else ""
    seeds = figures["seeds"] + figures["diverged"]
    return f"{figures['mean']:+.4f}{error} ({figures['better']} of {seeds} lower{diverged}{detectable})"


def _gap(figures: dict[str, float] | None) -> str:
    return "–" if figures is None else f"{figures['value']:.0%} ({figures['low']:.0%} to {figures['high']:.0%})"
