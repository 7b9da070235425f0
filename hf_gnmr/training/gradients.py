"""Norms of each unit's gradient as the optimizer would use it, before clipping.

Under the Trainer, the true gradient can be read after the last micro-batch's backward and (under DDP) after the all-reduce,
but before clipping.  The Trainer has no event at that point, so the model itself provides one: a forward hook registers a
gradient hook on the model's outputs (loss and logits); the first of them to fire in a backward asks the autograd engine for
a callback at the end of that backward, and that callback queues another one, which runs after the callbacks that DDP queued
in the meantime.  Hooks on *parameters* would not work: under reentrant checkpointing each layer runs a separate backward,
and within a micro-batch the gradients are neither accumulated nor reduced.

How the norms are measured depends on the engine that holds the gradients (`engines`).  The norms of the parameters, the loss
and the loss scale are transferred to the host in one vector (`StepVector`).
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
from .distributed import world_size
from .engines import unit_norms
from .signals import Signal


@dataclass(frozen=True)
class Reading:
    """One optimizer step's gradient, on the host, in units of the loss that the model returned."""

    norms: Floats
    """L2 norm per unit, float64, shape (num_units,): accumulated, rank-averaged, unscaled, unclipped."""
    seen: Bools
    """Units of which at least one parameter had a gradient; the norm of the others is 0 and has no meaning."""
    total_norm: float
    """L2 norm over all trainable parameters, including those outside the units."""
    loss: float | None
    """This rank's loss over the step's micro-batches, weighted as in the backward: the model's own loss output, otherwise
    the loss that the Trainer reported; None without either (a custom loss under a Trainer that reports none)."""
    seconds: float
    """Time spent on computing and fetching the norms, without the wait for the backward itself."""
    backwards: int
    """Number of backward passes in the step."""
    began: float
    """`time.perf_counter()` at the step's first forward."""
    signal: Floats | None = None
    """The trigger's signal per unit, float64; None if it measured none."""


class StepVector:
    """What one step sends from device to host: named parts of one vector, so that one transfer is enough."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices
        """Indices of the parameters whose norms are in the vector."""
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Append a part: a tensor of one dimension, on the same device as the others."""
        self._parts[name] = values

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


