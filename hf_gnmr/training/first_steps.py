"""What the first steps of a training show to be wrong with its set-up, and short windows; each is reported once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import nn

from ..backends.units import Unit, base_model
from ..config import SetupError
from ..control.controller import Bools
from .distributed import world_size
from .journal import OddWindows, say, say_out_of_reach
from .reading import Reading

STEPS = 3
"""Steps after which something that was wrong in each of them is reported."""


class FirstSteps:
    """Looks at the readings of a training.

    Args:
        model: the model, for advice.
        units: the monitored units.
        accumulation: micro-batches in a full window.
        scaler_known: whether the loss scaler, or that there is none, is known: then the loss may have any weight.
        reports: whether this process reports what it sees (all of them look, so that all of them refuse alike).
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        accumulation: int,
        *,
        scaler_known: bool,
        reports: Callable[[], bool] = lambda: True,
    ) -> None:
        self._model, self._units, self._reports = model, units, reports
        self._windows = OddWindows(accumulation)
        self._without = 0
        """Steps without any backward, before the first one with a backward."""
        self._readings = 0
        self._reached = False
        self._seen: Bools = np.zeros(len(units), dtype=bool)
        self._said_short = self._looked = False
        self._weights: list[float] | None = None if scaler_known else []

    def may_lack_backward(self) -> bool:
        """Whether a step without a backward is tolerated: once there was one, or before the first steps are over."""
        return self._readings > 0 or self._without < STEPS - 1

    def saw(self, step: int, reading: Reading, micro_batches: int, skipped: str | None) -> None:
        """A step ended.

        Args:
            step: the optimizer step, counted from 1.
            reading: its gradient.
            micro_batches: how many the step had.
            skipped: why it did not count; None if it did.

        Raises:
            SetupError: no gradient has reached the units in any of the first steps.
        """
        if self._reports():
            self._windows.saw(min(micro_batches, reading.backwards))
        # A custom loop counts its micro-batches by their backward passes, so there a missing one is a shorter window.
        short = reading.backwards < max(micro_batches, 1) or micro_batches < self._windows.accumulation
        if skipped is not None and short and not self._said_short:
            self._said_short = True
            self._say(
                f"step {step}: {skipped}. Such steps are in the trace, but not in the history, and change no path (this is "
                "reported once)"
            )
        if not reading.backwards:
            self._without += not self._readings
            return
        self._look_at_weight(reading)
        if self._readings < STEPS:
            self._readings += 1
            self._reached |= reading.reached
            self._seen = self._seen | reading.seen
            if self._readings == STEPS:
                self._look_at_reach()

    def _say(self, text: str) -> None:
        if self._reports():
            say(text)

    def _look_at_reach(self) -> None:
        if not self._reached:
            raise SetupError(f"no gradient reaches the decoder layers ({self._names(~self._seen)}): {self._advice()}")
        parts = any(unit.part is not None or "expert" in unit.name for unit in self._units)
        if self._seen.all() or (parts and self._seen.any()):  # an expert may wait for its first token
            return
        self._say(f"no gradient reaches {self._names(~self._seen)} in the first {STEPS} steps: {self._advice()}")

    def _names(self, mask: Bools) -> str:
        chosen = [self._units[i] for i in np.flatnonzero(mask).tolist()]
        layers = all(unit.name.endswith(f".{unit.layer}") for unit in chosen)
        names = [str(unit.layer) if layers else unit.name for unit in chosen[:8]]
        return f"{'decoder layers' if layers else 'units'} {', '.join(names)}{', …' if len(chosen) > 8 else ''}"

    def _advice(self) -> str:
        if any(getattr(module, "gradient_checkpointing", False) for module in base_model(self._model).modules()):
            return (
                "gradient checkpointing is on, and in its reentrant form it cuts the graph where no input requires a "
                "gradient. Call model.enable_input_require_grads() before training, or use "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        return (
            "all their gradients are zero or missing. Is the loss 0 (all labels ignored, a reward without signal), or does "
            "it not depend on them (a detached output, another adapter made active, a projection behind zero weights)?"
        )

    def _look_at_weight(self, reading: Reading) -> None:
        """Report a loss that looks scaled in each of the first steps, where no scaler was given."""
        if self._weights is None or reading.weight is None:
            return
        self._weights.append(reading.weight / reading.backwards)
        if len(self._weights) == STEPS:
            if all(looks_scaled(weight) and weight == self._weights[0] for weight in self._weights):
                self._say(
                    f"IS THERE A LOSS SCALER? In each of the first {STEPS} steps the loss entered the backward multiplied "
                    f"by {self._weights[0]:g}. If a scaler did that, its scale is in every norm: pass scaler= "
                    "(accelerator.scaler). If the loss is a sum, all is well"
                )
            self._weights = None

    def decided(self, idle: Callable[[], Bools], reading: Reading, trigger: str) -> None:
        """After the first decision on a gradient: report the trained units that the controller cannot help."""
        if not self._looked and reading.seen.any() and self._reports():
            self._looked = True
            say_out_of_reach(self._units, idle(), reading, trigger)


def looks_scaled(weight: float) -> bool:
    """Whether a micro-batch's loss enters the backward with a power of two as large as a loss scale.

    Without a scaler the weight is 1, its share of the step, or that times the number of processes (as the Trainer undoes
    DDP's average); and whatever the loop chose.
    """
    if not math.isfinite(weight) or weight < 256 or math.isclose(weight, world_size(), rel_tol=1e-6):
        return False
    return abs(math.log2(weight) - round(math.log2(weight))) < 1e-6
