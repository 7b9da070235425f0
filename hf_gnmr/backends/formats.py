"""Number formats below 16 bits: rounding onto a format's grid, and codes that take as many bits as they say.

Two kinds, both scaled so that the largest magnitude of a token, a tensor or a block is the largest number of the format:

* `FloatFormat`: sign, exponent, mantissa, no infinities: E2M1 (4 bits), E3M2 (6), E4M3 and E5M2 (8).
* `IntFormat`: symmetric integers of 2 to 8 bits, the most negative code unused.

Rounding is to nearest, ties to even, and beyond the largest number to the largest number.  Of a row that holds a number that
is not finite no number is finite on the way back (its scale is not): what was not finite is never hidden.

How a float is rounded without a table: the step of the format's grid around y is a power of two times y's own, so adding
and subtracting 1.5 · 2^(23-m) · 2^e (e: y's exponent, at least the format's least) leaves exactly m mantissa bits, with the
processor's own rounding.  Four passes over the data (mask, lower bound, add, subtract) and the clamp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ConfigError

EXPONENT = 0x7F800000
"""The exponent bits of an fp32 number."""
TINY = torch.finfo(torch.float32).tiny
"""Least scale: below it 1 / scale would overflow."""


@dataclass(frozen=True)
class FloatFormat:
    """Sign, `exponent_bits`, `mantissa_bits`; `largest` is the largest number it has."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    largest: float

    @property
    def bits(self) -> int:
        """Bits a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def least_normal(self) -> float:
        """2 to the least exponent; below it numbers are subnormal, with a fixed step."""
        return 2.0 ** (2 - 2 ** (self.exponent_bits - 1))

    def round_(self, y: Tensor) -> Tensor:
        """Bring `y` (fp32, scaled) onto the grid, in place."""
        y.clamp_(-self.largest, self.largest)
        step = torch.bitwise_and(y.view(torch.int32), EXPONENT).view(torch.float32).clamp_(min=self.least_normal)
        magic = 1.5 * 2.0 ** (23 - self.mantissa_bits)
        return y.add_(step, alpha=magic).sub_(step, alpha=magic)

    def encode_(self, y: Tensor) -> Tensor:
        """Codes, int16 in [0, 2^bits), of numbers on the grid (fp32; destroyed)."""
        # Scaled so that the format's least normal number is BF16's, its fields lie in a BF16 number as they are; and a BF16
        # number holds every number of the grid.
        u = y.mul_(2.0**-126 / self.least_normal).to(torch.bfloat16).view(torch.int16)
        sign = torch.bitwise_right_shift(u, 16 - self.bits).bitwise_and_(1 << (self.bits - 1))
        u.bitwise_right_shift_(7 - self.mantissa_bits).bitwise_and_((1 << (self.bits - 1)) - 1)
        return u.bitwise_or_(sign)

    def decode(self, codes: Tensor) -> Tensor:
        """Numbers, fp32, of codes (int16; destroyed)."""
        sign = torch.bitwise_left_shift(codes, 16 - self.bits).bitwise_and_(-0x8000)
        codes.bitwise_and_((1 << (self.bits - 1)) - 1).bitwise_left_shift_(7 - self.mantissa_bits).bitwise_or_(sign)
        return codes.view(torch.bfloat16).float().mul_(self.least_normal * 2.0**126)


@dataclass(frozen=True)
class IntFormat:
    """Integers from -largest to largest."""

    bits: int

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def largest(self) -> float:
        return float(2 ** (self.bits - 1) - 1)

    def round_(self, y: Tensor) -> Tensor:
        """Bring `y` (fp32, scaled) onto the grid, in place."""
        return y.round_().clamp_(-self.largest, self.largest)

    def encode_(self, y: Tensor) -> Tensor:
        """Codes, int16 in [0, 2^bits), of numbers on the grid (fp32; destroyed): the number plus `largest`."""
        return y.add_(self.largest).to(torch.int16)

    def decode(self, codes: Tensor) -> Tensor:
        """Numbers, fp32, of codes (int16)."""
        return codes.to(torch.float32).sub_(self.largest)


Format = FloatFormat | IntFormat

E2M1 = FloatFormat("e2m1", 2, 1, 6.0)
E3M2 = FloatFormat("e3m2", 3, 2, 28.0)
E4M3 = FloatFormat("e4m3", 4, 3, 448.0)
E5M2 = FloatFormat("e5m2", 5, 2, 57344.0)
FLOATS = {4: E2M1, 6: E3M2, 8: E4M3}
"""The float format of so many bits."""
KINDS = ("float", "int")
SCALINGS = ("token", "tensor", "block")


def format_of(key: str, kind: str, bits: int) -> Format | None:
    """The format of a kind and width; None for 16 bits: nothing is quantised.

    Raises:
        ConfigError: no such format; `key` and what was expected are named.
    """
    if kind not in KINDS:
        raise ConfigError(f"format={kind!r}: expected one of {', '.join(map(repr, KINDS))}")
    allowed = sorted(FLOATS) if kind == "float" else list(range(2, 9))
    whole = isinstance(bits, int) and not isinstance(bits, bool)
    if whole and bits == 16:
        return None
    if not whole or bits not in allowed:
        raise ConfigError(f"{key}={bits!r}: expected {', '.join(map(str, allowed))} or 16 bits with format={kind!r}")
    return FLOATS[bits] if kind == "float" else IntFormat(bits)


def row_scale(x: Tensor, form: Format) -> Tensor:
    """Scale of each row: its largest magnitude over the format's largest number, at least fp32's least normal number.

    Args:
        x: (rows, n), any floating dtype.
        form: the format.

    Returns:
        (rows, 1), fp32; nan or inf where a row holds such.
    """
    if x.shape[1] == 0:
        return torch.full((x.shape[0], 1), TINY, device=x.device)
    # The two extremes, and not abs(): one pass less to write (torch.aminmax is slow on a CPU).
    low, high = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
    return torch.maximum(high, low.neg_()).float().div_(form.largest).clamp_(min=TINY)


def tensor_scale(x: Tensor, form: Format) -> Tensor:
    """One scale for all of `x`, as `row_scale` has it; fp32, no dimension."""
    if x.numel() == 0:
        return torch.full((), TINY, device=x.device)
    return torch.maximum(x.amax(), x.amin().neg_()).float().div_(form.largest).clamp_(min=TINY)


def quantise_rows(x: Tensor, form: Format) -> Tensor:
    """`x` (rows, n) quantised and dequantised row by row, in its own dtype."""
    y, scale = _scaled(x, form)
    return form.round_(y).mul_(scale).to(x.dtype)


def quantise(x: Tensor, form: Format, scaling: str = "token", block: int = 128) -> Tensor:
    """`x` quantised and dequantised, in its own dtype and shape.

    Args:
        x: (..., n), any floating dtype; not changed.
        form: the format.
        scaling: what shares a scale: "token" (a row), "tensor", or "block" (`block` neighbours of a row, the last block of a
            row shorter where n is no multiple).
        block: numbers a block.

    Raises:
        ConfigError: another scaling, or a block below 1.
    """
    if scaling not in SCALINGS:
        raise ConfigError(f"scaling={scaling!r}: expected one of {', '.join(map(repr, SCALINGS))}")
    if block < 1:
        raise ConfigError(f"block={block!r}: expected 1 or more")
    if x.numel() == 0:
        return x.clone()
    columns = x.shape[-1]
    rows = x.reshape(-1, columns)
    if scaling == "tensor":
        y, scale = on_grid(x, form)
        return y.mul_(scale).to(x.dtype)
    if scaling == "block":
        left = -columns % block
        padded = torch.nn.functional.pad(rows, (0, left)) if left else rows
        return quantise_rows(padded.reshape(-1, block), form).view(-1, columns + left)[:, :columns].reshape(x.shape)
    return quantise_rows(rows, form).view(x.shape)


def on_grid(x: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Numbers of the format's grid, fp32, and the one scale (no dimension) that takes them back to `x`."""
    y, scale = _scaled(x, form, tensor_scale)
    return form.round_(y), scale


