"""Settings are checked at construction, each error naming field, value and what was expected."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_gnmr.config import ConfigError, GNMRConfig, parse_bytes
from hf_gnmr.control.gnmr import Controller


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", -1.0),
        ("alpha", 0.0),
        ("alpha", math.nan),
        ("alpha", math.inf),
        ("alpha", "1.1"),
        ("alpha", True),
        ("alpha_init", math.nan),
        ("beta", -0.5),
        ("beta", math.nan),
        ("beta", 0),
        ("alpha_init_fraction", 1.5),
        ("alpha_init_fraction", -0.1),
        ("alpha_init_fraction", math.nan),
        ("fidelity_warmup", 2),
        ("fidelity_warmup", "0.1"),
        ("delta", 0),
        ("delta", 2.5),
        ("delta", "5"),
        ("t_lock", -1),
        ("t_lock", 0.5),
        ("max_o", -1),
        ("max_o", 1.0),
        ("max_o", 2.0),
        ("max_o", 0.0),
        ("max_o", -0.25),
        ("max_o", math.nan),
        ("max_o", "4"),
        ("max_o", True),
        ("max_o", None),
    ],
)
def test_values_out_of_range(field, value):
    with pytest.raises(ConfigError) as error:
        GNMRConfig(**{field: value})
    assert f"{field}={value!r}: expected " in str(error.value)


@pytest.mark.parametrize("field", ["alpha", "beta", "delta", "t_lock", "fidelity_warmup"])
def test_a_number_beyond_the_range_of_a_float(field):
    with pytest.raises(ConfigError, match=f"{field}: expected .*, got a whole number beyond the range of a float"):
        GNMRConfig(**{field: 10**5000})


def test_whole_floats_are_whole_numbers_and_beta_may_be_off():
    config = GNMRConfig(delta=3.0, t_lock=2.0, beta=None)
    assert (config.delta, config.t_lock) == (3, 2)
    assert isinstance(config.delta, int)


def test_zero_max_o_warns():
    with pytest.warns(UserWarning, match="no unit is ever lifted"):
        GNMRConfig(max_o=0)


@pytest.mark.parametrize(
    ("fraction", "total", "steps"), [(0.07, 100, 7), (0.29, 100, 29), (0.025, 100, 3), (0.1, 30, 3), (1.0, 7, 7)]
)
def test_fractions_of_steps_round_up_without_floating_point_surprises(fraction, total, steps):
    assert GNMRConfig(alpha_init_fraction=fraction).resolve_steps("alpha_init_fraction", total) == steps


@given(st.integers(0, 1000), st.integers(1, 3))
def test_a_fraction_of_a_thousand_is_exact(count, times):
    config = GNMRConfig(alpha_init_fraction=count / 1000)
    assert config.resolve_steps("alpha_init_fraction", 1000 * times) == count * times


@pytest.mark.parametrize(
    ("share", "units", "seats"), [(0.25, 40, 10), (0.25, 30, 7), (0.25, 3, 1), (0.29, 100, 29), (0.9999, 4, 3)]
)
def test_share_of_units_rounds_down_but_to_at_least_one(share, units, seats):
    assert GNMRConfig(max_o=share).resolve_max_o(units) == seats


def test_max_o_above_the_units_is_clipped_by_the_controller():
    assert Controller(3, GNMRConfig(max_o=9, alpha_init_fraction=0)).max_o == 3
    assert Controller(3, GNMRConfig(max_o=9, alpha_init_fraction=0), recoverable=[True, False, False]).max_o == 1


def test_a_share_of_the_steps_needs_their_number():
    with pytest.raises(ConfigError, match="alpha_init_fraction=0.025.*total_steps"):
        Controller(3, GNMRConfig())
    with pytest.raises(ConfigError, match="fidelity_warmup=0.1"):
        Controller(3, GNMRConfig(alpha_init_fraction=0, fidelity_warmup=0.1))
    Controller(3, GNMRConfig(alpha_init_fraction=0))


def test_a_mask_of_the_wrong_length():
    with pytest.raises(ConfigError, match=r"recoverable has shape \(2,\)"):
        Controller(3, GNMRConfig(alpha_init_fraction=0), recoverable=[True, False])
    with pytest.raises(ConfigError, match="num_units=0"):
        Controller(0, GNMRConfig(alpha_init_fraction=0))


@pytest.mark.parametrize(
    ("text", "size"), [("6GB", 6 * 10**9), ("1.5 GiB", 3 * 2**29), ("500 mb", 5 * 10**8), (12, 12), ("77", 77)]
)
def test_sizes_in_bytes(text, size):
    assert parse_bytes("x", text) == size


@pytest.mark.parametrize("text", ["6 G", "GB", "-1GB", 0, -5, True, 1.5, "1e9", None, "0GB"])
def test_sizes_that_are_refused(text):
    with pytest.raises(ConfigError, match="x=.*'6GB' or '500MiB'"):
        parse_bytes("x", text)
