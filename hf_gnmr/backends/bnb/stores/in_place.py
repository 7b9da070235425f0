"""The store `host` on a CPU: the mapped checkpoint is used where it lies, and pages of layers that left are given back.

What is not BF16 in the checkpoint is held as one BF16 copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ....control.monitor import Bools
from ..bf16_product import Product, multiply
from ..originals import Original
from ..pages import Watch, give_back
from .base import Module, Store, Worker
from .placement import SlotCache


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
                units = self._active | {unit}
                self._place(units if len(units) <= len(self._cache.slot_sizes) else {unit})
            return multiply(x, weight, bias, transposed)

        return product

    def reserve(self, units: int) -> None:
        # What is counted here are units whose pages may be resident, not memory: a "slot" is the mapped tensor itself.
        self._cache = SlotCache([1] * len(self.modules), units)
        self._held: set[int] = set()

    def apply(self, active: Bools) -> None:
        units = set(np.flatnonzero(active).tolist())
        self._place(units)
        self._active = units

    def _place(self, units: set[int]) -> None:
        if units <= self._held:
            self._cache.place(sorted(units))
            return
        if self._watch is not None:
            self._watch.check()  # before anything counts as done
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

    def census(self) -> dict[str, Any]:
        if not self.copies:
            return {}
        size = f"{self.resident_bytes:,} bytes, resident whatever is active"
        return {"note": f"{self.copies} weights held as one BF16 copy in memory ({size})"}

    def in_words(self) -> str:
        return "BF16 product with the original BF16 weights, used where they lie"
