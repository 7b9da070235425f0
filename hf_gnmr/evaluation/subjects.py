"""What is evaluated: a run, an adapter with its base, or a base model; and what identifies it."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..backends import BACKENDS
from ..backends.bnb.int8 import Int8Options
from ..config import ConfigError
from ..control.baselines import AllLifted
from ..files import read_json
from ..reading import inside
from ..run.recipe import load_recipe
from ..run.sections import ModelSection, Recipe
from ..trace.file import read_trace
from .rows import file_hash

PRECISIONS = ("low", "recovery", "final")
EVAL_FOLDER = "eval"
"""Folder for results inside a run's or adapter's folder."""
RECIPE, ADAPTER, ADAPTER_CONFIG, MODEL_CONFIG = (
    "recipe.yaml",
    "adapter_model.safetensors",
    "adapter_config.json",
    "config.json",
)
MODEL_FILES = (".safetensors", ".bin", ".json", ".model", ".jinja")
"""In a base model's folder: weights, configuration, tokenizer."""
SAMPLED_ABOVE = 16 * 2**20
"""Larger files are identified by samples, see `_sampled`."""


@dataclass(frozen=True)
class Subject:
    """What is evaluated."""

    label: str
    """The RUN as on the command line."""
    section: ModelSection
    """Its base model."""
    adapter: Path | None
    int8: bool
    """Whether it was trained over an 8-bit base (or, without a recipe, is requested in INT8)."""
    recipe: Recipe | None = None
    """None for anything but a run of hf-gnmr with an adapter."""
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
        """The dtype to run under autocast; None: without.

        Over an 8-bit base PEFT returns fp32 from IA3 and others (not from LoRA), which attention refuses.
        """
        return getattr(torch, dtype) if self.int8 and self.adapter_kind != "LORA" and dtype != "float32" else None

    @property
    def precision(self) -> str:
        """The path it was trained on: `low` for INT8 and GNMR, `recovery` for BF16, all-lifted and anything else."""
        if self.recipe is None or not self.int8 or self.recipe.trigger.name == AllLifted.name:
            return "recovery"
        return "low"

    @property
    def int8_options(self) -> Int8Options:
        """The backend's options in training; defaults where there is no recipe. Only with `int8`."""
        options = Int8Options() if self.recipe is None else self.recipe.backend.options
        assert isinstance(options, Int8Options)
        return options


def resolve(run: str, base: str | None, precision: str | None) -> Subject:
    """What a RUN on the command line is.

    Args:
        run: a folder, or a name on the Hub.
        base: another base model for an adapter; None: the one that it was trained over.
        precision: one of PRECISIONS; decides whether a model without a recipe is loaded in INT8. None: it is not.

    Raises:
        ConfigError: a folder that is none of the three kinds, or a run without an adapter.
    """
    folder = Path(run).expanduser()
    if base is not None and not ((folder / RECIPE).is_file() or (folder / ADAPTER_CONFIG).is_file()):
        raise ConfigError(f"--base {base}: {run} holds no adapter that could be put over another base")
    if base is not None and base.startswith((".", "/", "~")) and not Path(base).expanduser().is_dir():
        raise ConfigError(f"--base {base}: no such folder")
    above = folder.resolve().parent
    # A model's folder may consist of links to where its files are; a run's and an adapter's were written in one piece.
    own = (RECIPE, ADAPTER_CONFIG, *((MODEL_CONFIG,) if (folder / RECIPE).is_file() else ()))
    for place, name in ((above, RECIPE), *((folder, name) for name in own)):
        if not inside(place, name):
            raise ConfigError(f"{run}: {name} is a link to a file outside {place}; expected a file of that folder")
    step = re.fullmatch(r"checkpoint-(\d+)", folder.resolve().name) if (above / RECIPE).is_file() else None
    if step is not None:
        return _of_run(run, folder, load_recipe(above / RECIPE), base, precision, int(step[1]))
    if (folder / RECIPE).is_file():
        return _of_run(run, folder, load_recipe(folder / RECIPE), base, precision, None)
    if (folder / ADAPTER_CONFIG).is_file():
        return _of_adapter(run, folder, base, precision)
    if folder.is_dir() and not (folder / MODEL_CONFIG).is_file():
        raise ConfigError(
            f"{run}: neither a run ({RECIPE}), nor an adapter ({ADAPTER_CONFIG}), nor a model ({MODEL_CONFIG})"
        )
    if not folder.is_dir() and run.startswith((".", "/", "~")):
        raise ConfigError(f"{run}: no such folder")
    return Subject(run, ModelSection(name=run), None, _in_int8(precision))


def with_trust(subject: Subject, trusted: bool) -> Subject:
    """The subject, whose model's own code runs only if the command line permits it, whatever the run's recipe says.

    Raises:
        ConfigError: the recipe asks for it, and the command line does not permit it.
    """
    if subject.section.trust_remote_code and not trusted:
        raise ConfigError(
            f"{subject.label}: its recipe asks to run code that comes with {subject.section.name} (trust_remote_code); give "
            "--trust-remote-code if you trust the author of that code and of the recipe"
        )
    return replace(subject, section=replace(subject.section, trust_remote_code=trusted))


