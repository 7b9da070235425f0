"""What triggers other than GNMR measure: one number per unit and step, computed on the device and fetched with the norms.

`gsnr`: the mean over a unit's parameters of m² / (v − m² + 1e-12), where m and v are bias-corrected running means (decay
0.9) of the gradient and its square; the gradient is accumulated, reduced, unscaled and unclipped.  It stores m and a running
sum for v − m² (as a difference of two nearly equal numbers it would be lost in fp32): 8 bytes per trainable parameter, all
read and written in every step, plus up to 12 temporary bytes per parameter of one chunk (16 million).

`jacobian`: ‖gradient of the unit's input‖ / ‖gradient of its output‖ in the backward, over the step's micro-batches and all
ranks, measured by module hooks; it stores nothing between steps.

Windows that do not count as steps for the controller enter neither signal; nor do gradients that are not finite.

The gradient signal-to-noise ratio is that of Jiang et al. (arXiv 2309.13681), as used in Appendix E.5 of the GNMR paper; the
Jacobian proxy stands for the spectral norm of Takase et al. (arXiv 2312.16903).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..backends.hooks import Hook
from ..backends.units import Unit
from ..config import ConfigError
from ..control.controller import Floats

DECAY = 0.9
EPSILON = 1e-12
CHUNK = 2**24
"""Elements processed at a time."""


class Signal(ABC):
    """Measures units during the backward. Arrays per unit have shape (num_units,)."""

    name: ClassVar[str]
    without: ClassVar[str] = ""
    """Why a unit may have no signal, in words for the user."""
    extends: ClassVar[bool] = False
    """Whether `values` may be called again after one more backward of the same step, and then covers all of them."""
    summed: ClassVar[bool] = False
    """Whether `values` are sums over this rank alone, which the reader adds up over all ranks (`size` numbers)."""
    size: int = 0
    """How many numbers `values` returns, where they are added up."""
    seconds: float = 0.0
    """Time spent in hooks since the last `values` (host time; kernel time on an accelerator is not included)."""

    @abstractmethod
    def __init__(self, units: Sequence[Unit]) -> None:
        """Start measuring."""

    @abstractmethod
    def values(self, scale: Tensor, skips: bool = False) -> Tensor:
        """What `combine` needs, fp32, one dimension, on the device, without a sync; called after a step's last backward.

        Under DDP the signal must be equal on all ranks (they must choose the same units): one that is not computed from the
        reduced gradients alone is `summed`. No collective here: the ranks may run different numbers of backward passes.

        Args:
            scale: the loss scale, shape (1,).
            skips: whether a loss scaler skips the update if any gradient is not finite.
        """

    @abstractmethod
    def combine(self, values: Floats) -> Floats:
        """The signal per unit, float64, from `values` on the host; nan for units without one."""

    @property
    def state_bytes(self) -> int:
        """Bytes that it keeps on the device between steps."""
        return 0

    def discard(self) -> None:
        """Discard what was measured since the last `values`."""
        return None

    def mark(self) -> None:
        """A backward begins: `cut` discards what is measured from here on."""
        return None

    def cut(self) -> None:
        """Discard what was measured since `mark`: that backward was interrupted."""
        return None

    def measured(self) -> Any:
        """What was measured since the last `values`, for `restore`."""
        return None

    def restore(self, measured: Any) -> None:
        """Return to an earlier `measured()`: the backward passes since then count for nothing."""
        return None

    def tensors(self) -> dict[str, Tensor]:
        """What a resumed run needs."""
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue from `tensors()`.

        Raises:
            ConfigError: the tensors belong to other parameters.
        """
        return None

    def remove(self) -> None:
        """Remove hooks from the model."""
        return None


