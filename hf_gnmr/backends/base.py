"""What a backend owes the rest: units with two paths each, and a way to put an active set in force.

A backend never sees a score or a threshold, and nothing outside it knows of formats, kernels or weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ..control.controller import Bools
from .units import Unit

Counts = NDArray[np.int64]


class Backend(ABC):
    """A set of units that can run a low-cost or a recovery path.

    Building one makes the model switchable (every unit on the low-cost path); `remove` undoes that.
    Arrays have shape (num_units,).
    """

    name: ClassVar[str]
    recoverable: Bools
    """Units with both paths."""
    bytes_low: Counts
    """Bytes of the switched weights on the low-cost path, per unit."""
    bytes_recovery: Counts
    """Bytes of the same weights on the recovery path, per unit."""
    bytes_added: Counts
    """Bytes that a unit adds on the device while it is active (ΔM), beyond what is resident anyway."""
    resident_bytes: int = 0
    """Bytes that the store of recovery weights holds in the device's memory (a CPU's anonymous one) whatever is active."""
    host_bytes: int = 0
    """Bytes that it holds in the host's anonymous memory, where that is not the device."""
    holds_all: bool = True
    """Whether all units can be active at once, whatever maxO is."""

    @abstractmethod
    def __init__(self, model: nn.Module, units: Sequence[Unit], **options: Any) -> None:
        """Make the model's units switchable, or raise SetupError; every unit starts on the low-cost path."""

    def reserve(self, units: int) -> None:
        """Make room for as many active units at a time; before the first `apply`."""
        return None

    @abstractmethod
    def apply(self, active: Bools) -> int:
        """Put `active` units on the recovery path and all others on the low-cost one; returns how many changed.

        Called only between an optimizer step and the next forward.
        """

    def apply_exact(self) -> int:
        """Run all units in 16 bits, whatever the recovery path is (a trigger's warm-up); until the next `apply`."""
        return self.apply(self.recoverable)

    @abstractmethod
    def remove(self) -> None:
        """Leave the model as it was found; may be called twice."""

    @abstractmethod
    def census(self) -> dict[str, Any]:
        """What runs on each path, as plain JSON values for the trace and, line by line, for the user."""

    def step_figures(self) -> dict[str, Any]:
        """What the backend has to say about the step that has just been done, for the trace: plain JSON values."""
        return {}

    def idle(self) -> Bools:
        """Units of which nothing that is switched ran in the last step that `step_figures` told of; none, if not known."""
        return np.zeros(len(self.recoverable), dtype=bool)

    def recovery_bytes(self, active: Bools) -> int:
        """ΔM of an active set."""
        return int(self.bytes_added[active].sum())

    def recovery_bytes_bound(self, units: int) -> int:
        """The most that `units` active units can add."""
        if units <= 0:
            return 0
        return int(np.sort(self.bytes_added[self.recoverable])[-units:].sum())
