"""One optimizer step's gradient as numbers: what is sent from the device, and what the host reads from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..control.controller import Bools, Floats


@dataclass(frozen=True)
class Reading:
    """One optimizer step's gradient, on the host, in units of the loss that the model returned."""

    norms: Floats
    """L2 norm per unit, float64, shape (num_units,): accumulated, rank-averaged, unscaled, unclipped."""
    seen: Bools
    """Units whose norm is not exactly 0; the others are not observed in this step: they had no gradient, or one of zeros."""
    total_norm: float | None
    """L2 norm over all trainable parameters, including those outside the units; None where it was not measured: the step's
    last micro-batch had no backward, so nothing was read before clipping."""
    loss: float | None
    """This rank's loss over the step's micro-batches, weighted as in the backward: the model's own loss output, otherwise
    the loss that the Trainer reported; None without either (a custom loss under a Trainer that reports none)."""
    seconds: float
    """Time spent on computing and fetching the norms, without the wait for the backward itself."""
    backwards: int
    """Number of backward passes in the step; with several processes, the fewest on any of them."""
    began: float
    """`time.perf_counter()` at the step's first forward."""
    signal: Floats | None = None
    """The trigger's signal per unit, float64; None if it measured none."""
    weight: float | None = None
    """The weight of the model's own loss output in the backward, summed over the micro-batches; None if it took no part."""
    first_not_finite: int | None = None
    """The first unit whose forward turned finite inputs into values that are not finite; None: none did, or not measured."""
    reached: bool = True
    """Whether any parameter of the units had a gradient, be it zero."""
    finite: bool = True
    """Whether every gradient is finite."""

    @classmethod
    def of_nothing(cls, num_units: int, losses: Sequence[Tensor]) -> Reading:
        """The reading of a step without a backward; its loss is the one that the Trainer reported, if any."""
        loss = float(torch.stack([x.to("cpu", torch.float32) for x in losses]).sum()) if losses else None
        return cls(np.zeros(num_units), np.zeros(num_units, dtype=bool), None, loss, 0.0, 0, time.perf_counter())


class StepVector:
    """What one step sends from device to host: named parts of one vector, so that one transfer is enough."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = indices
        """Indices of the parameters whose norms are in the vector."""
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Append a part: a tensor of one dimension, on the same device as the others."""
        self._parts[name] = values

    def part(self, name: str) -> Tensor | None:
        """A part, as added; None if there is none of that name."""
        return self._parts.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    @property
    def device(self) -> torch.device:
        """The device that holds the parts."""
        return next(iter(self._parts.values())).device

    def fetch(self) -> dict[str, Floats]:
        """The parts by name, on the host, float64; this is the step's only transfer."""
        values = torch.cat(list(self._parts.values())).to("cpu", torch.float64).numpy()
        ends = np.cumsum([len(part) for part in self._parts.values()])
        return dict(zip(self._parts, np.split(values, ends[:-1]), strict=True))


def loss_scale(scaler: Any, device: torch.device) -> Tensor:
    """The loss scale used in the backward that has just ended, fp32, shape (1,), without a host sync; 1 without a scaler."""
    if scaler is None or not scaler.is_enabled():
        return torch.ones(1, device=device)
    fetch = getattr(scaler, "_get_scale_async", None)
    scale = fetch() if fetch is not None else None
    if scale is None:
        scale = torch.tensor(float(scaler.get_scale()))
    return scale.detach().to(device, torch.float32).reshape(1).clone()
