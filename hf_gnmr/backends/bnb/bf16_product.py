"""The recovery path's BF16 product, with a weight that is in memory or rebuilt at each use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Product = Callable[[Tensor, "Tensor | None"], Tensor]
"""(n, in) BF16 and bias (out,) BF16 or None -> (n, out) BF16."""


class RebuiltLinear(torch.autograd.Function):
    """BF16 product with a weight that is rebuilt in forward and backward and never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Callable[[], Tensor], bias: Tensor | None, transposed: bool) -> Tensor:
        ctx.weight, ctx.transposed = weight, transposed
        return multiply(x, weight(), bias, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = ctx.weight()
            grad_x = grad @ (weight.t() if ctx.transposed else weight)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x (n, in) BF16; weight (out, in), or (in, out) if transposed: then bit for bit transformers' Conv1D."""
    if transposed:
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    return F.linear(x, weight, bias)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """codes: int8 (out, in); scale: fp32 (out,), the row's largest magnitude. Returns BF16 (out, in)."""
    return codes.to(torch.bfloat16).mul_(scale.unsqueeze(1) / 127.0)
