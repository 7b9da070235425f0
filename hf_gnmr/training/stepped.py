"""Whether an optimizer has updated a parameter: a parameter may also change for other reasons, and be changed back.

Adversarial weight perturbation, for one, moves the weights between two backward passes of a step and moves them back.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class OptimizerSteps:
    """Notes which of this process's optimizers have stepped since `forget`."""

    def __init__(self) -> None:
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        stepped = self._stepped

        def note(optimizer: Optimizer, *_: Any) -> None:
            stepped.add(optimizer)

        # Removed with this object too: a training that was interrupted closes nothing.
        self._remove = weakref.finalize(self, register_optimizer_step_post_hook(note).remove)

    def forget(self) -> None:
        """Start over."""
        self._stepped.clear()

    def updated(self, parameter: nn.Parameter) -> bool:
        """Whether an optimizer that holds this parameter has stepped."""
        return any(p is parameter for o in self._stepped for group in o.param_groups for p in group["params"])

    def remove(self) -> None:
        """Stop noting; may be called more than once."""
        self._remove()
