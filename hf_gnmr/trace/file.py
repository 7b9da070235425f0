"""The trace of a run: a header line, then one JSON line a step, flushed as it is written.

Whatever happens to the process, the lines of finished steps are on file; at worst the last line is cut, and reading
says so.  Values that are not finite are the strings "inf", "-inf" and "nan", so every line is plain JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..files import FileError, free_name, partial_name, plain, printable

SCHEMA = 1


class TraceError(FileError):
    """A trace that is missing, foreign or broken; the message names file and line."""


@dataclass
class Trace:
    """A trace as read."""

    path: Path
    header: dict[str, Any]
    steps: list[dict[str, Any]]
    cut: bool
    """The last line was not complete and was left out."""


class TraceWriter:
    """Appends to one trace file.

    Args:
        path: the file. One that exists is never overwritten: it is moved to ``trace.1.jsonl`` and so on, unless
            `resume_after` is given.
        header: the header's fields (without `schema`).
        resume_after: continue the file after this step; lines of later steps, which the resumed run takes again, are set
            aside in ``trace.after-step-N.jsonl``. None, or a file of another run: a new trace.
    """

    def __init__(self, path: str | os.PathLike[str], header: dict[str, Any], resume_after: int | None = None) -> None:
        self.path = Path(path)
        self.set_aside: Path | None = None
        """Where lines that stood in the way went."""
        self.continued = False
        """Whether an earlier trace goes on."""
        self.missing = 0
        """Steps up to `resume_after` that the earlier trace has no lines of."""
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
        """Append one line and hand it to the operating system."""
        self._file.write(json.dumps(plain(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


class TraceLines:
    """A trace's header, and its lines one at a time; floats come back exactly, "inf" and "nan" strings stay strings.

    Raises:
        TraceError: no such file, no header, a foreign schema; and, while lines are read, a broken one other than the last.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.cut = False
        """The last line was not complete and was left out (known once all lines are read)."""
        if not self.path.is_file():
            raise TraceError(f"{self.path}: no such trace")
        with self.path.open("rb") as file:
            first = file.readline()
        if not first.endswith(b"\n"):
            raise TraceError(f"{self.path}: empty or cut within its header, no step can be read")
        self.header = record_of(first, f"{self.path}, line 1")
        if self.header.get("schema") != SCHEMA:
            raise TraceError(
                f"{self.path}: schema {self.header.get('schema')!r}, {SCHEMA} can be read; is this a GNMR trace?"
            )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.path.open("rb") as file:
            file.readline()
            for number, line in enumerate(file, start=2):
                if not line.endswith(b"\n"):
                    self.cut = True
                    return
                record = record_of(line, f"{self.path}, line {number}")
                if not isinstance(record.get("step"), int):
                    raise TraceError(f"{self.path}, line {number}: no step number")
                yield record


def record_of(line: bytes, where: str) -> dict[str, Any]:
    """A line of a trace.

    Raises:
        TraceError: it is no JSON object; `where` is named.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: not an object")
    return record


def check_header(header: dict[str, Any], path: Path) -> None:
    """Raise TraceError for a header that lacks what figures are worked out from."""
    units = header.get("units")
    if not isinstance(units, list) or not units or not all(isinstance(unit, dict) for unit in units):
        raise TraceError(f"{path}: the header has no list of units")
    wanted = {"name": str, "layer": int, "recoverable": bool, "bytes_low": int, "bytes_recovery": int}
    for number, unit in enumerate(units):
        for key, kind in wanted.items():
            if not isinstance(unit.get(key), kind):
                raise TraceError(f"{path}: unit {number} of the header has {key}={unit.get(key)!r}")
        unit["name"] = printable(unit["name"])
    for key, kinds in HEADER.items():
        if not isinstance(header.get(key), kinds) or isinstance(header.get(key), bool):
            raise TraceError(f"{path}: the header has {key}={header.get(key)!r}")


HEADER: dict[str, Any] = {
    "config": dict,
    "max_o": int,
    "trigger": str,
    "backend": str,
    "census": dict,
    "total_steps": (int, type(None)),
}
"""What a header holds, and of what type."""


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a whole trace back, a dictionary a line.

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
    """Keep the header and the lines up to `step`; move the rest, a broken tail included, to a file of its own.

    Returns:
        that file (None: there was no rest), and the step of the last line that was kept (0: none).
    """
    lines = path.read_bytes().splitlines(keepends=True)
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
