"""Norms of each unit's gradient as the optimizer would use it before clipping.

Where the true gradient can be read under the Trainer: after the last micro-batch's backward and (under DDP) after the
all-reduce, before clipping.  No Trainer event lies there, so the model itself tells: a forward hook puts a gradient hook
on the model's outputs (loss and logits); the first of them to fire in a backward asks the autograd engine for a call at
the end of that backward, and from there for one more, which comes after the calls that DDP queued meanwhile.  Hooks on
*parameters* would not do: under reentrant checkpointing each layer is a backward of its own, and per micro-batch the
gradients are neither accumulated nor reduced.

Per step the device does one `_foreach_norm` per group of equal device and dtype (fp32 accumulation, no copy of a
gradient); the norms of the parameters, the loss and the loss scale travel to the host in one vector, and are combined
there in float64, where squares neither overflow nor vanish.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.state import GradientState
from torch import Tensor, nn

from ..backends.units import Unit, unwrap
from ..config import SetupError
from ..control.controller import Bools, Floats
from .checks import is_distributed
from .signals import Signal


@dataclass(frozen=True)
class Reading:
    """One optimizer step's gradient, on the host. Units of the loss as the model returned them."""

    norms: Floats
    """L2 norm per unit, float64, shape (num_units,): accumulated, rank-averaged, unscaled, unclipped."""
    seen: Bools
    """Units of which at least one parameter had a gradient; the others' norm is 0 and means nothing."""
    total_norm: float
    """L2 norm over all trainable parameters, those outside the units included."""
    loss: float | None
    """This rank's loss over the step's micro-batches, weighted as in the backward: the model's own loss output, else
    what the Trainer noted; None where there is neither (a custom loss in a Trainer that notes nothing)."""
    seconds: float
    """Time spent in working out and fetching the norms, without waiting for the backward itself."""
    backwards: int
    """Backward passes that made the step."""
    began: float
    """`time.perf_counter()` at the step's first forward."""
    signal: Floats | None = None
    """What the trigger's signal measured per unit, float64; None where it has none."""


