"""An earlier trace that a resumed run continues: whether it is the same run's, and where it is cut."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from ..files import FileError, free_name, partial_name, plain, regular
from ..reading import MAX_TRACE_BYTES, MAX_TRACE_LINE_BYTES, lines_of, open_regular, parse_json


def same_run(path: Path, header: dict[str, Any]) -> bool:
    """Whether `path` is the trace of the same run, with the same units under the same settings."""
    try:
        with open_regular(path, MAX_TRACE_BYTES) as file:
            old = parse_json(next(lines_of(file, path, MAX_TRACE_LINE_BYTES), b""), str(path))
    except (OSError, ValueError):
        return False
    names = ("run_id", "units", "config", "max_o", "trigger", "backend")
    return isinstance(old, dict) and all(old.get(name) == plain(header[name]) for name in names)


def cut_after(path: Path, step: int) -> tuple[Path | None, int]:
    """Keep the header and the lines up to `step`; move the rest, including a broken tail, to a separate file.

    Returns:
        that file (None: no lines were moved), and the step of the last line that was kept (0: none).

    Raises:
        FileError: a file beyond the limits of `reading`.
    """
    path = regular(path)
    last, kept = 0, 0
    with open_regular(path, MAX_TRACE_BYTES) as file:
        for number, line in enumerate(lines_of(file, path, MAX_TRACE_LINE_BYTES)):
            line_step = _kept_step(line, step, header=number == 0)
            if line_step is None:
                break
            last, kept = line_step, kept + len(line)
        if kept == os.fstat(file.fileno()).st_size:
            return None, last
        aside = path.with_name(f"{path.stem}.after-step-{step}{path.suffix}")
        if os.path.lexists(aside):
            aside = free_name(aside)
        partial = partial_name(path)
        file.seek(0)
        try:
            with partial.open("wb") as beginning:
                _copy(file, beginning, kept)
            with aside.open("xb") as rest:
                _copy(file, rest, None)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return aside, last


def _kept_step(line: bytes, step: int, *, header: bool) -> int | None:
    """The step of a line up to `step`, 0 of the header; None: a later line, a cut one, or none of a trace."""
    try:
        record = parse_json(line, "") if line.endswith(b"\n") else None
    except FileError:
        return None
    if not isinstance(record, dict):
        return None
    number = 0 if header else record.get("step")
    return number if type(number) is int and number <= step else None


def _copy(source: BinaryIO, target: BinaryIO, size: int | None) -> None:
    """Copy `size` bytes, or all that are left, a part at a time."""
    while size is None or size:
        part = source.read(2**20 if size is None else min(2**20, size))
        if not part:
            return
        target.write(part)
        size = None if size is None else size - len(part)
