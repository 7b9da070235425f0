"""Figures of a run, from its trace as arrays (matplotlib, the extra ``report``).

The axis is the optimizer step, in at most `columns.COLUMNS` columns of equal width.  Maxima are kept: a column shows its
highest score, any unit that was lifted, and the range from its lowest to its highest loss; more than `ROWS` units share rows
in the same way.  A column without a line, where steps are missing, stays blank.  Heat-map cells are whole pixels.

Colours that depend on the page's scheme are drawn as placeholders (`INK`, `FAINT`), which the page replaces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..config import SetupError
from ..files import printable
from .columns import Columns, by_rows, moving_mean
from .metrics import dwell, exceedance_curve, share_active, switches_by_step
from .series import Series

ROWS = 160
PIXELS = 1200
"""Minimum width of a heat map's picture; a browser that draws it smaller blends cells but drops none."""
INK, FAINT = "#1c2431", "#8a94a4"
"""Placeholders for the colours of text and of background lines."""
LIFTED, LINE, SECOND, LIMIT = "#00a3ff", "#0072b2", "#d55e00", "#cc0000"
RUNS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Colours of runs side by side, distinguishable with colour blindness; with the styles they repeat after 24 runs."""
STYLES = ("-", "--", ":", "-.")


def pyplot() -> Any:
    """matplotlib's pyplot, set up for figures in a page.

    Raises:
        SetupError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SetupError("figures need matplotlib: pip install 'hf-gnmr[report]'") from error
    matplotlib.use("Agg", force=True)
    from matplotlib import pyplot as plt

    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "hf_gnmr",
            "text.parse_math": False,
            "font.size": 10,
            "axes.titlesize": 10,
            "axes.titlelocation": "left",
            "font.family": "sans-serif",
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": FAINT,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": FAINT,
            "grid.alpha": 0.35,
            "grid.linewidth": 0.6,
            "legend.frameon": False,
            "figure.dpi": 100,
        }
    )
    return plt


def timeline(series: Series) -> Any:
    """On one step axis: heat maps of GNMR (with the recovery set) and of ΔGNMR, active units, loss, gradient norm."""
    plt = pyplot()
    columns = Columns.of(series)
    tall = _height(len(series.names))
    figure, axes = plt.subplots(
        5, 1, figsize=(8.6, 2 * tall + 5.2), sharex=True, height_ratios=[tall, tall, 1.1, 1.4, 1.4], layout="constrained"
    )
    _heat(figure, axes[0], series, columns, series.gnmr, "GNMR", series.active)
    _heat(figure, axes[1], series, columns, series.delta_gnmr, "ΔGNMR", None)
    count = columns.reduce(series.active.sum(axis=1).astype(float), np.fmax)
    axes[2].stairs(np.nan_to_num(count), columns.edges, fill=True, color=LIFTED, alpha=0.8)
    limit = int(series.header["max_o"])
    axes[2].axhline(limit, color=LIMIT, linewidth=1, linestyle="--")
    axes[2].set_title(f"units on the recovery path (maxO {limit}, dashed)")
    axes[2].set_ylim(0, max(limit, int(np.nanmax(count))) * 1.08 + 0.1)
    _curve(axes[3], series.loss, series.loss_given, columns, LINE)
    axes[3].set_title("loss (bold: moving mean)" if series.loss_given.any() else "loss (not recorded)")
    _curve(axes[4], series.grad_norm, np.ones(len(series), dtype=bool), columns, SECOND)
    axes[4].set_title("gradient norm, all parameters, before clipping (bold: moving mean)")
    positive = series.grad_norm[np.isfinite(series.grad_norm)]
    if len(positive) and 0 < positive.min() * 1.01 < positive.max():
        _log(axes[4].set_yscale, axes[4].yaxis)
    several = columns.edges[1] - columns.edges[0] > 1
    axes[4].set_xlabel("optimizer step" + (", several to a column; maxima are kept" if several else ""))
    for axis in axes[2:]:
        axis.grid(True)
    axes[0].set_xlim(columns.edges[0] - 0.5, columns.edges[-1] - 0.5)
    return figure