class GradientNorms:
    """Reads the norms at the end of every backward that completes an optimizer step.

    Args:
        model: the model whose `forward` the Trainer calls (below DDP and torch.compile).
        units: the monitored units.
        scaler: the gradient scaler in use (a `torch.amp.GradScaler`), or None.
        signal: what the trigger needs measured as well, or None.
        accumulation: backward passes of a whole window; only at the end of such a one is the signal taken.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        scaler: Any = None,
        signal: Signal | None = None,
        accumulation: int = 1,
    ) -> None:
        of_units = [p for unit in units for p in unit.parameters]
        known = {id(p) for p in of_units}
        rest = [p for p in unwrap(model).parameters() if p.requires_grad and id(p) not in known]
        self.parameters: list[nn.Parameter] = of_units + rest
        # A unit that is one of several experts in a tensor reads its part of the gradient: the parameter stands here once a
        # part.
        parts = [-1 if unit.part is None else unit.part for unit in units for _ in unit.parameters]
        self._parts = np.array(parts + [-1] * len(rest))
        # Parameters lie unit by unit, so that a unit's share of the vector is one contiguous segment.
        self._segments = np.cumsum([0] + [len(unit.parameters) for unit in units])[:-1]
        self._of_units = len(of_units)
        self._groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, p in enumerate(self.parameters):
            self._groups.setdefault((p.device, p.dtype), []).append(i)
        self._scaler = scaler
        self._signal = signal
        self._signal_values = 0
        self._accumulation = accumulation
        self._state = GradientState()
        self._armed = False
        self._frozen = [p for p in unwrap(model).parameters() if not p.requires_grad and p.is_floating_point()]
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._mark = 0
        self._version = (0, 0)
        self._backwards = 0
        self._began: float | None = None
        self._pending: tuple[Tensor, list[int], bool] | None = None
        self._seconds = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.step_losses: list[Tensor] = []
        """The Trainer's loss of each micro-batch, used where the model's own loss output takes no part in the backward."""
        _drop_leftovers(unwrap(model))
        self._handle = unwrap(model).register_forward_hook(self._on_forward)

    def remove(self) -> None:
        """Take the hook off the model."""
        self._handle.remove()
        if self._signal is not None:
            self._signal.remove()

    def read(self) -> Reading | None:
        """The reading of the optimizer step that is about to happen; None if no backward told of one.

        The one transfer from device to host of a step.

        Raises:
            SetupError: the backward reached none of the units' parameters.
        """
        if self._pending is None:
            return None
        vector, order, has_loss = self._pending
        self._pending = None
        which, version = self._version
        if self.parameters[which]._version != version:
            raise SetupError(
                "parameters were updated between the backward and the reading: it must come before the optimizer's step "
                "(and before clipping)"
            )
        if any(p.requires_grad for p in self._frozen):
            raise SetupError(
                "parameters that were frozen when training began have become trainable (another adapter was made active, or "
                "a layer unfrozen): they are in no unit. Make them trainable before training, and freeze them meanwhile"
            )
        if not any(i < self._of_units for i in order):
            raise SetupError(
                "none of the decoder layers' trainable parameters got a gradient in this step: another adapter was made "
                "active, or they were frozen, after training began. Choose the adapter before train()"
            )
        scaled_loss = has_loss
        if not has_loss and self.step_losses:
            total = torch.stack([x.detach().to(vector.device, torch.float32) for x in self.step_losses]).sum()
            vector, has_loss = torch.cat([vector, total[None]]), True
        self.step_losses = []
        if self._events is not None:
            # Wait for the backward here, so that the time below is that of the norms and not of the backward.
            self._events[1].synchronize()
            self._seconds += self._events[0].elapsed_time(self._events[1]) / 1e3
        start = time.perf_counter()
        values = vector.to("cpu", torch.float64).numpy()
        measured, values = values[: self._signal_values], values[self._signal_values :]
        signal = None if self._signal is None or not len(measured) else self._signal.combine(measured)
        self._signal_values = 0
        per_parameter = np.zeros(len(self.parameters))
        per_parameter[order] = values[: len(order)]
        scale = float(values[len(order)])
        with np.errstate(over="ignore", invalid="ignore"):
            square = np.square(per_parameter / scale)
            norms = np.sqrt(np.add.reduceat(square[: self._of_units], self._segments))
            total_norm = float(np.sqrt(square.sum()))
        loss = float(values[len(order) + 1]) / (scale if scaled_loss else 1.0) if has_loss else None
        seen = np.zeros(len(self.parameters), dtype=bool)
        seen[order] = True
        # An expert that no token was sent to has a gradient of zeros, which is no reading.
        seen &= (self._parts < 0) | (per_parameter != 0)
        seen_units = np.logical_or.reduceat(seen[: self._of_units], self._segments)
        if scaled_loss and self._scaler is None and _looks_scaled(float(values[len(order) + 2]), self._backwards):
            raise SetupError(
                f"the loss enters the backward times {values[len(order) + 2]:g}, as a loss scaler does it, and none was "
                "given: its scale would be in every norm. Pass scaler= (accelerator.scaler)"
            )
        backwards, began = self._backwards, self._began
        self.discard()
        seconds = self._seconds + time.perf_counter() - start
        self._seconds = 0.0
        return Reading(norms, seen_units, total_norm, loss, seconds, backwards, start if began is None else began, signal)

    @property
    def unread(self) -> int:
        """Backward passes since the last reading."""
        return self._backwards

    def discard(self) -> None:
        """Forget the backward passes since the last reading."""
        self._pending, self._losses, self._weights, self.step_losses = None, [], [], []
        self._backwards, self._began, self._mark = 0, None, 0
        if self._signal is not None:
            self._signal.discard()

    @property
    def elsewhere(self) -> int:
        """Trainable parameters in no unit (numbers, not tensors)."""
        return sum(p.numel() for p in self.parameters[self._of_units :])

    def drop_gradients(self) -> None:
        """Take the gradients away before the optimizer sees them: it then updates nothing."""
        for p in self.parameters:
            p.grad = None

    @torch.compiler.disable  # a clock and hooks: nothing to trace
    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        if self._began is None:
            self._began = time.perf_counter()
        if self._armed:  # a backward that was broken off: its losses are no part of the step, and the next one is read
            del self._losses[self._mark :], self._weights[self._mark :]
            if self._signal is not None:
                self._signal.cut()
            self._armed = False
        loss = getattr(output, "loss", None)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(_LossHook(self, tensor.detach()) if tensor is loss else self._arm)

    def _arm(self, grad: Tensor) -> None:
        if not self._armed:
            self._armed, self._mark = True, len(self._losses)
            if self._signal is not None:
                self._signal.mark()
            queue_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        queue_callback(self._after_reduction)

    def _after_reduction(self) -> None:
        self._armed = False
        self._backwards += 1
        if not self._state.sync_gradients:
            return
        start = time.perf_counter()
        cuda = self.parameters[0].device.type == "cuda"
        if cuda:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()
        parts: list[Tensor] = []
        order: list[int] = []
        home = self.parameters[0].device
        for indices in self._groups.values():
            present = [i for i in indices if self.parameters[i].grad is not None and self.parameters[i].requires_grad]
            if present:
                grads = [self._gradient(i) for i in present]
                norms = torch._foreach_norm(grads, 2, torch.float32)  # type: ignore[arg-type]
                parts.append(torch.stack(norms).to(home, non_blocking=True))
                order += present
        which = order[0] if order else 0
        self._version = (which, self.parameters[which]._version)
        scale = self._scale(home)
        parts.append(scale)
        if self._signal is not None and self._backwards == self._accumulation:
            self._seconds += self._signal.seconds
            skips = self._scaler is not None and self._scaler.is_enabled()
            parts.insert(0, self._signal.values(scale, skips).to(home))
            self._signal_values = len(parts[0])
        if self._losses:
            parts.append(torch.stack([x.to(home, torch.float32, non_blocking=True) for x in self._losses]).sum()[None])
            parts.append(torch.stack([x.to(home, torch.float32, non_blocking=True) for x in self._weights]).sum()[None])
        # A loop without accelerate passes here after each micro-batch; the last one's vector is the one that counts.
        self._pending = (torch.cat(parts), order, bool(self._losses))
        if cuda:
            assert self._events is not None
            self._events[1].record()
        else:
            self._seconds += time.perf_counter() - start

    def _gradient(self, i: int) -> Tensor:
        grad = self.parameters[i].grad
        assert grad is not None
        return grad if self._parts[i] < 0 else grad[int(self._parts[i])]

    def _scale(self, device: torch.device) -> Tensor:
        """The loss scale in force in this backward, shape (1,), without a host sync."""
        if self._scaler is None or not self._scaler.is_enabled():
            return torch.ones(1, device=device)
        fetch = getattr(self._scaler, "_get_scale_async", None)
        scale = fetch() if fetch is not None else None
        if scale is None:
            scale = torch.tensor(float(self._scaler.get_scale()))
        return scale.detach().to(device, torch.float32).reshape(1).clone()


class _LossHook:
    """On the model's loss output: the gradient that arrives is the weight this micro-batch's loss has in the step's."""

    def __init__(self, norms: GradientNorms, loss: Tensor) -> None:
        self.norms = norms
        self.loss = loss

    def __call__(self, grad: Tensor) -> None:
        self.norms._arm(grad)
        self.norms._losses.append((self.loss.float() * grad.detach().float()).sum())
        self.norms._weights.append(grad.detach().float().sum())


def _looks_scaled(weight: float, backwards: int) -> bool:
    """Whether the weight of a step's loss is a power of two as large as loss scalers'.

    It is 1 for a mean over the step, the number of micro-batches for their sum, and either of them times the number of
    processes where DDP's average has to be undone (as the Trainer does it for a mean over all tokens): none of these is one.
    """
    world = torch.distributed.get_world_size() if is_distributed() else 1
    if any(math.isclose(weight, usual, rel_tol=1e-6) for usual in (backwards, world, backwards * world)):
        return False
    return weight >= 256 and abs(math.log2(weight) - round(math.log2(weight))) < 1e-6


def queue_callback(function: Any) -> None:
    """Have the autograd engine call `function` at the end of the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a model's output: loss, logits, and hidden states where they were asked for."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)


def _drop_leftovers(model: nn.Module) -> None:
    """Take off hooks of readers whose training was broken off: they would go on working, unseen, in every step."""
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(getattr(hook, "__self__", None), GradientNorms):
            del model._forward_hooks[key]
