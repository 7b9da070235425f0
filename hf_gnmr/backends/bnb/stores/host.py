"""The store `host`: originals stay off the device; which class keeps them depends on where the 8-bit weights are."""

from __future__ import annotations

from ....config import SetupError
from ...base import Way
from .base import PlannedWeights, Store, StoreKind, StoreOptions, SwitchedBase
from .in_place import InPlace
from .slots import Slots


class Host(StoreKind):
    """`in_place.InPlace` on a CPU, `slots.Slots` on an accelerator."""

    summary = "originals off the device; used in place on a CPU"
    pins = True
    holds_all_anywhere = False

    @classmethod
    def open(cls, base: SwitchedBase) -> Store:
        if base.options.pin_memory and not base.on_accelerator:
            raise SetupError("pin_memory=True is for copies to an accelerator; this model's 8-bit weights are on the CPU")
        originals = base.find(not base.on_accelerator)
        store: Store
        if base.on_accelerator:
            store = Slots(base.modules, originals.weights, originals.watch, pin=base.options.pin_memory)
        else:
            store = InPlace(base.modules, originals.weights, originals.watch)
        store.source = originals.source
        return store

    @classmethod
    def ways(cls, planned: PlannedWeights) -> list[Way]:
        slots, everything = planned.slots, sum(planned.units)
        copy = "the checkpoint is not BF16: one BF16 copy of it is held" if planned.cast else ""
        return [
            Way("host_gpu", "INT8, recovery=host on a GPU", planned.weights, slots, moved=slots),
            Way("host_gpu_pinned", "INT8, recovery=host on a GPU, pinned", planned.weights, slots, everything, slots),
            Way(
                "host_cpu", "INT8, recovery=host on a CPU", planned.weights, everything if planned.cast else slots, note=copy
            ),
        ]

    @classmethod
    def way(cls, options: StoreOptions, on_cpu: bool) -> str:
        if on_cpu:
            return "host_cpu"
        return "host_gpu_pinned" if options.pin_memory else "host_gpu"

    @classmethod
    def planned_bounds(cls, planned: PlannedWeights, on_cpu: bool) -> list[int]:
        adds = not (on_cpu and planned.cast)  # one BF16 copy of everything is resident, whatever is active
        return [sum(planned.units[:lifted]) if adds else 0 for lifted in range(len(planned.units) + 1)]

    @classmethod
    def planned_holds_all(cls, on_cpu: bool) -> bool:
        return on_cpu
