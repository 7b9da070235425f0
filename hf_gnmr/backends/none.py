"""The model as loaded, nothing switched: the plain BF16 (or other) baseline, its norms still traced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from ..control.monitor import Bools
from .base import Backend, BackendOptions
from .units import Unit


class NoBackend(Backend):
    """Units are monitored; none is recoverable.

    Args:
        model: any model.
        units: its monitored layers.
    """

    name = "none"
    changes_forward = False

    switches = False

    @classmethod
    def why_no_budget(cls, options: BackendOptions) -> str | None:
        return "nothing is switched"

    def take(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.recoverable = np.zeros(len(units), dtype=bool)
        self.bytes_low = np.zeros(len(units), dtype=np.int64)
        self.bytes_recovery = np.zeros(len(units), dtype=np.int64)
        self.bytes_added = np.zeros(len(units), dtype=np.int64)
        self._weights: Counter[str] = Counter()
        for unit in units:
            for p in unit.module.parameters():
                self._weights[str(p.dtype).removeprefix("torch.")] += p.numel() * p.element_size()

    def apply(self, active: Bools) -> int:
        return 0

    def remove(self) -> None:
        return None

    def census(self) -> dict[str, Any]:
        stored = ", ".join(f"{size:,} bytes {dtype}" for dtype, size in sorted(self._weights.items()))
        return {"path": f"the model as loaded, nothing switched; parameters of the units: {stored}"}