class GradientNorms:
    """Reads the norms at the end of every backward that completes an optimizer step.

    Args:
        model: the model whose `forward` the Trainer calls (below DDP and torch.compile).
        units: the monitored units.
        scaler: the gradient scaler in use (a `torch.amp.GradScaler`), or None.
        signal: what the trigger needs measured besides the norms, or None.
        accumulation: backward passes in a full window; the signal is measured only at the end of a full one.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        scaler: Any = None,
        signal: Signal | None = None,
        accumulation: int = 1,
    ) -> None:
        self.norms = unit_norms(model, units)
        self._scaler = scaler
        self._signal = signal
        self._accumulation = accumulation
        self._state = GradientState()
        self._armed = False
        self._frozen = [p for p in unwrap(model).parameters() if not p.requires_grad and p.is_floating_point()]
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._mark = 0
        self._measured = (0, 0)
        """The index of a parameter, and its version when the norms were measured."""
        self._backwards = 0
        self._began: float | None = None
        self._pending: StepVector | None = None
        self._seconds = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self.step_losses: list[Tensor] = []
        """The Trainer's loss for each micro-batch, used if the model's own loss output takes no part in the backward."""
        _drop_leftovers(unwrap(model))
        self._handle = unwrap(model).register_forward_hook(self._on_forward)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters, those of the units first."""
        return self.norms.parameters

    def remove(self) -> None:
        """Remove the hook from the model."""
        self._handle.remove()
        self.norms.remove()
        if self._signal is not None:
            self._signal.remove()

    def read(self) -> Reading | None:
        """The reading of the optimizer step that is about to happen; None if no backward completed one.

        This is the step's only transfer from device to host.

        Raises:
            SetupError: the backward reached none of the units' parameters.
        """
        if self._pending is None:
            return None
        vector, self._pending = self._pending, None
        self._refuse_stale(vector)
        scaled_loss = "loss" in vector
        if not scaled_loss and self.step_losses:
            losses = [x.detach().to(vector.device, torch.float32) for x in self.step_losses]
            vector.add("loss", torch.stack(losses).sum()[None])
        self.step_losses = []
        if self._events is not None:
            # Wait for the backward here, so that the time measured below is that of the norms alone.
            self._events[1].synchronize()
            self._seconds += self._events[0].elapsed_time(self._events[1]) / 1e3
        start = time.perf_counter()
        parts = vector.fetch()
        signal = self._signal.combine(parts["signal"]) if self._signal is not None and "signal" in parts else None
        scale = float(parts["scale"][0])
        norms = self.norms.combine(parts["norms"], vector.indices, scale)
        loss = float(parts["loss"][0]) / (scale if scaled_loss else 1.0) if "loss" in parts else None
        if scaled_loss and self._scaler is None and _looks_scaled(float(parts["weight"][0]), self._backwards):
            raise SetupError(
                f"the loss enters the backward multiplied by {parts['weight'][0]:g}, as by a loss scaler, but no scaler "
                "was given: its scale would be in every norm. Pass scaler= (accelerator.scaler)"
            )
        backwards, began = self._backwards, self._began
        self.discard()
        seconds = self._seconds + time.perf_counter() - start
        self._seconds = 0.0
        began = start if began is None else began
        return Reading(norms.units, norms.seen, norms.total, loss, seconds, backwards, began, signal)

    def _refuse_stale(self, vector: StepVector) -> None:
        """Raise SetupError if the vector does not describe the gradient that the optimizer is about to use."""
        which, version = self._measured
        if self.parameters[which]._version != version:
            raise SetupError(
                "parameters were updated between the backward and the reading: the norms must be read before the "
                "optimizer's step (and before clipping)"
            )
        if any(p.requires_grad for p in self._frozen):
            raise SetupError(
                "parameters that were frozen when training began have become trainable (another adapter was made active, or "
                "a layer was unfrozen): they are in no unit. Make them trainable before training begins, and freeze them "
                "afterwards until they are needed"
            )
        if not any(i < self.norms.in_units for i in vector.indices):
            raise SetupError(
                "none of the decoder layers' trainable parameters got a gradient in this step: another adapter was made "
                "active, or they were frozen, after training began. Choose the adapter before train()"
            )

    @property
    def unread(self) -> int:
        """Backward passes since the last reading."""
        return self._backwards

    def discard(self) -> None:
        """Discard the backward passes since the last reading."""
        self._pending, self._losses, self._weights, self.step_losses = None, [], [], []
        self._backwards, self._began, self._mark = 0, None, 0
        self.norms.discard()
        if self._signal is not None:
            self._signal.discard()

    @property
    def elsewhere(self) -> int:
        """Number of trainable parameters outside all units (elements, not tensors)."""
        return self.norms.elsewhere

    def drop_gradients(self) -> bool:
        """Remove the gradients before the optimizer sees them: it then updates nothing. False if it already has."""
        return self.norms.drop()

    @torch.compiler.disable  # only a clock and hooks: nothing to compile
    def _on_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        if self._began is None:
            self._began = time.perf_counter()
        if self._armed:  # the last backward was interrupted: drop its losses and read the next one
            del self._losses[self._mark :], self._weights[self._mark :]
            if self._signal is not None:
                self._signal.cut()
            self._armed = False
        loss = getattr(output, "loss", None)
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(_LossHook(self, tensor.detach()) if tensor is loss else self.arm)

    def arm(self, grad: Tensor) -> None:
        """A backward has begun: ask the autograd engine for a callback at its end."""
        if not self._armed:
            self._armed, self._mark = True, len(self._losses)
            if self._signal is not None:
                self._signal.mark()
            queue_callback(self._end_of_backward)

    def note_weighted(self, loss: Tensor, grad: Tensor) -> None:
        """Record the model's own loss output and the gradient that arrived at it, which is its weight in the step's loss."""
        self._losses.append((loss.float() * grad.detach().float()).sum())
        self._weights.append(grad.detach().float().sum())

    def _end_of_backward(self) -> None:
        queue_callback(self.after_reduction)

    def after_reduction(self) -> None:
        """Measure the gradients as they are: once a backward is done, and (under DDP) reduced."""
        self._armed = False
        self._backwards += 1
        if not self._state.sync_gradients:
            return
        start = time.perf_counter()
        home = self.norms.home
        cuda = home.type == "cuda"
        if cuda:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()
        norms, indices = self.norms.measure()
        which = indices[0] if indices else 0
        self._measured = (which, self.parameters[which]._version)
        scale = self._scale(home)
        # A loop without accelerate gets here after each micro-batch; the vector of the last one counts.
        vector = self._pending = StepVector(indices)
        if self._signal is not None and self._backwards == self._accumulation:
            self._seconds += self._signal.seconds
            skips = self._scaler is not None and self._scaler.is_enabled()
            vector.add("signal", self._signal.values(scale, skips).to(home))
        vector.add("norms", norms)
        vector.add("scale", scale)
        if self._losses:
            for name, values in (("loss", self._losses), ("weight", self._weights)):
                gathered = [x.to(home, torch.float32, non_blocking=True) for x in values]
                vector.add(name, torch.stack(gathered).sum()[None])
        if cuda:
            assert self._events is not None
            self._events[1].record()
        else:
            self._seconds += time.perf_counter() - start

    def _scale(self, device: torch.device) -> Tensor:
        """The loss scale used in this backward, shape (1,), without a host sync."""
        if self._scaler is None or not self._scaler.is_enabled():
            return torch.ones(1, device=device)
        fetch = getattr(self._scaler, "_get_scale_async", None)
        scale = fetch() if fetch is not None else None
        if scale is None:
            scale = torch.tensor(float(self._scaler.get_scale()))
        return scale.detach().to(device, torch.float32).reshape(1).clone()


class _LossHook:
    """Hook on the model's loss output: the gradient that arrives is this micro-batch's weight in the step's loss."""

    def __init__(self, reader: GradientNorms, loss: Tensor) -> None:
        self.reader = reader
        self.loss = loss

    def __call__(self, grad: Tensor) -> None:
        self.reader.arm(grad)
        self.reader.note_weighted(self.loss, grad)


def _looks_scaled(weight: float, backwards: int) -> bool:
    """Whether the weight of a step's loss is a power of two as large as a loss scale.

    Without a scaler, the weight is 1 for a mean over the step, the number of micro-batches for their sum, and either of them
    times the number of processes if DDP's average has to be undone (as the Trainer does for a mean over all tokens).
    """
    world = world_size()
    if any(math.isclose(weight, usual, rel_tol=1e-6) for usual in (backwards, world, backwards * world)):
        return False
    return weight >= 256 and abs(math.log2(weight) - round(math.log2(weight))) < 1e-6


def queue_callback(function: Any) -> None:
    """Have the autograd engine call `function` at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in a model's output: loss, logits, and hidden states if they were requested."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)


def _drop_leftovers(model: nn.Module) -> None:
    """Remove the hooks of readers whose training was interrupted: they would silently keep working in every step."""
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(getattr(hook, "__self__", None), GradientNorms):
            del model._forward_hooks[key]
