"""What a recipe needs, from its architecture alone: the model is built on the meta device, where it takes no memory.

A quantised base gets the same modules as when it is loaded, and adapters are added as in a run, so the totals cover the same
modules that a run's census counts.  For saved activations, one micro-batch passes through the model under the backend,
which counts what is kept for the backward exactly as in a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..backends import BACKENDS, Backend
from ..backends.base import Way
from ..backends.units import FINDERS, Unit, find_units, in_adapter
from ..config import refusing
from ..control.triggers import make_trigger
from ..terminal import shown
from ..trace.lifted import resolve_trigger_options
from ..training.options import DEFAULT_BACKEND, Options, within_budget
from .architecture import load_config, on_meta
from .models import BUILTIN, architecture_config, check_architecture, lora_config, module_names
from .patterns import check_patterns
from .recipe import SCRATCH
from .sections import Recipe, RecipeError

STATE_BYTES = {"adamw": 8, "adam": 8, "adafactor": None, "sgd": 0, "rmsprop": 4, "lion": 4, "adagrad": 4}
"""Bytes of optimizer state per trainable parameter, by the beginning of the optimizer's name (fp32 states)."""
UNKNOWN_STEPS = 1_000_000
"""Used if the number of steps is unknown: how many units can be lifted does not depend on it."""


def plan(recipe: Recipe, *, processes: int = 1, rows: int | None = None) -> dict[str, Any]:
    """The recipe's figures, in bytes and counts.

    Raises:
        RecipeError: no architecture available, or adapters that match no module.
        ConfigError, SetupError: the errors that the run itself would raise.
    """
    with refusing("model: config.json or model.architecture cannot be used", RecipeError):
        config, source = architecture(recipe)
    steps = _steps(recipe, processes, rows)
    backend = BACKENDS[recipe.backend.name]
    by_base = recipe.lora is not None and (backend.quantised_base or not backend.switches)
    with refusing("model: no model can be built of its configuration (config.json, model.architecture)", RecipeError):
        figures = (_plan_bases if by_base else _plan_whole)(recipe, config, source, steps["steps"])
    return {**figures, **steps}


def _plan_bases(recipe: Recipe, config: Any, source: str, total_steps: int | None) -> dict[str, Any]:
    """Figures for adapters over a frozen base: the ways to hold the base, side by side."""
    # Read before the model is built, because building sets it.
    cast = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.") != "bfloat16"
    own = BACKENDS[recipe.backend.name]
    # A recipe that switches nothing is compared with the ways of the default backend.
    backend = own if own.quantised_base else BACKENDS[DEFAULT_BACKEND]
    options = recipe.backend.options if own.quantised_base else backend.Options()
    plain, _ = _with_adapters(config, recipe, None)
    model, units = _with_adapters(config, recipe, backend)
    frozen = [p for name, p in plain.get_base_model().named_parameters() if not in_adapter(name)]
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def seats(bounds: Sequence[int], holds_all: bool, recoverable: list[bool]) -> tuple[int, int]:
        gnmr = recipe.gnmr
        if own.quantised_base:
            gnmr = within_budget(gnmr, options_of(recipe), bounds, holds_all=holds_all)
        max_o = gnmr.resolve_max_o(sum(recoverable))
        return max_o, most_lifted(recipe, [unit.name for unit in units], recoverable, max_o, total_steps)

    on_cpu = bool(recipe.training.get("use_cpu"))
    planned = backend.plan_base(model.get_base_model(), units, options, cast=cast, on_cpu=on_cpu, seats=seats)
    optimizer = str(recipe.training.get("optim", "adamw_torch"))
    per_parameter = _per_parameter(optimizer)
    state = None if per_parameter is None else int(per_parameter * trainable)
    common = 4 * trainable + 4 * trainable + (state or 0)  # adapters and gradients in fp32
    ways = [Way("bf16", "BF16", sum(2 * p.numel() for p in frozen)), *planned.ways]
    return {
        "architecture": source,
        "parameters": sum(p.numel() for p in frozen),
        "trainable_parameters": trainable,
        "units": len(units),
        "recoverable_units": len(planned.unit_bytes),
        "max_o": planned.max_o,
        "most_lifted": planned.lifted,
        "unit_bytes": planned.unit_bytes[0] if planned.unit_bytes else 0,
        "adapter_bytes": 4 * trainable,
        "gradient_bytes": 4 * trainable,
        "optimizer": optimizer,
        "optimizer_bytes": state,
        "checkpoint_cast_to_bf16": cast,
        "ways": {
            way.key: {
                "name": way.name,
                "note": way.note,
                "weights": way.weights,
                "recovery": way.recovery,
                "host_bytes": way.host_bytes,
                "moved": way.moved,
                "device_bytes": way.weights + way.recovery + common,
            }
            for way in ways
        },
        "way": planned.way if own.switches else "bf16",
    }


