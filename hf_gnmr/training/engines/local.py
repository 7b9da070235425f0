"""Gradients that are complete on this process: one process, DDP after its all-reduce, `device_map` over several devices.

One `_foreach_norm` per group of equal device and dtype (fp32 accumulation, no copy of a gradient).  On the host the norms
are combined in float64, where squares neither overflow nor underflow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...backends.units import Unit
from ...control.monitor import Floats
from .base import Norms, UnitNorms, partitioning


class LocalNorms(UnitNorms):
    """Norms of complete gradients."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        super().__init__(model, units)
        self._groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, p in enumerate(self.parameters):
            self._groups.setdefault((p.device, p.dtype), []).append(i)

    @classmethod
    def handles(cls, model: nn.Module) -> bool:
        return partitioning(model) is None

    def measure(self) -> tuple[Tensor, list[int]]:
        home, measured, indices = self.home, [], []
        for members in self._groups.values():
            present = [i for i in members if self.parameters[i].grad is not None and self.parameters[i].requires_grad]
            if present:
                gradients = [self._gradient(i) for i in present]
                norms = torch._foreach_norm(gradients, 2, torch.float32)  # type: ignore[arg-type]
                measured.append(torch.stack(norms).to(home, non_blocking=True))
                indices += present
        return torch.cat(measured) if measured else torch.zeros(0, device=home), indices

    def _gradient(self, i: int) -> Tensor:
        gradient = self.parameters[i].grad
        assert gradient is not None
        return gradient if self.parts[i] < 0 else gradient[int(self.parts[i])]

    def combine(self, norms: Floats, indices: list[int], scale: float) -> Norms:
        by_parameter = np.zeros(len(self.parameters))
        by_parameter[indices] = norms
        with np.errstate(over="ignore", invalid="ignore"):
            square = np.square(by_parameter / scale)
            units = np.sqrt(np.add.reduceat(square[: self.in_units], self.segments))
            total = float(np.sqrt(square.sum()))
        seen = np.zeros(len(self.parameters), dtype=bool)
        seen[indices] = True
        # An expert that received no token has a gradient of zeros, which does not count as a reading.
        seen &= (self.parts < 0) | (by_parameter != 0)
        return Norms(units, np.logical_or.reduceat(seen[: self.in_units], self.segments), total)
