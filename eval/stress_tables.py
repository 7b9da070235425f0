"""The tables of a grid of runs (`stress.py`): differences paired by seed, gaps closed, what the controller did."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import statistics

import numpy as np

FREE_OF_MAX_O = ("none", "all", "exact", "static")
"""Arms that are the same whatever maxO is."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to choose units."""

    trigger: str
    thresholds: tuple[str, str] | None = None
    """ALPHA and BETA as they were given."""
    ratio: float | None = None
    of: Arm | None = None
    """Of `listed`: whose most lifted units."""
    units: str | None = None
    """Of `listed`: a pattern."""

    @property
    def label(self) -> str:
        if self.of is not None:
            return f"{self.trigger} {self.of.label}"
        if self.units is not None:
            return f"{self.trigger} {self.units}"
        if self.thresholds is not None:
            return f"{self.trigger} {'/'.join(self.thresholds)}"
        return self.trigger if self.ratio is None else f"{self.trigger} {self.ratio:g}"

    @property
    def free_of_max_o(self) -> bool:
        return self.trigger in FREE_OF_MAX_O or self.units is not None

    def overrides(self) -> list[str]:
        """The thresholds in a recipe's words."""
        if self.thresholds is None:
            return []
        alpha, beta = self.thresholds
        *init, final = stages(alpha)
        # A recipe that has two stages has one here, where one is asked for.
        first = [f"gnmr.alpha_init={init[0]}"] if init else ["gnmr.alpha_init_fraction=0.0"]
        return [*first, f"gnmr.alpha={final}", f"gnmr.beta={'null' if beta == 'off' else beta}"]


def stages(alpha: str) -> list[str]:
    """INIT-ALPHA or ALPHA as one or two numbers; a minus after an e belongs to the number."""
    found = re.split(r"(?<![eE])-", alpha)
    if not 1 <= len(found) <= 2:
        raise ValueError(alpha)
    return found


@dataclasses.dataclass(frozen=True)
class Job:
    """One run."""

    arm: Arm
    form: str
    max_o: int | None
    seed: int

    @property
    def name(self) -> str:
        parts = [self.form.replace(":", "-"), *([] if self.max_o is None else [f"maxo{self.max_o}"])]
        label = self.arm.label.replace("*", "any").replace("?", "one")
        return "_".join([*parts, re.sub(r"[^\w.-]", "-", label), f"seed{self.seed}"])


def rows_of(runs: dict[Job, dict]) -> list[dict]:
    """One row an arm, format and maxO."""
    cells: dict[tuple, dict[int, dict]] = {}
    for job, figures in runs.items():
        cells.setdefault((job.form, job.max_o, job.arm), {})[job.seed] = figures

    def losses(form: str, max_o: int | None, arm: Arm) -> dict[int, float]:
        found = cells.get((form, max_o, arm)) or cells.get((form, None, arm)) or {}
        return {seed: float(f["eval_loss"]) for seed, f in found.items()}

    rows = []
    for (form, max_o, arm), by_seed in cells.items():
        ours = losses(form, max_o, arm)
        low, high = losses(form, None, Arm("none")), losses(form, None, Arm("all"))
        always = losses(form, max_o, Arm("listed", of=arm))
        finite = [loss for loss in ours.values() if math.isfinite(loss)]

        def mean(key: str, by_seed: dict = by_seed) -> float | None:
            values = [f[key] for f in by_seed.values() if f.get(key) is not None]
            return statistics.mean(values) if values else None

        rows.append(
            {
                "format": form,
                "max_o": max_o,
                "arm": arm.label,
                "seeds": sorted(ours),
                "diverged": len(ours) - len(finite),
                "loss": statistics.mean(finite) if finite else None,
                "loss_sd": statistics.stdev(finite) if len(finite) > 1 else None,
                "perplexity": statistics.mean(map(_exp, finite)) if finite else None,
                "perplexity_sd": statistics.stdev(map(_exp, finite)) if len(finite) > 1 else None,
                "against_none": None if arm.trigger == "none" else paired(ours, low),
                "against_all": None if arm.trigger == "all" else paired(ours, high),
                "against_random": paired(ours, _control(cells, form, max_o, arm)),
                "against_listed": paired(ours, always),
                "gap_closed": gap_closed(ours, low, high),
                "lifted": _mean_shares([f["lifted"] for f in by_seed.values()]),
                "hit_max_o_rate": None if arm.free_of_max_o else mean("hit_max_o_rate"),
                **{
                    key: mean(key)
                    for key in (
                        "promotion_ratio",
                        "gnmr_exceedance",
                        "delta_gnmr_exceedance",
                        "controller_share",
                        "peak_saved_bytes",
                        "peak_recovery_bytes",
                        "trigger_bytes",
                        "gss_max",
                    )
                },
            }
        )
    return rows


