"""Simulated 4-bit and 6-bit training: every tensor of a linear in E2M1 or E3M2, recovery in hybrid FP8 or unquantised.

Paper, section 5.2 and Appendix E.2, second configuration.  A simulation: numbers are rounded, nothing is stored in few bits
and nothing runs faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ...config import ConfigError
from ..formats import FLOATS
from ..units import Unit
from .paths import LowPrecision
from .products import HybridFp8, LowBit, Product


class LowBitBackend(LowPrecision):
    """Decoder layers (or experts) in `bits_low`, recovered in `bits_recovery`.

    Args:
        model: see `LowPrecision`.
        units: see `LowPrecision`.
        bits_low: 4 (E2M1) or 6 (E3M2).
        bits_recovery: 8 (hybrid FP8, emulated) or 16 (the plain product).
        eval_path: "low", "recovery" or "active".

    Raises:
        ConfigError: other bits.
        SetupError: see `LowPrecision`.
    """

    name = "lowbit"

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], *, bits_low: int = 4, bits_recovery: int = 8, eval_path: str = "low"
    ) -> None:
        self._take(model, units, *products_of(bits_low, bits_recovery), eval_path)

    def census(self) -> dict[str, Any]:
        census = super().census()
        return {**census, "path": f"SIMULATED (numbers are rounded; no memory or time is saved): {census['path']}"}


def products_of(bits_low: int, bits_recovery: int) -> tuple[Product, Product | None]:
    """The two paths' products.

    Raises:
        ConfigError: bits that this backend does not have.
    """
    for name, bits, allowed in (("bits_low", bits_low, (4, 6)), ("bits_recovery", bits_recovery, (8, 16))):
        if not isinstance(bits, int) or isinstance(bits, bool) or bits not in allowed:
            raise ConfigError(f"{name}={bits!r}: {' or '.join(map(str, allowed))} is allowed with backend='lowbit'")
    form = FLOATS[bits_low]
    return LowBit(form), HybridFp8() if bits_recovery == 8 else None
