"""Where the recovery path's weights are, and how an active unit gets at them: one class a store.

* `InPlace` (`host` on a CPU): the mapped checkpoint is used where it lies, and pages are given back; what is not BF16 there
  is held as one BF16 copy.
* `Slots` (`host` on an accelerator): the mapped checkpoint or pinned host memory, copied beside the computation into a few
  slots on the device that are allocated once.
* `Decoded` (`device`): one byte a weight beside the 8-bit ones; the original is decoded at each use, in one workspace.
* `Dequantised` (`dequantize`): nothing is kept.

A store makes, for each module, a function from BF16 input and bias to the BF16 product; it is told the active set after
every decision, and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....control.controller import Bools
from ..bf16_product import Product, RebuiltLinear, dequantize, multiply
from ..originals import Original
from ..pages import Watch, give_back
from .base import Module, Store, Worker
from .placement import SlotCache
from .residual import Residual, Workspace, decode, encode


class InPlace(Store):
    """Originals used where they lie, on the CPU. Mapped pages are kept for `units` layers and given back beyond that."""

    def __init__(self, modules: Sequence[Sequence[Module]], originals: dict[Module, Original], watch: Watch | None) -> None:
        super().__init__(modules)
        self.originals, self._watch = originals, watch
        mapped = [[originals[m].weight for m in members if originals[m].mapped] for members in self.modules]
        self._mapped: list[list[Tensor]] = mapped
        self.bytes_added = np.array([sum(2 * t.numel() for t in tensors) for tensors in mapped], dtype=np.int64)
        self.resident_bytes = sum(2 * o.weight.numel() for o in originals.values() if not o.mapped)
        self.copies = sum(not o.mapped for o in originals.values())
        self._unit = {module: unit for unit, members in enumerate(self.modules) for module in members}
        self._worker = Worker()
        self._lock = threading.Lock()  # what is held changes, or pages of what is not held go
        self._active: set[int] = set()
        self.reserve(len(self.modules))
        for tensors in mapped:
            give_back(tensors)  # what the check of the codes has read

    def product(self, module: Module) -> Product:
        original, unit = self.originals[module], self._unit[module]
        weight, transposed = original.weight, original.transposed

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            if unit not in self._held:  # evaluation on the recovery path, which passes all units through
                wanted = self._active | {unit}
                self._place(wanted if len(wanted) <= len(self._cache.slot_sizes) else {unit})
            return multiply(x, weight, bias, transposed)

        return product

    def reserve(self, units: int) -> None:
        # What is counted here are units whose pages may be resident, not memory: a "slot" is the mapped tensor itself.
        self._cache = SlotCache([1] * len(self.modules), units)
        self._held: set[int] = set()

    def apply(self, active: Bools) -> None:
        wanted = set(np.flatnonzero(active).tolist())
        self._place(wanted)
        self._active = wanted

    def _place(self, units: set[int]) -> None:
        if units <= self._held:
            self._cache.place(sorted(units))
            return
        if self._watch is not None:
            self._watch.check()  # before anything is taken for done
        self._cache.place(sorted(units))
        held = {unit for unit in self._cache.holds if unit is not None}
        with self._lock:
            gone, self._held = self._held - held, held
        if gone:
            self._worker.start(lambda: self._give_back(gone))

    def _give_back(self, units: set[int]) -> None:
        """Drop the pages of units that left, but of none that has come back before its turn here: it is being read."""
        for unit in sorted(units):
            for tensor in self._mapped[unit]:
                with self._lock:  # for one tensor, so that a decision does not wait for a whole layer
                    if unit in self._held:
                        break
                    give_back([tensor])

    def close(self) -> None:
        self._worker.close()
        for tensors in self._mapped:
            give_back(tensors)
        self._watch, self.originals, self._mapped = None, {}, []

    def in_words(self) -> str:
        return "BF16 product with the original BF16 weights, used where they lie"


class Decoded(Store):
    """Both paths resident: codes, scales, and one residual byte a weight, from which originals are decoded at each use."""

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
            "BF16 product with the original BF16 weights, decoded at each use from the 8-bit codes and one byte more a "
            f"weight ({self.exceptions:,} exceptions)"
        )


class Dequantised(Store):
    """No originals: codes × scale / 127."""

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
