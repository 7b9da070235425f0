"""What is evaluated: a run, an adapter with its base, or a base model; what makes it itself, and how it is built."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from ..backends.bnb.int8 import Int8Backend, cast_notes_silenced
from ..backends.units import all_layers
from ..config import ConfigError
from ..files import read_json
from ..run.models import load_adapter, load_base, load_tokenizer, model_source
from ..run.recipe import load_recipe
from ..run.sections import ModelSection, Recipe
from ..trace.file import read_trace
from .tasks import file_hash

PRECISIONS = ("low", "recovery", "final")
EVAL_FOLDER = "eval"
"""Folder for results inside a run's or adapter's folder."""


@dataclass(frozen=True)
class Subject:
    """What is evaluated."""

    label: str
    """The RUN as given."""
    section: ModelSection
    """Its base model."""
    adapter: Path | None
    int8: bool
    """Whether it was trained over an 8-bit base (or, without training, is asked for in INT8)."""
    recipe: Recipe | None = None
    """Of a run of ours."""
    adapter_kind: str = "LORA"
    """PEFT's name for it."""
    checkpoint: int | None = None
    """Step of a run's checkpoint; None: the run's end."""

    @property
    def place(self) -> str:
        """Where it is: a resolved folder, or a name on the Hub."""
        folder = Path(self.label).expanduser()
        return str(folder.resolve()) if folder.is_dir() else self.label

    def autocast(self, dtype: str) -> torch.dtype | None:
        """Over an 8-bit base PEFT returns fp32 from IA3 and others, LoRA apart, and attention refuses it."""
        return getattr(torch, dtype) if self.int8 and self.adapter_kind != "LORA" and dtype != "float32" else None

    @property
    def precision(self) -> str:
        """The path it was trained on: `low` for INT8 and GNMR, `recovery` for BF16, all-lifted and anything else."""
        if self.recipe is None or not self.int8 or self.recipe.trigger.name == "all":
            return "recovery"
        return "low"


def resolve(run: str, base: str | None, precision: str | None) -> Subject:
    """What a RUN on the command line is.

    Raises:
        ConfigError: a folder that is none of the three kinds, or a run without an adapter.
    """
    folder = Path(run).expanduser()
    adapter = folder / "adapter_model.safetensors"
    if base is not None and not ((folder / "recipe.yaml").is_file() or (folder / "adapter_config.json").is_file()):
        raise ConfigError(f"--base {base}: {run} holds no adapter that could be put over another base")
    above = folder.resolve().parent
    step = re.fullmatch(r"checkpoint-(\d+)", folder.resolve().name) if (above / "recipe.yaml").is_file() else None
    if step is not None or (folder / "recipe.yaml").is_file():
        recipe = load_recipe((above if step else folder) / "recipe.yaml")
        if recipe.lora is None:
            if base is not None:
                raise ConfigError(f"--base {base}: {run} trained all weights and needs no base")
            if not (folder / "config.json").is_file():
                raise ConfigError(f"{run}: no model in it: the run is not finished")
            return Subject(run, ModelSection(name=str(folder)), None, precision in ("low", "final"))
        if adapter.is_file() and not (folder / "adapter_config.json").is_file():
            raise ConfigError(f"{run}: adapter_model.safetensors without adapter_config.json")
        if not adapter.is_file():
            raise ConfigError(f"{run}: no adapter_model.safetensors in it: the run is not finished")
        section = recipe.model if base is None else replace(recipe.model, name=base)
        if base is not None:
            print(f"{run}: trained over {recipe.model.name}, and put over {base}", flush=True)
        at = int(step[1]) if step else None
        return Subject(run, section, folder, recipe.backend.name == "int8", recipe, checkpoint=at)
    if (folder / "adapter_config.json").is_file():
        if not adapter.is_file():
            raise ConfigError(f"{run}: adapter_config.json without adapter_model.safetensors")
        config = read_json(folder / "adapter_config.json")
        if config.get("num_virtual_tokens") is not None:
            raise ConfigError(
                f"{run}: a {config.get('peft_type')} adapter adds virtual tokens to the prompt; only adapters inside the "
                "layers (LoRA, IA3, LoKr, ...) are evaluated here"
            )
        named = config.get("base_model_name_or_path")
        name = base or named
        if base is not None and named and str(named) != base:
            print(f"{run}: the adapter names {named} as its base, and is put over {base}", flush=True)
        if not name:
            raise ConfigError(f"{run}: the adapter does not say what its base model is: give --base")
        kind = str(config.get("peft_type"))
        section = ModelSection(name=str(name), revision=config.get("revision") if base is None else None)
        return Subject(run, section, folder, precision in ("low", "final"), adapter_kind=kind)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{run}: neither a run (recipe.yaml), nor an adapter (adapter_config.json), nor a model (config.json)"
        )
    if not folder.is_dir() and run.startswith((".", "/", "~")):
        raise ConfigError(f"{run}: no such folder")
    return Subject(run, ModelSection(name=run), None, precision in ("low", "final"))