def _in_int8(precision: str | None) -> bool:
    """Whether a model without a recipe is loaded in INT8."""
    return precision in ("low", "final")


def _of_run(
    run: str, folder: Path, recipe: Recipe, base: str | None, precision: str | None, checkpoint: int | None
) -> Subject:
    if recipe.lora is None:
        if base is not None:
            raise ConfigError(f"--base {base}: {run} trained all weights and needs no base")
        if not (folder / MODEL_CONFIG).is_file():
            raise ConfigError(f"{run}: no model in it: the run is not finished")
        return Subject(run, ModelSection(name=str(folder)), None, _in_int8(precision))
    if not (folder / ADAPTER).is_file():
        raise ConfigError(f"{run}: no {ADAPTER} in it: the run is not finished")
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{run}: {ADAPTER} without {ADAPTER_CONFIG}")
    section = recipe.model if base is None else replace(recipe.model, name=base, revision=None, architecture=None)
    if base is not None:
        print(f"{run}: trained over {recipe.model.name}, and put over {base}", flush=True)
    return Subject(run, section, folder, BACKENDS[recipe.backend.name].quantised_base, recipe, checkpoint=checkpoint)


def _of_adapter(run: str, folder: Path, base: str | None, precision: str | None) -> Subject:
    """Any PEFT adapter inside the layers."""
    if not (folder / ADAPTER).is_file():
        raise ConfigError(f"{run}: {ADAPTER_CONFIG} without {ADAPTER}")
    config = read_json(folder / ADAPTER_CONFIG)
    if config.get("num_virtual_tokens") is not None:
        raise ConfigError(
            f"{run}: a {config.get('peft_type')} adapter adds virtual tokens to the prompt; expected an adapter inside the "
            "layers (LoRA, IA3, LoKr, ...)"
        )
    recorded = config.get("base_model_name_or_path")
    name = base or recorded
    if base is not None and recorded and str(recorded) != base:
        print(f"{run}: the adapter names {recorded} as its base, and is put over {base}", flush=True)
    if not name:
        raise ConfigError(f"{run}: the adapter does not name its base model: give --base")
    section = ModelSection(name=str(name), revision=config.get("revision") if base is None else None)
    return Subject(run, section, folder, _in_int8(precision), adapter_kind=str(config.get("peft_type")))


def identity_of(subject: Subject, precision: str) -> dict[str, Any]:
    """What two evaluations of the same model have in common: its contents. `place` is for people, and not compared."""
    adapter = {} if subject.adapter is None else {n: file_hash(subject.adapter / n) for n in (ADAPTER, ADAPTER_CONFIG)}
    base = Path(subject.section.name).expanduser()
    base_files = [f for f in sorted(base.glob("*")) if f.suffix in MODEL_FILES and f.is_file()] if base.is_dir() else []
    recovery = None
    if subject.recipe is not None and subject.int8:
        source = subject.int8_options.recovery_source
        recovery = [subject.int8_options.recovery, None if source is None else os.fspath(source)]
    return {
        "place": subject.place,
        "base": "local" if base.is_dir() else f"{subject.section.name}@{subject.section.revision or 'main'}",
        "base_files": {f.name: _sampled(f) if f.stat().st_size > SAMPLED_ABOVE else file_hash(f) for f in base_files},
        "adapter": adapter,
        "int8": subject.int8,
        "threshold": subject.section.llm_int8_threshold if subject.int8 else None,
        "recovery": recovery,
        "final": last_layers(subject) if precision == "final" else None,
    }


def _sampled(file: Path) -> str:
    """A hash of the size and of 64 KiB at 64 places: reading all of a large model for each evaluation would take minutes."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for i in range(64):
            stream.seek(i * (size - 2**16) // 63)
            digest.update(stream.read(2**16))
    return digest.hexdigest()[:16]


def short_hash(text: str) -> str:
    """Eight hexadecimal digits that keep folders of the same name apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def folder_for(subject: Subject) -> Path:
    """Where results go without --output."""
    if subject.adapter is not None:
        return subject.adapter / EVAL_FOLDER
    return Path("eval-results") / f"{Path(subject.label).name}-{short_hash(subject.place)}"


def last_layers(subject: Subject) -> list[int]:
    """The model's layers on the recovery path in the last step of training, or in a checkpoint's.

    Raises:
        ConfigError: the trace has no such step.
        TraceError: the trace cannot be read.
    """
    assert subject.adapter is not None
    run = subject.adapter if subject.checkpoint is None else subject.adapter.resolve().parent
    if not inside(run, "trace.jsonl"):
        raise ConfigError(f"--precision final: trace.jsonl of {subject.label} is a link to a file outside the run's folder")
    trace = read_trace(run / "trace.jsonl")
    steps = [step for step in trace.steps if subject.checkpoint is None or step["step"] == subject.checkpoint]
    if not steps:
        raise ConfigError(f"--precision final: the trace of {subject.label} has no step {subject.checkpoint or ''}")
    return [trace.header["units"][unit]["layer"] for unit in steps[-1]["active"]]
