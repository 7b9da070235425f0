"""A running job in the terminal: ``hf-gnmr report RUN --follow``.

Reads what is appended to the trace, twice a second.  On a terminal the last step is drawn in place: the units of highest
risk, with a bar each.  Into a pipe or a file it prints one line per step.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ..files import FileError, printable
from ..reading import MAX_TRACE_BYTES, MAX_TRACE_LINE_BYTES, lines_of, open_regular
from ..terminal import raw_stream, shown
from .file import SCHEMA, TraceError, check_header, record_of

QUIET = 120.0
"""Seconds without a step after which a note is printed."""
ROWS = 12
"""Most units that are drawn."""


class Tail:
    """The records of a growing trace; a new file under the same name is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._inode: int | None = None

    def new(self) -> Iterator[dict[str, Any]]:
        """Complete lines appended since the last call.

        Raises:
            TraceError: a line that is not a JSON object.
        """
        try:
            with open_regular(self.path, MAX_TRACE_BYTES) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._at:
                    self._inode, self._at = status.st_ino, 0
                file.seek(self._at)
                for line in lines_of(file, self.path, MAX_TRACE_LINE_BYTES):
                    if not line.endswith(b"\n"):
                        return  # still being written
                    self._at += len(line)
                    yield record_of(line, str(self.path))
        except TraceError:
            raise
        except FileError as error:
            if self.path.exists():
                raise TraceError(str(error)) from error


class Screen:
    """Where steps are shown: drawn in place on a terminal, else a line each."""

    def __init__(self, path: Path, out: TextIO) -> None:
        self.path = path
        self.out = out
        self.in_place = out.isatty()
        self.header: dict[str, Any] | None = None
        self._drawn = 0  # lines that the next drawing replaces

    def show(self, records: Iterator[dict[str, Any]]) -> bool:
        """Show some records of the trace; returns whether a step was among them.

        Raises:
            TraceError: no header, another schema, or a line that is not a step's.
        """
        lines: list[str] = []
        for record in records:
            if "schema" in record:
                if record["schema"] != SCHEMA:
                    raise TraceError(f"{self.path}: schema {shown(record['schema'])}, expected {SCHEMA}")
                check_header(record, self.path)
                self.header, self._drawn = record, 0
                continue
            if self.header is None:
                raise TraceError(f"{self.path}: no header; is this a GNMR trace?")
            try:
                lines = panel(self.header, record, shutil.get_terminal_size().columns)
                line = line_of(self.header, record)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise TraceError(
                    f"{self.path}, step {shown(record.get('step'))}: not a step's line ({printable(str(error))})"
                ) from error
            if not self.in_place:
                self.say(line)
        if lines and self.in_place:
            # Move up over the previous drawing, and clear to the end of the screen.
            print(f"\x1b[{self._drawn}F\x1b[J" if self._drawn else "", end="", file=raw_stream(self.out))
            self.say("\n".join(lines))
            self._drawn = len(lines)
        return bool(lines)

    def say(self, text: str) -> None:
        print(text, file=self.out, flush=True)


def follow(run: Path, out: TextIO | None = None, *, every: float = 0.5, patience: float = math.inf) -> int:
    """Show a run until it ends (its summary is written and no line follows) or Ctrl-C.

    Args:
        run: folder of the run, which need not exist yet, or its trace.
        out: where to print; None: standard output.
        every: seconds between reads.
        patience: seconds without a new line after which to stop.

    Returns:
        the exit status.

    Raises:
        TraceError: a file that is not a trace.
    """
    path = run if run.suffix == ".jsonl" else run / "trace.jsonl"
    if not path.parent.parent.is_dir():
        raise TraceError(f"{path.parent.parent}: no such folder")
    tail, screen = Tail(path), Screen(path, sys.stdout if out is None else out)
    if not path.exists():
        screen.say(f"waiting for {path}")
    last_step, noted = time.monotonic(), False
    try:
        while True:
            quiet = time.monotonic() - last_step
            if screen.show(tail.new()):
                last_step, noted = time.monotonic(), False
            elif _ended(path) or quiet > patience:
                return 0
            elif quiet > QUIET and not noted and path.exists():
                noted = True
                screen.say(f"no new step for {QUIET:.0f} s: a long one, or the run is gone (Ctrl-C to stop)")
            time.sleep(every)
    except KeyboardInterrupt:
        return 0


def _ended(path: Path) -> bool:
    """Whether a summary was written after the last line."""
    summary = path.with_name("summary.json")
    try:
        return summary.stat().st_mtime_ns >= path.stat().st_mtime_ns
    except OSError:
        return False


def line_of(header: dict[str, Any], record: dict[str, Any]) -> str:
    """One step as one line."""
    total = header.get("total_steps")
    parts = [f"step {record['step']}" + (f"/{total}" if total else ""), f"loss {_number(record['loss'])}"]
    if record["skipped"] is not None:
        return "  ".join([*parts, f"not counted: {printable(str(record['skipped']))}"])
    risk = [(-math.inf if r is None else float(r), i) for i, r in enumerate(record["risk"])]
    top, unit = max(risk)
    parts += [
        f"grad {_number(record['grad_norm'])}",
        f"lifted {len(record['active'])} (maxO {header['max_o']})",
        f"triggered {len(record['triggered'])}",
        f"highest R {top:.2f} ({header['units'][unit]['name']})",
    ]
    return "  ".join(parts)


def panel(header: dict[str, Any], record: dict[str, Any], width: int) -> list[str]:
    """One step as a table of the units of highest risk, at most `width` characters wide."""
    lines = [line_of(header, record)]
    if record["skipped"] is None:
        share = record["controller_ms"] / record["step_ms"] if record["step_ms"] else 0.0
        beta = "off" if record["beta"] is None else f"{record['beta']:g}"
        lines.append(
            f"{record['step_ms']:.0f} ms a step, controller {share:.2%}; α {record['alpha']:g}, β {beta}; * on the recovery "
            "path, ! triggered"
        )
        risk = [0.0 if r is None else float(r) for r in record["risk"]]
        order = sorted(range(len(risk)), key=lambda i: (-risk[i], i))[:ROWS]
        names = [header["units"][i]["name"] for i in order]
        size = max(map(len, names), default=0)
        room = max(4, width - size - 34)
        for i, name in zip(order, names, strict=True):
            marks = ("*" if i in record["active"] else " ") + ("!" if i in record["triggered"] else " ")
            bar = "█" * round(room * min(risk[i], 2.0) / 2.0)
            scores = f"GNMR {_number(record['gnmr'][i]):>6} Δ {_number(record['delta_gnmr'][i]):>6}"
            lines.append(f"{marks} {name:{size}} {scores} {bar}")
    return [line[:width] for line in lines]


def _number(value: Any) -> str:
    return "–" if value is None else f"{float(value):.3g}"
