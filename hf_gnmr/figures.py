"""Figures of a run, from its trace as arrays (matplotlib, the extra ``report``).

Long runs are thinned to at most `COLUMNS` columns of equal numbers of steps, and maxima are kept: a column shows the highest
score, any unit that was lifted, and the range between the lowest and the highest loss in it.

Colours that depend on the page's scheme are drawn in stand-ins (`INK`, `FAINT`), which the page replaces.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .config import SetupError
from .metrics import dwell, exceedance_curve
from .series import Series

COLUMNS = 1000
INK, FAINT = "#1c2431", "#8a94a4"
"""Stand-ins for the text's colour and that of lines behind."""
LIFTED, LINE, SECOND, LIMIT = "#0d9488", "#2563eb", "#d97706", "#dc2626"
RUNS = ("#2563eb", "#d97706", "#0d9488", "#9333ea", "#dc2626", "#65a30d", "#0891b2", "#be185d")
"""Colours of runs side by side."""


def pyplot() -> Any:
    """matplotlib's pyplot, set up for figures in a page.

    Raises:
        SetupError: matplotlib is not there.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SetupError("figures take matplotlib: pip install 'hf-gnmr[report]'") from error
    matplotlib.use("Agg", force=True)
    from matplotlib import pyplot as plt

    plt.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "hf_gnmr", "text.parse_math": False, "font.size": 10, "axes.titlesize": 10,
        "axes.titlelocation": "left", "font.family": "sans-serif", "figure.facecolor": "none", "axes.facecolor": "none",
        "savefig.facecolor": "none", "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT,
        "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
        "grid.color": FAINT, "grid.alpha": 0.35, "grid.linewidth": 0.6, "legend.frameon": False, "figure.dpi": 100,
    })
    return plt


def columns(size: int) -> np.ndarray:
    """Edges of the columns that `size` lines are thinned to, (columns + 1,)."""
    return np.unique(np.linspace(0, size, min(size, COLUMNS) + 1).astype(np.int64))


def thin(values: np.ndarray, edges: np.ndarray, reduce: np.ufunc) -> np.ndarray:
    """Values (S, ...) to one row a column, by a ufunc such as `np.fmax`, which passes over nan."""
    return reduce.reduceat(values, edges[:-1], axis=0)


def timeline(series: Series) -> Any:
    """Heat maps of GNMR, with the recovery set, and of ΔGNMR; active units; loss; gradient norm: on one step axis."""
    plt = pyplot()
    units = len(series.names)
    edges = columns(len(series))
    steps = np.append(series.step[edges[:-1]], series.step[-1] + 1).astype(float)
    tall = _height(units)
    figure, axes = plt.subplots(
        5, 1, figsize=(8.6, 2 * tall + 5.2), sharex=True, height_ratios=[tall, tall, 1.1, 1.4, 1.4], layout="constrained"
    )
    active = thin(series.active, edges, np.logical_or)
    _heat(figure, axes[0], series, thin(series.gnmr, edges, np.fmax), steps, "GNMR", active)
    _heat(figure, axes[1], series, thin(series.delta_gnmr, edges, np.fmax), steps, "ΔGNMR", None)
    left = steps[:-1]
    count = thin(series.active.sum(axis=1), edges, np.maximum)
    axes[2].fill_between(left, count, step="post", color=LIFTED, alpha=0.8, linewidth=0)
    limit = int(series.header["max_o"])
    axes[2].axhline(limit, color=LIMIT, linewidth=1, linestyle="--")
    axes[2].set_title(f"units on the recovery path (maxO {limit}, dashed)")
    axes[2].set_ylim(0, max(limit, int(count.max(initial=0))) * 1.08 + 0.1)
    _curve(axes[3], series.loss, edges, left, LINE)
    axes[3].set_title("loss" if np.isfinite(series.loss).any() else "loss (not recorded)")
    _curve(axes[4], series.grad_norm, edges, left, SECOND)
    axes[4].set_title("gradient norm, all parameters, before clipping")
    positive = series.grad_norm[np.isfinite(series.grad_norm)]
    if len(positive) and positive.min() > 0:
        _log(axes[4].set_yscale, axes[4].yaxis)
    axes[4].set_xlabel("optimizer step" + ("" if len(series) <= COLUMNS else ", several to a column; maxima are kept"))
    for axis in axes[2:]:
        axis.grid(True)
    return figure


def _height(units: int) -> float:
    """Of a heat map, in inches."""
    return min(3.4, max(1.1, 0.14 * units))


def _heat(
    figure: Any, axis: Any, series: Series, scores: np.ndarray, steps: np.ndarray, name: str, active: np.ndarray | None
) -> None:
    from matplotlib.colors import LogNorm

    plt = pyplot()
    units = len(series.names)
    finite = scores[np.isfinite(scores)]
    top = max(2.0, float(np.quantile(finite, 0.999)) if len(finite) else 2.0)
    shown = np.where(np.isinf(scores), top, scores)  # what is not finite is the top of the scale, and marked
    mesh = axis.pcolormesh(
        steps, np.arange(units + 1) - 0.5, np.ma.masked_invalid(shown.T), cmap=plt.get_cmap("magma_r"),
        norm=LogNorm(0.5, top, clip=True), rasterized=True,
    )
    bar = figure.colorbar(mesh, ax=axis, pad=0.01, aspect=14, extend="both")
    bar.ax.minorticks_off()
    marks = [t for t in (0.5, 1, 1.5, 2, 3, 5, 10, 30, 100) if t <= top]
    bar.set_ticks(marks, labels=[f"{t:g}" for t in marks])
    title = f"{name}, unit by step"
    if active is not None and active.any():
        where, unit = np.nonzero(active)
        thick = max(1.0, 0.3 * 72 * _height(units) / units)
        axis.hlines(unit + 0.3, steps[where], steps[where + 1], color=LIFTED, linewidth=thick, rasterized=True)
        title += "; green: on the recovery path"
    if np.isinf(scores).any():
        where, unit = np.nonzero(np.isinf(scores))
        axis.plot(((steps[:-1] + steps[1:]) / 2)[where], unit, "x", color=LIMIT, markersize=4)
        title += "; red: not finite"
    axis.set_title(title)
    axis.invert_yaxis()
    axis.grid(False)
    ticks = np.unique(np.linspace(0, units - 1, min(units, 12)).round().astype(int))
    axis.set_yticks(ticks, [short_name(series.names[i]) for i in ticks], fontsize=8)


def _log(set_scale: Callable[[str], None], axis: Any) -> None:
    """A logarithmic axis with plain numbers: 1, 2 and 5 of each decade, or the decades alone where there are many."""
    from matplotlib.ticker import LogLocator, NullFormatter

    set_scale("log")
    low, high = axis.get_view_interval()
    few = low > 0 and high / low < 200
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def short_name(name: str) -> str:
    """A unit's name without what all have in common."""
    parts = [p for p in name.split(".") if p not in ("model", "layers", "self_attn", "mlp", "transformer", "h", "decoder")]
    return ".".join(parts) or name


