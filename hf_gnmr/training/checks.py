"""Setups with which training must not start; each error gives the reason and the fix."""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import AcceleratorState
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

from ..backends.units import base_model
from ..config import ConfigError, SetupError
from ..files import FileError
from ..trace.file import refuse_place
from .distributed import world_size
from .engines import refuse_unreadable_engine, refuse_unreadable_optimizer, refuse_unreadable_settings

LAUNCHED = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Environment variables in which launchers pass the number of processes."""


def one_process_of_several() -> str | None:
    """A warning if a launcher was asked for several processes and this training runs in only one; None otherwise.

    `accelerate launch --cpu --num_processes 2` silently starts one process; the only trace of the request is the address at
    which the processes would have met.
    """
    if world_size() > 1:
        return None
    set_by_launcher = {name: os.environ[name] for name in LAUNCHED if os.environ.get(name, "1") not in ("", "1")}
    if set_by_launcher:
        evidence = ", ".join(f"{name}={value}" for name, value in set_by_launcher.items())
    elif os.environ.get("MASTER_ADDR") and "WORLD_SIZE" not in os.environ:
        evidence = "MASTER_ADDR is set and WORLD_SIZE is not"
    else:
        return None
    return (
        f"WORLD SIZE 1: a launcher appears to have been asked for several processes ({evidence}), but this training runs in "
        "one. On a CPU, `accelerate launch --cpu --num_processes N` starts only one: use `torchrun --nproc_per_node N` with "
        "training.ddp_backend=gloo"
    )


def scaler_missing(scaled: bool) -> str | None:
    """A warning if FP16 mixed precision runs without a loss scaler, as it does on a CPU; None otherwise."""
    precision = AcceleratorState().mixed_precision if AcceleratorState._shared_state else "no"
    if precision == "fp16" and not scaled:
        return "mixed precision is fp16, but there is no loss scaler: small gradients may vanish. Use bf16"
    return None


def refuse_unreduced_gradients(model: nn.Module) -> None:
    """Raise SetupError in a custom loop on several processes if nothing is known to average the gradients.

    Under a Trainer, the callback gets the model below DDP, and the gradients are averaged.
    """
    world = world_size()
    if world > 1 and not any(isinstance(m, DistributedDataParallel) for m in (model, getattr(model, "_orig_mod", None))):
        raise SetupError(
            f"{world} processes, and the model is not wrapped in DistributedDataParallel: gradients averaged by hand would "
            "be read before they are averaged, and each process would decide for itself. Pass the model that "
            "accelerator.prepare (or DistributedDataParallel) returned"
        )


def refuse_unreadable_gradients(args: TrainingArguments, model: nn.Module) -> None:
    """Raise SetupError for a Trainer under which the unclipped gradient cannot be read or paths cannot be switched."""
    refuse_unreadable_engine(model)
    refuse_unreadable_optimizer(str(getattr(args.optim, "value", args.optim)), model)
    if args.n_gpu > 1 and not getattr(base_model(model), "is_loaded_in_8bit", False):
        raise SetupError(
            f"torch.nn.DataParallel over {args.n_gpu} GPUs replicates the model in every forward pass. "
            "Start one process per GPU (torchrun or accelerate launch), or make one GPU visible"
        )


def refuse_training_settings(training: dict[str, Any]) -> None:
    """Raise the same errors for a recipe's `training` section, before anything is built, and for settings without effect."""
    refuse_unreadable_settings(training)
    refuse_unreadable_optimizer(str(training.get("optim", "")))
    if training.get("resume_from_checkpoint"):
        raise SetupError("training.resume_from_checkpoint has no effect in a recipe: use run.resume")
    if training.get("do_train") is False:
        raise SetupError("training.do_train=False: a recipe is for training")


def refuse_windows_never_full(dataloader: Any, accumulation: int) -> None:
    """Raise SetupError if an epoch is shorter than one accumulation window."""
    try:
        batches = len(dataloader)
    except TypeError:
        return  # an iterable data set does not know its length
    if batches < accumulation:
        raise SetupError(
            f"an epoch has {batches} micro-batches, fewer than gradient_accumulation_steps={accumulation}: no window would "
            "ever be full and the controller would never decide. Lower gradient_accumulation_steps or the batch size"
        )


def refuse_trace_place(path: str | os.PathLike[str], setting: str, *, named: bool) -> None:
    """Raise ConfigError, naming the setting, where `trace.file.refuse_place` refuses a trace."""
    try:
        refuse_place(path, named=named)
    except FileError as error:
        raise ConfigError(f"{setting}: {error}") from error
