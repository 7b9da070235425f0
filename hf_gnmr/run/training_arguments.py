"""The section `training` as TrainingArguments, and what the Trainer would refuse of it after the model was loaded."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from ..terminal import described, is_own, shown
from .sections import RecipeError


def training_arguments(settings: dict[str, Any]) -> TrainingArguments:
    """TrainingArguments of these settings, with loggers, schedule and optional packages tried.

    Raises:
        RecipeError: naming the setting and the cause.
    """
    defaults: dict[str, Any] = {"prediction_loss_only": True}  # evaluation would keep the logits of all rows
    if not torch.cuda.is_available() and not _other_accelerator():
        defaults["use_cpu"] = True
    before = dict(os.environ)
    try:
        arguments = TrainingArguments(**{**defaults, **settings})
    except Exception as error:  # of enumerations, parsers and launchers, besides TrainingArguments' own
        os.environ.clear()
        os.environ.update(before)  # it passes settings to accelerate there
        raise refused_setting(settings, error, _without(defaults, settings)) from error
    for name, attempt in (
        ("optim_args" if arguments.optim_args else "optim", lambda: Trainer.get_optimizer_cls_and_kwargs(arguments)),
        ("log_level", arguments.get_process_log_level),
        ("report_to", lambda: _try_loggers(arguments)),
        ("lr_scheduler_kwargs", lambda: _try_schedule(arguments)),
        ("torch_compile_backend", lambda: _try_compiler(arguments)),
        ("use_liger_kernel", lambda: _try_liger(arguments)),
    ):
        try:
            attempt()  # type: ignore[operator]
        except Exception as error:
            raise refused_setting(settings, error, name) from error
    if arguments.push_to_hub and _offline():
        raise RecipeError("training.push_to_hub=True: the Hub cannot be reached, because HF_HUB_OFFLINE is set")
    return arguments


def refused_setting(settings: dict[str, Any], error: Exception, name: str | None = None) -> Exception:
    """An error of TrainingArguments or the Trainer, as one that names the setting it is about.

    Args:
        settings: the section `training`.
        error: what was raised; our own errors are returned as they are.
        name: the setting, where it is known; None: the one that the error's text names, if any.
    """
    if is_own(error):
        return error
    text = str(error)
    named = [key for key in settings if re.search(rf"\b{re.escape(key)}\b", text)]
    # Some quote the value alone, and in capitals. Short values ("no") are in every text.
    quoted = [key for key, value in settings.items() if isinstance(value, str) and f"'{value.lower()}'" in text.lower()]
    key = name or next(iter([*named, *quoted]), None)
    setting = "training" if key is None else f"training.{key}={shown(settings.get(key))}"
    return RecipeError(f"{setting}: {described(error, hint=False)}")


def _without(defaults: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """The setting without which TrainingArguments can be made; None: there is no such single one."""
    for key in settings:
        rest = {name: value for name, value in settings.items() if name != key}
        try:
            TrainingArguments(**{**defaults, "output_dir": ".", **rest})
        except Exception:  # noqa: S112 - another setting is at fault
            continue
        return key
    return None


def _try_loggers(arguments: TrainingArguments) -> None:
    """Make the loggers that the Trainer would make: each refuses where its package is missing."""
    from transformers.integrations import get_reporting_integration_callbacks

    for logger in get_reporting_integration_callbacks(arguments.report_to):
        logger()


def _try_schedule(arguments: TrainingArguments) -> None:
    """Make the learning rate's schedule over one number."""
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    get_scheduler(
        arguments.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=0,
        num_training_steps=max(1, arguments.max_steps),
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs or {},
    )


def _try_compiler(arguments: TrainingArguments) -> None:
    """Look the compiler up as accelerate does."""
    from accelerate.utils import DynamoBackend

    if arguments.torch_compile_backend is not None:
        DynamoBackend(arguments.torch_compile_backend.upper())


def _try_liger(arguments: TrainingArguments) -> None:
    from transformers.utils import is_liger_kernel_available

    if arguments.use_liger_kernel and not is_liger_kernel_available():
        raise RecipeError("training.use_liger_kernel=True: liger-kernel is not installed: pip install liger-kernel")


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _other_accelerator() -> bool:
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return accelerator is not None and accelerator.type != "cpu"