def _height(units: int) -> float:
    """Height of a heat map, in inches."""
    return min(3.4, max(1.1, 0.14 * units))


def _heat(
    figure: Any, axis: Any, series: Series, columns: Columns, scores: np.ndarray, name: str, active: np.ndarray | None
) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm, to_rgba

    plt = pyplot()
    units = len(series.names)
    group = math.ceil(units / ROWS)
    rows = math.ceil(units / group)
    shown = by_rows(columns.reduce(scores, np.fmax), group, np.fmax)
    finite = shown[np.isfinite(shown)]
    top = max(2.0, float(np.quantile(finite, 0.999)) if len(finite) else 2.0)
    scale = ScalarMappable(LogNorm(0.5, top, clip=True), plt.get_cmap("magma_r"))
    cells = np.asarray(scale.to_rgba(np.where(np.isfinite(shown), shown, top))).transpose(1, 0, 2)  # not finite: the top
    cells[np.isnan(shown).T] = (0, 0, 0, 0)
    # Whole pixels, at least four to a cell's height, so that the lowest ones can mark lifted units.
    wide, high = math.ceil(PIXELS / cells.shape[1]), max(4, math.ceil(240 / rows))
    picture = np.repeat(np.repeat(cells, high, axis=0), wide, axis=1)
    several = "" if group == 1 else f"; {group} units to a row, the highest shown"
    title = f"{name}, unit by step{several}"
    if active is not None and active.any():
        lifted = by_rows(columns.reduce(active, np.logical_or), group, np.logical_or).T
        bars = np.zeros((rows, high), dtype=bool)
        bars[:, -max(1, round(0.3 * high)) :] = True
        where = (lifted[:, None, :] & bars[:, :, None]).reshape(rows * high, -1)
        picture[np.repeat(where, wide, axis=1)] = to_rgba(LIFTED)
        title += "; blue bars: on the recovery path"
    edges = columns.edges - 0.5
    axis.imshow(picture, aspect="auto", interpolation="none", extent=(edges[0], edges[-1], rows - 0.5, -0.5), origin="upper")
    broken = np.isinf(shown)
    if broken.any():
        column, row = np.nonzero(broken)
        axis.plot(columns.middle[column], row, "x", color=LIMIT, markersize=4)
        title += "; red: not finite"
    bar = figure.colorbar(scale, ax=axis, pad=0.01, aspect=14, extend="both")
    bar.ax.minorticks_off()
    marks = [t for t in (0.5, 1, 1.5, 2, 3, 5, 10, 30, 100) if t <= top]
    bar.set_ticks(marks, labels=[f"{t:g}" for t in marks])
    axis.set_title(title)
    axis.grid(False)
    ticks = np.unique(np.linspace(0, rows - 1, min(rows, 12)).round().astype(int)).tolist()
    axis.set_yticks(ticks, [short_name(series.names[i * group]) for i in ticks], fontsize=8)


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
    """A unit's name without the parts that most names share."""
    parts = [p for p in name.split(".") if p not in ("model", "layers", "self_attn", "mlp", "transformer", "h", "decoder")]
    return printable(".".join(parts) or name, 24)


def _curve(
    axis: Any,
    values: np.ndarray,
    recorded: np.ndarray,
    columns: Columns,
    color: str,
    label: str | None = None,
    style: str = "-",
) -> None:
    """A thin line through each column's lowest and highest value, a bold moving mean, and crosses where not finite."""
    finite = np.where(np.isfinite(values), values, np.nan)
    if np.isfinite(finite).any():
        low, high = columns.reduce(finite, np.fmin), columns.reduce(finite, np.fmax)
        both = np.stack([low, high], axis=1).ravel()
        axis.plot(np.repeat(columns.middle, 2), both, color=color, linewidth=0.7, alpha=0.5)
        mean = moving_mean(finite, columns)
        dot = "." if len(columns.middle) < 60 else None
        axis.plot(columns.middle, mean, color=color, linewidth=1.5, label=label, linestyle=style, marker=dot)
    broken = recorded & ~np.isfinite(values)
    if broken.any():
        at = np.unique(columns.index[broken])
        place = np.nanmax(finite) if np.isfinite(finite).any() else 1.0
        axis.plot(columns.middle[at], np.full(len(at), place), "x", color=LIMIT, markersize=5)


