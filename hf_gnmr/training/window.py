"""The backward passes of one optimizer step, and the way back to fewer of them.

A probe in a user's callback may save the gradients, run a backward of its own and put them back.  What that backward
left behind here (its loss, its norms, the trigger's measurements) then has to go too, so the state before each pass is kept
until the step ends: a few references to numbers on the device, no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .accumulated import GradientMarks, Marks, in_proportion
from .reading import StepVector


@dataclass(eq=False)  # one is found again by identity: tensors do not compare
class Passes:
    """What the backward passes of a step left behind."""

    count: int = 0
    losses: list[Tensor] = field(default_factory=list)
    """The model's own loss outputs, each weighted as in its backward."""
    weights: list[Tensor] = field(default_factory=list)
    step_losses: list[Tensor] = field(default_factory=list)
    """The losses that the loop reported."""
    pending: StepVector | None = None
    """What was measured at the end of the latest pass."""
    signal: Any = None
    """What the trigger's signal had measured before the pass that followed."""
    marks: Marks = field(default_factory=list)
    """Of the gradients after the latest pass."""
    norms: Tensor | None = None
    """Of a sample of the gradients after the latest pass."""

    def copy(self) -> Passes:
        """A copy that does not grow with this one."""
        return replace(self, losses=[*self.losses], weights=[*self.weights], step_losses=[*self.step_losses])


class Window:
    """The passes of the current step, and what they were before each pass.

    Args:
        parameters: trainable parameters, those of the units first.
        accumulation: passes in a full window.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], accumulation: int) -> None:
        self.marks = GradientMarks(parameters)
        self.now = Passes()
        self._accumulation = accumulation
        self._earlier: list[Passes] = []
        self._thrown_away = False

    def before_pass(self, signal: Any) -> None:
        """A pass begins: keep what the earlier ones left behind."""
        if self.now.count:
            earlier = replace(self.now.copy(), signal=signal)
            if not self.marks.unchanged():  # clipped, perhaps: a probe just before the optimizer's step
                earlier.marks, earlier.norms = self.marks.take(), self.marks.norms()
            self._earlier.append(earlier)
        self.marks.take()

    def after_pass(self) -> None:
        """A pass has ended and added to the gradients."""
        self.now.count += 1
        self.now.marks, self.now.norms = self.marks.take(), self.marks.norms()

    def throw_away(self, signal: Any) -> None:
        """The gradients of the passes so far are gone, unless they are put back."""
        if self.now.count:
            self._earlier.append(replace(self.now, signal=signal))
            self._thrown_away = True
        self.now = Passes()

    def clear(self) -> None:
        """The step has ended."""
        self.now, self._earlier, self._thrown_away = Passes(), [], False
        self.marks.release()

    def put_back(self, at_end: bool = False) -> Passes | None:
        """The earlier state to which something other than a backward returned the gradients; None: to none.

        It is `now` from here on. Values are compared only where gradients were replaced, or where they were changed in place
        and that is not just clipping: between two passes, after gradients were thrown away, or after more passes than a
        window has.

        Args:
            at_end: whether the step's passes are over, so that the gradients may have been clipped.
        """
        if not self._earlier or self.marks.unchanged() or self.marks.removed():
            return None
        found = self._match(at_end)
        if found is None:
            return None
        del self._earlier[self._earlier.index(found) :]
        self.now = found
        self.now.marks = self.marks.take()
        return found

    def _match(self, at_end: bool) -> Passes | None:
        kept = self.marks.same_tensors(self.now.marks)
        if not kept:
            for earlier in reversed(self._earlier):
                if self.marks.same_tensors(earlier.marks):
                    return earlier
        suspicious = not at_end or self._thrown_away or self.now.count > self._accumulation
        if kept and not suspicious:
            return None
        norms = self.marks.norms()
        if self.now.norms is not None and torch.equal(norms, self.now.norms):
            return None
        states = [s for s in reversed(self._earlier) if s.norms is not None]
        exact = next((s for s in states if torch.equal(norms, s.norms) and bool(norms.any())), None)  # type: ignore[arg-type]
        if exact is not None:
            return exact
        if self.now.norms is not None and (kept or not suspicious) and in_proportion(norms, self.now.norms):
            return None
        return next((s for s in states if in_proportion(norms, s.norms)), None)  # type: ignore[arg-type]
