"""Set-ups on which training must not start, each with the reason and the mend."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, DistributedType
from torch import nn
from transformers import TrainingArguments

from .config import SetupError
from .units import base_model

GRADIENTS_GONE = ("lomo", "layerwise")
"""Optimizers (parts of their names) that use up each gradient inside the backward: no norm is left to read."""


def refuse_unreadable_gradients(args: TrainingArguments, model: nn.Module) -> None:
    """Raise SetupError where the unclipped gradient cannot be read, or the model's paths cannot be switched."""
    kind = AcceleratorState().distributed_type if AcceleratorState._shared_state else DistributedType.NO
    if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM):
        raise SetupError(
            f"{kind.value}: gradients are partitioned or kept by the engine, so a layer's unclipped norm cannot be read. "
            "Use one process, DDP, or device_map"
        )
    _refuse_optimizer(str(getattr(args.optim, "value", args.optim)))
    if args.n_gpu > 1 and not getattr(base_model(model), "is_loaded_in_8bit", False):
        raise SetupError(
            f"torch.nn.DataParallel over {args.n_gpu} GPUs replicates the model in every forward. "
            "Start one process per GPU (torchrun or accelerate launch), or make one GPU visible"
        )


def refuse_training_settings(training: dict[str, Any]) -> None:
    """The same for a recipe's `training` section, before anything is built; and settings that would do nothing here."""
    for key in ("deepspeed", "fsdp"):
        if training.get(key):
            raise SetupError(
                f"training.{key}={training[key]!r}: {key} partitions the gradients, so a layer's unclipped norm cannot be "
                "read. Use one process, DDP, or device_map"
            )
    _refuse_optimizer(str(training.get("optim", "")))
    if training.get("resume_from_checkpoint"):
        raise SetupError("training.resume_from_checkpoint is not read here: use run.resume")
    if training.get("do_train") is False:
        raise SetupError("training.do_train=False: a recipe is for training")


def _refuse_optimizer(name: str) -> None:
    if any(part in name.lower() for part in GRADIENTS_GONE):
        raise SetupError(
            f"optim={name!r} uses up each gradient inside the backward, so no norm is left to read. "
            "Use an optimizer that steps after the backward, such as adamw_torch"
        )


def refuse_windows_never_full(dataloader: Any, accumulation: int) -> None:
    """Raise SetupError where an epoch is shorter than one accumulation window."""
    try:
        batches = len(dataloader)
    except TypeError:
        return  # an iterable data set does not know
    if batches < accumulation:
        raise SetupError(
            f"an epoch has {batches} micro-batches, fewer than gradient_accumulation_steps={accumulation}: no window would "
            "ever be complete and the controller would never decide. Lower gradient_accumulation_steps or the batch size"
        )
