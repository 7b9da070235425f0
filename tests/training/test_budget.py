"""`max_recovery_memory`: the number of units that fits, never exceeded, or a reason why there is none."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import load_int8, trace_lines, with_lora
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gnmr import ConfigError, GNMRCallback, GNMRConfig
from hf_gnmr.backends.base import Backend
from hf_gnmr.control.gnmr import Controller
from hf_gnmr.training.options import Options, within_budget


class Sized:
    """A backend that is only sizes."""

    def __init__(self, sizes):
        self.bytes_added = np.array(sizes, dtype=np.int64)
        self.recoverable = np.ones(len(sizes), dtype=bool)

    recovery_bytes = Backend.recovery_bytes
    recovery_bytes_bound = Backend.recovery_bytes_bound


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_budget_is_never_exceeded_and_no_smaller_than_it_must_be(data):
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=1, max_size=12))
    budget = data.draw(st.integers(1, 1 + sum(sizes)))
    backend, options = Sized(sizes), Options(max_recovery_memory=budget)
    bounds = [backend.recovery_bytes_bound(units) for units in range(len(sizes) + 1)]
    if budget < max(sizes):
        with pytest.raises(ConfigError, match="is below one unit: the largest adds"):
            within_budget(GNMRConfig(), options, bounds, holds_all=True)
        return
    config = within_budget(GNMRConfig(alpha_init_fraction=0.0), options, bounds, holds_all=True)
    worst = sorted(sizes)[::-1]
    assert sum(worst[: config.max_o]) <= budget
    assert config.max_o == len(sizes) or sum(worst[: config.max_o + 1]) > budget
    controller = Controller(len(sizes), config)
    for _ in range(10):
        norms = data.draw(st.lists(st.floats(0, 1e3), min_size=len(sizes), max_size=len(sizes)))
        assert backend.recovery_bytes(controller.step(norms).active) <= budget


def test_a_budget_instead_of_max_o(tiny, trainer_for, tmp_path):
    callback = GNMRCallback(max_recovery_memory="150KB", alpha=0.5, alpha_init_fraction=0)
    trainer_for(with_lora(load_int8(tiny)), callback).train()
    header, lines = trace_lines(tmp_path / "run")
    assert header["max_o"] == 2 and header["census"]["recovery_bytes_bound"] == 2 * 73_728
    assert max(line["recovery_bytes"] for line in lines) == 2 * 73_728 <= 150_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_recovery_memory": "10KB"}, "below one unit: the largest adds 73,728 bytes"),
        ({"max_recovery_memory": "150KB", "max_o": 1}, "max_recovery_memory='150KB' and max_o=1: give only one of them"),
        ({"max_recovery_memory": "150KB", "recovery": "device"}, "lifted units add no memory here"),
        ({"max_recovery_memory": "150KB", "fidelity_warmup": 0.5}, "lifts all 3 units, which add 221,184 bytes"),
    ],
)
def test_budgets_that_are_refused(options, message, tiny, trainer_for):
    with pytest.raises(ConfigError, match=message):
        trainer_for(with_lora(load_int8(tiny)), GNMRCallback(**options)).train()


@pytest.mark.parametrize("text", ["6 G", "GB", "-1GB", 0, -5, True, 1.5, "1e9", "0GB"])
def test_sizes_that_are_refused(text):
    with pytest.raises(ConfigError, match="max_recovery_memory="):
        GNMRCallback(max_recovery_memory=text)
