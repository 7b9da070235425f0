"""``hf-gnmr plan RECIPE``: what a recipe needs, from its architecture alone; no weight is loaded.

The model is built on the meta device, its linears replaced by bitsandbytes' and adapters added as a run does it, so that the
sums are over the same modules that a run's census counts.  Activations are not in it: they depend on batch, length and
checkpointing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch

from ..backends.bnb.stores.residual import CHUNK
from ..backends.units import find_units
from ..config import ConfigError, SetupError, parse_bytes
from ..training.options import Options, within_budget
from .models import BUILTIN, architecture_config, lora_config
from .plan_activations import activations_in_words, head_in_words, most_lifted, plan_activations, seats_in_words
from .recipe import SCRATCH, find_recipe, load_recipe
from .sections import Recipe, RecipeError

EXCEPTIONS = 0.012
"""Share of weights that the store `device` keeps beside the residuals, as measured on trained models."""
STATE_BYTES = {"adamw": 8, "adam": 8, "adafactor": None, "sgd": 0, "rmsprop": 4, "lion": 4, "adagrad": 4}
"""Bytes of optimizer state a trainable parameter, by the name's beginning (fp32 states)."""


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (1: does not fit, 2: something to mend)."""
    parser = argparse.ArgumentParser(prog="hf-gnmr plan", description="What a recipe needs; loads no weights.")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--device-memory", metavar="SIZE", help="fail where the recipe's own way does not fit, e.g. 24GB")
    parser.add_argument("--processes", type=int, default=1, help="processes of the run, for the number of steps")
    parser.add_argument("--rows", type=int, help="training rows, where the data set is not at hand")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    options = parser.parse_intermixed_args(argv)
    try:
        limit = None if options.device_memory is None else parse_bytes("--device-memory", options.device_memory)
        recipe = load_recipe(find_recipe(options.recipe), options.overrides)
        figures = plan(recipe, processes=options.processes, rows=options.rows)
    except (ConfigError, SetupError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(figures, indent=2) if options.json else in_words(figures))
    way = figures.get("way", "this recipe")
    need = figures["ways"][way]["device_bytes"] if "ways" in figures else figures["device_bytes"]
    if limit is not None and need > limit:
        print(
            f"does not fit: {way} needs {need:,} bytes before activations, {need - limit:,} more than "
            f"--device-memory {options.device_memory} ({limit:,})",
            file=sys.stderr,
        )
        return 1
    return 0


def plan(recipe: Recipe, *, processes: int = 1, rows: int | None = None) -> dict[str, Any]:
    """The figures, in bytes and counts.

    Raises:
        RecipeError: no architecture at hand, or adapters that match nothing.
    """
    config, where = architecture(recipe)
    optimizer = str(recipe.training.get("optim", "adamw_torch"))
    if recipe.lora is None or recipe.backend.name not in ("int8", "none"):
        return {**plan_activations(recipe, config, where, _per_parameter(optimizer)), **_steps(recipe, processes, rows)}
    # Before the model is built, which sets it to what it is built in.
    cast = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.") != "bfloat16"
    plain, _ = on_meta(config, recipe, int8=False)
    model, unit_list = on_meta(config, recipe, int8=True)
    base = model.get_base_model()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = _bytes(p for name, p in plain.get_base_model().named_parameters() if ".lora_" not in name)
    switched = [m for m in base.modules() if isinstance(m, bnb.nn.Linear8bitLt)]
    counted = {id(m.weight) for m in switched}
    low = sum(m.weight.numel() + 4 * m.out_features for m in switched)
    rest = _bytes(p for name, p in base.named_parameters() if ".lora_" not in name and id(p) not in counted)

    units = [[m for m in unit.module.modules() if isinstance(m, bnb.nn.Linear8bitLt)] for unit in unit_list]
    sizes = [sum(2 * m.weight.numel() for m in modules) for modules in units]
    recoverable = sorted((size for size in sizes if size), reverse=True)
    max_o = _max_o(recipe, recoverable, cast)
    names, able = [unit.name for unit in unit_list], [size > 0 for size in sizes]
    lifted = most_lifted(recipe, names, able, max_o)
    slots = sum(recoverable[: lifted or max_o])  # with trigger none: what the other ways would take
    in_units = sum(size // 2 for size in sizes)
    largest = max((m.weight.numel() for modules in units for m in modules), default=0)
    residual = in_units + 6 * math.ceil(EXCEPTIONS * in_units) + 2 * largest + 4 * min(largest, CHUNK)

    per_parameter = _per_parameter(optimizer)
    state = None if per_parameter is None else int(per_parameter * trainable)
    common = 4 * trainable + 4 * trainable + (state or 0)  # adapters and gradients in fp32
    ways = {
        "BF16": {"weights": weights, "recovery": 0, "host_bytes": 0, "moved": 0},
        "INT8": {"weights": low + rest, "recovery": 0, "host_bytes": 0, "moved": 0},
        "INT8, recovery=host on a GPU": {"weights": low + rest, "recovery": slots, "host_bytes": 0, "moved": slots},
        "INT8, recovery=host on a GPU, pinned": {
            "weights": low + rest,
            "recovery": slots,
            "host_bytes": 2 * in_units,
            "moved": slots,
        },
        "INT8, recovery=host on a CPU": {
            "weights": low + rest,
            "recovery": 2 * in_units if cast else slots,
            "host_bytes": 0,
            "moved": 0,
        },
        "INT8, recovery=device": {"weights": low + rest, "recovery": residual, "host_bytes": 0, "moved": 0},
        "INT8, recovery=dequantize": {"weights": low + rest, "recovery": 0, "host_bytes": 0, "moved": 0},
    }
    for way in ways.values():
        way["device_bytes"] = way["weights"] + way["recovery"] + common
    return {
        "architecture": where,
        "parameters": sum(p.numel() for name, p in plain.get_base_model().named_parameters() if ".lora_" not in name),
        "trainable_parameters": trainable,
        "units": len(units),
        "recoverable_units": len(recoverable),
        "max_o": max_o,
        "most_lifted": lifted,
        "unit_bytes": recoverable[0] if recoverable else 0,
        "adapter_bytes": 4 * trainable,
        "gradient_bytes": 4 * trainable,
        "optimizer": optimizer,
        "optimizer_bytes": state,
        "checkpoint_cast_to_bf16": cast,
        "ways": ways,
        "way": _way(recipe),
        **_steps(recipe, processes, rows),
    }


def _per_parameter(optimizer: str) -> float | None:
    """Bytes of state a parameter; None: not known."""
    kind = optimizer.removeprefix("paged_")
    size = next((size for name, size in STATE_BYTES.items() if kind.startswith(name)), None)
    return None if size is None else size / (4 if "8bit" in kind else 8 if "4bit" in kind else 1)


def architecture(recipe: Recipe) -> tuple[Any, str]:
    """The model's configuration and where it is from: its folder, the recipe itself, or the Hub."""
    from transformers import AutoConfig

    section = recipe.model
    if section.name == SCRATCH:
        return architecture_config(section), "the recipe's own"
    if section.name == BUILTIN:
        from .builtin import base_config

        return base_config(), "built in"
    folder = Path(section.name).expanduser()
    if section.architecture is not None and not folder.is_dir():
        return architecture_config(section), f"the recipe's own, of {section.name}"
    try:
        config = AutoConfig.from_pretrained(
            folder if folder.is_dir() else section.name,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"model.name={section.name!r}: its configuration cannot be loaded ({error}), and the recipe has no "
            "model.architecture to go by"
        ) from error
    return config, section.name


