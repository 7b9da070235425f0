"""``hf-gnmr replay`` as text: the grid of settings that its arguments describe, and the table of their figures."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields
from typing import Any

from ..config import ConfigError, GNMRConfig
from ..terminal import printable, shown
from .series import Series

MAX_GRID = 10_000
"""Combinations of a grid, each a replay of the whole trace: seconds for a long one."""
NOTE = "open loop: the norms are the recorded ones; with other units lifted they would have differed"


def settings_grid(arguments: list[str]) -> list[dict[str, Any]]:
    """Every combination of arguments such as ``alpha=1.1,1.2``.

    Raises:
        ConfigError: not a field of GNMRConfig, or a value that is neither a number nor ``off``.
    """
    known = [f.name for f in fields(GNMRConfig)]
    axes: list[list[tuple[str, Any]]] = []
    for text in arguments:
        name, equals, values = text.partition("=")
        if not equals or name not in known:
            raise ConfigError(f"--set {text}: expected FIELD=VALUE[,VALUE...], with FIELD one of {', '.join(known)}")
        if any(name == axis[0][0] for axis in axes):
            raise ConfigError(f"--set {text}: {name} is set twice; --set {name}=A,B makes a grid")
        axes.append([(name, _value(text, value)) for value in values.split(",")])
    size = math.prod(map(len, axes))
    if size > MAX_GRID:
        raise ConfigError(f"--set: expected at most {MAX_GRID:,} combinations, got {size:,}")
    return [dict(choice) for choice in itertools.product(*axes)]


def _value(text: str, value: str) -> Any:
    if value in ("null", "None", "off"):
        return None
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise ConfigError(f"--set {printable(text)}: expected a number (or off: no β), got {shown(value)}")


def in_words(series: Series, rows: list[dict[str, Any]], unequal: list[str]) -> list[str]:
    """The table as lines of text, and whether the replay reproduces the record.

    Args:
        series: the trace.
        rows: figures of each replay, with its `settings`; the recorded ones first.
        unequal: `replay.differences` of the trace.
    """

    def cell(key: str, value: Any) -> str:
        if value is None:
            return "n/a"
        if key in ("switches", "mean_recovery_bytes"):
            return f"{value:,.0f}"
        return f"{value:.2f}" if key == "mean_dwell" else f"{value:.2%}"

    columns = {
        "settings": "settings",
        "promotion_ratio": "promotion",
        "hit_max_o_rate": "hit-maxO",
        "gnmr_exceedance": "GNMR ≥ α",
        "delta_gnmr_exceedance": "ΔGNMR ≥ β",
        "switches": "switches",
        "mean_dwell": "dwell",
        "mean_recovery_bytes": "ΔM, mean",
        "unit_steps_as_recorded": "as recorded",
    }
    cells = [[row["settings"], *(cell(key, row[key]) for key in list(columns)[1:])] for row in rows]
    sizes = [max(len(line[i]) for line in (list(columns.values()), *cells)) for i in range(len(columns))]
    trigger, units = series.header.get("trigger"), len(series.names)
    lines = [f"{series.path}: {len(series)} steps of {units} units, trigger {trigger}"]
    for line in (list(columns.values()), *cells):
        rest = (text.rjust(size) for text, size in zip(line[1:], sizes[1:], strict=True))
        lines.append("  ".join([line[0].ljust(sizes[0]), *rest]))
    if not unequal:
        lines.append("the replay under the recorded settings equals the recorded decisions exactly")
    return [*lines, *(f"NOT AS RECORDED: {text}" for text in unequal), NOTE]
