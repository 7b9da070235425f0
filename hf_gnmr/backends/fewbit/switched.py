"""A linear that runs its unit's product, and the switch that says which."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..linears import Latest, Switched
from .products import Product


class ProductSwitch:
    """What a unit's modules run, in train and in eval mode; None: the plain product."""

    __slots__ = ("in_eval", "in_train")

    def __init__(self) -> None:
        self.in_train: Product | None = None
        self.in_eval: Product | None = None


class SwitchedLinear(Switched, nn.Linear):
    """A linear that runs its unit's product."""

    ours = ("paths", "latest")
    paths: ProductSwitch
    latest: Latest

    # As it is under torch.compile, so that a choice of units costs no recompilation.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        product = self.paths.in_train if self.training else self.paths.in_eval
        if product is None:
            return super().forward(x)
        return product(x, self.weight, self.bias, self.latest)