def _plan_whole(recipe: Recipe, config: Any, source: str, total_steps: int | None) -> dict[str, Any]:
    """Figures for a model that is held in one way, whatever is switched in it."""
    backend = BACKENDS[recipe.backend.name]
    with torch.device("meta"):
        model = base_on_meta(recipe, config)
        parameters = sum(p.numel() for p in model.parameters())
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        model, units, max_o, lifted = seats_on_meta(recipe, model, total_steps)
        trainable = [p for p in model.parameters() if p.requires_grad]
        numbers, size = sum(p.numel() for p in trainable), sum(p.numel() * p.element_size() for p in trainable)
        half = bool(recipe.training.get("bf16") or recipe.training.get("fp16"))
        forward = functools.partial(_forward, recipe=recipe)
        saved = backend.plan_saved(model, units, recipe.backend.options, forward, half)
    per_parameter = _per_parameter(str(recipe.training.get("optim", "adamw_torch")))
    # States have the parameters' dtype: Adam's two take 8 bytes per parameter in fp32.
    state = None if per_parameter is None else int(per_parameter * size / 4)
    held = weights + (size if recipe.lora is not None else 0)
    return {
        "architecture": source,
        "parameters": parameters,
        "trainable_parameters": numbers,
        "units": len(units),
        "max_o": max_o,
        "most_lifted": lifted,
        "unit_names": [units[0].name, units[-1].name],
        "weight_bytes": held,
        "gradient_bytes": size,
        "optimizer_bytes": state,
        "saved_bytes": saved,
        "micro_batch_tokens": recipe.training.get("per_device_train_batch_size", 8) * recipe.data.max_length,
        "device_bytes": held + size + (state or 0) + saved.get("low", 0),
    }


def options_of(recipe: Recipe) -> Options:
    """What is switched and how, as in a run of the recipe."""
    return Options(layers=recipe.model.layers, **recipe.backend.keywords(), **recipe.trigger.keywords())


def _per_parameter(optimizer: str) -> float | None:
    """Bytes of optimizer state per parameter; None: not known."""
    kind = optimizer.removeprefix("paged_")
    size = next((size for name, size in STATE_BYTES.items() if kind.startswith(name)), None)
    return None if size is None else size / (4 if "8bit" in kind else 8 if "4bit" in kind else 1)


def architecture(recipe: Recipe) -> tuple[Any, str]:
    """The model's configuration and its source: the model's folder, the recipe itself, or the Hub."""
    section = recipe.model
    if section.name == SCRATCH:
        return architecture_config(section), "the recipe's own"
    if section.name == BUILTIN:
        from .builtin import base_config

        return base_config(section.builtin_size), "built in"
    folder = Path(section.name).expanduser()
    try:
        config = load_config(folder if folder.is_dir() else section.name, section)
    except RecipeError:
        raise
    except (OSError, ValueError) as error:
        if section.architecture is not None and not folder.is_dir():
            stated = f"as the recipe states it for {section.name}, whose own configuration is not available here"
            return architecture_config(section), stated
        raise RecipeError(
            f"model.name={section.name!r}: its configuration cannot be loaded ({error}), and the recipe has no "
            "model.architecture to use instead (that of another model does not count)"
        ) from error
    check_architecture(section, config)
    return config, section.name


