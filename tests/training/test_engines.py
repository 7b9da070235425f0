"""Readers of gradients: the first one that handles a model reads it; what none can read is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import random_llama, trace_lines
from torch import nn

from hf_gnmr import GNMRCallback, GNMRSession, SetupError
from hf_gnmr.backends.units import Unit, find_units
from hf_gnmr.training import engines
from hf_gnmr.training.engines.base import Norms
from hf_gnmr.training.engines.local import LocalNorms


class Sharded(LocalNorms):
    """A reader for another engine: it reports norms by which it can be recognised."""

    asked: list[nn.Module] = []
    asked_for_by = ("fsdp",)
    reads_in_backward = True

    @classmethod
    def handles(cls, model):
        cls.asked.append(model)
        return True

    def combine(self, norms, indices, scale):
        local = super().combine(norms, indices, scale)
        return Norms(np.arange(1.0, 1.0 + len(local.units)), local.seen, 42.0)


@pytest.fixture
def sharded(monkeypatch):
    """`Sharded` before the readers in the package."""
    monkeypatch.setattr(Sharded, "asked", [])
    monkeypatch.setattr(engines, "ENGINES", (Sharded, *engines.ENGINES))
    return Sharded


def test_a_model_on_one_process_is_read_locally():
    model = random_llama()
    units = find_units(model)
    reader = engines.unit_norms(model, units)
    assert type(reader) is LocalNorms
    assert reader.in_units == sum(len(unit.parameters) for unit in units)
    assert reader.elsewhere == sum(p.numel() for p in model.parameters()) - sum(unit.numel for unit in units)


@pytest.mark.parametrize("refuse", [engines.refuse_unreadable_engine, lambda model: engines.unit_norms(model, [])])
def test_parameters_on_a_device_mesh_are_refused_by_name(refuse):
    model = nn.Linear(2, 2)
    model.bias.device_mesh = "a mesh of two devices"
    with pytest.raises(SetupError, match=r"the model's parameters are DTensors.*Use one process, DDP, or device_map"):
        refuse(model)


def test_another_reader_is_asked_first_and_its_norms_reach_the_trace(sharded, trainer_for, tmp_path):
    model = random_llama()
    trainer_for(model, GNMRCallback(backend="none"), max_steps=2).train()
    _, lines = trace_lines(tmp_path / "run")
    assert [line["norms"] for line in lines] == [[1.0, 2.0, 3.0]] * 2
    assert [line["grad_norm"] for line in lines] == [42.0] * 2
    assert sharded.asked and all(asked is model for asked in sharded.asked)


def test_another_reader_may_read_what_the_first_ones_cannot(sharded):
    model = nn.Linear(2, 2)
    model.bias.device_mesh = "a mesh of two devices"
    engines.refuse_unreadable_engine(model)
    assert type(engines.unit_norms(model, [Unit(0, 0, "linear", model, tuple(model.parameters()))])) is sharded


@pytest.mark.parametrize(("key", "value"), [("fsdp", "full_shard"), ("deepspeed", "zero2.json")])
def test_settings_that_ask_for_an_unreadable_engine_are_refused(key, value):
    with pytest.raises(SetupError, match=f"training.{key}={value!r}: {key} partitions the gradients"):
        engines.refuse_unreadable_settings({key: value})


@pytest.mark.parametrize("training", [{}, {"fsdp": "", "deepspeed": None}, {"fsdp": [], "optim": "adamw_torch"}], ids=str)
def test_settings_that_ask_for_no_engine_are_accepted(training):
    engines.refuse_unreadable_settings(training)


def test_settings_are_accepted_if_a_reader_names_them(sharded):
    engines.refuse_unreadable_settings({"fsdp": "full_shard"})
    with pytest.raises(SetupError, match="deepspeed partitions the gradients"):
        engines.refuse_unreadable_settings({"deepspeed": "zero2.json"})


@pytest.mark.parametrize("name", ["lomo", "adalomo", "galore_adamw_layerwise", "APOLLO_ADAMW_LAYERWISE"])
def test_optimizers_that_step_inside_the_backward_are_refused(name):
    with pytest.raises(SetupError, match=f"optim='{name}' uses up each gradient inside the backward"):
        engines.refuse_unreadable_optimizer(name)
    engines.refuse_unreadable_optimizer("adamw_torch")


def test_optimizers_that_step_inside_the_backward_are_accepted_if_a_reader_reads_before(sharded):
    engines.refuse_unreadable_optimizer("lomo")
    engines.refuse_unreadable_optimizer("lomo", nn.Linear(2, 2))


def test_the_reader_of_the_model_itself_must_read_before_such_an_optimizer(sharded, monkeypatch):
    monkeypatch.setattr(sharded, "handles", classmethod(lambda cls, model: False))
    engines.refuse_unreadable_optimizer("lomo")  # before a model is loaded: one of the readers might handle it
    with pytest.raises(SetupError, match="optim='lomo' uses up each gradient"):
        engines.refuse_unreadable_optimizer("lomo", nn.Linear(2, 2))


def test_a_reader_learns_of_what_is_discarded_and_of_its_removal(sharded, monkeypatch):
    seen = []
    monkeypatch.setattr(sharded, "discard", lambda self: seen.append("discard"), raising=False)
    monkeypatch.setattr(sharded, "remove", lambda self: seen.append("remove"), raising=False)
    session = GNMRSession(random_llama().train(), backend="none", alpha_init_fraction=0.0)
    session.discard()
    assert seen == ["discard"]
    session.detach()
    assert seen[-1] == "remove"


def test_an_update_that_came_before_the_reading_is_not_called_withheld(sharded, monkeypatch, tmp_path):
    monkeypatch.setattr(sharded, "drop", lambda self: False, raising=False)
    model = random_llama().train()
    session = GNMRSession(model, backend="none", alpha_init_fraction=0.0, output_dir=tmp_path)
    with torch.no_grad():
        session.units[1].parameters[0].fill_(float("nan"))
    monkeypatch.setattr(sharded, "combine", LocalNorms.combine)
    tokens = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()
    session.observe()
    session.decide()
    session.detach()
    _, (line,) = trace_lines(tmp_path)
    assert not np.isfinite(float(line["grad_norm"])) and line["update_withheld"] is False


def unit_of(index, parameters, part=None):
    return Unit(index, index, f"unit {index}", nn.Module(), tuple(parameters), part)


class Four(nn.Module):
    """Two parameters of one unit, one of another, and one outside all units."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1).bfloat16())
        self.c, self.d = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))