def histograms(series: Series) -> Any:
    """How long units stay on the recovery path, and how many switch in a step."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 2.5), layout="constrained")
    dwells = {int(k): v for k, v in dwell(series.active, series.adjacent)["counts"].items()}
    switched = switches_by_step(series).astype(int)
    switches = {int(k): int(v) for k, v in zip(*np.unique(switched, return_counts=True), strict=True)}
    for axis, numbers, title, label in (
        (axes[0], dwells, "dwell", "consecutive steps on the recovery path"),
        (axes[1], switches, "switches", "units that switch in a step"),
    ):
        axis.set_title(title + ("" if numbers else ": none"))
        axis.set_xlabel(label)
        _bars(axis, numbers)
        axis.grid(True, axis="y")
    return figure


def _bars(axis: Any, counts: dict[int, int]) -> None:
    """Bars at whole numbers; the tail shares the last bar."""
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
        axis.set_xlim(min(kept) - 0.6, max(max(kept), min(kept) + 4) + 0.6)
    if len(counts) > 1:
        _log(axis.set_yscale, axis.yaxis)


def exceedances(series: Series) -> Any:
    """Share of (unit, step) pairs that reach a threshold, against the threshold."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8.6, 2.6), layout="constrained")
    limits = [("α", series.alpha, LINE), ("β", series.beta, SECOND)]
    used = [v for _, values, _ in limits for v in np.unique(values[np.isfinite(values)]).tolist()]
    thresholds = np.geomspace(min([1.0, *(0.8 * v for v in used)]), max([10.0, *(1.25 * v for v in used)]), 81)
    curves = exceedance_curve(series, thresholds)
    for name, label, color in (("gnmr", "GNMR", LINE), ("delta_gnmr", "ΔGNMR", SECOND)):
        shares = np.array([np.nan if s is None or s == 0 else s for s in curves[name]], dtype=float)
        axis.plot(thresholds, shares, color=color, label=label if np.isfinite(shares).any() else f"{label} (never)")
    for level, (name, values, color) in enumerate(limits):  # at separate heights, as α and β may be equal
        for value in np.unique(values[np.isfinite(values)])[:3]:
            axis.axvline(value, color=color, linewidth=1, linestyle="--")
            place = (value, 1 - 0.12 * level)
            axis.annotate(f" {name} {value:g}", place, xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axis.set_xscale("log")
    if any(share for shares in curves.values() for share in shares):
        _log(axis.set_yscale, axis.yaxis)
    marks = [t for t in (0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 30, 100) if thresholds[0] <= t <= thresholds[-1]]
    axis.set_xticks(marks, [f"{t:g}" for t in marks])
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
    looks = itertools.cycle([(color, style) for style in STYLES for color in RUNS])
    for series, label, (color, style) in zip(runs, labels, looks, strict=False):
        columns = Columns.of(series)
        # The space: matplotlib omits names that begin with an underscore from a legend.
        _curve(axes[0], series.loss, series.loss_given, columns, color, printable(f" {label}", 60), style)
        axes[1].plot(columns.middle, moving_mean(share_active(series), columns), color=color, linestyle=style, linewidth=1.4)
    axes[0].set_title("loss (bold: moving mean)")
    axes[1].set_title("share of units on the recovery path (moving mean)")
    axes[1].set_xlabel("optimizer step")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(loc="upper right", fontsize=8)
    for axis in axes:
        axis.grid(True)
    return figure


OF_A_RUN: dict[str, Callable[[Series], Any]] = {
    "timeline": timeline,
    "histograms": histograms,
    "exceedance": exceedances,
}
"""The figures of one run, by name."""
