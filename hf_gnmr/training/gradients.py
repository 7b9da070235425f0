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

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.state import GradientState
from torch import Tensor, nn

from ..backends.hooks import Hook
from ..backends.units import Unit, unwrap
from ..config import SetupError
from .accumulated import any_nonzero
from .distributed import is_distributed
from .engines import unit_norms
from .forwards import ForwardProbe, queue_callback, tensors_in
from .reading import Reading, StepVector, loss_scale
from .signals import Signal
from .stepped import OptimizerSteps
from .window import Window


class GradientNorms:
    """Reads the norms at the end of every backward that completes an optimizer step.

    Args:
        model: the model whose `forward` the Trainer calls (below DDP and torch.compile).
        units: the monitored units.
        scaler: the gradient scaler in use (a `torch.amp.GradScaler`), or None.
        signal: what the trigger needs measured besides the norms, or None.
        accumulation: backward passes in a full window; the signal is measured only at the end of a full one.
        probe: watches the units' forwards, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        scaler: Any = None,
        signal: Signal | None = None,
        accumulation: int = 1,
        probe: ForwardProbe | None = None,
    ) -> None:
        self.norms = unit_norms(model, units)
        self._scaler = scaler
        self._signal = signal
        self._accumulation = accumulation
        self._probe = probe
        self._state = GradientState()
        self._armed = False
        self._frozen = [p for p in unwrap(model).parameters() if not p.requires_grad and p.is_floating_point()]
        self._mark = 0
        own, others = self.norms.parameters[: self.norms.in_units], self.norms.parameters[self.norms.in_units :]
        self._window = Window([*own, *others], accumulation)
        self._steps = OptimizerSteps()
        self._measured = (0, 0)
        """The index of a parameter, and its version when the norms were measured."""
        self._began: float | None = None
        self._seconds = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._handle = unwrap(model).register_forward_hook(Hook(self._on_forward))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All trainable parameters, those of the units first."""
        return self.norms.parameters

    @property
    def step_losses(self) -> list[Tensor]:
        """The Trainer's loss for each micro-batch, used if the model's own loss output takes no part in the backward."""
        return self._window.now.step_losses

    def remove(self) -> None:
        """Remove the hook from the model."""
        self._handle.remove()
        self.norms.remove()
        self._window.clear()
        self._steps.remove()
        if self._probe is not None:
            self._probe.remove()
        if self._signal is not None:
            self._signal.remove()

    def read(self) -> Reading | None:
        """The reading of the optimizer step that is about to happen; None if no backward was seen since the last one.

        This is the step's only transfer from device to host. With several processes all of them must call it.

        Raises:
            SetupError: the gradient is not the one that was measured, or cannot be monitored.
        """
        self._refuse_other_parameters()
        self._return_to(at_end=True)
        if self._window.now.pending is not None and self._window.marks.removed():  # the loop threw the step's gradient away
            self._forget()
        vector, self._window.now.pending = self._window.now.pending, None
        if vector is None and not self._state.sync_gradients:
            return None
        if vector is not None:
            self._refuse_stale(vector)
        measured = vector is not None
        vector = StepVector([]) if vector is None else vector
        self._add_agreed(vector)
        if not self.unread and not is_distributed():
            self.discard()
            return None
        scaled_loss = "loss" in vector
        if not scaled_loss and self.step_losses:
            losses = [x.to(self.norms.home, torch.float32) for x in self.step_losses]
            vector.add("loss", torch.stack(losses).sum()[None])
        if self._events is not None and measured:
            # Wait for the backward here, so that the time measured below is that of the norms alone.
            self._events[1].synchronize()
            self._seconds += self._events[0].elapsed_time(self._events[1]) / 1e3
        start = time.perf_counter()
        finite = None if measured else self._all_finite()
        parts = vector.fetch()
        backwards = -int(parts["agreed"][0])
        if not backwards and not self.unread:
            self.discard()
            return None
        signal = self._signal.combine(parts["signal"]) if self._signal is not None and "signal" in parts else None
        scale = float(parts["scale"][0]) if measured else 1.0
        norms = self.norms.combine(parts["norms"] if measured else np.zeros(0), vector.indices, scale)
        first = None if self._probe is None else self._probe.combine(parts["agreed"][1:])
        reading = Reading(
            norms=norms.units,
            seen=norms.seen,
            total_norm=norms.total if measured else None,
            loss=float(parts["loss"][0]) / (scale if scaled_loss else 1.0) if "loss" in parts else None,
            seconds=self._seconds + time.perf_counter() - start,
            backwards=backwards,
            began=start if self._began is None else self._began,
            signal=signal,
            weight=float(parts["weight"][0]) if "weight" in parts else None,
            first_not_finite=first,
            reached=any(i < self.norms.in_units for i in vector.indices),
            finite=bool(np.isfinite(norms.total)) if finite is None else finite,
        )
        self._seconds = 0.0
        self.discard()
        return reading

    def _add_agreed(self, vector: StepVector) -> None:
        """Append what all processes must know: the fewest backward passes, where a forward failed, the sum of a signal."""
        count = torch.tensor([-float(self.unread)], device=self.norms.home)
        agreed = count if self._probe is None else torch.cat([count, self._probe.values().to(self.norms.home)])
        if is_distributed():
            torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
            if self._signal is not None and self._signal.summed:  # here, because every rank gets here once a step
                own = vector.part("signal")
                total = torch.zeros(self._signal.size, device=self.norms.home) if own is None else own.clone()
                torch.distributed.all_reduce(total)
                vector.add("signal", total)
        vector.add("agreed", agreed)

    def _all_finite(self) -> bool:
        """Whether the gradients, which were not measured in the backward, are finite (after clipping, possibly)."""
        return bool(torch.isfinite(self.norms.measure()[0]).all())

    @property
    def last_micro_batch(self) -> bool:
        """Whether accelerate considers this the last micro-batch of the window; without accelerate always."""
        return bool(self._state.sync_gradients)

    def holds_unseen_gradient(self) -> bool:
        """Whether the units hold a gradient although no backward was seen: it came about where it cannot be read."""
        return any_nonzero([p.grad for p in self.parameters[: self.norms.in_units] if p.grad is not None])

    def _refuse_stale(self, vector: StepVector) -> None:
        """Raise SetupError if the vector does not describe the gradient that the optimizer is about to use."""
        which, version = self._measured
        if self.parameters[which]._version != version and self._steps.updated(self.parameters[which]):
            raise SetupError(
                "parameters were updated between the backward and the reading: the norms must be read before the "
                "optimizer's step (and before clipping)"
            )

    def _refuse_other_parameters(self) -> None:
        """Raise SetupError if other parameters are trained than when training began."""
        if any(p.requires_grad for p in self._frozen):
            raise SetupError(
                "parameters that were frozen when training began have become trainable (another adapter was made active, or "
                "a layer was unfrozen): they are in no unit. Make them trainable before training begins, and freeze them "
                "afterwards until they are needed"
            )
        if not any(p.requires_grad for p in self.parameters[: self.norms.in_units]):
            raise SetupError(
                "none of the decoder layers' trainable parameters can get a gradient any more: another adapter was made "
                "active, or they were frozen, after training began. Choose the adapter before train()"
            )

    @property
    def unread(self) -> int:
        """Backward passes since the last reading."""
        return self._window.now.count

    def discard(self) -> None:
        """Discard the backward passes since the last reading."""
        self._forget()
        self._began = None
        self._window.clear()
        if self._probe is not None:
            self._probe.discard()

    def _forget(self) -> None:
        """Forget what the backward passes so far left behind: their gradients are gone, unless they are put back."""
        self._window.throw_away(None if self._signal is None else self._signal.measured())
        self._mark = 0
        self.norms.discard()
        if self._signal is not None:
            self._signal.discard()

    def _return_to(self, at_end: bool = False) -> None:
        """Forget the passes whose gradients were replaced by those from before."""
        earlier = self._window.put_back(at_end)
        if earlier is not None and self._signal is not None:
            self._signal.restore(earlier.signal)

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
            self._cut()
        loss = getattr(output, "loss", None)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                # A copy: the loop may divide its loss in place.
                tensor.register_hook(_LossHook(self, tensor.detach().clone()) if tensor is loss else self.arm)

    def _cut(self) -> None:
        """Drop the losses of the latest backward, which added nothing to the step's gradient."""
        self._armed = False
        del self._window.now.losses[self._mark :], self._window.now.weights[self._mark :]
        if self._signal is not None:
            self._signal.cut()

    def arm(self, grad: Tensor) -> None:
        """A backward has begun: ask the autograd engine for a callback at its end."""
        if not self._armed:
            self._return_to()
            if self.unread and self._window.marks.thrown_away():
                self._forget()
            self._window.before_pass(None if self._signal is None else self._signal.measured())
            self._armed, self._mark = True, len(self._window.now.losses)
            if self._signal is not None:
                self._signal.mark()
            queue_callback(self._end_of_backward)

    def note_weighted(self, loss: Tensor, grad: Tensor) -> None:
        """Record the model's own loss output and the gradient that arrived at it, which is its weight in the step's loss."""
        self._window.now.losses.append((loss.float() * grad.detach().float()).sum())
        self._window.now.weights.append(grad.detach().float().sum())

    def _end_of_backward(self) -> None:
        queue_callback(self.after_reduction)

    def after_reduction(self) -> None:
        """Measure the gradients as they are: once a backward is done, and (under DDP) reduced."""
        if self._window.marks.unchanged():  # torch.autograd.grad, or a backward that reached nothing that is trained
            self._cut()
            return
        self._armed = False
        self._window.after_pass()
        if not self._state.sync_gradients:
            return
        start = time.perf_counter()
        home = self.norms.home
        cuda = home.type == "cuda"
        if cuda:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events[0].record()
        norms, indices = self.norms.measure()
        which = int(indices[0]) if len(indices) else 0
        self._measured = (which, self.parameters[which]._version)
        self._steps.forget()
        scale = loss_scale(self._scaler, home)
        # A loop without accelerate gets here after each micro-batch; the vector of the last one counts.
        passes, vector = self._window.now, StepVector(indices)
        before, passes.pending = passes.pending, vector
        self._add_signal(vector, before, scale)
        vector.add("norms", norms)
        vector.add("scale", scale)
        if passes.losses:
            for name, values in (("loss", passes.losses), ("weight", passes.weights)):
                gathered = [x.to(home, torch.float32, non_blocking=True) for x in values]
                vector.add(name, torch.stack(gathered).sum()[None])
        if cuda:
            assert self._events is not None
            self._events[1].record()
        else:
            self._seconds += time.perf_counter() - start

    def _add_signal(self, vector: StepVector, before: StepVector | None, scale: Tensor) -> None:
        """Append the trigger's signal once the window is full; a further backward in the same step keeps or extends it."""
        signal = self._signal
        if signal is None or self.unread < self._accumulation:
            return
        kept = None if before is None else before.part("signal")
        if kept is None or signal.extends:
            self._seconds += signal.seconds
            skips = self._scaler is not None and self._scaler.is_enabled()
            kept = signal.values(scale, skips).to(self.norms.home)
        vector.add("signal", kept)


class _LossHook:
    """Hook on the model's loss output: the gradient that arrives is this micro-batch's weight in the step's loss."""

    def __init__(self, reader: GradientNorms, loss: Tensor) -> None:
        self.reader = reader
        self.loss = loss

    def __call__(self, grad: Tensor) -> None:
        self.reader.arm(grad)
        self.reader.note_weighted(self.loss, grad)
