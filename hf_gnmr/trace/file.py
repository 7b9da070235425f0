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
from typing import Any

from ..files import FileError, free_number, numbered, partial_name, plain, printable, regular, replaceable
from ..reading import MAX_TRACE_BYTES, MAX_TRACE_LINE_BYTES, lines_of, open_regular, parse_json
from ..terminal import shown
from .appended import Appended
from .continued import cut_after, same_run
from .lock import hold, release, renew

SCHEMA = 1
START = b'{"schema"'
"""How every trace begins."""


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
    """Appends to one trace file, which no other process may write at the same time.

    Args:
        path: the file. An existing one is never overwritten: it is renamed to ``trace.1.jsonl`` and so on, unless
            `resume_after` is given.
        beside: files that belong to the trace: they are renamed with it, to the same number.
        header: the header's fields (without `schema`).
        resume_after: continue the file after this step; lines of later steps, which the resumed run repeats, are moved to
            ``trace.after-step-N.jsonl``. None, or a file of another run: a new trace.

    Raises:
        SetupError: another process writes this trace.
        FileError: `path` is something other than a regular file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: dict[str, Any],
        resume_after: int | None = None,
        beside: tuple[Path, ...] = (),
    ) -> None:
        regular(path)
        self.path = Path(path)
        self.number: int | None = None
        """The trace had to be continued in ``trace.N.jsonl``, with this N; None: it is in `path`."""
        self.notice: str | None = None
        """What was done to the file by others and what became of the trace, once after it was noticed."""
        self._beside = beside
        self.set_aside: Path | None = None
        """File that holds an earlier trace, or the lines removed from it; None: there were none."""
        self.continued = False
        """Whether an earlier trace is continued."""
        self.missing = 0
        """Steps up to `resume_after` without a line in the earlier trace."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._header = line_of({"schema": SCHEMA, **header})
        self._lock: Path | None = hold(self.path)
        try:
            self._open(header, resume_after)
        except BaseException:
            self._release()
            raise

    def _open(self, header: dict[str, Any], resume_after: int | None) -> None:
        if resume_after is not None and same_run(self.path, header):
            self.set_aside, last = cut_after(self.path, resume_after)
            self.continued, self.missing = True, resume_after - last
            self._file = Appended(regular(self.path), new=False)
            self._header = next(self._file.lines())
            return
        earlier = [file for file in (self.path, *self._beside) if file.is_file()]  # never a device or a folder
        number = free_number(self.path, *self._beside)
        for file in earlier:
            os.replace(file, numbered(file, number))
        if self.path in earlier:
            self.set_aside = numbered(self.path, number)
        self._file = Appended(regular(self.path), new=True)
        self.write({"schema": SCHEMA, **header})

    def write(self, record: dict[str, Any]) -> None:
        """Append one line and flush it to the operating system; `notice` reports a file that others changed before."""
        fault = self._file.fault()
        if fault is not None:
            self.notice = self._recover(fault)
        self._file.write(line_of(record))

    def _recover(self, fault: str) -> str:
        """Continue in a file with a name and a header, with all steps that can still be read; returns what happened."""
        original, aside = self._file.path, None  # behind any link
        partial = partial_name(original)
        original.parent.mkdir(parents=True, exist_ok=True)
        steps = 0
        try:
            with partial.open("wb") as copy:
                copy.write(self._header)
                for number, line in self._file.own_lines():
                    if number:
                        copy.write(line)
                        steps += 1
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self._file.close()
        if self._lock is not None:
            renew(self._lock, original)
        if fault == "truncated":  # nobody's name is free: what is left of the file keeps all that is in it
            aside = numbered(original, free_number(original, *self._beside))
            os.replace(regular(original), aside)
        elif fault == "replaced":
            self.number = free_number(original, *self._beside)
            self.path = numbered(original, self.number)
        target = self.path if fault == "replaced" else original
        os.replace(partial, target)
        self._file = Appended(target, new=False)
        return {
            "deleted": f"{original} was deleted or moved away during the run: it was written again, with {steps} steps",
            "replaced": f"{original} was replaced by another file during the run, which is left as it is: the trace "
            f"continues in {self.path}, with all {steps} steps so far",
            "truncated": f"{original} was truncated or overwritten during the run: it continues with the {steps} steps "
            f"that can still be read, and what was found is in {aside}",
        }[fault]

    def close(self) -> None:
        """Close the file, once more written again if others changed it (`notice`); may be called more than once."""
        try:
            fault = None if self._lock is None else self._file.fault(thorough=True)
            if fault is not None:
                self.notice = self._recover(fault)
        finally:
            self._file.close()
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            release(self._lock)
            self._lock = None


class TraceLines:
    """A trace's header, and its lines one at a time; floats are read back exactly, "inf" and "nan" stay strings.

    Raises:
        TraceError: no such file, no header, another schema; and, while lines are read, a broken one other than the last.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TraceError(f"path={shown(path)}: expected a path")
        self.path = Path(path)
        self.cut = False
        """The last line was incomplete and was left out (known once all lines are read)."""
        try:
            os.stat(self.path)
        except ValueError as error:  # a name with NUL
            raise TraceError(f"path={shown(os.fspath(path))}: expected a path") from error
        except OSError as error:
            reason = "no such trace" if isinstance(error, FileNotFoundError) else error.strerror or error
            raise TraceError(f"{printable(os.fspath(path), 400)}: {reason}") from error
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


def line_of(record: dict[str, Any]) -> bytes:
    """A record as a line of a trace."""
    return (json.dumps(plain(record), allow_nan=False) + "\n").encode()


def refuse_place(path: str | os.PathLike[str], *, named: bool) -> None:
    """Refuse a place where no trace can be written, before anything is loaded.

    Args:
        path: where the trace is to be written.
        named: the user named this very file, so that a file other than a trace is refused; otherwise it is set aside.

    Raises:
        FileError: something other than a regular file, a name that ends in a separator, a file where a folder is needed, or
            (with `named`) a file that is no trace.
    """
    if named and (not os.fspath(path) or os.fspath(path).endswith(os.sep)):
        raise FileError(f"{os.fspath(path)!r} names no file: expected a file name")
    file = regular(path)
    existing = next(parent for parent in file.parents if os.path.lexists(parent))
    if not existing.is_dir():
        raise FileError(f"{path}: {existing} is not a folder")
    if named:
        replaceable(file, lambda beginning: START.startswith(beginning[: len(START)]), "a trace")


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
