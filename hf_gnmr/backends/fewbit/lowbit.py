"""Simulated 4-bit and 6-bit training: every tensor of a linear in E2M1 or E3M2, recovery in hybrid FP8 or unquantised.

Paper, section 5.2 and Appendix E.2, second configuration.  A simulation: numbers are rounded, nothing is stored in few bits
and nothing runs faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...config import ConfigError
from ..formats import FLOATS
from ..units import Unit
from .paths import LowPrecision, LowPrecisionOptions
from .products import HybridFp8, LowBit, Product

BITS_LOW, BITS_RECOVERY = (4, 6), (8, 16)


@dataclass(frozen=True)
class LowBitOptions(LowPrecisionOptions):
    """Bits of the two paths."""

    bits_low: int = 4
    """Bits on the low-cost path: 4 (E2M1) or 6 (E3M2)."""
    bits_recovery: int = 8
    """Bits on the recovery path: 8 (hybrid FP8, emulated) or 16 (the plain product)."""

    backend = "lowbit"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, bits, choices in (
            ("bits_low", self.bits_low, BITS_LOW),
            ("bits_recovery", self.bits_recovery, BITS_RECOVERY),
        ):
            if not isinstance(bits, int) or isinstance(bits, bool) or bits not in choices:
                raise ConfigError(f"{name}={bits!r}: expected {' or '.join(map(str, choices))} with backend='lowbit'")


class LowBitBackend(LowPrecision):
    """Decoder layers (or experts) in `bits_low`, recovered in `bits_recovery`.

    Raises:
        ConfigError: a wrong option.
        SetupError: see `LowPrecision`.
    """

    name = "lowbit"
    Options = LowBitOptions
    options: LowBitOptions

    def products(self, units: Sequence[Unit]) -> tuple[Product, Product | None]:
        return LowBit(FLOATS[self.options.bits_low]), HybridFp8() if self.options.bits_recovery == 8 else None

    def census(self) -> dict[str, Any]:
        census = super().census()
        return {**census, "path": f"SIMULATED (numbers are rounded; no memory or time is saved): {census['path']}"}
