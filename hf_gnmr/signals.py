"""What triggers other than GNMR measure: one number a unit and step, taken on the device and fetched with the norms.

`gsnr`: the mean over a unit's parameters of m² / (v − m² + 1e-12), where m and v are bias-corrected running means (decay
0.9) of the gradient and its square; the gradient is the accumulated, reduced, unscaled, unclipped one.  It holds m and v in
fp32, 8 bytes a trainable parameter, and reads them all in every step.

`jacobian`: ‖gradient of the unit's input‖ / ‖gradient of its output‖ in the backward, over the step's micro-batches and all
ranks, by module hooks; it holds nothing from step to step.

The gradient signal-to-noise ratio is that of Jiang et al. (arXiv 2309.13681) as the GNMR paper's Appendix E.5 uses it; the
Jacobian proxy stands for the spectral norm of Takase et al. (arXiv 2312.16903).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from .checks import is_distributed
from .config import ConfigError
from .controller import Floats
from .units import Unit

DECAY = 0.9
EPSILON = 1e-12


class Signal(ABC):
    """Measures units during the backward. Arrays have shape (num_units,)."""

    name: ClassVar[str]
    seconds: float = 0.0
    """Time spent in hooks since the last `values` (host time; on an accelerator the kernels' is not in it)."""

    @abstractmethod
    def __init__(self, units: Sequence[Unit]) -> None:
        """Begin to measure."""

    @abstractmethod
    def values(self, scale: Tensor) -> Tensor:
        """What `combine` needs, fp32, one dimension, on the device, without a sync: at the end of a step's last backward.

        Args:
            scale: the loss scale in force, shape (1,).
        """

    @abstractmethod
    def combine(self, values: Floats) -> Floats:
        """The signal per unit, float64, from `values` on the host; nan where a unit gave none."""

    @property
    def state_bytes(self) -> int:
        """Bytes that it holds on the device from step to step."""
        return 0

    def discard(self) -> None:
        """Forget what the backward passes since the last `values` gave."""
        return None

    def tensors(self) -> dict[str, Tensor]:
        """What a resumed run needs."""
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `tensors()`.

        Raises:
            ConfigError: tensors of other parameters.
        """
        return None

    def remove(self) -> None:
        """Take hooks off the model."""
        return None


class Gsnr(Signal):
    """Running means of g and g², and their ratio, by foreach operations over all parameters."""

    name = "gsnr"

    def __init__(self, units: Sequence[Unit]) -> None:
        self._parameters = [p for unit in units for p in unit.parameters]
        self._segments = np.cumsum([0] + [len(unit.parameters) for unit in units])[:-1]
        self._numel = np.array([p.numel() for p in self._parameters], dtype=np.float64)
        self._m = [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        self._v = [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        # How often each was updated: on the device, since whether a gradient is finite is known there only.
        self._count = torch.zeros(len(self._parameters), device=self._parameters[0].device)

    def values(self, scale: Tensor) -> Tensor:
        present = [i for i, p in enumerate(self._parameters) if p.grad is not None]
        home = self._count.device
        sums = torch.full((len(self._parameters),), torch.nan, device=home)
        if not present:
            return sums
        found: list[Any] = [self._parameters[i].grad for i in present]
        grads = [g.float() / scale.to(g.device) for g in found]
        m, v = [self._m[i] for i in present], [self._v[i] for i in present]
        finite = torch.isfinite(torch.stack([n.to(home) for n in torch._foreach_norm(grads, 2)]))
        # A gradient that is not finite enters no mean: its weight is 0, and its numbers are replaced so that 0 stays 0.
        weights = ((1 - DECAY) * finite).unbind()
        shares = [w.to(g.device).expand_as(g) for w, g in zip(weights, grads, strict=True)]
        for g in grads:
            g.nan_to_num_(0.0, 0.0, 0.0)
        torch._foreach_lerp_(m, grads, shares)
        torch._foreach_mul_(grads, grads)
        torch._foreach_lerp_(v, grads, shares)
        index = torch.tensor(present, device=home)
        self._count[index] += finite.float()
        # With c = 1 - 0.9^t the ratio of the corrected means is m² / (c·v - m² + 1e-12·c²); the variance is at least 0.
        correction = [c.to(g.device) for c, g in zip((1 - DECAY ** self._count[index]).unbind(), grads, strict=True)]
        square = torch._foreach_mul(m, m)
        spread = torch._foreach_mul(v, correction)
        torch._foreach_sub_(spread, square)
        torch._foreach_clamp_min_(spread, 0.0)
        torch._foreach_add_(spread, [EPSILON * c * c for c in correction])
        torch._foreach_div_(square, spread)
        sums[index] = torch.stack([s.sum().to(home) for s in square])
        return sums

    def combine(self, values: Floats) -> Floats:
        there = ~np.isnan(values)
        total = np.add.reduceat(np.where(there, values, 0.0), self._segments)
        count = np.add.reduceat(np.where(there, self._numel, 0.0), self._segments)
        with np.errstate(invalid="ignore", divide="ignore"):
            return total / count

    @property
    def state_bytes(self) -> int:
        return sum(8 * m.numel() for m in self._m)

    def tensors(self) -> dict[str, Tensor]:
        found = {"count": self._count}
        for i, (m, v) in enumerate(zip(self._m, self._v, strict=True)):
            found |= {f"m.{i}": m, f"v.{i}": v}
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        ours = self.tensors()
        if {k: t.shape for k, t in ours.items()} != {k: t.shape for k, t in tensors.items()}:
            raise ConfigError("the state of trigger gsnr in the checkpoint is that of other parameters: start anew")
        for name, tensor in ours.items():
            tensor.copy_(tensors[name])


class Jacobian(Signal):
    """Gain of each unit in the backward, by full backward hooks on its module."""

    name = "jacobian"

    def __init__(self, units: Sequence[Unit]) -> None:
        self._norms: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in units]
        self._handles = [
            unit.module.register_full_backward_hook(self._hook(self._norms[i])) for i, unit in enumerate(units)
        ]
        self._home = units[0].parameters[0].device

    def _hook(self, norms: tuple[list[Tensor], list[Tensor]]) -> Any:
        def record(module: nn.Module, grads_in: Any, grads_out: Any) -> None:
            start = time.perf_counter()
            for grads, kept in zip((grads_in, grads_out), norms, strict=True):
                grad = next((g for g in (grads if isinstance(grads, tuple) else (grads,)) if g is not None), None)
                if grad is not None:
                    kept.append(torch._foreach_norm([grad], 2, torch.float32)[0])
            self.seconds += time.perf_counter() - start

        return record

    def values(self, scale: Tensor) -> Tensor:
        self.seconds = 0.0
        zero = torch.zeros((), device=self._home)
        squares = torch.stack([
            torch.stack([n.to(self._home) for n in kept]).square().sum() if kept else zero
            for sides in self._norms for kept in sides
        ])
        self.discard()
        if is_distributed():  # every rank must choose the same units
            torch.distributed.all_reduce(squares)
        return squares

    def combine(self, values: Floats) -> Floats:
        squares = values.reshape(-1, 2)
        with np.errstate(invalid="ignore", divide="ignore"):
            gain = np.sqrt(squares[:, 0] / squares[:, 1])
        gain[np.isnan(gain) & ~np.isfinite(squares).all(axis=1)] = np.inf  # inf / inf: as bad as inf
        gain[(squares == 0).any(axis=1)] = np.nan
        return gain

    def discard(self) -> None:
        for sides in self._norms:
            for kept in sides:
                kept.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


SIGNALS: dict[str, type[Signal]] = {"gsnr": Gsnr, "jacobian": Jacobian}