def moving_mean(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the finite values in a window around each, (S,); nan where the value itself is not finite."""
    there = np.isfinite(values)
    kernel = np.ones(width)
    counts = np.convolve(there, kernel, "same")
    sums = np.convolve(np.where(there, values, 0.0), kernel, "same")
    return np.where(there, sums / np.maximum(counts, 1), np.nan)


def _curve(axis: Any, values: np.ndarray, edges: np.ndarray, left: np.ndarray, color: str, label: str | None = None) -> None:
    finite = np.where(np.isfinite(values), values, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        low, high = thin(finite, edges, np.fmin), thin(finite, edges, np.fmax)
    if len(finite) > len(left):
        axis.fill_between(left, low, high, color=color, alpha=0.3, linewidth=0)
    width = max(1, len(values) // 100)
    if len(values) > 3 * width:
        axis.plot(left, moving_mean(values, width)[edges[:-1]], color=color, linewidth=1.4, label=label)
        if len(finite) <= len(left):
            axis.plot(left, finite, color=color, linewidth=0.5, alpha=0.4)
    else:
        axis.plot(left, finite[edges[:-1]], color=color, linewidth=1.2, marker="." if len(left) < 60 else None, label=label)
    broken = np.flatnonzero(np.isinf(values))
    if len(broken) and np.isfinite(finite).any():
        axis.plot(broken, np.full(len(broken), np.nanmax(finite)), "x", color=LIMIT, markersize=4)


def histograms(series: Series) -> Any:
    """How long units stay on the recovery path, and how many switch in a step."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 2.5), layout="constrained")
    counts = {int(k): v for k, v in dwell(series.active, series.adjacent)["counts"].items()}
    switched = (series.active[1:] ^ series.active[:-1])[series.adjacent].sum(axis=1)
    numbers = {int(k): int(v) for k, v in zip(*np.unique(switched, return_counts=True), strict=True)}
    for axis, found, title, label in (
        (axes[0], counts, "dwell", "consecutive steps on the recovery path"),
        (axes[1], numbers, "switches", "units that switch in a step"),
    ):
        axis.set_title(title + ("" if found else ": none"))
        axis.set_xlabel(label)
        _bars(axis, found)
        axis.grid(True, axis="y")
    return figure


def _bars(axis: Any, counts: dict[int, int]) -> None:
    """Bars of whole numbers; the longest tails share the last bar."""
    if not counts:
        return
    last = 20
    kept = {k: v for k, v in counts.items() if k < last}
    rest = sum(v for k, v in counts.items() if k >= last)
    axis.bar(list(kept), list(kept.values()), color=LINE, width=0.8)
    if rest:
        axis.bar([last], [rest], color=SECOND, width=0.8)
        axis.set_xticks([*range(0, last, 5), last], [*map(str, range(0, last, 5)), f"≥ {last}"])
    else:
        from matplotlib.ticker import MaxNLocator

        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(counts) > 1:
        _log(axis.set_yscale, axis.yaxis)


def exceedances(series: Series) -> Any:
    """Share of (unit, step) pairs that reach a threshold, against the threshold."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8.6, 2.6), layout="constrained")
    thresholds = np.geomspace(1.0, 10.0, 61)
    curves = exceedance_curve(series, thresholds)
    for name, label, color in (("gnmr", "GNMR", LINE), ("delta_gnmr", "ΔGNMR", SECOND)):
        shares = np.array([np.nan if s is None or s == 0 else s for s in curves[name]], dtype=float)
        axis.plot(thresholds, shares, color=color, label=label if np.isfinite(shares).any() else f"{label} (never)")
    limits = [("α", series.alpha, LINE), ("β", series.beta, SECOND)]
    for level, (name, values, color) in enumerate(limits):  # each at a height of its own, as α and β may be the same
        for value in np.unique(values[np.isfinite(values)])[:3]:
            axis.axvline(value, color=color, linewidth=1, linestyle="--")
            place = (value, 1 - 0.12 * level)
            axis.annotate(f" {name} {value:g}", place, xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axis.set_xscale("log")
    if any(share for shares in curves.values() for share in shares):
        _log(axis.set_yscale, axis.yaxis)
    axis.set_xticks([1, 1.5, 2, 3, 5, 10], ["1", "1.5", "2", "3", "5", "10"])
    axis.set_xticks([], minor=True)
    axis.set_title("share of (unit, step) pairs that reach a threshold")
    axis.set_xlabel("threshold")
    axis.legend(loc="upper right")
    axis.grid(True)
    return figure


def comparison(runs: Sequence[Series], labels: Sequence[str]) -> Any:
    """Loss and units on the recovery path of several runs on one step axis."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 1, figsize=(8.6, 4.4), sharex=True, layout="constrained")
    for i, (series, label) in enumerate(zip(runs, labels, strict=True)):
        edges = columns(len(series))
        left, color = series.step[edges[:-1]], RUNS[i % len(RUNS)]
        _curve(axes[0], series.loss, edges, left, color, label)
        share = series.active.sum(axis=1) / max(1, int(series.recoverable.sum()))
        width = max(1, len(series) // 100)
        axes[1].plot(left, moving_mean(share, width)[edges[:-1]], color=color, linewidth=1.4)
    axes[0].set_title("loss (moving mean; shaded: its range in a column)")
    axes[1].set_title("share of units on the recovery path (moving mean)")
    axes[1].set_xlabel("optimizer step")
    axes[0].legend(loc="upper right", fontsize=8)
    for axis in axes:
        axis.grid(True)
    return figure


OF_A_RUN: dict[str, Callable[[Series], Any]] = {
    "timeline": timeline, "histograms": histograms, "exceedance": exceedances,
}
"""The figures of one run, by name."""