def _with_adapters(config: Any, recipe: Recipe, backend: type[Backend] | None) -> tuple[Any, list[Unit]]:
    """The model with its adapters on the meta device, the base stored as by `backend` (None: BF16), and its units."""
    from peft import get_peft_model

    section = recipe.lora
    assert section is not None  # only a base under adapters is quantised
    with torch.device("meta"):
        model = on_meta(config, recipe.model, torch.bfloat16)
        if backend is not None:
            with _silent():
                backend.quantise_on_meta(model)
        model.requires_grad_(False)
        check_patterns({"target_modules": section.target_modules}, module_names(model), "lora.")
        try:
            model = get_peft_model(model, lora_config(section))
        except (ValueError, TypeError) as error:
            raise RecipeError(f"lora (target_modules={shown(section.target_modules)}): {error}") from error
    return model, find_units(model, recipe.model.layers)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Show only errors from transformers."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def base_on_meta(recipe: Recipe, config: Any) -> Any:
    """The recipe's model on the meta device, without adapters."""
    bf16 = recipe.lora is not None or recipe.model.dtype == "bfloat16"
    return on_meta(config, recipe.model, torch.bfloat16 if bf16 else torch.float32)


def seats_on_meta(recipe: Recipe, model: Any, total_steps: int | None = None) -> tuple[Any, list[Unit], int, int]:
    """The model with its adapters, its units, maxO, and the most units that can be lifted at a time.

    Raises:
        ConfigError, SetupError: no such units, or a budget or trigger that does not fit them.
    """
    from peft import get_peft_model

    if recipe.lora is not None:
        model.requires_grad_(False)
        check_patterns({"target_modules": recipe.lora.target_modules}, module_names(model), "lora.")
        with torch.device("meta"):
            model = get_peft_model(model, lora_config(recipe.lora))
    options = options_of(recipe)
    units = FINDERS[options.unit_kind](model, recipe.model.layers)
    switched = BACKENDS[recipe.backend.name].switches
    gnmr = within_budget(recipe.gnmr, options, [0] * (len(units) + 1), holds_all=True)
    max_o = gnmr.resolve_max_o(len(units)) if switched else 0
    names = [unit.name for unit in units]
    return model, units, max_o, most_lifted(recipe, names, [switched] * len(units), max_o, total_steps)


def most_lifted(recipe: Recipe, names: list[str], recoverable: list[bool], max_o: int, total_steps: int | None) -> int:
    """The most units that the trigger can have on the recovery path at a time.

    Raises:
        ConfigError: what the run's trigger would also refuse, such as a list that matches no unit or a ratio above maxO.
    """
    if not any(recoverable):
        return 0
    mask = np.array(recoverable)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # max_o=0 was reported when the recipe was read
        config = dataclasses.replace(recipe.gnmr, max_o=max_o)
    trigger = make_trigger(
        recipe.trigger.name,
        len(names),
        config,
        total_steps=total_steps or UNKNOWN_STEPS,
        recoverable=mask,
        options=resolve_trigger_options(recipe.trigger.options, names, mask),
        names=names,
    )
    return trigger.most_active()


def _forward(model: Any, recipe: Recipe) -> None:
    """One micro-batch of the recipe's size through the model, on the meta device."""
    rows, length = recipe.training.get("per_device_train_batch_size", 8), recipe.data.max_length
    model.train()
    # A mask in its final form: otherwise transformers would look at values, which the meta device does not have.
    mask = torch.zeros((rows, 1, length, length), device="meta")
    ids = torch.zeros((rows, length), dtype=torch.long, device="meta")
    model(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False)


def _steps(recipe: Recipe, processes: int, rows: int | None) -> dict[str, Any]:
    """Optimizer steps as the Trainer counts them (None: not known), the global batch, processes and rows."""
    training = recipe.training
    per_step = training.get("per_device_train_batch_size", 8) * processes
    accumulation = training.get("gradient_accumulation_steps", 1)
    figures = {"global_batch": per_step * accumulation, "processes": processes}
    if training.get("max_steps", -1) > 0:
        return {**figures, "steps": training["max_steps"], "rows": rows}
    rows = rows if rows is not None else recipe.data.rows
    if rows is None:
        return {**figures, "steps": None, "rows": None}
    batches = rows // per_step if training.get("dataloader_drop_last") else math.ceil(rows / per_step)
    windows = math.ceil(batches / accumulation)
    return {**figures, "steps": math.ceil(training.get("num_train_epochs", 3) * windows), "rows": rows}
