"""Products of linears in few bits, forward and backward: each an exact statement of what is rounded, and when.

`LowBit` (simulated; paper, Appendix E.2, second configuration): with q row by row onto a format's grid,

    y = q(q(x) q(w)ᵀ + b);   dx = q(q(dy) q(w));   dw = q(q(dy)ᵀ q(x));   db = Σ q(dy)

where rows are tokens for x, y, dy and dx, and output rows for w and dw.  Operands are dequantised in the dtype of the
product (BF16 rounds them once more, by 2⁻⁹), sums are the processor's own.

`HybridFp8` (first configuration): E4M3 for x and w, E5M2 for dy, one scale per tensor, computed from the tensor itself
("current scaling": there is no history to keep).  y, dx, dw are in the dtype of the product, scaled afterwards;
db = Σ dy.  "emulated" multiplies the grids' numbers in the product's dtype, which holds them exactly (FP16: in fp32, since
sums of grid numbers overflow it); "scaled_mm" passes FP8 numbers to the processor's own FP8 product.

An input that several products read is quantised once (`Latest`).  The backward keeps the quantised input and the quantised
weight, never the input itself.  An input that is not finite gives results that are not finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..formats import E4M3, E5M2, FloatFormat, on_grid, quantise_rows, tensor_scale
from ..linears import Latest, as_autocast, without_autocast

ENGINES = ("emulated", "scaled_mm")


@dataclass(frozen=True)
class LowBit:
    """Everything in one format, scaled row by row."""

    form: FloatFormat

    @property
    def name(self) -> str:
        """For the census."""
        return f"{self.form.bits}-bit ({self.form.name.upper()}) w, x, y, dy, dw, dx"

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, latest: Latest) -> Tensor:
        """x (..., in), weight (out, in), bias (out,) or None -> (..., out), in the dtype that `F.linear` gives."""
        if x.numel() == 0:
            return F.linear(x, weight, bias)
        x, weight, bias = _operands(x, weight, bias, latest)
        xq = latest.get(self.form.name, lambda: quantise_rows(_rows(x.detach()), self.form))
        return _LowBit.apply(x, weight, bias, xq, self.form, latest)


@dataclass(frozen=True)
class HybridFp8:
    """E4M3 forward, E5M2 backward, one scale per tensor."""

    engine: str = "emulated"

    @property
    def name(self) -> str:
        """For the census."""
        how = "emulated" if self.engine == "emulated" else "the processor's scaled FP8 product"
        return f"hybrid FP8 (E4M3 forward, E5M2 gradients; {how})"

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, latest: Latest) -> Tensor:
        """Same shapes and dtypes as `LowBit`'s."""
        if x.numel() == 0:
            return F.linear(x, weight, bias)
        x, weight, bias = _operands(x, weight, bias, latest)
        grid, scale = latest.get(f"fp8 {self.engine}", lambda: _fp8(_rows(x.detach()), E4M3, self.engine))
        return _HybridFp8.apply(x, weight, bias, grid, scale, self.engine, latest)


Product = LowBit | HybridFp8


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None, latest: Latest) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in the product's dtype; registers the input in `latest`."""
    uncast = x
    x, weight, bias = as_autocast(x, weight, bias)
    latest.is_new(uncast, x.dtype)
    return x, weight, bias


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _LowBit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, xq: Tensor, form: FloatFormat, latest: Latest
    ) -> Tensor:
        # The operands are already in autocast's dtype.
        wq = quantise_rows(weight, form)
        ctx.form, ctx.latest, ctx.shape = form, latest, x.shape
        ctx.save_for_backward(xq if ctx.needs_input_grad[1] else None, wq if ctx.needs_input_grad[0] else None)
        with without_autocast(x):
            y = F.linear(xq, wq, bias)
        return quantise_rows(y, form).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        xq, wq = ctx.saved_tensors
        form = ctx.form
        ctx.latest.forget()
        dyq = quantise_rows(_rows(dy), form)
        with without_autocast(dy):
            dx = quantise_rows(dyq @ wq, form).view(ctx.shape) if ctx.needs_input_grad[0] else None
            dw = quantise_rows(dyq.t() @ xq, form) if ctx.needs_input_grad[1] else None
        db = dyq.sum(dim=0) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None, None


class _HybridFp8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grid: Tensor, scale: Tensor, engine: str, latest: Latest
    ) -> Tensor:
        w, w_scale = _fp8(weight, E4M3, engine)
        ctx.engine, ctx.latest, ctx.shape, ctx.dtype = engine, latest, x.shape, x.dtype
        need_x, need_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(grid if need_w else None, scale, w if need_x else None, w_scale)
        y = _multiply(grid, w.t(), scale, w_scale, x.dtype, engine)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, w, w_scale = ctx.saved_tensors
        ctx.latest.forget()
        flat = _rows(dy)
        g, scale = _fp8(flat, E5M2, ctx.engine)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _multiply(g, w, scale, w_scale, ctx.dtype, ctx.engine).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            dw = _multiply(g.t(), x, scale, x_scale, ctx.dtype, ctx.engine)
        db = flat.sum(dim=0) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None, None, None


def _fp8(x: Tensor, form: FloatFormat, engine: str) -> tuple[Tensor, Tensor]:
    """The grid's numbers, in a dtype that the engine multiplies, and their scale."""
    if engine == "scaled_mm":  # the cast rounds as `on_grid` does; the scale keeps every number in range
        scale = tensor_scale(x, form)
        return (x.float() * scale.reciprocal()).to(torch.float8_e4m3fn if form is E4M3 else torch.float8_e5m2), scale
    grid, scale = on_grid(x, form)
    return grid.to(torch.float32 if x.dtype == torch.float16 else x.dtype), scale


def _multiply(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, engine: str) -> Tensor:
    """a (m, k) times b (k, n), each with its scale, in `dtype`."""
    if engine == "emulated":
        with without_autocast(a):
            return (a @ b).mul_(a_scale * b_scale).to(dtype)
    # The product needs a's rows and b's columns contiguous, and k a multiple of 16: tokens are padded with zeros.
    padding = -a.shape[1] % 16
    if padding:
        a = torch.cat([a, a.new_zeros(a.shape[0], padding)], dim=1)
        b = torch.cat([b, b.new_zeros(padding, b.shape[1])], dim=0)
    columns = b.t().contiguous().t()
    return torch._scaled_mm(a.contiguous(), columns, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)
