"""A model's configuration, checked before anything is built from it.

A configuration comes from a recipe, a folder or the Hub.  Building a model, on the meta device too, makes a module for each
layer and expert, and some configurations make a list as long as a number says.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..reading import (
    MAX_DATA_BYTES,
    MAX_JSON_BYTES,
    MAX_MODEL_JSON_BYTES,
    FileError,
    check_regular,
    parse_json,
    read_bytes,
    read_json,
)
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
MAX_LABELS = 2**15
"""Of labels: transformers makes a name for each."""
MAX_RANK = 2**16
"""Of an adapter."""
MAX_PARAMETERS = 10**13
"""Of a model's parameters, counted on the meta device."""
LAYERS = re.compile(r"(^|_)(layers?|blocks?|depths?|groups?)$")
PARTS = re.compile(
    r"^(num|number_of)_(?!.*(position|token|embed|bin|frame|sample|bucket|step|label|channel|feature|patch|param))"
)
COUNTS = re.compile(r"^(num|n|number_of)_|(^|_)(size|dim|heads|position_embeddings)$")
"""Keys whose values are whole numbers, and never below 0 (`vision_feature_layer` may be, so names of layers alone do not
count)."""
AT_LEAST_ONE = {"num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"}
"""Of the decoder."""
NUMBERS = re.compile(r"(^|_)(factor|theta|eps|epsilon|dropout|range|std)$")
"""Keys whose values are numbers."""
SHAPES: dict[str, type | tuple[type, ...]] = {
    "model_type": str, "rope_type": str, "layer_types": (list, tuple), "id2label": dict, "label2id": dict,
    "quantization_config": dict, "auto_map": dict, "rope_scaling": dict, "rope_parameters": dict, "text_config": dict,
}  # fmt: skip
"""Types of values that transformers uses without looking; every one may be null."""
NO_SIZE = re.compile(r"theta|token|_ids?$|seed|factor|scal|clip|logit|val(ue)?$|limit|bytes")
"""Keys whose whole numbers size nothing."""
PARSED = re.compile(r"(.*_)?config\.json|special_tokens_map\.json|added_tokens\.json|chat_template\.json|.*\.index\.json")
"""JSON files of a folder that are small, and that the libraries parse without limits."""
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
            if isinstance(part, dict):
                expected = _expected(str(key), value, of_decoder=place in (where, f"{where}.text_config"))
            else:
                expected = _expected_number(place.rpartition(".")[2], value, of_decoder=False)
            if expected is not None:
                raise RecipeError(f"{printable(name, 400)}={shown(value)}: expected {expected}")
        if isinstance(part, dict):
            _check_experts(part, place)


def _expected(key: str, value: Any, *, of_decoder: bool) -> str | None:
    """What the value of a key should have been, in words; None: it is within the limits."""
    if value is None:
        return None
    if key in ("dtype", "torch_dtype") and not isinstance(value, (dict, torch.dtype)) and not _is_dtype(value):
        return "the name of a dtype of torch, such as 'bfloat16'"
    shape = SHAPES.get(key)
    if shape is not None and not isinstance(value, shape):
        return "a name" if shape is str else "a mapping" if shape is dict else "a list"
    if key in ("id2label", "label2id") and len(value) > MAX_LABELS:
        return f"at most {MAX_LABELS:,} labels, got {len(value):,}"
    if isinstance(value, str):
        return "a whole number" if COUNTS.search(key) else "a number" if NUMBERS.search(key) else None
    return _expected_number(key, value, of_decoder=of_decoder)


def _expected_number(key: str, value: Any, *, of_decoder: bool) -> str | None:
    """What the number of a key, or one of its list, should have been; None: it is within the limits, or no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if value != value:
        return "a number"
    most = MAX_LABELS if key == "num_labels" else _most(key)
    if value > most:
        return f"at most {most:,}"
    least = 1 if of_decoder and key in AT_LEAST_ONE else 0
    return f"at least {least}" if value < least and COUNTS.search(key) else None


def _is_dtype(name: Any) -> bool:
    """Whether this is what transformers takes for a dtype."""
    if not isinstance(name, str):
        return False
    return name == "auto" or isinstance(getattr(torch, name, None), torch.dtype)


def cause(error: BaseException, values: Any = None) -> str:
    """An error of transformers in one line; a bare KeyError with the settings that have this value.

    Args:
        error: of any type: what a configuration makes transformers raise is open-ended.
        values: the configuration.
    """
    if isinstance(error, KeyError) and isinstance(values, dict) and error.args:
        at = [name for name, value in _leaves(values) if value == error.args[0]]
        if at:
            return f"{', '.join(at[:3])}={shown(error.args[0])}: not known to transformers"
    text = printable(" ".join(str(error).split()), 400)
    return text if isinstance(error, (ValueError, OSError)) and text else f"{type(error).__name__}: {text}"


def _leaves(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of a configuration, in its parts too."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{name}", inner) for name, inner in _leaves(value))
        else:
            yield str(key), value


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
    except Exception as error:
        values = config.to_dict()
        padding, tokens = values.get("pad_token_id"), values.get("vocab_size")
        beyond = isinstance(padding, int) and isinstance(tokens, int) and not -tokens <= padding < tokens
        named = f"pad_token_id={shown(padding)} of vocab_size={shown(tokens)}: " if beyond else ""
        raise RecipeError(f"model: cannot build a model of its configuration: {named}{cause(error, values)}") from error
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise RecipeError(f"model: expected at most {MAX_PARAMETERS:,} parameters, got {count:,}")
    return model


def check_folder(folder: str | os.PathLike[str], where: str) -> None:
    """Refuse a local folder in which a file that would be read is no regular one, or a JSON file is beyond its limits.

    Raises:
        RecipeError: naming the file; a FIFO, for one, would make the libraries wait for ever.
    """
    path = Path(folder).expanduser()
    for file in sorted(path.iterdir()) if path.is_dir() else []:
        if file.suffix in READ_FROM_FOLDERS and file.exists() and not file.is_dir():
            try:
                check_regular(file, MAX_MODEL_JSON_BYTES if file.suffix == ".json" else MAX_DATA_BYTES)
                if PARSED.fullmatch(file.name):
                    parse_json(read_bytes(file, MAX_JSON_BYTES), f"{file} cannot be read as JSON")
            except FileError as error:
                raise RecipeError(f"{where}: {error}") from error


def load_config(source: str | Path, section: ModelSection) -> Any:
    """A model's transformers configuration, its sizes checked before and after transformers has read them.

    Args:
        source: folder or Hub id.
        section: revision, and whether the model's own code may run.

    Raises:
        RecipeError: sizes beyond the limits, a file that is no regular one, or values that transformers refuses.
        OSError: it is not available.
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
    try:
        config = AutoConfig.from_pretrained(source, revision=section.revision, trust_remote_code=section.trust_remote_code)
        values = config.to_dict()
    except OSError:  # not available; the caller may have another source
        raise
    except Exception as error:
        raise RecipeError(f"{where} cannot be loaded: {cause(error)}") from error
    check_sizes(values, where)
    return config
