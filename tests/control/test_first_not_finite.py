"""If no norm of a step is finite, the unit whose own forward failed comes first; the norms cannot tell which one it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_gnmr import Controller, GNMRConfig
from hf_gnmr.control.triggers import make_trigger

SETTINGS = GNMRConfig(max_o=1, alpha_init_fraction=0.0, t_lock=1)
BAD = np.full(4, np.nan)


def begun(trigger="gnmr", max_o=1):
    controller = make_trigger(trigger, 4, GNMRConfig(max_o=max_o, alpha_init_fraction=0.0), total_steps=10)
    controller.step(np.ones(4), signal=np.arange(4.0))
    return controller


@pytest.mark.parametrize("trigger", ["gnmr", "jacobian", "gsnr"])
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_the_culprit_gets_the_seat(trigger, first):
    decision = begun(trigger).step(BAD, signal=np.arange(4.0), first_not_finite=first)
    assert np.flatnonzero(decision.active).tolist() == [first]
    assert np.isinf(decision.risk).all() and np.isinf(decision.gnmr).all(), "the scores are those of the paper"


def test_the_other_seats_go_by_index():
    assert np.flatnonzero(begun(max_o=2).step(BAD, first_not_finite=2).active).tolist() == [0, 2]


def test_unknown_as_before():
    assert np.flatnonzero(begun().step(BAD).active).tolist() == [0]


def test_a_finite_norm_anywhere_tells_more_than_the_forward():
    decision = begun(max_o=2).step(np.array([np.inf, 1.0, 1.0, np.inf]), first_not_finite=1)
    assert np.flatnonzero(decision.active).tolist() == [0, 3]


def test_a_unit_without_a_recovery_path_gets_none():
    controller = Controller(3, SETTINGS, total_steps=10, recoverable=[True, False, True])
    controller.step(np.ones(3))
    assert controller.step(BAD[:3], first_not_finite=1).active.tolist() == [True, False, False]


@given(st.lists(st.floats(0.1, 10), min_size=4, max_size=4), st.integers(0, 3), st.integers(0, 4))
def test_finite_steps_do_not_depend_on_it(norms, first, max_o):
    one, other = (Controller(4, GNMRConfig(max_o=max_o or 1, alpha_init_fraction=0.0), total_steps=9) for _ in range(2))
    for values in (np.ones(4), norms):
        left, right = one.step(values), other.step(values, first_not_finite=first)
        assert left.active.tolist() == right.active.tolist() and left.triggered.tolist() == right.triggered.tolist()
