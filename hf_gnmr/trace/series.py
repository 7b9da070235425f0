"""A trace as arrays: the input of figures, replays and pages.

Lines are read one at a time, so a trace of 100,000 steps takes the memory of its numbers and not of its text.  S is the
number of lines, U the number of units.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..control.controller import Bools, Floats
from ..reading import inside
from ..terminal import printable, shown
from . import fields
from .file import Trace, TraceError, TraceLines, check_header

VECTORS = ("norms", "gnmr", "delta_gnmr", "risk", "signal")
"""Fields of a line with one float a unit."""
SETS = ("triggered", "active")
"""Fields of a line with a list of unit indices."""
MOST_STEPS = 2**50
"""Step numbers stay below it, so that a figure's columns are computed in int64."""


@dataclass
class Series:
    """The lines of a trace.

    Floats are nan where a line has none.  The scalar fields of a line (`fields.SCALARS`) are attributes too: `series.step`,
    int64, `series.loss`, float64, `series.withheld`, bool, and so on, each (S,).
    """

    path: Path
    header: dict[str, Any]
    columns: dict[str, np.ndarray]
    """The scalar fields by attribute name, (S,) each."""
    counted: Bools
    """(S,): lines that were a step for the controller."""
    reasons: dict[int, str]
    """Why the other lines were not, by line."""
    loss_given: Bools
    """(S,): lines with a loss; `loss` is nan both where none was recorded and where it was nan."""
    norms: Floats
    """(S, U): unclipped; nan also where a unit had no gradient."""
    seen: Bools
    """(S, U): units that had a gradient."""
    gnmr: Floats
    delta_gnmr: Floats
    risk: Floats
    """(S, U): nan on lines that do not count, and (except `risk`, which is 0) for units that were not seen."""
    triggered: Bools
    """(S, U): units that triggered at the end of the step."""
    active: Bools
    """(S, U): units on the recovery path *during* the step.  `Decision.active` is the set for the *next* step: the decision
    at the end of line i determines `active[i + 1]`."""
    signal: Floats
    """(S, U): what the trigger measured besides the norms; nan where it measured nothing."""
    cut: bool = False
    """The last line was incomplete and was left out."""
    problem: str | None = None
    """Why the rest of the file cannot be read."""

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.__dict__["columns"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    @property
    def recoverable(self) -> Bools:
        """(U,): units with both paths."""
        return np.array([unit["recoverable"] for unit in self.header["units"]], dtype=bool)

    @property
    def names(self) -> list[str]:
        """(U,): the units' names."""
        return [str(unit["name"]) for unit in self.header["units"]]

    @property
    def troubles(self) -> list[str]:
        """What is wrong with the trace and how it was handled, a sentence each."""
        sentences = []
        if self.problem is not None:
            sentences.append(f"only the first {len(self)} steps can be read: {self.problem}")
        if self.cut:
            sentences.append(
                "the last line is cut (the run was killed while writing it, or is still running); it is left out"
            )
        if not len(self):
            sentences.append("no step was recorded")
        gaps = np.flatnonzero(~self.adjacent)
        if len(gaps):
            missing = int((np.diff(self.step) - 1).sum())
            sentences.append(
                f"{missing} steps are missing, the first after step {self.step[gaps[0]]}; figures leave them blank"
            )
        return sentences

    def warn(self, label: str = "warning") -> None:
        """Print the troubles to standard error, a line each."""
        for trouble in self.troubles:
            print(f"{label}: {trouble}", file=sys.stderr)

    @property
    def adjacent(self) -> Bools:
        """(S - 1,): whether a line and the next are consecutive steps."""
        return np.diff(self.step) == 1

    def __len__(self) -> int:
        return len(self.step)


def read_series(path: str | os.PathLike[str], *, strict: bool = True) -> Series:
    """Read a trace as arrays.

    Args:
        path: the trace file, or the folder of a run.
        strict: raise for a broken line; otherwise return the lines before it, with `problem` set.

    Raises:
        TraceError: no trace, a foreign one, or (strict) a broken line.
    """
    file = Path(path)
    if file.is_dir():
        if not inside(file, "trace.jsonl"):
            raise TraceError(f"{file}: its trace.jsonl is a link to a file outside the folder; name the trace itself")
        file = file / "trace.jsonl"
    lines = TraceLines(file)
    collected = _Lines(lines.path, lines.header)
    problem = None
    try:
        for record in lines:
            collected.add(record)
    except TraceError as error:
        if strict:
            raise
        problem = str(error)
    series = collected.series()
    series.cut, series.problem = lines.cut, problem
    return series


def series_of(trace: Trace) -> Series:
    """A trace that is in memory, as arrays."""
    collected = _Lines(trace.path, trace.header)
    for record in trace.steps:
        collected.add(record)
    series = collected.series()
    series.cut = trace.cut
    return series


class _Lines:
    """Collects lines."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        check_header(header, path)
        _check_optional(header, path)
        self.path = path
        self.header = header
        self.scalars = fields.SCALARS
        names = (*(scalar.name for scalar in self.scalars), *VECTORS, *SETS, "seen", "loss_given")
        self.rows: dict[str, list[Any]] = {name: [] for name in names}
        self.reasons: dict[int, str] = {}
        self.count = len(header["units"])
        self._last = 0
        self._nothing = np.full(self.count, np.nan)

    def add(self, record: dict[str, Any]) -> None:
        line = len(self.rows["step"])
        try:
            row: dict[str, Any] = {scalar.name: _number(scalar.name, record.get(scalar.name)) for scalar in self.scalars}
            for name in VECTORS:
                row[name] = self._vector(name, record.get(name))
            row["seen"] = np.array([value is not None for value in record["norms"]], dtype=bool)
            row["loss_given"] = record["loss"] is not None
            for name in SETS:
                row[name] = self._set(name, record[name])
            first = record.get("first_not_finite")
            if first is not None and not (type(first) is int and 0 <= first < self.count):
                raise ValueError(f"first_not_finite={first!r}: expected a unit index from 0 to {self.count - 1}")
            reason, step = record["skipped"], record["step"]
            if isinstance(step, bool) or not self._last < step < MOST_STEPS:
                raise ValueError(f"step={shown(step)}: expected a step after step {self._last}")
            if (row["norms"] < 0).any():
                raise ValueError("a norm is negative")
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            why = f"{type(error).__name__}: {printable(str(error), 400)}"
            raise TraceError(f"{self.path}, step {shown(record.get('step'))}: not a step's line ({why})") from error
        for name, value in row.items():  # only now, so that a broken line leaves nothing behind
            self.rows[name].append(value)
        self._last = step
        if reason is not None:
            self.reasons[line] = str(reason)

    def _set(self, name: str, members: Any) -> Bools:
        if not isinstance(members, list) or not all(type(i) is int and 0 <= i < self.count for i in members):
            raise ValueError(f"{name}={shown(members)}: expected a list of unit indices from 0 to {self.count - 1}")
        mask = np.zeros(self.count, dtype=bool)
        mask[members] = True
        return mask

    def _vector(self, name: str, values: Any) -> Floats:
        if values is None:
            return self._nothing
        try:
            vector = np.array(values, dtype=np.float64)  # None becomes nan; "inf" and "nan" are parsed
        except (TypeError, ValueError):
            raise ValueError(f"{name}={shown(values)}: expected {self.count} numbers, one a unit") from None
        if vector.shape != (self.count,):
            raise ValueError(f"{name}: expected {self.count} values, one a unit, got shape {vector.shape}")
        return vector

    def series(self) -> Series:
        size = len(self.rows["step"])
        columns = {scalar.column: scalar.convert(np.array(self.rows[scalar.name], dtype=float)) for scalar in self.scalars}
        by_unit: dict[str, Any] = {name: np.array(self.rows[name], dtype=float) for name in VECTORS}
        by_unit |= {name: np.array(self.rows[name], dtype=bool) for name in (*SETS, "seen")}
        counted = np.ones(size, dtype=bool)
        counted[list(self.reasons)] = False
        return Series(
            self.path,
            self.header,
            columns,
            counted=counted,
            reasons=self.reasons,
            loss_given=np.array(self.rows["loss_given"], dtype=bool),
            **{name: values.reshape(size, self.count) for name, values in by_unit.items()},
        )


CENSUS_NUMBERS = ("recovery_bytes_bound", "resident_bytes", "trigger_bytes")


def _check_optional(header: dict[str, Any], path: Path) -> None:
    """Check what a header need not have, but figures are computed from where it has it.

    Raises:
        TraceError: naming file, key and value.
    """
    options = header.get("trigger_options", {})
    if not isinstance(options, dict):
        raise TraceError(f"{path}: the header has trigger_options={shown(options)}: expected a mapping")
    numbers = {f"census.{key}": header["census"][key] for key in CENSUS_NUMBERS if key in header["census"]}
    numbers |= {
        f"units.{i}.bytes_added": unit["bytes_added"] for i, unit in enumerate(header["units"]) if "bytes_added" in unit
    }
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -(2**62) < value < 2**62:
            raise TraceError(f"{path}: the header has {name}={shown(value)}: expected a number of bytes")


def _number(name: str, value: Any) -> float:
    try:
        return np.nan if value is None else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={shown(value)}: expected a number") from None


def run_lengths(active: Bools, adjacent: Bools) -> Iterable[tuple[int, int, int]]:
    """Runs of consecutive steps in which a unit is in a set: (unit, first line, length), unit by unit.

    Args:
        active: (S, U).
        adjacent: (S - 1,): whether a line and the next are consecutive steps; a run ends where they are not.
    """
    if len(active) == 0:
        return
    joined = np.concatenate([[False], adjacent])
    before = np.vstack([np.zeros((1, active.shape[1]), dtype=bool), active[:-1]]) & joined[:, None]
    starts = active & ~before
    after = np.vstack([active[1:] & adjacent[:, None], np.zeros((1, active.shape[1]), dtype=bool)])
    ends = active & ~after
    for unit in range(active.shape[1]):
        first, last = np.flatnonzero(starts[:, unit]), np.flatnonzero(ends[:, unit])
        for a, b in zip(first.tolist(), last.tolist(), strict=True):
            yield unit, a, b - a + 1