def on_meta(config: Any, recipe: Recipe, *, int8: bool) -> tuple[Any, Any]:
    """The model under its adapters without any memory, and its units."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    section = recipe.lora
    assert section is not None  # without adapters there is nothing in 8 bits
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if int8:
            quantizer = AutoHfQuantizer.from_config(BitsAndBytesConfig(load_in_8bit=True), pre_quantized=False)
            with _silent():
                quantizer.preprocess_model(model=model, device_map={"": "cpu"})
            model.is_loaded_in_8bit = True
        model.requires_grad_(False)
        try:
            model = get_peft_model(model, lora_config(section))
        except (ValueError, TypeError) as error:
            raise RecipeError(f"lora (target_modules={section.target_modules!r}): {error}") from error
    return model, find_units(model, recipe.model.layers)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _bytes(parameters: Any) -> int:
    """In BF16, whatever the meta device holds (biases of 8-bit linears are FP32 there)."""
    return sum(2 * p.numel() for p in parameters)


def _max_o(recipe: Recipe, recoverable: list[int], cast: bool) -> int:
    """maxO as the run itself would have it, or its refusal."""
    backend = recipe.backend
    if backend.name != "int8":
        return recipe.gnmr.resolve_max_o(len(recoverable))
    options = Options(trigger=recipe.trigger.name, trigger_options=recipe.trigger.options(), **backend.options())
    on_gpu = _way(recipe).startswith("INT8, recovery=host on a GPU")
    adds = backend.recovery == "host" and (on_gpu or not cast)
    bounds = [sum(recoverable[:lifted]) if adds else 0 for lifted in range(len(recoverable) + 1)]
    config = within_budget(recipe.gnmr, options, bounds, holds_all=not on_gpu)
    return config.resolve_max_o(len(recoverable))


def _way(recipe: Recipe) -> str:
    if recipe.backend.name == "none":
        return "BF16"
    if recipe.trigger.name == "none":
        return "INT8"
    if recipe.backend.recovery != "host":
        return f"INT8, recovery={recipe.backend.recovery}"
    if recipe.training.get("use_cpu"):
        return "INT8, recovery=host on a CPU"
    return "INT8, recovery=host on a GPU" + (", pinned" if recipe.backend.pin_memory else "")


def _steps(recipe: Recipe, processes: int, rows: int | None) -> dict[str, Any]:
    """Optimizer steps as the Trainer counts them, or why they are not known."""
    training = recipe.training
    per_step = training.get("per_device_train_batch_size", 8) * processes
    accumulation = training.get("gradient_accumulation_steps", 1)
    found = {"global_batch": per_step * accumulation, "processes": processes}
    if training.get("max_steps", -1) > 0:
        return {**found, "steps": training["max_steps"], "rows": rows}
    rows = rows if rows is not None else recipe.data.rows
    if rows is None:
        return {**found, "steps": None, "rows": None}
    batches = rows // per_step if training.get("dataloader_drop_last") else math.ceil(rows / per_step)
    windows = math.ceil(batches / accumulation)
    return {**found, "steps": math.ceil(training.get("num_train_epochs", 3) * windows), "rows": rows}


def in_words(figures: dict[str, Any]) -> str:
    """The figures as a table, in decimal GB or MB."""
    if "ways" not in figures:
        return activations_in_words(figures)
    unit, size_of = ("GB", 1e9) if figures["ways"]["BF16"]["weights"] >= 1e9 else ("MB", 1e6)

    def amount(size: int | None) -> str:
        return "?" if size is None else f"{size / size_of:.2f}"

    lines = [
        *head_in_words(figures),
        f"{figures['units']} units, {figures['recoverable_units']} recoverable, the largest {amount(figures['unit_bytes'])} "
        f"{unit} of BF16; {seats_in_words(figures)}",
        f"adapters {amount(figures['adapter_bytes'])} {unit}, gradients {amount(figures['gradient_bytes'])} {unit}, "
        f"optimizer state ({figures['optimizer']}) {amount(figures['optimizer_bytes'])} {unit}",
        "",
        f"{f'{unit} (decimal), before activations':38} {'weights':>8} {'recovery':>9} {'in all':>8} {'host':>8} "
        f"{'moved a step':>13}",
    ]
    for name, way in figures["ways"].items():
        mark = "  <- this recipe" if name == figures["way"] else ""
        lines.append(
            f"{name:38} {amount(way['weights']):>8} {amount(way['recovery']):>9} {amount(way['device_bytes']):>8} "
            f"{amount(way['host_bytes']):>8} {amount(way['moved']):>13}{mark}"
        )
    lines += [
        "",
        f"recovery: what {figures['most_lifted'] or figures['max_o']} lifted units add at most (host), or what is resident "
        f"whatever is active (device; about {100 * EXCEPTIONS:.1f}% exceptions, known only from the weights)",
        "moved a step: from host to device at worst, when all lifted units change; host: anonymous memory",
    ]
    if figures["checkpoint_cast_to_bf16"]:
        lines.append("the checkpoint is not BF16: on a CPU recovery=host holds one BF16 copy of it")
    if figures["optimizer_bytes"] is None:
        lines.append("this optimizer's state is not known here and not in the sums")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
