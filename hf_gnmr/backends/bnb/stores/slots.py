"""The store `host` on an accelerator: originals on the host, a few slots on the device, copies beside the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....control.monitor import Bools
from ..bf16_product import Product, multiply
from ..originals import Original
from ..pages import Watch
from .base import Module, Store, Worker
from .placement import SlotCache


class Slots(Store):
    """Originals on the host; at most `units` layers of BF16 on each device, in buffers allocated once.

    Args:
        modules: the 8-bit modules of each unit.
        originals: their original weights, in the checkpoint's dtype.
        watch: on the files that are mapped; None: none is.
        pin: hold the originals in pinned host memory, in BF16.
        copy: (destination, source) -> None; the copy of one weight.
    """

    holds_all = False

    def __init__(
        self,
        modules: Sequence[Sequence[Module]],
        originals: dict[Module, Original],
        watch: Watch | None,
        *,
        pin: bool = False,
        copy: Callable[[Tensor, Tensor], Any] | None = None,
    ) -> None:
        super().__init__(modules)
        self.bytes_added = 2 * self.weights
        self._watch, self._copy = watch, copy or _copy
        self.pinned = pin
        self.originals = originals
        if pin:
            self.originals = {
                m: Original(o.weight.to(torch.bfloat16).pin_memory(), o.transposed, mapped=False)
                for m, o in originals.items()
            }
        self.host_bytes = sum(o.weight.numel() * o.weight.element_size() for o in self.originals.values() if not o.mapped)
        self._unit = {module: unit for unit, members in enumerate(self.modules) for module in members}
        self._devices = [members[0].state.CB.device if members else None for members in self.modules]
        self._by_device: dict[torch.device, _DeviceSlots] = {}
        self._active: set[int] = set()
        self._views: dict[Module, Tensor] = {}
        self._waiting: dict[Module, _Arrival] = {}
        self._worker = Worker()
        self.copied = 0
        """Units copied so far."""

    def reserve(self, units: int) -> None:
        self._views.clear()
        self._waiting.clear()
        self._by_device = {}
        for device in dict.fromkeys(d for d in self._devices if d is not None):
            members = [unit for unit, where in enumerate(self._devices) if where == device]
            self._by_device[device] = _DeviceSlots(device, members, self.weights[members].tolist(), min(units, len(members)))

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots, allocated once."""
        return sum(2 * buffer.numel() for slots in self._by_device.values() for buffer in slots.buffers)

    def product(self, module: Module) -> Product:
        transposed = self.originals[module].transposed
        views, waiting = self._views, self._waiting

        def product(x: Tensor, bias: Tensor | None) -> Tensor:
            if module not in views:
                self._demand(self._unit[module])
            arrival = waiting.get(module)
            if arrival is not None:
                try:
                    arrival.wait()
                except BaseException:
                    self._forget(self._unit[module])  # half a copy must never pass for the weights
                    raise
                waiting.pop(module, None)
            return multiply(x, views[module], bias, transposed)

        return product

    def apply(self, active: Bools) -> None:
        self._active = set(np.flatnonzero(active).tolist())
        self._place(self._active)

    def _demand(self, unit: int) -> None:
        """Bring in a unit that is not there: evaluation on the recovery path passes all units through the slots, and no
        backward asks for them again; the first lifted layer after it brings all lifted ones back."""
        units = self._active | {unit}
        fits = all(sum(u in units for u in slots.members) <= len(slots.buffers) for slots in self._by_device.values())
        self._place(units if fits else {unit})

    def _place(self, units: set[int]) -> None:
        if not self._by_device:
            self.reserve(len(self.modules))
        if self._watch is not None and any(slots.lacks(units) for slots in self._by_device.values()):
            self._watch.check()  # before anything counts as done
        for device, slots in self._by_device.items():
            brought = slots.place(units)
            for unit in set(slots.members) - slots.held():
                self._drop(unit)
            for unit, buffer in brought:
                self._bring(unit, buffer, device)

    def _drop(self, unit: int) -> None:
        for module in self.modules[unit]:
            self._views.pop(module, None)
            self._waiting.pop(module, None)

    def _forget(self, unit: int) -> None:
        """As if the unit had never been brought in."""
        self._drop(unit)
        for slots in self._by_device.values():
            slots.remove(unit)

    def _bring(self, unit: int, buffer: Tensor, device: torch.device) -> None:
        self.copied += 1
        pairs, offset = [], 0
        for module in self.modules[unit]:
            source = self.originals[module].weight
            view = buffer[offset : offset + source.numel()].view(source.shape)
            offset += source.numel()
            self._views[module] = view
            pairs.append((view, source))
        # What still reads the slot (the backward of this step) was queued before this point.
        arrival = _Arrival(device)
        arrival.future = self._worker.start(lambda: arrival.run(self._copy, pairs))
        for module in self.modules[unit]:
            self._waiting[module] = arrival

    def bound(self, units: int) -> int:
        # Each device has slots for as many units as may be chosen among its own.
        by_device: dict[Any, list[int]] = {}
        for unit, device in enumerate(self._devices):
            if device is not None:
                by_device.setdefault(device, []).append(int(self.bytes_added[unit]))
        return sum(sum(sorted(sizes, reverse=True)[: max(0, units)]) for sizes in by_device.values())

    def close(self) -> None:
        self._worker.close()
        self._by_device, self._watch = {}, None
        self.originals = {}
        self._views.clear()
        self._waiting.clear()

    def census(self) -> dict[str, Any]:
        return {"slot_bytes": self.slot_bytes}

    def in_words(self) -> str:
        return (
            "BF16 product with the original BF16 weights, copied from "
            f"{'pinned host memory' if self.pinned else 'the mapped checkpoint'} into slots of {self.slot_bytes:,} bytes, "
            "allocated once"
        )


