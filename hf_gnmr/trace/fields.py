"""The scalar fields of a step's line: one table for the arrays, the summary and the page.

`series.Series` has a column for each entry of `SCALARS`, `metrics.summarise` a key for each of its figures, and the table of
runs in `report.page` a row for each figure that has one.  One more scalar of the trace is one more entry here (and the code
that writes it into the trace).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..control.controller import Bools, Floats

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A row of the page's table of runs."""

    label: str
    share: bool = False
    """Printed in percent; otherwise as a number."""
    after: str | None = None
    """Key of the row above it; None: the last row."""


@dataclass(frozen=True)
class Figure:
    """A figure of the summary that depends on one scalar field."""

    key: str
    """Its key in the summary."""
    reduction: Callable[[np.ndarray, Bools], Any]
    """Takes the column, (S,), and the lines that count, bool, (S,); returns a plain JSON value."""
    after: str | None = None
    """Key that it follows in the summary; None: the last key."""
    row: Row | None = None
    """How the page shows it; None: not shown."""


@dataclass(frozen=True)
class Scalar:
    """A scalar field of a step's line."""

    name: str
    """Its key in the line."""
    meaning: str
    figures: tuple[Figure, ...] = ()
    attribute: str = ""
    """Name of its column in `Series`; default: `name`."""
    dtype: type = float
    """Type of its column: float (nan where a line has none), int, or bool (whether the value is above 0)."""

    @property
    def column(self) -> str:
        """Name of its column in `Series`."""
        return self.attribute or self.name

    def convert(self, values: Floats) -> np.ndarray:
        """Its column, (S,), from float64 values that are nan where a line has none."""
        return np.nan_to_num(values) > 0 if self.dtype is bool else values.astype(self.dtype)


def first(values: Floats, counted: Bools) -> float | None:
    """The first line's value; None where it has none."""
    return _number(values[0]) if len(values) else None


def last(values: Floats, counted: Bools) -> float | None:
    """The last line's value; None where it has none."""
    return _number(values[-1]) if len(values) else None


def mean(values: Floats, counted: Bools) -> float | None:
    """Sum of the values over the number of lines; None where no line has one."""
    return None if np.isnan(values).all() else float(np.nansum(values)) / len(values)


def number_true(values: Bools, counted: Bools) -> int:
    """The number of lines on which a bool field is true."""
    return int(values.sum())


def peak(values: Floats, counted: Bools | None = None) -> int | None:
    """The highest value, as a whole number; None where no line has one."""
    recorded = values[~np.isnan(values)]
    return int(recorded.max()) if len(recorded) else None


def peak_or_zero(values: Floats, counted: Bools) -> int:
    """The highest value, as a whole number; 0 where no line has one."""
    return peak(values) or 0


def spike_scores(values: Floats, counted: Bools) -> list[float]:
    """Each finite value of the lines that count, over the mean of them all; empty where that mean is 0.

    Of gradient norms these are the global spike scores (GSS) of Huang et al. (arXiv 2501.06842): a diagnostic of a finished
    run and no trigger, since they look ahead and do not distinguish units.
    """
    finite = [value for value in values[counted].tolist() if math.isfinite(value)]
    average = sum(finite) / len(finite) if finite else 0.0
    return [value / average for value in finite] if average else []


def highest_spike_score(values: Floats, counted: Bools) -> float | None:
    """The highest of `spike_scores`; None where there are none."""
    return max(spike_scores(values, counted), default=None)


SCALARS: tuple[Scalar, ...] = (
    Scalar("step", "optimizer step, from 1; where lines are missing there are gaps", dtype=int),
    Scalar(
        "loss",
        "loss of the step; nan where none was recorded, and where it was nan (`Series.loss_given` distinguishes them)",
        (
            Figure("first_loss", first, after="controller_share", row=Row("first loss", after="controller_share")),
            Figure("last_loss", last, after="first_loss", row=Row("last loss", after="first_loss")),
        ),
    ),
    Scalar(
        "saved_bytes",
        "bytes of saved activations; nan where the backend counts none",
        (
            Figure(
                "peak_saved_bytes",
                peak,
                after="steps_on_recovery_by_layer",
                row=Row("saved activations, peak bytes", after="resident_bytes"),
            ),
        ),
    ),
    Scalar("saved_tokens", "tokens whose activations were saved; nan where the backend counts none"),
    Scalar(
        "grad_norm",
        "gradient norm of all parameters, before clipping; nan where it could not be read",
        (
            Figure(
                "gss_max",
                highest_spike_score,
                after="trigger_bytes",
                row=Row("global spike score, highest", after="peak_saved_bytes"),
            ),
        ),
    ),
    Scalar(
        "recovery_bytes",
        "ΔM of the step: bytes that the recovery path added",
        (Figure("peak_recovery_bytes", peak_or_zero, after="gss_max", row=Row("ΔM, peak bytes", after="mean_dwell")),),
    ),
    Scalar(
        "first_not_finite",
        "the first unit whose own forward gave values that are not finite; nan where none did or it is unknown",
    ),
    Scalar("alpha", "threshold α in force; nan on lines that do not count"),
    Scalar("beta", "threshold β in force; nan on lines that do not count, and where Δ-GNMR is off"),
    Scalar(
        "update_withheld",
        "whether the optimizer update was withheld",
        (Figure("withheld_updates", number_true, after="non_finite_steps"),),
        attribute="withheld",
        dtype=bool,
    ),
    Scalar("step_ms", "duration of the step, in ms", (Figure("step_ms", mean, after="bytes_recovery"),)),
    Scalar(
        "controller_ms",
        "time spent in the controller, in ms",
        (Figure("controller_ms", mean, after="step_ms", row=Row("controller, ms a step", after="gss_max")),),
    ),
)
"""An entry's figures follow keys of the hand-written summary or of the entries above it."""


def placed(base: Mapping[str, T], additions: Iterable[tuple[str, T, str | None]]) -> dict[str, T]:
    """`base` with further items, each (key, value, the key that it follows; None: at the end).

    Raises:
        ValueError: a key that exists already, or one to follow that does not.
    """
    items = list(base.items())
    for key, value, after in additions:
        keys = [name for name, _ in items]
        if key in keys:
            raise ValueError(f"key {key!r}: exists already")
        if after is not None and after not in keys:
            raise ValueError(f"key {key!r} with after={after!r}: expected one of {', '.join(keys)}")
        items.insert(len(items) if after is None else keys.index(after) + 1, (key, value))
    return dict(items)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
