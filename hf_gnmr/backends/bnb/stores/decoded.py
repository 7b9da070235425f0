"""The store `device`: both paths resident, one byte per weight besides the 8-bit ones; originals are decoded at each use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...base import Way
from ..bf16_product import Product, RebuiltLinear
from ..originals import Original
from ..pages import give_back
from .base import Module, PlannedWeights, Store, StoreKind, StoreOptions, SwitchedBase
from .residual import CHUNK, Residual, Workspace, decode, encode

EXCEPTIONS = 0.012
"""Share of weights stored in addition to the residuals, as measured on trained models; for the plan."""


class Decoded(Store, StoreKind):
    """Both paths resident: codes, scales, and one residual byte per weight, from which originals are decoded at each use."""

    summary = "both paths resident, about two bytes per weight"

    def __init__(self, modules: Sequence[Sequence[Module]], originals: dict[Module, Original]) -> None:
        super().__init__(modules)
        self._workspaces: dict[torch.device, Workspace] = {}
        largest: dict[torch.device, int] = {}
        for module in originals:
            device = module.state.CB.device
            largest[device] = max(largest.get(device, 0), module.state.CB.numel())
        for device, weights in largest.items():
            self._workspaces[device] = Workspace(weights, device)
        self._residuals: dict[Module, tuple[Residual, bool]] = {}
        for module, original in originals.items():
            weight = original.weight.T if original.transposed else original.weight
            codes, scale = module.state.CB, module.state.SCB
            weight = weight.to(codes.device, torch.bfloat16)
            self._residuals[module] = encode(weight, codes, scale, self._workspaces[codes.device]), original.transposed
            if original.mapped:
                give_back([original.weight])
        self.exceptions = sum(residual.index.numel() for residual, _ in self._residuals.values())
        self.resident_bytes = sum(residual.nbytes for residual, _ in self._residuals.values())
        self.resident_bytes += sum(workspace.nbytes for workspace in self._workspaces.values())

    @classmethod
    def open(cls, base: SwitchedBase) -> Decoded:
        originals = base.find(False)
        store = cls(base.modules, originals.weights)
        store.source = originals.source
        return store

    @classmethod
    def ways(cls, planned: PlannedWeights) -> list[Way]:
        switched = sum(planned.units) // 2
        residual = switched + 6 * math.ceil(EXCEPTIONS * switched) + 2 * planned.largest + 4 * min(planned.largest, CHUNK)
        resident = (
            f"resident whichever units are active; about {100 * EXCEPTIONS:.1f}% exceptions, known only from the weights"
        )
        return [Way("device", "INT8, recovery=device", planned.weights, recovery=residual, note=resident)]

    @classmethod
    def way(cls, options: StoreOptions, on_cpu: bool) -> str:
        return "device"

    def product(self, module: Module) -> Product:
        residual, transposed = self._residuals[module]
        workspace = self._workspaces[module.state.CB.device]

        def weight() -> Tensor:
            decoded = decode(residual, module.state.CB, module.state.SCB, workspace)
            return decoded.t().contiguous() if transposed else decoded

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            return RebuiltLinear.apply(x, weight, bias, transposed)

        return product

    def close(self) -> None:
        self._residuals, self._workspaces = {}, {}

    def in_words(self) -> str:
        return (
            "BF16 product with the original BF16 weights, decoded at each use from the 8-bit codes and one more byte per "
            f"weight ({self.exceptions:,} exceptions)"
        )
