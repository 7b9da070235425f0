"""A model inside a user's own module: found, monitored and switched as if it were given itself."""

from __future__ import annotations

import pytest
from conftest import load_int8, random_llama, trace_lines, with_lora
from torch import nn

from hf_gnmr import GNMRCallback, SetupError

SETTINGS = {"max_o": 1, "alpha": 0.9, "alpha_init_fraction": 0.0}


class Wrapper(nn.Module):
    """As for a task's own loss or head."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        self.scale = nn.Linear(2, 2)

    def forward(self, input_ids, labels):
        return self.lm(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("layers", [None, "model.layers.*", "lm.base_model.model.model.layers.*"])
def test_the_model_inside_is_found_with_its_originals(trainer_for, tiny, tmp_path, layers):
    """By the names inside, or by those of the wrapper."""
    trainer_for(Wrapper(with_lora(load_int8(tiny))), GNMRCallback(layers=layers, **SETTINGS), max_steps=3).train()
    header, lines = trace_lines(tmp_path / "run")
    assert [unit["name"] for unit in header["units"]] == [f"model.layers.{i}" for i in range(3)]
    assert all(unit["recoverable"] for unit in header["units"]) and lines[-1]["active"]


def test_a_full_model_inside(trainer_for, tmp_path):
    trainer_for(Wrapper(random_llama()), GNMRCallback(backend="activation", **SETTINGS), max_steps=2).train()
    assert len(trace_lines(tmp_path / "run")[1]) == 2


def test_two_models_inside_are_not_guessed(trainer_for, tiny):
    wrapper = Wrapper(with_lora(load_int8(tiny)))
    wrapper.teacher = random_llama()
    with pytest.raises(SetupError, match=r"cannot identify the decoder layers of Wrapper.*layers=\"path.to.layers"):
        trainer_for(wrapper, GNMRCallback(**SETTINGS), max_steps=2).train()
