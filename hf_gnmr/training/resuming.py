"""Whether a checkpoint's history fits the run that resumes it: the same units and settings, and steps of the same size.

A norm is comparable with the history only if a step is made of as many rows as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..config import ConfigError
from ..control import arguments
from ..terminal import shown

State = Mapping[str, Any]
"""A stored state, or a part of it: plain JSON values by name."""
ResumeHistory = Literal["continue", "new"]
"""What a resumed run does with the history in its checkpoint."""


@dataclass(frozen=True)
class GlobalBatch:
    """Rows per optimizer step: rows per micro-batch × micro-batches × processes."""

    rows: int | None
    """Rows of a micro-batch on one process; None: unknown (a custom loop that does not state it)."""
    accumulation: int
    """Micro-batches of a step on one process."""
    processes: int

    @property
    def size(self) -> int:
        """Rows of a step; its micro-batches where the rows are unknown."""
        return (self.rows or 1) * self.accumulation * self.processes

    def __str__(self) -> str:
        rows = "" if self.rows is None else f"{self.rows} rows × "
        what = "micro-batches" if self.rows is None else "rows"
        return (
            f"{self.size} {what} a step ({rows}gradient_accumulation_steps={self.accumulation} × {self.processes} "
            f"process{'es' if self.processes > 1 else ''})"
        )

    def _difference(self, before: GlobalBatch) -> str:
        """In words; where one number alone differs, that one first."""
        stored, own = before.to_dict(), self.to_dict()
        differing = [name for name in own if own[name] != stored[name]]
        if len(differing) == 1:
            name = differing[0]
            return f"the checkpoint was written with {name}={stored[name]}, this run has {own[name]} ({before}; now {self})"
        return f"the checkpoint was written with {before}, this run has {self}"

    def to_dict(self) -> dict[str, int | None]:
        """Plain values for a checkpoint."""
        return {
            "gradient_accumulation_steps": self.accumulation,
            "rows_per_micro_batch": self.rows,
            "processes": self.processes,
        }

    def check(self, stored: Mapping[str, Any]) -> str | None:
        """Compare with what a checkpoint stores (`to_dict`).

        Returns:
            a warning if they cannot be compared; None if the steps are of equal size.

        Raises:
            ConfigError: the steps differ.
        """
        accumulation, processes = stored.get("gradient_accumulation_steps"), stored.get("processes")
        if not isinstance(accumulation, int) or not isinstance(processes, int):
            if accumulation is not None and accumulation != self.accumulation:
                raise ConfigError(
                    f"the checkpoint was written with gradient_accumulation_steps={accumulation!r}, this run has "
                    f"{self.accumulation!r}: {MEND}"
                )
            return f"the checkpoint does not state the rows of a step; this run has {self}. If they differ, {MEND}"
        rows = stored.get("rows_per_micro_batch")
        before = GlobalBatch(rows if isinstance(rows, int) else None, accumulation, processes)
        if (before.rows is None) != (self.rows is None):
            return f"the checkpoint has {before}, this run {self}, which cannot be compared. If they differ, {MEND}"
        if before.size != self.size:
            raise ConfigError(f"{self._difference(before)}: norms of steps of another size are not comparable; {MEND}")
        return None


MEND = (
    "resume with a step of the same size, or start the history from scratch with resume_history='new' (in a recipe: "
    "run.resume_history: new)"
)


def check_setup(stored: Mapping[str, Any] | None, setup: Mapping[str, Any], batch: GlobalBatch) -> str | None:
    """Compare what a checkpoint's history depends on (`GNMRSession.setup`) with this run.

    Args:
        stored: the checkpoint's; None: not stored.
        setup: this run's.
        batch: this run's steps; their fields in `setup` are compared by the rows that they amount to.

    Returns:
        a warning about what cannot be compared, or None.

    Raises:
        ConfigError: they differ; the message names the field.
    """
    if stored is not None and not isinstance(stored, Mapping):
        raise ConfigError(f"the checkpoint's setup={shown(stored)}: expected a dict")
    for name, value in setup.items():
        if stored is not None and name not in batch.to_dict() and stored.get(name) != value:
            raise ConfigError(
                f"the checkpoint was written with {name}={stored.get(name)!r}, this run has {value!r}: resume with the "
                "model and settings of the checkpoint, or start from scratch"
            )
    return batch.check(stored or {})


def session_state(state: Any) -> tuple[int, State | None, str | None, State | None]:
    """Step, controller, run_id and setup of `GNMRSession.state_dict()`, checked; older states have no setup.

    Raises:
        ConfigError: a field that is missing or of a wrong type, by name.
    """
    stored = arguments.State(state, "session")
    setup = stored.mapping("setup") if "setup" in state else None
    return stored.count("steps_done"), stored.mapping("controller"), stored.text("run_id"), setup
