"""What happened to the gradients between two moments: a backward of the step, one that was thrown away, or put back values.

A user's code may run backward passes of its own between those of the step (a probe in a callback, `torch.autograd.grad`, a
batch that is dropped).  Such a pass leaves a mark on the gradients, or none: autograd adds to a gradient in place, which
raises its version; `zero_grad` removes it.  A probe that saves the gradients before its backward puts the same tensors back,
or their values.  A few attributes of a few parameters are compared; values are read only where a gradient was changed by
something other than a backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

MOST = 256
"""Parameters that are looked at. Each backward of the step reaches some of them, or nothing that is worth noting."""
SAMPLED = 16
"""Of these, parameters of one device and dtype whose gradients' norms are remembered."""
SMALL = 64
"""The sample is taken from this many of the smallest."""
SAME_RATIO = 1e-3
"""Gradients that were clipped differ from what they were by one factor, up to this (rounding in 16 bits)."""


class GradientMarks:
    """Compares gradients with what they were when `take` was called.

    Args:
        parameters: trainable parameters; above `MOST` of them, that many are looked at, evenly spread.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        distinct = list({id(p): p for p in parameters}.values())
        chosen = np.unique(np.linspace(0, len(distinct) - 1, min(MOST, len(distinct))).astype(int))
        self._parameters = [distinct[i] for i in chosen]
        alike = [p for p in self._parameters if (p.device, p.dtype) == (distinct[0].device, distinct[0].dtype)]
        small = sorted(alike, key=lambda p: p.numel())[:SMALL]
        self._sample = [small[i] for i in np.random.default_rng(0).permutation(len(small))[:SAMPLED]]
        self._zero = torch.zeros((), device=self._sample[0].device)
        self.marks: Marks = []
        self.take()

    def take(self) -> Marks:
        """Remember the gradients as they are now, without keeping them alive."""
        gradients = [p.grad for p in self._parameters]
        self.marks = [None if g is None else (id(g), g._version) for g in gradients]
        return self.marks

    def release(self) -> None:
        """Forget them."""
        self.marks = [None] * len(self._parameters)

    def unchanged(self) -> bool:
        """Whether no gradient has been added to, made or removed since `take`."""
        for p, mark in zip(self._parameters, self.marks, strict=True):
            gradient = p.grad
            if mark is None:
                if gradient is not None:
                    return False
            elif gradient is None or (id(gradient), gradient._version) != mark:
                return False
        return True

    def same_tensors(self, marks: Marks) -> bool:
        """Whether the gradients are the tensors of earlier marks, whatever happened to their values."""
        gradients = (p.grad for p in self._parameters)
        return any(marks) and all(
            (None if g is None else id(g)) == (m and m[0]) for g, m in zip(gradients, marks, strict=True)
        )

    def removed(self) -> bool:
        """Whether the gradients that existed at `take` are all gone (`zero_grad`); False if there were none."""
        existed = [p for p, mark in zip(self._parameters, self.marks, strict=True) if mark is not None]
        return bool(existed) and all(p.grad is None for p in existed)

    def thrown_away(self) -> bool:
        """Whether the gradients that existed at `take` are gone, or were set to zero in place (this reads them)."""
        if self.removed():
            return True
        if self.unchanged():
            return False
        left = [p.grad for p, mark in zip(self._parameters, self.marks, strict=True) if mark and p.grad is not None]
        return bool(left) and not any_nonzero(left)

    def norms(self) -> Tensor:
        """L2 norms of the sample's gradients, fp32, shape (up to `SAMPLED`,); 0 without a gradient. No host sync."""
        present = [p.grad for p in self._sample if p.grad is not None]
        norms = iter(torch._foreach_norm(present, 2, torch.float32) if present else ())
        # No index tensor: it would be a copy to the device, which waits.
        return torch.stack([self._zero if p.grad is None else next(norms) for p in self._sample])


Marks = list[tuple[int, int] | None]
"""Identity and version of each gradient that is looked at; None: there is none."""


def in_proportion(norms: Tensor, others: Tensor) -> bool:
    """Whether two samples of norms differ by one factor only, as before and after clipping (reads them: a host sync)."""
    a, b = norms.double(), others.double()
    if not bool(((a > 0) == (b > 0)).all()) or not bool((a > 0).any()):
        return False
    ratios = (a / b)[b > 0]
    return bool(ratios.max() <= ratios.min() * (1 + SAME_RATIO))


def any_nonzero(gradients: Sequence[Tensor]) -> bool:
    """Whether any number in these tensors is not zero (reads them: a host sync)."""
    return any(bool(torch.count_nonzero(g)) for g in gradients)
