"""The plan of a recipe that trains all weights, or that quantises anything but frozen weights, from its architecture alone.

One micro-batch goes through the model on the meta device, under the backend itself: what it counts as kept for the
backward is what a run counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..backends import ActivationBackend, LowBitBackend
from ..backends.fewbit.fp8 import refuse_shapes
from ..backends.units import FINDERS, Unit
from ..config import GNMRConfig
from ..control.triggers import make_trigger
from ..training.options import Options, within_budget
from .models import lora_config
from .sections import Recipe


def plan_activations(recipe: Recipe, config: Any, where: str, per_parameter: float | None) -> dict[str, Any]:
    """The figures, in bytes and counts.

    Args:
        recipe: any backend but `int8`.
        config: the model's configuration.
        where: where that is from.
        per_parameter: bytes of optimizer state a trainable parameter with fp32 states; None: not known.

    Raises:
        ConfigError, SetupError: what the run itself would raise.
    """
    with torch.device("meta"):
        model = base_on_meta(recipe, config)
        parameters = sum(p.numel() for p in model.parameters())
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        model, units, max_o, lifted = seats_on_meta(recipe, model)
        half = bool(recipe.training.get("bf16") or recipe.training.get("fp16"))
        trainable = [p for p in model.parameters() if p.requires_grad]
        backend_section = recipe.backend
        saved: dict[str, int] = {}
        if backend_section.name == "fp8" and backend_section.emulate is False:
            refuse_shapes(units)
        if backend_section.name in ("fp8", "lowbit"):  # what the run would refuse; both take the same modules
            LowBitBackend(model, units).remove()
        numbers = sum(p.numel() for p in trainable)
        size = sum(p.numel() * p.element_size() for p in trainable)
        if backend_section.name == "activation":
            if half:  # autocast's products, and so the inputs that they keep, are in 16 bits
                model = model.to(torch.bfloat16)
            backend = ActivationBackend(
                model,
                units,
                bits_low=backend_section.bits_low,
                bits_recovery=backend_section.bits_recovery,
                format=backend_section.format,
            )
            for name, active in (("low", False), ("recovery", True)):
                backend.apply(np.full(len(units), active))
                _forward(model, recipe)
                backend.apply(np.full(len(units), active))
                saved[name] = backend.step_figures()["saved_bytes"]
            backend.apply_exact()
            _forward(model, recipe)
            backend.apply_exact()
            saved["16 bits"] = backend.step_figures()["saved_bytes"]
            backend.remove()
    # States are in the parameters' dtype: two of them (Adam) are 8 bytes a parameter in fp32.
    state = None if per_parameter is None else int(per_parameter * size / 4)
    training = recipe.training
    return {
        "architecture": where,
        "parameters": parameters,
        "trainable_parameters": numbers,
        "units": len(units),
        "max_o": max_o,
        "most_lifted": lifted,
        "unit_names": [units[0].name, units[-1].name],
        "weight_bytes": weights + (size if recipe.lora is not None else 0),
        "gradient_bytes": size,
        "optimizer_bytes": state,
        "saved_bytes": saved,
        "micro_batch_tokens": training.get("per_device_train_batch_size", 8) * recipe.data.max_length,
        "device_bytes": weights + (size if recipe.lora is not None else 0) + size + (state or 0) + saved.get("low", 0),
    }


def base_on_meta(recipe: Recipe, config: Any) -> Any:
    """The recipe's model on the meta device, without adapters."""
    from transformers import AutoModelForCausalLM

    bf16 = recipe.lora is not None or recipe.model.dtype == "bfloat16"
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if bf16 else torch.float32)


def seats_on_meta(recipe: Recipe, model: Any) -> tuple[Any, list[Unit], int, int]:
    """The model with its adapters, its units, maxO, and how many units can be lifted at a time.

    Raises:
        ConfigError, SetupError: no such units, or a budget or trigger that they do not fit.
    """
    from peft import get_peft_model

    if recipe.lora is not None:
        model.requires_grad_(False)
        with torch.device("meta"):
            model = get_peft_model(model, lora_config(recipe.lora))
    options = Options(trigger=recipe.trigger.name, trigger_options=recipe.trigger.options(), **recipe.backend.options())
    units = FINDERS[options.unit_kind](model, recipe.model.layers)
    switched = recipe.backend.name != "none"
    gnmr = within_budget(recipe.gnmr, options, [0] * (len(units) + 1), holds_all=True)
    max_o = gnmr.resolve_max_o(len(units)) if switched else 0
    return model, units, max_o, most_lifted(recipe, [unit.name for unit in units], [switched] * len(units), max_o)


def most_lifted(recipe: Recipe, names: list[str], recoverable: list[bool], max_o: int) -> int:
    """Units that the trigger can have on the recovery path at a time.

    Raises:
        ConfigError: a list that names no unit, or a ratio above maxO.
    """
    trigger, count = recipe.trigger, sum(recoverable)
    if trigger.name == "none":
        return 0
    at_most = max_o
    if trigger.name in ("all", "static"):  # `static` has all of them there in its warm-up
        at_most = count
    if trigger.name in ("listed", "random") and count:
        control = make_trigger(
            trigger.name,
            len(names),
            GNMRConfig(alpha_init_fraction=0.0, max_o=max_o),
            recoverable=np.array(recoverable),
            options=trigger.options(),
            names=names,
        )
        at_most = control.most_active()
    return count if recipe.gnmr.fidelity_warmup else at_most


def _forward(model: Any, recipe: Recipe) -> None:
    rows, length = recipe.training.get("per_device_train_batch_size", 8), recipe.data.max_length
    model.train()
    # With a mask of its final form nothing asks for values, which the meta device does not have.
    mask = torch.zeros((rows, 1, length, length), device="meta")
    ids = torch.zeros((rows, length), dtype=torch.long, device="meta")
    model(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False)


def seats_in_words(figures: dict[str, Any]) -> str:
    """maxO, and how many units can be lifted where the trigger does not keep to it."""
    free = "" if figures["most_lifted"] == figures["max_o"] else f", {figures['most_lifted']} lifted at a time at most"
    return f"maxO {figures['max_o']}{free}"


def head_in_words(figures: dict[str, Any]) -> list[str]:
    """What every plan begins with."""
    steps = "not known (give --rows)" if figures["steps"] is None else f"{figures['steps']:,}"
    return [
        f"{figures['parameters']:,} parameters, {figures['trainable_parameters']:,} trainable",
        f"architecture: {figures['architecture']}",
        f"global batch {figures['global_batch']} on {figures['processes']} process(es); steps: {steps}",
    ]


def activations_in_words(figures: dict[str, Any]) -> str:
    """The figures as lines, in decimal MB."""

    def amount(size: int | None) -> str:
        return "not known" if size is None else f"{size / 1e6:,.2f} MB"

    lines = [
        *head_in_words(figures),
        f"{figures['units']} units ({' to '.join(dict.fromkeys(figures['unit_names']))}); {seats_in_words(figures)}",
        f"weights {amount(figures['weight_bytes'])}, gradients {amount(figures['gradient_bytes'])}, optimizer state "
        f"{amount(figures['optimizer_bytes'])}",
    ]
    if figures["saved_bytes"]:
        kept = ", ".join(f"{amount(size)} ({name})" for name, size in figures["saved_bytes"].items())
        lines.append(
            f"inputs of projections kept for the backward of a micro-batch of {figures['micro_batch_tokens']:,} tokens: "
            f"{kept}; other activations are not in it"
        )
    return "\n".join(lines)