def test_norms_are_combined_per_unit_with_the_loss_scale_divided_out():
    model = Four()
    reader = LocalNorms(model, [unit_of(0, [model.a, model.b]), unit_of(1, [model.c])])
    model.a.grad, model.b.grad = torch.tensor([4.0, 4.0]), torch.tensor([2.0]).bfloat16()
    model.d.grad = torch.tensor([8.0])
    norms, indices = reader.measure()
    assert norms.dtype == torch.float32 and sorted(indices) == [0, 1, 3]
    combined = reader.combine(norms.double().numpy(), indices, 2.0)
    np.testing.assert_allclose(combined.units, [3.0, 0.0], rtol=1e-6)
    assert combined.seen.tolist() == [True, False], "no gradient is not a gradient of zero"
    assert combined.total == pytest.approx(5.0)
    reader.drop()
    assert reader.measure()[1] == [] and all(p.grad is None for p in model.parameters())


def test_an_expert_reads_its_part_of_the_gradient():
    model = nn.Module()
    model.experts = nn.Parameter(torch.zeros(3, 2))
    reader = LocalNorms(model, [unit_of(i, [model.experts], part=i) for i in range(3)])
    model.experts.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]])
    norms, indices = reader.measure()
    combined = reader.combine(norms.double().numpy(), indices, 1.0)
    np.testing.assert_allclose(combined.units, [5.0, 0.0, 10.0])
    assert combined.seen.tolist() == [True, False, True], "an expert without a token is not observed"
