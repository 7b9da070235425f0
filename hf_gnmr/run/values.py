"""A recipe's values: each is converted to the type of its field, or refused with its name and what was expected."""

from __future__ import annotations

import difflib
import math
import re
import typing
from enum import Enum
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..terminal import printable, shown
from .architecture import MAX_RANK
from .sections import RecipeError

LEAST: dict[str, float] = {
    "lora.r": 1, "lora.lora_alpha": 1, "lora.lora_dropout": 0, "data.max_length": 8, "data.rows": 1, "data.eval_rows": 0,
    "data.generate_rows": 0, "data.max_new_tokens": 1, "data.documents": 1, "model.llm_int8_threshold": 0,
    "training.learning_rate": 0, "training.weight_decay": 0, "training.max_grad_norm": 0, "training.warmup_steps": 0,
    "training.per_device_train_batch_size": 1, "training.per_device_eval_batch_size": 1,
    "training.gradient_accumulation_steps": 1, "training.max_steps": 1, "training.num_train_epochs": 0,
    "training.logging_steps": 0, "training.save_steps": 0, "training.seed": 0, "training.label_smoothing_factor": 0,
    "training.adam_beta1": 0, "training.adam_beta2": 0, "training.adam_epsilon": 0, "training.neftune_noise_alpha": 0,
    "training.torch_empty_cache_steps": 1, "training.eval_steps": 0, "training.eval_delay": 0,
    "training.eval_accumulation_steps": 1, "training.save_total_limit": -1, "training.data_seed": 0,
    "training.dataloader_num_workers": 0, "training.dataloader_prefetch_factor": 1, "training.ddp_bucket_cap_mb": -1,
    "training.ddp_timeout": 1, "training.local_rank": -1,
}  # fmt: skip
"""Lowest valid value per key. `training.max_steps` may also be -1, which means "by epochs" in transformers."""

BELOW_ONE = 0.999_999_999_999
"""torch refuses coefficients of 1."""
MOST: dict[str, float] = {
    "lora.lora_dropout": 1, "training.label_smoothing_factor": 1, "lora.r": MAX_RANK, "lora.lora_alpha": 10**9,
    "data.max_length": 2**24, "data.rows": 10**12, "data.eval_rows": 10**9, "data.generate_rows": 10**9,
    "data.documents": 10**7, "data.max_new_tokens": 10**6, "training.per_device_train_batch_size": 10**6,
    "training.per_device_eval_batch_size": 10**6, "training.gradient_accumulation_steps": 10**6, "training.max_steps": 10**9,
    "training.num_train_epochs": 10**6, "training.dataloader_num_workers": 1024, "training.seed": 2**32 - 1,
    "training.data_seed": 2**32 - 1, "training.save_total_limit": 10**6, "training.learning_rate": 10**9,
    "training.warmup_steps": 10**9, "training.weight_decay": 10**9, "training.adam_beta1": BELOW_ONE,
    "training.adam_beta2": BELOW_ONE, "training.adam_epsilon": 10**3, "training.max_grad_norm": 1e38,
    "training.neftune_noise_alpha": 10**6, "training.torch_empty_cache_steps": 10**9, "training.logging_steps": 10**9,
    "training.eval_steps": 10**9, "training.eval_delay": 10**9, "training.eval_accumulation_steps": 10**9,
    "training.save_steps": 10**9, "training.dataloader_prefetch_factor": 1000, "training.ddp_bucket_cap_mb": 10**6,
    "training.ddp_timeout": 10**9, "training.local_rank": 10**6,
}  # fmt: skip
"""Highest valid value per key: memory, processes and loops grow with them, or a library cannot convert a higher one (to a
float32, or a duration). Seeds end where numpy's do."""


def check_value(key: str, value: Any, hint: Any) -> Any:
    """`value` converted to the type `hint` and checked against the range of `key`.

    Raises:
        RecipeError: naming key, value and the expected type or range.
    """
    expected = _words(hint)
    union = typing.get_args(hint) or (hint,)
    if isinstance(value, bool) and not any(t in (bool, Any) or _holds(t, value) for t in union):
        raise RecipeError(f"{key}={shown(value)}: expected {expected}")
    names = [member.value for t in union if isinstance(t, type) and issubclass(t, Enum) for member in t]
    if names and isinstance(value, str) and value not in names:
        near = difflib.get_close_matches(value, names, n=1)
        listed = ", ".join(map(repr, names)) if len(names) <= 12 else f"one of {len(names)} names"
        raise RecipeError(f"{key}={shown(value)}: {f'did you mean {near[0]!r}? ' if near else ''}expected {listed}")
    try:
        result = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        raise RecipeError(f"{key}={shown(value)}: expected {expected}") from error
    # GNMRConfig checks its own ranges.
    if isinstance(result, (int, float)) and not isinstance(result, bool) and not key.startswith("gnmr."):
        least, most = LEAST.get(key, -math.inf), MOST.get(key, math.inf)
        by_epochs = key == "training.max_steps" and result == -1
        if not ((math.isfinite(result) and least <= result <= most) or by_epochs):
            bounds = [f"at least {least:g}"] if least > -math.inf else []
            bounds += [f"at most {most:,.15g}"] if most < math.inf else []
            raise RecipeError(
                f"{key}={shown(value)}: expected a finite number{', ' if bounds else ''}{' and '.join(bounds)}"
            )
    return result


def check_finite(key: str, value: Any) -> None:
    """Refuse inf and nan inside a mapping or list, such as `lr_scheduler_kwargs`: schedules fail on them in mid-run.

    Raises:
        RecipeError: naming the key.
    """
    pending = [(key, value)]
    while pending:
        name, part = pending.pop()
        if isinstance(part, dict):
            pending += [(f"{name}.{inner}", item) for inner, item in part.items()]
        elif isinstance(part, (list, tuple)):
            pending += [(name, item) for item in part]
        elif isinstance(part, float) and not math.isfinite(part):
            raise RecipeError(f"{printable(name)}={shown(part)}: expected a finite number")


def _holds(hint: Any, value: Any) -> bool:
    """Whether the type is a Literal with exactly this value."""
    return typing.get_origin(hint) is Literal and any(value is v for v in typing.get_args(hint))


def _words(hint: Any) -> str:
    """The type as text, without module names."""
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"\b(?:typing|transformers\.[\w.]*|collections\.abc)\.", "", text)


def check_known(name: Any, known: list[str], kind: str, prefix: str = "") -> None:
    """Raise RecipeError for an unknown name, with the nearest known one."""
    if name not in known:
        text = name if isinstance(name, str) else shown(name)
        near = difflib.get_close_matches(text[:100], known, n=1, cutoff=0.5)
        hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
        raise RecipeError(f"unknown {kind} {prefix}{printable(text)}: {hint}")