def _control(cells: dict[tuple, dict[int, dict]], form: str, max_o: int | None, arm: Arm) -> dict[int, float]:
    """Losses of the units drawn at random that `arm` is held against: those matched to its thresholds, or those of a ratio
    that came to its own (within 2%)."""
    if arm.trigger == "random":
        return {}
    thresholds = (arm.of or arm).thresholds
    matched = cells.get((form, max_o, Arm("random", thresholds))) if thresholds else None
    if matched is None:
        ratio = statistics.mean(f.get("promotion_ratio") or 0.0 for f in cells[form, max_o, arm].values())
        drawn = {
            a.ratio: found
            for (f, m, a), found in cells.items()
            # A given ratio is drawn alike under every maxO that allows it.
            if f == form and a.ratio is not None and (m == max_o or arm.free_of_max_o)
        }
        near = min(drawn, key=lambda r: abs(r - ratio), default=None)
        matched = drawn[near] if near is not None and abs(near - ratio) <= 0.02 * ratio else {}
    return {seed: float(f["eval_loss"]) for seed, f in matched.items()}


def _mean_shares(shares: list[dict[str, float]]) -> dict[str, float]:
    kinds = {kind for found in shares for kind in found}
    means = {kind: statistics.mean(found.get(kind, 0.0) for found in shares) for kind in kinds}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _exp(loss: float) -> float:
    return math.inf if loss > 700 else math.exp(loss)


def paired(ours: dict[int, float], theirs: dict[int, float]) -> dict | None:
    """Difference of losses seed by seed: mean, its standard error, seeds, and the effect that would have been seen.

    `detectable`: what a two-sided t test at 5% finds with about 80% power: 2.8 standard errors with many seeds, 5.4 with
    three (there it is 77%).  `diverged`: seeds of ours without a loss to compare, where theirs have one: not lower.
    """
    diverged = sum(s in theirs and math.isfinite(theirs[s]) and not math.isfinite(loss) for s, loss in ours.items())
    seeds = [s for s in ours if s in theirs and math.isfinite(ours[s]) and math.isfinite(theirs[s])]
    differences = [ours[s] - theirs[s] for s in seeds]
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
    """Of Student's t, from its distribution function by bisection."""

    def below(t: float) -> float:
        x = np.linspace(0, t, 2001)
        density = np.exp(math.lgamma((free + 1) / 2) - math.lgamma(free / 2)) / math.sqrt(free * math.pi)
        return 0.5 + float(np.trapezoid(density * (1 + x * x / free) ** (-(free + 1) / 2), x))

    low, high = 0.0, 1000.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < p else (low, middle)
    return low


def gap_closed(ours: dict[int, float], low: dict[int, float], high: dict[int, float]) -> dict | None:
    """(ppl_low - ppl) / (ppl_low - ppl_recovery) of the means over seeds, with its 95% interval (Fieller's, paired by seed).

    None where there is no gap to close: a t test at 5% does not tell it from zero, so that the ratio could be anything.
    With two seeds that is rarely told, with one never.
    """
    seeds = [s for s in ours if s in low and s in high]
    table = np.array([[_exp(d[s]) for d in (low, ours, high)] for s in seeds])
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


