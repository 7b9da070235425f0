"""What a run writes to disk: its trace, line by line, and at the end the summary computed from it.

Problems with these files are reported clearly and never stop the training.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.units import Unit
from ..control.controller import Bools, Decision, Floats
from ..control.triggers import TRIGGERS
from ..files import FileError, free_name, numbered, read_json, regular, write_json
from ..trace.file import TraceError, TraceWriter, read_trace
from ..trace.metrics import summarise
from .census import summary_in_words
from .reading import Reading
from .signals import SIGNALS

TRACE_FILE = "trace.jsonl"
SUMMARY_FILE = "summary.json"


class Journal:
    """The trace of a running training, on the process that writes the files.

    Args:
        path: the trace file; the summary is written next to it.
        header: the trace's header.
        resume_after: the last step before a resumed run continues; None: a new run.
    """

    def __init__(self, path: Path, header: dict[str, Any], resume_after: int | None) -> None:
        self.path = path
        self.summary = path.with_name(SUMMARY_FILE)
        """Where the run's summary goes."""
        self._ended = False
        """Whether a line could not be written: no further one is."""
        writer = self._writer = TraceWriter(path, header, resume_after, (self.summary,))
        if resume_after is not None and not writer.continued:
            say(f"resumed at step {resume_after}, but {path} is not (or no longer) the trace of this run: a new one begins")
        if writer.missing:
            say(f"{path} lacks the {writer.missing} steps before step {(resume_after or 0) + 1}")
        if writer.set_aside is not None:
            say(f"earlier trace lines were set aside in {writer.set_aside}")

    def step(
        self,
        *,
        step: int,
        reading: Reading,
        decision: Decision | None,
        active: Bools,
        micro_batches: int,
        skipped: str | None,
        withheld: bool,
        step_ms: float,
        controller_ms: float,
        recovery_bytes: int,
        more: dict[str, Any] | None = None,
    ) -> None:
        """Write one step's line.

        Args:
            step: the optimizer step, counted from 1.
            reading: its gradient norms.
            decision: what the controller decided after it; None if the step did not count for the controller.
            active: the units that were on the recovery path DURING this step. The decision's own `active` is the set for
                the NEXT step and appears in the next line.
            micro_batches: how many the step had.
            skipped: why the step did not count; None if it did.
            withheld: whether the optimizer's update was withheld.
            step_ms: duration of the step.
            controller_ms: the part of it spent on reading norms and deciding.
            recovery_bytes: what the active units added.
            more: the backend's own figures.
        """
        if self._ended:
            return
        # "active" is the set during this step; `decision.active` is the next step's set and appears in the next line.
        record = {
            "step": step,
            "loss": reading.loss,
            "grad_norm": reading.total_norm,
            "norms": _seen(reading.norms, reading.seen),
            "gnmr": _seen(decision.gnmr, decision.seen) if decision else None,
            "delta_gnmr": _seen(decision.delta_gnmr, decision.seen) if decision else None,
            "risk": decision.risk.tolist() if decision else None,
            "alpha": decision.alpha if decision else None,
            "beta": decision.beta if decision else None,
            "triggered": np.flatnonzero(decision.triggered).tolist() if decision else [],
            "active": np.flatnonzero(active).tolist(),
            "micro_batches": micro_batches,
            "skipped": skipped,
            "update_withheld": withheld,
            "step_ms": step_ms,
            "controller_ms": controller_ms,
            "recovery_bytes": recovery_bytes,
            **(more or {}),
        }
        if reading.signal is not None:
            record["signal"] = reading.signal.tolist()
        if reading.first_not_finite is not None:
            record["first_not_finite"] = reading.first_not_finite
        try:
            self._writer.write(record)
        except (OSError, FileError) as error:
            say(f"NO TRACE from step {step} on: cannot write {self.path} ({error})")
            warnings.warn(f"the trace ends before step {step}: {error}", stacklevel=2)
            self._ended = True
            return
        self._report(f"step {step}")

    def _report(self, when: str) -> None:
        """Report what others did to the trace, and follow it to the file in which it continues."""
        notice, self._writer.notice = self._writer.notice, None
        if notice is not None:
            say(f"{when}: {notice}")
            warnings.warn(notice, stacklevel=3)
            self.path = self._writer.path
            if self._writer.number is not None:  # beside the file that took the trace's place, under the trace's number
                self.summary = numbered(self.path.with_name(SUMMARY_FILE), self._writer.number)

    def close(self) -> None:
        """Close the trace; may be called twice."""
        try:
            self._writer.close()
        except (OSError, FileError) as error:
            say(f"the trace {self.path} was changed after the last step and cannot be written again ({error})")
        self._report("after the last step")


