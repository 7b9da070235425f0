"""What happened to the gradients between two moments, without reading their values.

A user's code may run backward passes of its own between those of the step (a probe in a callback, `torch.autograd.grad`, a
batch that is dropped).  Such a pass leaves a mark on the gradients, or none: autograd adds to a gradient in place, which
raises its version; `zero_grad` removes it.  A few attributes of a few parameters are compared; values are read only where a
gradient was changed by something other than a backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

MOST = 256
"""Parameters that are looked at. Each backward of the step reaches some of them, or nothing that is worth noting."""


class GradientMarks:
    """Compares gradients with what they were when `take` was called.

    Args:
        parameters: trainable parameters; above `MOST` of them, that many are looked at, evenly spread.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        distinct = list({id(p): p for p in parameters}.values())
        chosen = np.unique(np.linspace(0, len(distinct) - 1, min(MOST, len(distinct))).astype(int))
        self._parameters = [distinct[i] for i in chosen]
        self._marks: list[tuple[int, int] | None] = []
        self.take()

    def take(self) -> None:
        """Remember the gradients as they are now, without keeping them alive."""
        gradients = [p.grad for p in self._parameters]
        self._marks = [None if g is None else (id(g), g._version) for g in gradients]

    def release(self) -> None:
        """Forget them."""
        self._marks = [None] * len(self._parameters)

    def unchanged(self) -> bool:
        """Whether no gradient has been added to, made or removed since `take`."""
        for p, mark in zip(self._parameters, self._marks, strict=True):
            gradient = p.grad
            if mark is None:
                if gradient is not None:
                    return False
            elif gradient is None or (id(gradient), gradient._version) != mark:
                return False
        return True

    def removed(self) -> bool:
        """Whether the gradients that existed at `take` are all gone (`zero_grad`); False if there were none."""
        existed = [p for p, mark in zip(self._parameters, self._marks, strict=True) if mark is not None]
        return bool(existed) and all(p.grad is None for p in existed)

    def thrown_away(self) -> bool:
        """Whether the gradients that existed at `take` are gone, or were set to zero in place (this reads them)."""
        if self.removed():
            return True
        if self.unchanged():
            return False
        left = [p.grad for p, mark in zip(self._parameters, self._marks, strict=True) if mark and p.grad is not None]
        return bool(left) and not any_nonzero(left)


def any_nonzero(gradients: Sequence[Tensor]) -> bool:
    """Whether any number in these tensors is not zero (reads them: a host sync)."""
    return any(bool(torch.count_nonzero(g)) for g in gradients)
