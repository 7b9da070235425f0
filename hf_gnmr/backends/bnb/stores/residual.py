"""Original BF16 weights as one extra byte beside the 8-bit codes.

With base = bf16(code · scale / 127), the bit patterns of an original weight and of its base, read as 16-bit integers, are
close: neighbouring patterns are neighbouring representable numbers. The difference fits in a signed byte nearly
everywhere that code ≠ 0; where it does not, the pattern itself is stored separately, with its index. About 1% of weights
are such exceptions, so that code, residual and exceptions take about 2.07 bytes per weight, and the decoded weight is the
original bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Weights decoded at a time: bounds the FP32 intermediate."""


@dataclass(frozen=True)
class Residual:
    """What has to be stored of one module's original, in addition to its codes and scales."""

    bytes_: Tensor
    """int8, shape (out, in): difference of bit patterns; 0 at exceptions."""
    index: Tensor
    """int32, shape (exceptions,): positions in the flattened weight."""
    pattern: Tensor
    """int16, shape (exceptions,): bit patterns of the original there."""

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.bytes_, self.index, self.pattern))


class Workspace:
    """Memory for one decoded weight, allocated once and used by all modules of a device in turn."""

    def __init__(self, weights: int, device: torch.device) -> None:
        self.weights = weights
        self.decoded = torch.empty(weights, dtype=torch.bfloat16, device=device)
        self.product = torch.empty(min(weights, CHUNK), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return 2 * self.decoded.numel() + 4 * self.product.numel()


def encode(original: Tensor, codes: Tensor, scale: Tensor, workspace: Workspace) -> Residual:
    """The residual of `original` (BF16, (out, in)) over `codes` (int8, (out, in)) and `scale` (fp32, (out,)), one device."""
    base = _base(codes, scale, workspace).view(torch.int16)
    pattern = original.contiguous().view(torch.int16)
    difference = pattern.to(torch.int32) - base.to(torch.int32)
    fits = (difference >= -128) & (difference <= 127)
    index = torch.nonzero(~fits.flatten()).flatten()
    return Residual(
        bytes_=torch.where(fits, difference, 0).to(torch.int8),
        index=index.to(torch.int32),
        pattern=pattern.flatten()[index],
    )


def decode(residual: Residual, codes: Tensor, scale: Tensor, workspace: Workspace) -> Tensor:
    """The original weight, BF16 (out, in), in the workspace: valid until the next decode into it."""
    weight = _base(codes, scale, workspace)
    weight.view(torch.int16).add_(residual.bytes_)
    weight.view(torch.int16).view(-1).index_put_((residual.index,), residual.pattern)
    return weight


def _base(codes: Tensor, scale: Tensor, workspace: Workspace) -> Tensor:
    """bf16(code · scale / 127), (out, in), in the workspace."""
    rows, columns = codes.shape
    weight = workspace.decoded[: rows * columns].view(rows, columns)
    step = (scale.float() / 127.0).unsqueeze(1)
    at_once = max(1, CHUNK // columns)
    product = workspace.product
    if columns > product.numel():
        product = torch.empty(columns, dtype=torch.float32, device=codes.device)
    for first in range(0, rows, at_once):
        part = codes[first : first + at_once]
        scaled = product[: part.numel()].view(part.shape)
        torch.mul(part, step[first : first + at_once], out=scaled)
        weight[first : first + at_once].copy_(scaled)
    return weight
