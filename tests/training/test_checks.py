"""Setups with which training must not start, each refused with the reason and the fix; and what is only reported."""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState
from conftest import load_bf16, load_int8, token_rows, with_lora
from torch.utils.data import IterableDataset
from transformers import TrainerState, TrainingArguments

from hf_gnmr import GNMRCallback, GNMRSession, SetupError
from hf_gnmr.backends.bnb.switchable import SwitchableLinear8bitLt
from hf_gnmr.training import checks


def is_plain(model):
    return not any(isinstance(m, SwitchableLinear8bitLt) for m in model.modules()) and not model._forward_hooks


@pytest.fixture
def no_launcher(monkeypatch):
    """No variable of a launcher in the environment."""
    for name in (*checks.LAUNCHED, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "evidence"),
    [
        ({"WORLD_SIZE": "2"}, "(WORLD_SIZE=2)"),
        ({"PMI_SIZE": "8", "SLURM_STEP_NUM_TASKS": "8"}, "(PMI_SIZE=8, SLURM_STEP_NUM_TASKS=8)"),
        ({"MASTER_ADDR": "127.0.0.1"}, "(MASTER_ADDR is set and WORLD_SIZE is not)"),
    ],
)
def test_a_launchers_variables_are_the_evidence(no_launcher, variables, evidence):
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    warning = checks.one_process_of_several()
    assert warning.startswith("WORLD SIZE 1") and evidence in warning
    no_launcher.setattr(checks, "world_size", lambda: 2)
    assert checks.one_process_of_several() is None, "the processes have met"


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}, {"WORLD_SIZE": ""}], ids=str)
def test_one_process_is_no_reason_for_a_warning(no_launcher, variables):
    for name, value in variables.items():
        no_launcher.setenv(name, value)
    assert checks.one_process_of_several() is None


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"fsdp": "full_shard"}, "fsdp partitions the gradients"),
        ({"deepspeed": "zero2.json"}, "deepspeed partitions the gradients"),
        ({"optim": "lomo"}, "uses up each gradient inside the backward"),
        ({"resume_from_checkpoint": "x"}, "use run.resume"),
        ({"do_train": False}, "a recipe is for training"),
    ],
)
def test_settings_of_a_recipe_are_refused_by_name(training, message):
    with pytest.raises(SetupError, match=message):
        checks.refuse_training_settings(training)


def test_usual_settings_of_a_recipe_are_accepted():
    checks.refuse_training_settings({"optim": "adamw_torch", "do_train": True, "fsdp": "", "resume_from_checkpoint": None})


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


def test_windows_are_compared_with_the_length_of_an_epoch():
    checks.refuse_windows_never_full([1, 2, 3], 3)
    checks.refuse_windows_never_full(torch.utils.data.DataLoader(Endless()), 3)  # its length is not known
    with pytest.raises(SetupError, match="an epoch has 3 micro-batches, fewer than gradient_accumulation_steps=4"):
        checks.refuse_windows_never_full([1, 2, 3], 4)


def test_windows_that_can_never_be_full_are_refused(trainer_for, tiny):
    trainer = trainer_for(with_lora(load_int8(tiny)), GNMRCallback(), rows=token_rows(8), gradient_accumulation_steps=4)
    with pytest.raises(SetupError, match="2 micro-batches, fewer than gradient_accumulation_steps=4"):
        trainer.train()


def test_an_optimizer_that_uses_up_gradients_in_the_backward_is_refused(trainer_for, tiny):
    trainer = trainer_for(with_lora(load_int8(tiny)), GNMRCallback())
    trainer.args.optim = "galore_adamw_layerwise"
    trainer.optimizer = torch.optim.SGD([p for p in trainer.model.parameters() if p.requires_grad], lr=1e-3)
    with pytest.raises(SetupError, match="uses up each gradient inside the backward"):
        trainer.train()


def test_fp16_without_a_scaler_is_reported(trainer_for, tiny, capsys):
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(), fp16=True, max_steps=1).train()
    assert "mixed precision is fp16, but there is no loss scaler" in capsys.readouterr().out
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(), bf16=True, max_steps=1).train()
    assert "loss scaler" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"), [("WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1")]
)
def test_one_process_where_several_were_asked_for_is_reported(trainer_for, tiny, capsys, monkeypatch, name, value):
    trainer = trainer_for(with_lora(load_int8(tiny)), GNMRCallback(), max_steps=1)
    monkeypatch.setenv(name, value)
    trainer.train()
    out = capsys.readouterr().out
    assert "WORLD SIZE 1" in out and name in out and "torchrun --nproc_per_node" in out


def test_one_process_that_was_asked_for_is_not_reported(trainer_for, tiny, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(), max_steps=1).train()
    assert "WORLD SIZE" not in capsys.readouterr().out


@pytest.mark.parametrize("driver", ["session", "callback"])
@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM"])
def test_engines_that_keep_the_gradients_are_refused(trainer_for, tiny, monkeypatch, kind, driver):
    model = with_lora(load_int8(tiny))
    trainer = trainer_for(model, GNMRCallback())
    distributed = AcceleratorState().distributed_type
    with monkeypatch.context() as patch:
        patch.setitem(PartialState._shared_state, "distributed_type", getattr(DistributedType, kind))
        with pytest.raises(SetupError, match="unclipped norm cannot be read"):
            if driver == "session":
                GNMRSession(model, alpha_init_fraction=0.0)
            else:
                GNMRCallback().on_train_begin(trainer.args, TrainerState(max_steps=6), None, model=model)
    assert AcceleratorState().distributed_type == distributed and is_plain(model)


def test_data_parallel_over_a_16_bit_model_is_refused(tiny, monkeypatch):
    arguments = TrainingArguments("/nowhere", use_cpu=True, report_to=[])
    monkeypatch.setattr(type(arguments), "n_gpu", property(lambda self: 2))
    with pytest.raises(SetupError, match="one process per GPU"):
        GNMRCallback(backend="none").rehearse(arguments, with_lora(load_bf16(tiny)), 6)


def test_several_processes_without_ddp_and_sharded_parameters_are_refused(tiny, monkeypatch):
    model = with_lora(load_int8(tiny)).train()
    with monkeypatch.context() as patch:
        patch.setattr("hf_gnmr.training.checks.world_size", lambda: 2)
        with pytest.raises(SetupError, match="2 processes, and the model is not wrapped in DistributedDataParallel"):
            GNMRSession(model, alpha_init_fraction=0.0)
        GNMRSession(model, alpha_init_fraction=0.0, reduced=True).detach()
    next(p for p in model.parameters() if p.requires_grad).device_mesh = "sharded"
    with pytest.raises(SetupError, match="DTensors"):
        GNMRSession(model, alpha_init_fraction=0.0)