def _scaled(x: Tensor, form: Format, scale_of: Callable[[Tensor, Format], Tensor] = row_scale) -> tuple[Tensor, Tensor]:
    """x / its scale in fp32, in memory of its own, and the scale."""
    if x.dtype == torch.float64:
        scale = scale_of(x, form)
        return (x / scale).float(), scale
    if x.dtype == torch.float32:
        scale = scale_of(x, form)
        return torch.mul(x, scale.reciprocal()), scale
    y = x.float()  # first: extremes of 16-bit numbers are several times as slow on a CPU
    scale = scale_of(y, form)
    return y.mul_(scale.reciprocal()), scale


class Packed:
    """A matrix quantised row by row, its codes packed without a gap.

    Codes of width w in {1, 2, 4, 8} lie 8 / w to a byte; other widths are split into such (5 bits are 4 and 1).  What shares
    a byte is the same column of rows far apart, so that both ways are whole-array operations on contiguous memory.

    Attributes:
        planes: uint8, one a part of the width.
        scale: (rows, 1), fp32.
    """

    __slots__ = ("dtype", "form", "planes", "scale", "shape")

    def __init__(self, planes: list[Tensor], scale: Tensor, shape: torch.Size, form: Format, dtype: torch.dtype) -> None:
        self.planes, self.scale, self.shape, self.form, self.dtype = planes, scale, shape, form, dtype

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(p.numel() for p in self.planes) + self.scale.numel() * 4