class _DeviceSlots:
    """The slots on one device and the units that live there."""

    def __init__(self, device: torch.device, members: list[int], sizes: list[int], slots: int) -> None:
        self.members = members
        self.cache = SlotCache(sizes, slots)
        self.buffers = [torch.empty(size, dtype=torch.bfloat16, device=device) for size in self.cache.slot_sizes]

    def place(self, units: set[int]) -> list[tuple[int, Tensor]]:
        """(unit that comes, its buffer) for each slot that is filled anew."""
        brought = self.cache.place([i for i, unit in enumerate(self.members) if unit in units])
        return [(self.members[i], self.buffers[slot]) for i, slot in brought]

    def held(self) -> set[int]:
        """Units that have a slot."""
        return {self.members[i] for i in self.cache.holds if i is not None}

    def lacks(self, units: set[int]) -> bool:
        """Whether one of `units` that lives here has no slot."""
        return bool(units & set(self.members) - self.held())

    def remove(self, unit: int) -> None:
        """Empty the unit's slot."""
        if unit in self.held():
            self.cache.holds[self.cache.holds.index(self.members.index(unit))] = None


class _Arrival:
    """A unit's weights on their way: waited for where the unit's forward first needs them, on the device if it can be."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.future: Future[Any] | None = None
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._queued = torch.cuda.Event()
            self._queued.record(torch.cuda.current_stream(device))
            self._done = torch.cuda.Event()

    def run(self, copy: Callable[[Tensor, Tensor], Any], pairs: list[tuple[Tensor, Tensor]]) -> None:
        """In the worker: all of a unit's copies, on a stream of their own."""
        if not self._cuda:
            for destination, source in pairs:
                copy(destination, source)
            return
        stream = _copy_stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(self._queued)
            for destination, source in pairs:
                copy(destination, source)
            self._done.record(stream)

    def wait(self) -> None:
        """Make what comes next on the current stream wait; the host waits only until the copies are queued."""
        assert self.future is not None
        self.future.result()
        if self._cuda:
            torch.cuda.current_stream(self.device).wait_event(self._done)


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]


def _copy(destination: Tensor, source: Tensor) -> None:
    destination.copy_(source.to(torch.bfloat16), non_blocking=True)
