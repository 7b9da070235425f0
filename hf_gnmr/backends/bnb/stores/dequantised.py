"""The store `dequantize`: nothing is kept; the recovery path computes in BF16 on the 8-bit weights."""

from __future__ import annotations

from torch import Tensor

from ...base import Way
from ..bf16_product import Product, RebuiltLinear, dequantize
from .base import Module, PlannedWeights, Store, StoreKind, StoreOptions, SwitchedBase


class Dequantised(Store, StoreKind):
    """No originals: codes × scale / 127."""

    summary = "BF16 compute on the 8-bit weights, no originals"
    originals_used = False
    source = "dequantised 8-bit weights; no originals"

    @classmethod
    def open(cls, base: SwitchedBase) -> Dequantised:
        return cls(base.modules)

    @classmethod
    def ways(cls, planned: PlannedWeights) -> list[Way]:
        return [Way("dequantize", "INT8, recovery=dequantize", planned.weights)]

    @classmethod
    def way(cls, options: StoreOptions, on_cpu: bool) -> str:
        return "dequantize"

    def product(self, module: Module) -> Product:
        def weight() -> Tensor:
            if module.weight.CB is not None:
                module.init_8bit_state()
            return dequantize(module.state.CB, module.state.SCB)

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            return RebuiltLinear.apply(x, weight, bias, False)

        return product

    def in_words(self) -> str:
        return "BF16 product with DEQUANTISED 8-bit weights (not the originals)"
