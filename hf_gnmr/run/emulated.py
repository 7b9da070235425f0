"""A recipe on a CPU that emulates BF16 products: which kernels run them, and the recipe's settings for such a CPU."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from ..backends import bf16_cpu
from ..config import SetupError
from .sections import Recipe, RecipeError

EMULATED = "emulated_bf16"
"""A recipe's section of sections: settings that replace the recipe's own where BF16 products run by float32 kernels."""


def merge_settings(below: dict[str, Any], values: dict[str, Any], sections: list[str]) -> dict[str, Any]:
    """`values` on top of those of an extended recipe, by section.

    Raises:
        RecipeError: a part that is no section, or has no keys.
    """
    result = dict(below)
    for section, settings in values.items():
        if section not in sections or not isinstance(settings, dict):
            raise RecipeError(f"{EMULATED}.{section}: expected one of {', '.join(sections)}, with key: value lines")
        result[section] = {**result.get(section, {}), **settings}
    return result


def device_type(recipe: Recipe) -> str:
    """Where the recipe will run, before there are `TrainingArguments`: ``cpu``, or the accelerator's type."""
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if recipe.training.get("use_cpu") or accelerator is None:
        return "cpu" if recipe.training.get("use_cpu") or not torch.cuda.is_available() else "cuda"
    return accelerator.type


def kernels(recipe: Recipe) -> tuple[bool, str]:
    """Whether the run's BF16 products run by float32 kernels, and the choice, its reason and its effects as a line."""
    emulated, line = bf16_cpu.choose(recipe.run.bf16_products, device_type(recipe))
    if recipe.adapted:
        changed = ", ".join(f"{key}={value!r}" for key, value in recipe.adapted.items())
        line += f"; the recipe's {EMULATED} settings apply: {changed}"
    return emulated, line


def same_on_all_ranks(key: str, choice: Any) -> None:
    """Refuse a choice that is not the same on all ranks, which each make it for themselves.

    Raises:
        SetupError: naming the key that settles it.
    """
    if PartialState().num_processes < 2:
        return
    choices = gather_object([choice])
    if any(other != choices[0] for other in choices):
        raise SetupError(f"{key}=auto: the ranks chose {', '.join(map(str, choices))}; give {key}=native or float32")


def differences(recipe: Recipe, other: Recipe) -> dict[str, Any]:
    """The settings of `other` that differ from those of `recipe`, by ``section.key``."""
    before, after = recipe.to_dict(), other.to_dict()
    return {
        f"{section}.{key}": value
        for section, values in after.items()
        for key, value in (values or {}).items()
        if (before[section] or {}).get(key) != value
    }