def pack(x: Tensor, form: Format) -> Packed:
    """Quantise a matrix row by row and pack the codes.

    Args:
        x: (rows, n), any floating dtype; not changed.
        form: the format.
    """
    y, scale = _scaled(x, form)
    codes = form.encode_(form.round_(y))
    planes, shift = [], 0
    for width in widths(form.bits):
        part = codes if shift == 0 else codes >> shift
        shift += width
        if shift < form.bits:
            part = part & ((1 << width) - 1)
        planes.append(_fold(part, width))
    return Packed(planes, scale, x.shape, form, x.dtype)


def unpack(packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
    """The dequantised matrix, (rows, n), in `dtype` (None: the one that was packed)."""
    rows, form = packed.shape[0], packed.form
    codes, shift = None, 0
    for width, plane in zip(widths(form.bits), packed.planes, strict=True):
        part = _unfold(plane, width, rows)
        codes = part if codes is None else codes.bitwise_or_(part.bitwise_left_shift_(shift))
        shift += width
    assert codes is not None
    return form.decode(codes).mul_(packed.scale).to(packed.dtype if dtype is None else dtype)


def widths(bits: int) -> list[int]:
    """Widths that divide a byte and sum to `bits`, the largest first."""
    return [w for w in (8, 4, 2, 1) if bits & w]


def packed_bytes(rows: int, columns: int, form: Format) -> int:
    """Bytes of a packed matrix."""
    return sum(-(-rows * w // 8) * columns for w in widths(form.bits)) + 4 * rows


def _fold(codes: Tensor, width: int) -> Tensor:
    """Codes (rows, n) below 2^width, int16 -> uint8 (⌈rows · width / 8⌉, n)."""
    if width == 8:
        return codes.to(torch.uint8)
    share = 8 // width
    held = -(-codes.shape[0] // share)
    out = codes[:held].to(torch.uint8)
    for i in range(1, share):
        part = codes[i * held : (i + 1) * held]
        if part.shape[0] == 0:
            break
        out[: part.shape[0]].bitwise_or_(part.to(torch.uint8).bitwise_left_shift_(i * width))
    return out


def _unfold(plane: Tensor, width: int, rows: int) -> Tensor:
    """The inverse of `_fold`: int16 (rows, n)."""
    if width == 8:
        return plane.to(torch.int16)
    held = plane.shape[0]
    out = torch.empty((rows, plane.shape[1]), dtype=torch.int16, device=plane.device)
    for i in range(8 // width):
        part = out[i * held : (i + 1) * held]
        if part.shape[0] == 0:
            break
        part.copy_((plane[: part.shape[0]] >> (i * width)).bitwise_and_((1 << width) - 1))
    return out
