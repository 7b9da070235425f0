"""Gradients that are complete on this process: one process, DDP after its all-reduce, `device_map` over several devices.

One `_foreach_norm` per group of equal device and dtype (fp32 accumulation, no copy of a gradient), and one `vector_norm` for
each tensor whose slices are units (fused experts).  On the host the norms are combined in float64, where squares neither
overflow nor underflow.
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
        sliced: dict[nn.Parameter, list[int]] = {}
        for i, p in enumerate(self.parameters):
            if self.parts[i] < 0:
                self._groups.setdefault((p.device, p.dtype), []).append(i)
            else:
                sliced.setdefault(p, []).append(i)
        self._sliced = [_Sliced(p, np.array(indices), self.parts[indices]) for p, indices in sliced.items()]

    @classmethod
    def handles(cls, model: nn.Module) -> bool:
        return partitioning(model) is None

    def measure(self) -> tuple[Tensor, Sequence[int]]:
        home, measured = self.home, []
        indices: list[int] = []
        for members in self._groups.values():
            present = [i for i in members if self.parameters[i].grad is not None and self.parameters[i].requires_grad]
            if present:
                gradients = [self.parameters[i].grad for i in present]
                norms = torch._foreach_norm(gradients, 2, torch.float32)  # type: ignore[arg-type]
                measured.append(torch.stack(norms).to(home, non_blocking=True))
                indices += present
        for sliced in self._sliced:
            gradient = sliced.parameter.grad
            if gradient is not None and sliced.parameter.requires_grad:
                measured.append(sliced.norms(gradient).to(home, non_blocking=True))
                indices += sliced.indices
        return torch.cat(measured) if measured else torch.zeros(0, device=home), indices

    def combine(self, norms: Floats, indices: Sequence[int], scale: float) -> Norms:
        by_parameter = np.zeros(len(self.parameters))
        by_parameter[list(indices)] = norms
        with np.errstate(over="ignore", invalid="ignore"):
            square = np.square(by_parameter / scale)
            units = np.sqrt(np.add.reduceat(square[: self.in_units], self.segments))
            total = float(np.sqrt(square.sum()))
        # No gradient, or one of zeros (a zero loss, ignored labels, an expert that received no token): no observation.
        return Norms(units, units != 0, total)


class _Sliced:
    """A parameter whose slices along the first dimension belong to different units."""

    def __init__(self, parameter: nn.Parameter, indices: np.ndarray, parts: np.ndarray) -> None:
        self.parameter = parameter
        self.indices: list[int] = indices.tolist()
        """Positions among `UnitNorms.parameters`, one per slice that is a unit's."""
        whole = len(parts) == parameter.shape[0] and bool((parts == np.arange(len(parts))).all())
        self._parts = None if whole else torch.from_numpy(parts).to(parameter.device)

    def norms(self, gradient: Tensor) -> Tensor:
        """L2 norms of the slices, fp32, in the order of `indices`, without a copy of the gradient."""
        dimensions = tuple(range(1, gradient.ndim))
        norms = torch.linalg.vector_norm(gradient, dim=dimensions, dtype=torch.float32)
        return norms if self._parts is None else norms[self._parts]