def identity_of(subject: Subject, precision: str) -> dict[str, Any]:
    """What makes two evaluations ones of the same model: contents; `place` is for people."""
    files = {}
    if subject.adapter is not None:
        files = {name: file_hash(subject.adapter / name) for name in ("adapter_model.safetensors", "adapter_config.json")}
    base = Path(subject.section.name).expanduser()
    there = [f for f in sorted(base.glob("*")) if f.suffix in MODEL_FILES] if base.is_dir() else []
    backend = None if subject.recipe is None or not subject.int8 else subject.recipe.backend
    return {
        "place": subject.place,
        "base": "local" if base.is_dir() else f"{subject.section.name}@{subject.section.revision or 'main'}",
        "base_files": {f.name: _sampled(f) if f.stat().st_size > SAMPLED_ABOVE else file_hash(f) for f in there},
        "adapter": files,
        "int8": subject.int8,
        "threshold": subject.section.llm_int8_threshold if subject.int8 else None,
        "recovery": None if backend is None else [backend.recovery, backend.recovery_source],
        "final": _last_layers(subject) if precision == "final" else None,
    }


MODEL_FILES = (".safetensors", ".bin", ".json", ".model", ".jinja")
"""Of a base model's folder: weights, configuration, tokenizer."""
SAMPLED_ABOVE = 16 * 2**20


def _sampled(file: Path) -> str:
    """Size, and 64 KiB at 64 places: reading all of a large model for each evaluation would take minutes."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for i in range(64):
            stream.seek(i * (size - 2**16) // 63)
            digest.update(stream.read(2**16))
    return digest.hexdigest()[:16]


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def folder_for(subject: Subject) -> Path:
    """Where results go unless told otherwise."""
    if subject.adapter is not None:
        return subject.adapter / EVAL_FOLDER
    return Path("eval-results") / f"{Path(subject.label).name}-{short_hash(subject.place)}"


def build(subject: Subject, precision: str, dtype: str) -> tuple[Any, Any, str]:
    """Model in eval mode, tokenizer, and what runs, in words.

    Raises:
        ConfigError, SetupError: a model that cannot be loaded, or an adapter that does not fit it.
    """
    from peft import PeftConfig, get_peft_model

    source = model_source(subject.section)
    tokenizer = load_tokenizer(source, subject.section)
    model = load_base(source, subject.section, "int8" if subject.int8 else "none", getattr(torch, dtype))
    if subject.adapter is not None:
        try:
            config = PeftConfig.from_pretrained(subject.adapter)
            config.inference_mode = False  # else its parameters are frozen, and layers are known by what is trainable
            model = get_peft_model(model, config)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{subject.label}: its adapter does not fit {subject.section.name}: {error}") from error
        try:
            load_adapter(model, str(subject.adapter), subject.label)
        except (KeyError, SafetensorError) as error:
            raise ConfigError(f"{subject.label}: its adapter file is not whole: {error}") from error
    model.eval()
    if torch.cuda.is_available():
        model.to("cuda")
    kind = f"{'adapter over ' if subject.adapter is not None else ''}{subject.section.name}"
    if not subject.int8:
        return model, tokenizer, f"{kind}, {dtype}"
    # Every layer, adapted or not; the low-cost path too runs through the switched modules (DoRA's plain one fails on a CPU).
    units = all_layers(model, subject.section.layers)
    recovery = "dequantize" if precision == "low" else "host" if subject.recipe is None else subject.recipe.backend.recovery
    source_of = None if recovery == "dequantize" or subject.recipe is None else subject.recipe.backend.recovery_source
    backend = Int8Backend(model, units, eval_path="active", recovery=recovery, recovery_source=source_of)
    active = np.zeros(len(units), dtype=bool)
    if precision == "recovery":
        active = backend.recoverable
    elif precision == "final":
        active[_last_layers(subject)] = True
    backend.reserve(int(active.sum()))
    backend.apply(active)
    if precision == "low":
        return model, tokenizer, f"{kind}, bitsandbytes INT8 everywhere"
    weights = "" if recovery != "dequantize" else " (dequantised weights)"
    if precision == "final":
        return model, tokenizer, f"{kind}, INT8 with layers {np.flatnonzero(active).tolist()} in BF16{weights}"
    return model, tokenizer, f"{kind}, every layer of the 8-bit model on its BF16 path{weights}"


def _last_layers(subject: Subject) -> list[int]:
    """The model's layers on the recovery path in the last step of training."""
    assert subject.adapter is not None
    trace = read_trace((subject.adapter if subject.checkpoint is None else subject.adapter.resolve().parent) / "trace.jsonl")
    steps = [s for s in trace.steps if subject.checkpoint is None or s["step"] == subject.checkpoint]
    if not steps:
        raise ConfigError(f"--precision final: the trace of {subject.label} has no step {subject.checkpoint or ''}")
    active = steps[-1]["active"]
    return [trace.header["units"][unit]["layer"] for unit in active]


def adapter_effect(model: Any, autocast: torch.dtype | None = None) -> float:
    """Largest change of a logit that the adapter makes on a fixed input; 0.0: none."""
    ids = torch.arange(5, 21, device=model.device)[None]
    with (
        torch.no_grad(),
        cast_notes_silenced(),
        torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None),
    ):
        on = model(input_ids=ids).logits
        with model.disable_adapter():
            off = model(input_ids=ids).logits
    return float((on - off).abs().max())
