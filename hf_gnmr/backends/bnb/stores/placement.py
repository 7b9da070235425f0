"""Which unit's weights lie in which of a few slots: fixed sizes, least recently used goes first. No tensors here."""

from __future__ import annotations

from collections.abc import Sequence


class SlotCache:
    """Slots for at most `len(slot_sizes)` units at a time.

    A unit that left the active set stays in its slot until the slot is needed, so that one that returns soon costs nothing.

    Args:
        unit_sizes: size of each unit (bytes, elements: any unit of measure, the slots' too).
        slots: number of slots. Their sizes are those of the largest units, so that any `slots` units fit together.
    """

    def __init__(self, unit_sizes: Sequence[int], slots: int) -> None:
        self.unit_sizes = list(unit_sizes)
        self.slot_sizes = sorted(self.unit_sizes, reverse=True)[: max(0, slots)]
        self.holds: list[int | None] = [None] * len(self.slot_sizes)
        """The unit in each slot, or None."""
        self._used = [0] * len(self.unit_sizes)
        self._clock = 0

    def slot_of(self, unit: int) -> int | None:
        """The slot that holds `unit`, if one does."""
        return self.holds.index(unit) if unit in self.holds else None

    def place(self, active: Sequence[int]) -> list[tuple[int, int]]:
        """Make room for all `active` units.

        Returns:
            (unit, slot) for each unit that has to be brought in; the others have one already.

        Raises:
            ValueError: more units than slots.
        """
        if len(active) > len(self.slot_sizes):
            raise ValueError(f"{len(active)} units for {len(self.slot_sizes)} slots")
        self._clock += 1
        for unit in active:
            self._used[unit] = self._clock
        before = list(self.holds)
        needed = set(active)
        for unit in sorted((u for u in active if u not in before), key=lambda u: -self.unit_sizes[u]):
            fitting = [
                slot
                for slot, size in enumerate(self.slot_sizes)
                if size >= self.unit_sizes[unit] and self.holds[slot] not in needed
            ]
            if not fitting:
                self._place_anew(active)
                break
            # The smallest slot that will do; an empty one before a held one, the least recently used unit first.
            slot = min(fitting, key=lambda s: (self.slot_sizes[s], self._last_used(s)))
            self.holds[slot] = unit
        return [(unit, slot) for slot, unit in enumerate(self.holds) if unit is not None and unit != before[slot]]

    def _last_used(self, slot: int) -> int:
        unit = self.holds[slot]
        return -1 if unit is None else self._used[unit]

    def _place_anew(self, active: Sequence[int]) -> None:
        """Small units sit in slots that a large one needs: largest unit to largest slot, which always fits."""
        self.holds = [None] * len(self.slot_sizes)
        for slot, unit in enumerate(sorted(active, key=lambda u: (-self.unit_sizes[u], u))):
            self.holds[slot] = unit
