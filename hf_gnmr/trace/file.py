"""The trace of a run: a header line, then one JSON line per step, flushed as it is written.

Whatever happens to the process, the lines of finished steps are on file; at worst the last line is cut, which reading
reports.  Values that are not finite are the strings "inf", "-inf" and "nan", so every line is plain JSON.

A step's line holds its scalar fields (`fields.SCALARS`), one float per unit for each of `series.VECTORS` (null where it has
none), `skipped` (why the controller did not count the step, or null), and two lists of unit indices: `triggered`,
the units that triggered at the end of the step, and `active`, the units on the recovery path *during* the step.  What
`controller.Decision` calls `active` is the set for the *next* step: it is `active` of the line that follows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..files import FileError, free_name, partial_name, plain, printable
from ..reading import MAX_TRACE_BYTES, MAX_TRACE_LINE_BYTES, lines_of, open_regular, parse_json
from ..terminal import shown

SCHEMA = 1


class TraceError(FileError):
    """A trace that is missing, foreign or broken; the message names file and line."""


@dataclass
class Trace:
    """A trace as read from its file."""

    path: Path
    header: dict[str, Any]
    steps: list[dict[str, Any]]
    cut: bool
    """The last line was incomplete and was left out."""


class TraceWriter:
    """Appends to one trace file.

    Args:
        path: the file. An existing one is never overwritten: it is renamed to ``trace.1.jsonl`` and so on, unless
            `resume_after` is given.
        header: the header's fields (without `schema`).
        resume_after: continue the file after this step; lines of later steps, which the resumed run repeats, are moved to
            ``trace.after-step-N.jsonl``. None, or a file of another run: a new trace.
    """

    def __init__(self, path: str | os.PathLike[str], header: dict[str, Any], resume_after: int | None = None) -> None:
        self.path = Path(path)
        self.set_aside: Path | None = None
        """File that holds an earlier trace, or the lines removed from it; None: there were none."""
        self.continued = False
        """Whether an earlier trace is continued."""
        self.missing = 0
        """Steps up to `resume_after` without a line in the earlier trace."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_after is not None and _same_run(self.path, header):
            self.set_aside, last = _cut_after(self.path, resume_after)
            self.continued, self.missing = True, resume_after - last
            self._file: IO[str] = self.path.open("a", encoding="utf-8")
            return
        if self.path.exists():
            self.set_aside = free_name(self.path)
            os.replace(self.path, self.set_aside)
        self._file = self.path.open("w", encoding="utf-8")
        self.write({"schema": SCHEMA, **header})

    def write(self, record: dict[str, Any]) -> None:
        """Append one line and flush it to the operating system."""
        self._file.write(json.dumps(plain(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called more than once."""
        self._file.close()


class TraceLines:
    """A trace's header, and its lines one at a time; floats are read back exactly, "inf" and "nan" stay strings.

    Raises:
        TraceError: no such file, no header, another schema; and, while lines are read, a broken one other than the last.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.cut = False
        """The last line was incomplete and was left out (known once all lines are read)."""
        if not self.path.is_file():
            raise TraceError(f"{self.path}: no such trace")
        first = next(self._lines(), b"")
        if not first.endswith(b"\n"):
            raise TraceError(f"{self.path}: empty or cut within its header, no step can be read")
        self.header = record_of(first, f"{self.path}, line 1")
        if self.header.get("schema") != SCHEMA:
            raise TraceError(
                f"{self.path}: schema {shown(self.header.get('schema'))}, expected {SCHEMA}; is this a GNMR trace?"
            )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(self._lines(), start=1):
            if number == 1:
                continue
            if not line.endswith(b"\n"):
                self.cut = True
                return
            record = record_of(line, f"{self.path}, line {number}")
            if not isinstance(record.get("step"), int):
                raise TraceError(f"{self.path}, line {number}: no step number")
            yield record

    def _lines(self) -> Iterator[bytes]:
        try:
            with open_regular(self.path, MAX_TRACE_BYTES) as file:
                yield from lines_of(file, self.path, MAX_TRACE_LINE_BYTES)
        except FileError as error:
            raise TraceError(str(error)) from error


def record_of(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line of a trace.

    Raises:
        TraceError: not a JSON object; the message begins with `where`.
    """
    try:
        record = parse_json(line, where)
    except FileError as error:
        raise TraceError(str(error)) from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: not an object")
    return record


def check_header(header: dict[str, Any], path: Path) -> None:
    """Check that a header has what figures are computed from; makes the units' names printable.

    Raises:
        TraceError: naming file, key and value.
    """
    units = header.get("units")
    if not isinstance(units, list) or not units or not all(isinstance(unit, dict) for unit in units):
        raise TraceError(f"{path}: the header has no list of units")
    expected = {"name": str, "layer": int, "recoverable": bool, "bytes_low": int, "bytes_recovery": int}
    for number, unit in enumerate(units):
        for key, kind in expected.items():
            if not isinstance(unit.get(key), kind) or (kind is int and not -(2**62) < unit[key] < 2**62):
                raise TraceError(f"{path}: unit {number} of the header has {key}={shown(unit.get(key))}")
        unit["name"] = printable(unit["name"])
    for key, kinds in HEADER.items():
        value = header.get(key)
        if not isinstance(value, kinds) or isinstance(value, bool) or (isinstance(value, int) and not 0 <= value < 2**62):
            raise TraceError(f"{path}: the header has {key}={shown(header.get(key))}")


HEADER: dict[str, Any] = {
    "config": dict,
    "max_o": int,
    "trigger": str,
    "backend": str,
    "census": dict,
    "total_steps": (int, type(None)),
}
"""Required fields of a header, and their types."""


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a whole trace, one dictionary per line.

    Raises:
        TraceError: see `TraceLines`.
    """
    lines = TraceLines(path)
    steps = list(lines)
    return Trace(lines.path, lines.header, steps, lines.cut)


def _same_run(path: Path, header: dict[str, Any]) -> bool:
    """Whether `path` is the trace of the same run, with the same units under the same settings."""
    try:
        with path.open(encoding="utf-8") as file:
            old = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    names = ("run_id", "units", "config", "max_o", "trigger", "backend")
    return isinstance(old, dict) and all(old.get(name) == plain(header[name]) for name in names)


def _cut_after(path: Path, step: int) -> tuple[Path | None, int]:
    """Keep the header and the lines up to `step`; move the rest, including a broken tail, to a separate file.

    Returns:
        that file (None: no lines were moved), and the step of the last line that was kept (0: none).
    """
    lines = path.read_bytes().split(b"\n")
    lines = [*(line + b"\n" for line in lines[:-1]), *filter(None, lines[-1:])]
    kept: list[bytes] = []
    last = 0
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
            keep = line.endswith(b"\n") and (number == 0 or record["step"] <= step)
        except (ValueError, KeyError, TypeError):
            keep = False
        if not keep:
            break
        kept.append(line)
        last = record.get("step", 0)
    rest = lines[len(kept) :]
    if not rest:
        return None, last
    aside = path.with_name(f"{path.stem}.after-step-{step}{path.suffix}")
    if aside.exists():
        aside = free_name(aside)
    partial = partial_name(path)
    partial.write_bytes(b"".join(kept))
    aside.write_bytes(b"".join(rest))
    os.replace(partial, path)
    return aside, last