def _seen(values: Floats, seen: Bools) -> list[float | None]:
    """Values per unit; None for units without a gradient in this step."""
    return [value if was_seen else None for value, was_seen in zip(values.tolist(), seen.tolist(), strict=True)]


def write_summary(trace: Path, last_step: int, file: Path | None = None) -> dict[str, Any] | None:
    """Write and return the figures of a run that ended at `last_step`; None, with a warning, if its trace gives none.

    Args:
        trace: its trace.
        last_step: the run's last optimizer step.
        file: where the figures go; None: `summary.json` beside the trace.
    """
    try:
        read = read_trace(trace)
        summary = {**summarise(read, last_step), "run_id": read.header.get("run_id")}
        target = trace.with_name(SUMMARY_FILE) if file is None else file
        _set_aside_anothers(target, summary["run_id"])
        write_json(target, summary)
    except (TraceError, OSError, KeyError, TypeError, ValueError, IndexError) as error:
        warnings.warn(f"no {SUMMARY_FILE}: {type(error).__name__}: {error}", stacklevel=2)
        return None
    print(summary_in_words(summary), flush=True)
    return summary


def _set_aside_anothers(file: Path, run_id: Any) -> None:
    """Rename the summary of another run (two traces of other names in one folder share its name)."""
    if not file.is_file():
        return
    try:
        known = read_json(file).get("run_id", run_id)  # earlier versions wrote none
    except FileError:
        known = None
    if known != run_id:
        aside = free_name(file)
        os.replace(regular(file), aside)
        say(f"the summary of another run was set aside in {aside}")


class OddWindows:
    """Warns if none of the first accumulation windows was full: the controller would never decide.

    Args:
        accumulation: micro-batches in a full window.
    """

    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation
        self._lengths: list[int] | None = []

    def saw(self, micro_batches: int) -> None:
        """A window of `micro_batches` micro-batches ended."""
        if self._lengths is None or micro_batches == self.accumulation:
            self._lengths = None
            return
        self._lengths.append(micro_batches)
        if len(self._lengths) == 3:
            say(
                f"NO DECISION so far: the first windows had {', '.join(map(str, self._lengths))} micro-batches instead of "
                f"gradient_accumulation_steps={self.accumulation}. Set it to the real number per step"
            )


def say_not_finite(step: int, units: Sequence[Unit], reading: Reading, withheld: bool) -> None:
    """Report gradients that are not finite, an update that was withheld because of them, and a loss that is not finite."""

    def short(unit: Unit) -> str:
        return str(unit.layer) if unit.name.endswith(f".{unit.layer}") else unit.name

    bad = [units[i] for i in np.flatnonzero(~np.isfinite(reading.norms) & reading.seen).tolist()]
    update = "; the optimizer's update was withheld" if withheld else ""
    if bad or withheld:
        names = ", ".join(map(short, bad[:8])) + (", …" if len(bad) > 8 else "")
        place = f"in layer{'s' if len(bad) > 1 else ''} {names}" if bad else "outside the layers"
        if reading.total_norm is None:
            place = "(the step's last micro-batch had no backward: not measured by layer)"
        first = reading.first_not_finite
        origin = "" if first is None else f"; the forward of {short(units[first])} was the first that was not finite"
        say(f"step {step}: gradient not finite {place}{origin}{update}")
    elif reading.loss is not None and not math.isfinite(reading.loss):
        say(f"step {step}: loss {reading.loss}, with finite gradients; the update was made")


def say_out_of_reach(units: Sequence[Unit], idle: Bools, reading: Reading, trigger: str) -> None:
    """Report, after the first step, the trained units that the controller cannot help."""

    def names(mask: Bools) -> str:
        chosen = [units[i].name for i in np.flatnonzero(mask).tolist()]
        return f"{len(chosen)} of {len(units)} units ({', '.join(chosen[:4])}{', …' if len(chosen) > 4 else ''})"

    unused = idle & reading.seen
    if unused.any():
        say(
            f"LIFTING CHANGES NOTHING for {names(unused)}: they are trained, but their switched modules did not run in the "
            "first step (something reads their weights without calling the modules' forward). They may still take seats"
        )
    if reading.signal is not None:
        unranked = np.isnan(reading.signal) & reading.seen & np.isfinite(reading.norms)
        if unranked.any():
            why = SIGNALS[str(TRIGGERS[trigger].signal)].without
            say(
                f"NO SIGNAL of trigger {trigger!r} from {names(unranked)}: it will not lift them"
                + (f". ({why})" if why else "")
            )


def say(text: str) -> None:
    """Print a line, marked as ours, among the Trainer's output."""
    print(f"GNMR: {text}", flush=True)
