"""A model's configuration, checked before anything is built from it.

A configuration comes from a recipe, a folder or the Hub.  Building a model, on the meta device too, makes a module for each
layer and expert, and some configurations make a list as long as a number says.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import torch

from ..reading import MAX_DATA_BYTES, MAX_MODEL_JSON_BYTES, FileError, check_regular, read_json
from ..terminal import printable, shown
from .sections import ModelSection, RecipeError

MAX_LAYERS = 1024
"""Of numbers of layers. The deepest language models have about 130; on the meta device a layer takes milliseconds."""
MAX_PARTS = 2**14
"""Of other numbers of parts (experts, codebooks, heads), each of which may be a module."""
MAX_EXPERTS = 2**19
"""Of experts in all layers together."""
MAX_SIZE = 2**24
"""Of widths and lengths: 16.8 million; the longest contexts have 10 million positions."""
MAX_VOCABULARY = 2**27
"""Of vocabularies: 134 million; tables of n-grams have 20 million rows."""
MAX_RANK = 2**16
"""Of an adapter."""
MAX_PARAMETERS = 10**13
"""Of a model's parameters, counted on the meta device."""
LAYERS = re.compile(r"(^|_)(layers?|blocks?|depths?|groups?)$")
PARTS = re.compile(
    r"^(num|number_of)_(?!.*(position|token|embed|bin|frame|sample|bucket|step|label|channel|feature|patch|param))"
)
NO_SIZE = re.compile(r"theta|token|_ids?$|seed|factor|scal|clip|logit|val(ue)?$|limit|bytes")
"""Keys whose whole numbers size nothing."""
READ_FROM_FOLDERS = (".json", ".safetensors", ".bin", ".model", ".jinja", ".txt")
"""Endings of the files that transformers and PEFT read in a model's or adapter's folder."""


def check_sizes(values: Any, where: str) -> None:
    """Refuse a configuration's sizes beyond the limits, in its parts too (`text_config`, `rope_scaling`).

    Args:
        values: as read, before transformers has made anything of it.
        where: begins the message, as "model.architecture".

    Raises:
        RecipeError: naming key and value.
    """
    parts = [(where, values)]
    while parts:
        place, part = parts.pop()
        items = part.items() if isinstance(part, dict) else enumerate(part)
        for key, value in items:
            name = f"{place}.{key}"
            if isinstance(value, (dict, list, tuple)):
                parts.append((name, value))
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                most = _most(str(key) if isinstance(part, dict) else place.rpartition(".")[2])
                if value == value and value > most:
                    raise RecipeError(f"{printable(name, 400)}={shown(value)}: expected at most {most:,}")
        if isinstance(part, dict):
            _check_experts(part, place)


def _most(key: str) -> float:
    """The limit of a key's numbers."""
    name = key.lower()
    if NO_SIZE.search(name):
        return math.inf
    if "vocab" in name:
        return MAX_VOCABULARY
    if LAYERS.search(name):
        return MAX_LAYERS
    return MAX_PARTS if PARTS.search(name) else MAX_SIZE


def _check_experts(part: dict[str, Any], place: str) -> None:
    """Refuse too many experts over all layers of one part of a configuration."""
    counts = {key: value for key, value in part.items() if isinstance(value, int) and isinstance(key, str)}
    layers = max((value for key, value in counts.items() if LAYERS.search(key)), default=1)
    for key, value in counts.items():
        if key.endswith("experts") and value * layers > MAX_EXPERTS:
            raise RecipeError(
                f"{place}.{key}={value:,} in {layers:,} layers: expected at most {MAX_EXPERTS:,} experts in all"
            )


def check_adapter(values: dict[str, Any], where: str) -> None:
    """Refuse an adapter's configuration with sizes beyond the limits: ranks, and layers that it repeats.

    Raises:
        RecipeError: naming key and value.
    """
    check_sizes(values, where)
    patterns = values.get("rank_pattern")
    ranks = [values.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
    too_high = [rank for rank in ranks if isinstance(rank, int) and rank > MAX_RANK]
    if too_high:
        raise RecipeError(f"{where}: expected a rank of at most {MAX_RANK:,}, got {shown(too_high[0])}")
    repeated = values.get("layer_replication") or []
    if isinstance(repeated, list) and len(repeated) > MAX_LAYERS:
        raise RecipeError(f"{where}.layer_replication={shown(repeated)}: expected at most {MAX_LAYERS:,} ranges")
    spans = [pair for pair in repeated if isinstance(pair, list) and len(pair) == 2 and all(type(i) is int for i in pair)]
    if sum(end - start for start, end in spans) > MAX_LAYERS:
        raise RecipeError(f"{where}.layer_replication={shown(repeated)}: expected at most {MAX_LAYERS:,} layers")


def on_meta(config: Any, section: ModelSection, dtype: torch.dtype) -> Any:
    """A model of a configuration on the meta device, where it takes no memory for its weights.

    Raises:
        RecipeError: transformers cannot build it, or it has more parameters than `MAX_PARAMETERS`.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            # Given, and not left open: transformers would ask on the terminal whether to run a model's own code.
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=section.trust_remote_code)
    except (ValueError, TypeError, RuntimeError, ImportError, OverflowError, MemoryError) as error:
        raise RecipeError(f"model: cannot build a model of its configuration: {printable(str(error), 400)}") from error
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise RecipeError(f"model: expected at most {MAX_PARAMETERS:,} parameters, got {count:,}")
    return model


def check_folder(folder: str | os.PathLike[str], where: str) -> None:
    """Refuse a local folder in which a file that would be read is no regular one, or a JSON file is beyond its size.

    Raises:
        RecipeError: naming the file; a FIFO, for one, would make the libraries wait for ever.
    """
    path = Path(folder).expanduser()
    for file in sorted(path.iterdir()) if path.is_dir() else []:
        if file.suffix in READ_FROM_FOLDERS and file.exists() and not file.is_dir():
            try:
                check_regular(file, MAX_MODEL_JSON_BYTES if file.suffix == ".json" else MAX_DATA_BYTES)
            except FileError as error:
                raise RecipeError(f"{where}: {error}") from error


def load_config(source: str | Path, section: ModelSection) -> Any:
    """A model's transformers configuration, its sizes checked before and after transformers has read them.

    Args:
        source: folder or Hub id.
        section: revision, and whether the model's own code may run.

    Raises:
        RecipeError: sizes beyond the limits, or a file that is no regular one.
        OSError, ValueError: transformers cannot load it.
    """
    from transformers import AutoConfig

    where = f"model.name={shown(section.name)}: its configuration"
    check_folder(source, f"model.name={shown(section.name)}")
    file = Path(source).expanduser() / "config.json"
    if file.is_file():
        try:
            check_sizes(read_json(file), where)
        except FileError as error:
            raise RecipeError(f"{where} cannot be read: {error}") from error
    config = AutoConfig.from_pretrained(source, revision=section.revision, trust_remote_code=section.trust_remote_code)
    check_sizes(config.to_dict(), where)
    return config
