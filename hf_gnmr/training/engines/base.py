"""The interface of a gradient reader: norms on the device without a sync, then combined per unit on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from accelerate.state import AcceleratorState, DistributedType
from torch import Tensor, nn

from ...backends.units import Unit, unwrap
from ...control.monitor import Bools, Floats

PARTITIONING = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)
"""Engines of accelerate that partition gradients or keep them to themselves."""


def partitioning(model: nn.Module) -> str | None:
    """What partitions the model's gradients, in words; None if nothing does."""
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        return "the model's parameters are DTensors (fully_shard, tensor parallelism)"
    kind = AcceleratorState().distributed_type if AcceleratorState._shared_state else DistributedType.NO
    return str(kind.value) if kind in PARTITIONING else None


@dataclass(frozen=True)
class Norms:
    """One step's combined norms. Arrays are float64 or bool, shape (num_units,)."""

    units: Floats
    """L2 norm of each unit's gradient; 0 for units without one."""
    seen: Bools
    """Units whose norm is not exactly 0: the others had no gradient, or one of zeros."""
    total: float
    """L2 norm over all trainable parameters."""


class UnitNorms(ABC):
    """Reads the norms of a model's gradients, unit by unit.

    Args:
        model: the model whose `forward` is called (below DDP and torch.compile).
        units: the monitored units.
    """

    asked_for_by: ClassVar[tuple[str, ...]] = ()
    """Fields of TrainingArguments that request this reader's engine."""
    reads_in_backward: ClassVar[bool] = False
    """Whether it reads each gradient before an optimizer uses it up inside the backward."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        in_units = [p for unit in units for p in unit.parameters]
        known = {id(p) for p in in_units}
        outside = [p for p in unwrap(model).parameters() if p.requires_grad and id(p) not in known]
        self.parameters: list[nn.Parameter] = in_units + outside
        """The units' parameters, unit by unit, then all other trainable ones."""
        self.in_units = len(in_units)
        # A unit that is one of several experts in a tensor reads its part of the gradient, so the parameter is listed once
        # per part. -1 means the whole gradient.
        parts = [-1 if unit.part is None else unit.part for unit in units for _ in unit.parameters]
        self.parts = np.array(parts + [-1] * len(outside))
        # Parameters are listed unit by unit, so that a unit's share of the vector is one contiguous segment.
        self.segments = np.cumsum([0] + [len(unit.parameters) for unit in units])[:-1]

    @classmethod
    @abstractmethod
    def handles(cls, model: nn.Module) -> bool:
        """Whether this reader can read the model's gradients."""

    @property
    def home(self) -> torch.device:
        """The device on which a step's values are gathered."""
        return self.parameters[0].device

    @property
    def elsewhere(self) -> int:
        """Number of trainable parameters outside all units (elements, not tensors)."""
        return sum(p.numel() for p in self.parameters[self.in_units :])

    @abstractmethod
    def measure(self) -> tuple[Tensor, Sequence[int]]:
        """Norms of the existing gradients, fp32, on `home`, without a host sync, and the indices of their parameters."""

    @abstractmethod
    def combine(self, norms: Floats, indices: Sequence[int], scale: float) -> Norms:
        """Combine the measured norms per unit, on the host.

        Args:
            norms: from `measure`, as float64.
            indices: from `measure`.
            scale: the loss scale, which is divided out.
        """

    def drop(self) -> bool:
        """Remove the gradients, so that the optimizer updates nothing; False if the update can no longer be withheld."""
        for p in self.parameters:
            p.grad = None
        return True

    def discard(self) -> None:
        """Discard what was measured in the backward passes since the last reading."""
        return None

    def remove(self) -> None:
        """Remove hooks from the model."""
        return None
