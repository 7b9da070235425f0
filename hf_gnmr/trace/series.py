"""A trace as arrays: what figures, replays and pages are worked out from.

Lines are read one at a time, so that a trace of 100,000 steps takes the memory of its numbers and not of its text.  S is the
number of lines, U that of units.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..control.controller import Bools, Floats
from .file import Trace, TraceError, TraceLines, check_header

SCALARS = (
    "step",
    "loss",
    "grad_norm",
    "alpha",
    "beta",
    "step_ms",
    "controller_ms",
    "recovery_bytes",
    "saved_bytes",
    "saved_tokens",
    "update_withheld",
)
VECTORS = ("norms", "gnmr", "delta_gnmr", "risk", "signal")
SETS = ("triggered", "active")


@dataclass
class Series:
    """The lines of a trace. Floats are nan where a line has none."""

    path: Path
    header: dict[str, Any]
    step: np.ndarray
    """int64, (S,): optimizer steps, from 1; where lines are missing there are gaps."""
    counted: Bools
    """(S,): lines that were a step for the controller."""
    reasons: dict[int, str]
    """Why others were not, by line."""
    loss: Floats
    """(S,); where none was recorded nan, as where it was nan: see `loss_given`."""
    loss_given: Bools
    grad_norm: Floats
    """(S,): total, unclipped."""
    norms: Floats
    """(S, U): unclipped; nan also where a unit had no gradient."""
    seen: Bools
    """(S, U): units that had a gradient."""
    gnmr: Floats
    delta_gnmr: Floats
    risk: Floats
    """(S, U): nan on lines that do not count, and (but for `risk`, which is 0) of units that were not seen."""
    alpha: Floats
    beta: Floats
    """(S,): thresholds in force; nan where Δ-GNMR is off."""
    triggered: Bools
    active: Bools
    """(S, U): units that triggered at the end of the step, and units on the recovery path during it."""
    withheld: Bools
    step_ms: Floats
    controller_ms: Floats
    recovery_bytes: Floats
    saved_bytes: Floats
    saved_tokens: Floats
    """(S,); the last two nan where the backend counts none."""
    signal: Floats
    """(S, U): what the trigger measured beside the norms; nan where nothing."""
    cut: bool = False
    """The last line was not complete and was left out."""
    problem: str | None = None
    """What stands in the way of the rest of the file."""

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
        """What is wrong with the trace, in words, and what was done about it."""
        told = []
        if self.problem is not None:
            told.append(f"only the first {len(self)} steps can be read: {self.problem}")
        if self.cut:
            told.append("the last line is cut (the run was killed while it wrote, or still runs); it is left out")
        if not len(self):
            told.append("no step was recorded")
        gaps = np.flatnonzero(~self.adjacent)
        if len(gaps):
            missing = int((np.diff(self.step) - 1).sum())
            told.append(f"{missing} steps are missing, the first after step {self.step[gaps[0]]}; figures leave them blank")
        return told

    def warn(self, label: str = "warning") -> None:
        """Tell the troubles on standard error, a line each."""
        for trouble in self.troubles:
            print(f"{label}: {trouble}", file=sys.stderr)

    @property
    def adjacent(self) -> Bools:
        """(S - 1,): whether a line and the next are consecutive steps."""
        return np.diff(self.step) == 1

    def __len__(self) -> int:
        return len(self.step)


def read_series(path: str | os.PathLike[str], *, strict: bool = True) -> Series:
    """A trace as arrays.

    Args:
        path: the trace file, or the folder of a run.
        strict: refuse a file with a broken line; else what stands before it is given, and `problem` says what is wrong.

    Raises:
        TraceError: no trace, a foreign one, or (strict) a broken line.
    """
    file = Path(path)
    lines = TraceLines(file / "trace.jsonl" if file.is_dir() else file)
    found = _Lines(lines.path, lines.header)
    problem = None
    try:
        for record in lines:
            found.add(record)
    except TraceError as error:
        if strict:
            raise
        problem = str(error)
    series = found.series()
    series.cut, series.problem = lines.cut, problem
    return series


def series_of(trace: Trace) -> Series:
    """A trace that is in memory, as arrays."""
    found = _Lines(trace.path, trace.header)
    for record in trace.steps:
        found.add(record)
    series = found.series()
    series.cut = trace.cut
    return series


@dataclass
class _Lines:
    """Collects lines."""

    path: Path
    header: dict[str, Any]
    rows: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in (*SCALARS, *VECTORS, *SETS, "seen", "loss_given")}
    )
    reasons: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_header(self.header, self.path)
        self.count = len(self.header["units"])
        self._last = 0
        self._nothing = np.full(self.count, np.nan)

    def add(self, record: dict[str, Any]) -> None:
        number = len(self.rows["step"])
        try:
            row: dict[str, Any] = {name: _number(record.get(name)) for name in SCALARS}
            for name in VECTORS:
                row[name] = self._vector(record.get(name))
            row["seen"] = np.array([value is not None for value in record["norms"]], dtype=bool)
            row["loss_given"] = record["loss"] is not None
            for name in SETS:
                row[name] = self._set(name, record[name])
            reason, step = record["skipped"], record["step"]
            if isinstance(step, bool) or not self._last < step < 2**62:
                raise ValueError(f"it comes after step {self._last}")
            if (row["norms"] < 0).any():
                raise ValueError("a norm is negative")
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise TraceError(
                f"{self.path}, step {record.get('step')!r}: not a step's line ({type(error).__name__}: {error})"
            ) from error
        for name, value in row.items():  # only now: a broken line leaves nothing behind
            self.rows[name].append(value)
        self._last = step
        if reason is not None:
            self.reasons[number] = str(reason)

    def _set(self, name: str, members: Any) -> Bools:
        whole = isinstance(members, list) and all(type(i) is int and 0 <= i < self.count for i in members)
        if not whole:
            raise ValueError(f"{name}={members!r} is no list of units")
        found = np.zeros(self.count, dtype=bool)
        found[members] = True
        return found

    def _vector(self, values: Any) -> Floats:
        if values is None:
            return self._nothing
        found = np.array(values, dtype=np.float64)  # None becomes nan, "inf" and "nan" what they say
        if found.shape != (self.count,):
            raise ValueError(f"{found.shape} values for {self.count} units")
        return found

    def series(self) -> Series:
        numbers: dict[str, Any] = {name: np.array(self.rows[name], dtype=np.float64) for name in SCALARS}
        shape = (len(numbers["step"]), self.count)
        numbers |= {name: np.array(self.rows[name], dtype=np.float64).reshape(shape) for name in VECTORS}
        numbers |= {name: np.array(self.rows[name], dtype=bool).reshape(shape) for name in (*SETS, "seen")}
        numbers["loss_given"] = np.array(self.rows["loss_given"], dtype=bool)
        counted = np.ones(shape[0], dtype=bool)
        counted[list(self.reasons)] = False
        withheld = np.nan_to_num(numbers.pop("update_withheld")) > 0
        step = numbers.pop("step").astype(np.int64)
        return Series(self.path, self.header, step, counted=counted, reasons=self.reasons, withheld=withheld, **numbers)


def _number(value: Any) -> float:
    return np.nan if value is None else float(value)


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
