"""Which unit is in which slot: every active unit has one, and none is copied more often than needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gnmr.backends.bnb.stores.placement import SlotCache


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_slots_hold_every_active_unit_and_copy_no_more_than_needed(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    slots = data.draw(st.integers(1, len(sizes)))
    cache = SlotCache(sizes, slots)
    assert sum(cache.slot_sizes) == sum(sorted(sizes)[-slots:])
    used = {}
    for step in range(data.draw(st.integers(1, 12))):
        units = data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True, max_size=slots))
        before = list(cache.holds)
        brought = dict(cache.place(units))
        for unit in units:
            slot = cache.slot_of(unit)
            assert slot is not None and cache.slot_sizes[slot] >= sizes[unit]
            assert (unit in brought) == (before[slot] != unit)
        held = [u for u in cache.holds if u is not None]
        assert len(held) == len(set(held))
        if len(set(sizes)) == 1:
            assert set(brought) == {u for u in units if u not in before}, "what is in a slot is not copied again"
            evicted = [u for u in before if u is not None and u not in cache.holds]
            stayed = [u for u in before if u in cache.holds and u not in units]
            assert all(used[e] <= used[s] for e in evicted for s in stayed), "least recently used is evicted first"
        used |= dict.fromkeys(units, step)


def test_more_units_than_slots_is_an_error():
    with pytest.raises(ValueError, match="3 units for 2 slots"):
        SlotCache([1, 1, 1], 2).place([0, 1, 2])


def test_a_large_unit_finds_room_when_small_ones_sit_in_large_slots():
    cache = SlotCache([1, 4, 1, 4], 2)
    assert cache.slot_sizes == [4, 4]
    cache = SlotCache([1, 4, 1], 2)
    assert cache.slot_sizes == [4, 1]
    cache.place([0])
    cache.place([2])
    assert len(cache.place([0, 1])) >= 1 and cache.slot_of(1) == 0 and cache.slot_of(0) == 1
