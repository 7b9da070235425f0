"""The trace of a run that is resumed: whether it is this run's, and the lines that the resumed run repeats."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from ..files import free_name, partial_name, plain, regular
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
        FileError: something other than a regular file, or a file above the limits of `reading`.
    """
    path = regular(path)
    with open_regular(path, MAX_TRACE_BYTES) as file:
        end, last = _end_of(file, step)
        if end == os.fstat(file.fileno()).st_size:
            return None, last
        aside = path.with_name(f"{path.stem}.after-step-{step}{path.suffix}")
        if os.path.lexists(aside):
            aside = free_name(aside)
        partial = partial_name(path)
        try:
            file.seek(end)
            with aside.open("xb") as rest:
                shutil.copyfileobj(file, rest)
            file.seek(0)
            with partial.open("wb") as kept:
                shutil.copyfileobj(file, kept)
                kept.truncate(end)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return aside, last


def _end_of(file: BinaryIO, step: int) -> tuple[int, int]:
    """Where the lines up to `step` end, in bytes, and the step of the last of them."""
    end = last = 0
    for number in range(MAX_TRACE_BYTES):
        line = file.readline(MAX_TRACE_LINE_BYTES + 1)
        try:
            record = json.loads(line)
            if not line.endswith(b"\n") or (number and record["step"] > step):
                break
            last = record.get("step", 0)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            break
        end += len(line)
    return end, last