class Gsnr(Signal):
    """Running means and spreads of all parameters' gradients, with foreach operations.

    With weights 0.9^(t-i), whose sum is W = Σ 0.9^(t-i): m ← m + (g − m) / W, and S ← 0.9 S + (1 − 1/W) (g − m_before)², so
    that S / W is the bias-corrected v − m², never below 0.
    """

    name = "gsnr"

    def __init__(self, units: Sequence[Unit]) -> None:
        self._parameters = [p for unit in units for p in unit.parameters]
        self._segments = np.cumsum([0] + [len(unit.parameters) for unit in units])[:-1]
        self._unit_of = [index for index, unit in enumerate(units) for _ in unit.parameters]
        self._numel = np.array([p.numel() for p in self._parameters], dtype=np.float64)
        self._mean = [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        self._spread = [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        self._weight = np.zeros(len(self._parameters))
        """W of each parameter."""
        self._entered: list[int] = []
        """Indices of the parameters in the latest `values` whose gradients are assumed finite until `combine` knows."""

    def values(self, scale: Tensor, skips: bool = False) -> Tensor:
        home = self._parameters[0].device
        present = [i for i, p in enumerate(self._parameters) if p.grad is not None]
        sums = torch.full((2, len(self._parameters)), torch.nan, device=home)
        if not present:
            return sums.flatten()
        gradients: list[Any] = [self._parameters[i].grad for i in present]
        norms = torch.stack([n.to(home) for n in torch._foreach_norm(gradients, 2, torch.float32)])
        # A unit whose gradient is exactly zero is not observed in this step.
        units = torch.tensor([self._unit_of[i] for i in present], device=home)
        seen = torch.zeros(len(self._segments), device=home).index_add_(0, units, norms) != 0
        finite = torch.isfinite(norms) & seen[units]
        if skips:  # a loss scaler skips the whole update
            finite = finite & torch.isfinite(norms).all()
        sums[1, torch.tensor(present, device=home)] = finite.float()
        if home.type == "cpu":
            present = [i for i, good in zip(present, finite.tolist(), strict=True) if good]
            masks = None
        else:  # known only on the device: mask what is not finite here, and correct its weight in `combine`
            masks = dict(zip(present, finite.unbind(), strict=True))
        self._weight[present] = DECAY * self._weight[present] + 1.0
        self._entered = present
        for part in self._chunks(present):
            self._enter(part, scale, masks, sums)
        return sums.flatten()

    def _enter(self, part: list[int], scale: Tensor, masks: dict[int, Tensor] | None, sums: Tensor) -> None:
        grads: list[Any] = [self._parameters[i].grad for i in part]
        mean, spread = [self._mean[i] for i in part], [self._spread[i] for i in part]
        weights = self._weight[part].tolist()
        grads = [g.float() / scale.to(g.device) for g in grads]
        torch._foreach_sub_(grads, mean)
        if masks is not None:
            grads = [torch.where(masks[i].to(g.device), g, 0.0) for i, g in zip(part, grads, strict=True)]
        torch._foreach_mul_(spread, DECAY)
        scaled = torch._foreach_mul(grads, [(1 - 1 / w) ** 0.5 for w in weights])
        torch._foreach_addcmul_(spread, scaled, scaled)
        torch._foreach_mul_(grads, [1 / w for w in weights])
        torch._foreach_add_(mean, grads)
        del grads
        square = torch._foreach_mul(mean, mean)
        torch._foreach_copy_(scaled, spread)
        torch._foreach_div_(scaled, weights)
        torch._foreach_add_(scaled, EPSILON)
        torch._foreach_div_(square, scaled)
        sums[0, torch.tensor(part, device=sums.device)] = torch.stack([s.sum().to(sums.device) for s in square])

    def _chunks(self, indices: list[int]) -> Iterator[list[int]]:
        part: list[int] = []
        numbers = 0.0
        for i in indices:
            if part and numbers + self._numel[i] > CHUNK:
                yield part
                part, numbers = [], 0.0
            part.append(i)
            numbers += self._numel[i]
        if part:
            yield part

    def combine(self, values: Floats) -> Floats:
        sums, finite = values.reshape(2, -1)
        for i in self._entered:
            if finite[i] == 0.0:
                self._weight[i] = (self._weight[i] - 1.0) / DECAY
                self._spread[i].div_(DECAY)
        self._entered = []
        measured = ~np.isnan(sums) & (finite == 1.0)
        total = np.add.reduceat(np.where(measured, sums, 0.0), self._segments)
        count = np.add.reduceat(np.where(measured, self._numel, 0.0), self._segments)
        with np.errstate(invalid="ignore", divide="ignore"):
            return total / count

    @property
    def state_bytes(self) -> int:
        return sum(8 * m.numel() for m in self._mean)

    def tensors(self) -> dict[str, Tensor]:
        state = {"weight": torch.from_numpy(self._weight.copy())}
        for i, (m, s) in enumerate(zip(self._mean, self._spread, strict=True)):
            state |= {f"mean.{i}": m, f"spread.{i}": s}
        return state

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        state = self.tensors()
        if {k: t.shape for k, t in state.items()} != {k: t.shape for k, t in tensors.items()}:
            raise ConfigError(
                "the state of trigger gsnr in the checkpoint belongs to other parameters: resume with the model of the "
                "checkpoint, or start from scratch"
            )
        self._weight = tensors["weight"].cpu().double().numpy().copy()
        for name, tensor in state.items():
            if name != "weight":
                tensor.copy_(tensors[name])


class Jacobian(Signal):
    """Gain of each unit in the backward, measured by full backward hooks on its module."""

    name = "jacobian"
    extends = True
    summed = True
    without = "jacobian needs a gradient at the unit's input; units that read frozen embeddings have none"

    def __init__(self, units: Sequence[Unit]) -> None:
        self._norms: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in units]
        self._handles = [
            unit.module.register_full_backward_hook(Hook(self._hook(self._norms[i]))) for i, unit in enumerate(units)
        ]
        self._home = units[0].parameters[0].device
        self.size = 2 * len(units)
        self.mark()

    def _hook(self, norms: tuple[list[Tensor], list[Tensor]]) -> Any:
        def record(module: nn.Module, grads_in: Any, grads_out: Any) -> None:
            if not module.training:
                return
            start = time.perf_counter()
            for grads, kept in zip((grads_in, grads_out), norms, strict=True):
                grad = next((g for g in (grads if isinstance(grads, tuple) else (grads,)) if g is not None), None)
                if grad is not None:
                    kept.append(torch._foreach_norm([grad], 2, torch.float32)[0])
            self.seconds += time.perf_counter() - start

        return record

    def values(self, scale: Tensor, skips: bool = False) -> Tensor:
        self.seconds = 0.0
        zero = torch.zeros((), device=self._home)
        squares = torch.stack(
            [
                torch.stack([n.to(self._home) for n in kept]).square().sum() if kept else zero
                for sides in self._norms
                for kept in sides
            ]
        )
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
        self.mark()

    def mark(self) -> None:
        self._marks = [(len(kept_in), len(kept_out)) for kept_in, kept_out in self._norms]

    def cut(self) -> None:
        for sides, marks in zip(self._norms, self._marks, strict=True):
            for kept, length in zip(sides, marks, strict=True):
                del kept[length:]

    def measured(self) -> Any:
        return [(tuple(kept_in), tuple(kept_out)) for kept_in, kept_out in self._norms]

    def restore(self, measured: Any) -> None:
        for sides, before in zip(self._norms, measured, strict=True):
            for kept, values in zip(sides, before, strict=True):
                kept[:] = values
        self.mark()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


SIGNALS: dict[str, type[Signal]] = {"gsnr": Gsnr, "jacobian": Jacobian}