def markdown(table: dict, options: argparse.Namespace, wanted: int) -> str:
    """The grid's tables."""

    def number(value: float | None, digits: int = 4) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.2%}"

    def difference(d: dict | None) -> str:
        if d is None:
            return "–"
        error = "" if d["stderr"] is None else f" ± {d['stderr']:.4f}"
        seen = "" if d["stderr"] is None else f"; {d['detectable']:.4f} detectable"
        lost = f", {d['diverged']} diverged" if d["diverged"] else ""
        return f"{d['mean']:+.4f}{error} ({d['better']} of {d['seeds'] + d['diverged']} lower{lost}{seen})"

    def gap(g: dict | None) -> str:
        if g is None:
            return "–"
        return f"{g['value']:.0%} ({g['low']:.0%} to {g['high']:.0%})"

    def table_of(columns: list[str], cells: list[list[str]]) -> list[str]:
        return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells)]

    rows = table["rows"]
    arms = [f"`{r['arm']}`" if set("*_[") & set(r["arm"]) else r["arm"] for r in rows]
    first = [[r["format"], "recipe" if r["max_o"] is None else str(r["max_o"]), a] for r, a in zip(rows, arms, strict=True)]
    quality = [
        [
            f"{len(r['seeds'])}{', ' + str(r['diverged']) + ' diverged' if r['diverged'] else ''}",
            f"{number(r['perplexity'], 3)} ({number(r['perplexity_sd'], 3)})",
            f"{number(r['loss'])} ({number(r['loss_sd'])})",
            *(difference(r[f"against_{name}"]) for name in ("none", "all", "random", "listed")),
            gap(r["gap_closed"]),
        ]
        for r in rows
    ]
    control = [
        [
            share(r["promotion_ratio"]),
            share(r["hit_max_o_rate"]),
            share(r["gnmr_exceedance"]),
            share(r["delta_gnmr_exceedance"]),
            *("–" if r[k] is None else f"{r[k]:,.0f}" for k in ("peak_saved_bytes", "peak_recovery_bytes", "trigger_bytes")),
            share(r["controller_share"]),
            ", ".join(f"{kind} {part:.0%}" for kind, part in list(r["lifted"].items())[:4]) or "–",
        ]
        for r in rows
    ]
    lines = table_of(
        [
            "format",
            "maxO",
            "arm",
            "seeds",
            "perplexity (sd)",
            "loss (sd)",
            "loss − none",
            "loss − all",
            "loss − random",
            "loss − listed",
            "gap closed",
        ],
        [a + b for a, b in zip(first, quality, strict=True)],
    )
    lines += [
        "",
        "± is the standard error of the difference paired by seed; detectable: the effect that a t test at 5% finds "
        "with about 80% power. Random: as many units, drawn anew each step; listed: as many, always those the arm lifted "
        "most. Gap closed: (ppl none − ppl) / (ppl none − ppl all) of the means, 95% by Fieller's method.",
        "",
    ]
    lines += table_of(
        [
            "format",
            "maxO",
            "arm",
            "promotion ratio",
            "hit-maxO",
            "GNMR ≥ α",
            "ΔGNMR ≥ β",
            "saved bytes, peak",
            "ΔM, peak",
            "trigger's state, bytes",
            "control",
            "lifted, by kind",
        ],
        [a + b for a, b in zip(first, control, strict=True)],
    )
    if table["step_times"]:
        lines += [
            "",
            f"Step time against the plain model ({options.formats[0]}, {options.times} rounds, one thread), median "
            "(quartiles):",
            "",
        ]
        for side, t in table["step_times"].items():
            grown = "" if math.isnan(t["peak_bytes"]) else f"; the process grows by {t['peak_bytes'] / 1e6:.1f} MB"
            lines.append(f"* {side}: {t['median']:.3f} ({t['low']:.3f} to {t['high']:.3f}){grown}")
    there = len(table["runs"])
    if there < wanted:
        lines += ["", f"{wanted - there} of {wanted} runs are not there yet."]
    return "\n".join(lines)
