"""A running job in the terminal: ``hf-gnmr report RUN --follow``.

Reads what has been added to the trace, twice a second.  On a terminal the last step is drawn in place: the units of highest
risk with a bar each.  Into a pipe or a file it is one line a step.
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

from ..files import printable
from .file import SCHEMA, TraceError, check_header, record_of

QUIET = 120.0
"""Seconds without a step after which that is said."""
ROWS = 12
"""Units that are drawn at the most."""


class Tail:
    """The records of a trace that grows; a new file under the same name is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._inode: int | None = None

    def new(self) -> Iterator[dict[str, Any]]:
        """Whole lines that have come since the last call.

        Raises:
            TraceError: a line that is no record.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._at:
                    self._inode, self._at = status.st_ino, 0
                file.seek(self._at)
                for line in file:
                    if not line.endswith(b"\n"):
                        return  # still being written
                    self._at += len(line)
                    yield record_of(line, str(self.path))
        except FileNotFoundError:
            return


def follow(run: Path, out: TextIO | None = None, *, every: float = 0.5, patience: float = math.inf) -> int:
    """Show a run until it ends (its summary is written, and nothing came since) or Ctrl-C.

    Args:
        run: folder of the run, which may not be there yet, or its trace.
        out: where to; None: standard output.
        every: seconds between looks.
        patience: seconds without a new line after which to stop.

    Returns:
        the exit status.

    Raises:
        TraceError: a file that is no trace.
    """
    out = sys.stdout if out is None else out
    path = run if run.suffix == ".jsonl" else run / "trace.jsonl"
    in_place = out.isatty()
    tail, header, drawn, quiet, told = Tail(path), None, 0, time.monotonic(), False
    lines: list[str] = []
    if not path.parent.parent.is_dir():
        raise TraceError(f"{path.parent.parent}: no such folder")
    if not path.exists():
        print(f"waiting for {path}", file=out, flush=True)
    try:
        while True:
            latest = None
            for record in tail.new():
                if "schema" in record:
                    if record["schema"] != SCHEMA:
                        raise TraceError(f"{path}: schema {record['schema']!r}, {SCHEMA} can be read")
                    check_header(record, path)
                    header, drawn = record, 0
                    continue
                if header is None:
                    raise TraceError(f"{path}: no header; is this a GNMR trace?")
                latest = record
                try:
                    lines = panel(header, record, shutil.get_terminal_size().columns)
                    line = line_of(header, record)
                except (KeyError, TypeError, ValueError, IndexError) as error:
                    raise TraceError(f"{path}, step {record.get('step')!r}: not a step's line ({error})") from error
                if not in_place:
                    print(line, file=out, flush=True)
            if latest is not None:
                quiet, told = time.monotonic(), False
                if in_place:
                    # Up over what was drawn last, and clear to the end of the screen.
                    print(f"\x1b[{drawn}F\x1b[J" if drawn else "", end="", file=out)
                    print("\n".join(lines), file=out, flush=True)
                    drawn = len(lines)
            elif _ended(path) or time.monotonic() - quiet > patience:
                return 0
            elif time.monotonic() - quiet > QUIET and not told and path.exists():
                told = True
                text = f"no new step for {QUIET:.0f} s: a long one, or the run is gone (Ctrl-C ends this)"
                print(text, file=out, flush=True)
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
    """One step as a table of the units of highest risk, at most `width` columns."""
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
