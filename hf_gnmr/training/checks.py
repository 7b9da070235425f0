"""Setups with which training must not start; each error gives the reason and the fix."""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments

from ..backends.units import base_model
from ..config import MAX_COUNT, ConfigError, SetupError, integer, one_of
from ..files import FileError
from ..terminal import printable, shown
from ..trace.file import refuse_place
from .distributed import world_size
from .engines import refuse_unreadable_engine, refuse_unreadable_optimizer, refuse_unreadable_settings
from .options import Options

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


def no_gradient_seen(step: int) -> SetupError:
    """The error for a step whose gradient came about where it cannot be read, or for first steps without any backward."""
    return SetupError(
        f"no gradient was seen at step {step}: the loss does not come from the outputs of the given model (a custom "
        "compute_loss that calls an inner module?), the model was not in training mode, accelerate does not consider this "
        "the last micro-batch (GradientState), there was no backward in the first steps, or there is a second GNMRCallback. "
        "Compute the loss from model(**inputs) after model.train(), so that the unclipped gradient can be read"
    )


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


def check_model(model: Any) -> None:
    """Raise ConfigError unless a session's model is one of torch."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={shown(model)}: expected a torch.nn.Module")


def check_objects(options: Any, scaler: Any, output_dir: Any) -> None:
    """Raise ConfigError for a session's other arguments of a wrong type, naming the argument."""
    if options is not None and not isinstance(options, Options):
        raise ConfigError(f"options={shown(options)}: expected hf_gnmr.training.options.Options, or None")
    if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
        raise ConfigError(f"scaler={shown(scaler)}: expected a gradient scaler (accelerator.scaler), or None")
    if output_dir is not None and (not isinstance(output_dir, (str, os.PathLike)) or "\0" in os.fspath(output_dir)):
        raise ConfigError(f"output_dir={shown(output_dir)}: expected a path, or None")


def check_loss(loss: Any) -> None:
    """Raise ConfigError unless a loss that is reported is a tensor."""
    if not isinstance(loss, Tensor):
        raise ConfigError(f"loss={shown(loss)}: expected a tensor")


def check_micro_batches(micro_batches: Any) -> None:
    """Raise ConfigError unless a number of micro-batches is a whole number, or None."""
    if micro_batches is not None:
        integer("micro_batches", micro_batches, 0)


def check_arguments(total_steps: int | None, accumulation: int, rows: int | None, resume_history: str) -> None:
    """Raise ConfigError for a session's numbers unless they are whole and above 0 (total steps and rows may be None)."""
    one_of("resume_history", resume_history, ("continue", "new"))
    if isinstance(total_steps, bool) or not (total_steps is None or (isinstance(total_steps, int) and total_steps > 0)):
        raise ConfigError(f"total_steps={shown(total_steps)}: expected a whole number above 0, or None")
    if isinstance(accumulation, bool) or not (isinstance(accumulation, int) and accumulation > 0):
        raise ConfigError(f"gradient_accumulation_steps={shown(accumulation)}: expected a whole number above 0")
    for name, value in (("total_steps", total_steps), ("gradient_accumulation_steps", accumulation)):
        if value is not None:
            integer(name, value, 1, most=MAX_COUNT)
    if rows is not None:
        integer("rows_per_micro_batch", rows, 1)


def why_no_step(skipped: bool, micro_batches: int, backwards: int, accumulation: int) -> str | None:
    """Why an optimizer step does not count for the controller, in words; None: it does."""
    if skipped:
        return "loss scaler skipped the update"
    if micro_batches != accumulation:
        return f"window of {micro_batches} micro-batches instead of {accumulation}"
    if backwards < micro_batches:
        return f"{backwards} backward passes in a window of {micro_batches} micro-batches"
    return None


def rows_per_micro_batch(args: TrainingArguments, dataloader: Any) -> int:
    """Rows of a micro-batch on this process: those of the loader in use, otherwise those of the arguments."""
    total = getattr(dataloader, "total_batch_size", None)  # accelerate's, over all processes
    if isinstance(total, int) and total >= args.world_size and total % args.world_size == 0:
        return total // args.world_size
    return int(args.train_batch_size)


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
    if "\0" in os.fspath(path):
        raise ConfigError(f"{setting}={shown(os.fspath(path))}: expected a path without a null character")
    try:
        refuse_place(path, named=named)
    except FileError as error:
        raise ConfigError(f"{setting}: {printable(str(error), 600)}") from error
