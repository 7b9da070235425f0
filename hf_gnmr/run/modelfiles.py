"""The files of a local model folder, checked before a library reads them: JSON, index and headers of the weights.

What is checked here fails with the name of the file and the cause.  The weights themselves are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..reading import (
    MAX_DATA_BYTES,
    MAX_MODEL_JSON_BYTES,
    FileError,
    check_regular,
    inside,
    open_regular,
    read_json,
)
from ..terminal import printable, shown
from .sections import RecipeError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
JSON_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
"""JSON objects, each read by transformers where it is there."""
FIELDS: dict[str, dict[str, tuple[Any, str]]] = {
    "tokenizer.json": {"model": (dict, "a JSON object"), "added_tokens": (list, "a list")},
    "tokenizer_config.json": {
        "tokenizer_class": (str, "a text"),
        "model_max_length": ((int, float), "a number"),
        "added_tokens_decoder": (dict, "a JSON object"),
    },
    "config.json": {
        "model_type": (str, "a text"),
        "auto_map": (dict, "a JSON object"),
        "architectures": (list, "a list"),
        "quantization_config": (dict, "a JSON object"),
    },
}
"""Fields on whose types transformers fails without naming them: type, and what is expected, in words.

Those of tokenizer.json are needed; the others may be missing or null."""
POINTER = b"version https://git-lfs"
BEGINNING = 512


def check_model_files(source: str, where: str) -> None:
    """Refuse a local folder whose JSON files, index or weight files cannot be read; a name on the Hub is left alone.

    Args:
        source: folder or Hub id.
        where: begins the message, as "model.name='./llama'".

    Raises:
        RecipeError: naming the file and what is wrong with it.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return
    try:
        for name in JSON_FILES:
            if (folder / name).exists():
                _refuse_placeholder(folder / name)
                _check_contents(name, read_json(folder / name, MAX_MODEL_JSON_BYTES), folder / name)
        for file in _weight_files(folder):
            check_safetensors(file)
    except FileError as error:
        raise RecipeError(f"{where}: {error}") from error


def check_safetensors(file: Path) -> None:
    """Refuse a file that is no whole safetensors file; reads its header only.

    Raises:
        FileError: naming it and the cause.
    """
    _refuse_placeholder(file)
    try:
        with safe_open(file, framework="pt") as tensors:
            empty = not tensors.keys()
    except (SafetensorError, OSError, ValueError) as error:
        raise FileError(f"{file} is not a whole safetensors file: {printable(str(error), 300)}") from error
    if empty:
        raise FileError(f"{file} holds no tensors")


def _refuse_placeholder(file: Path) -> None:
    """Raise FileError for what a download leaves in the place of a file."""
    with open_regular(file, MAX_DATA_BYTES) as stream:
        beginning = stream.read(BEGINNING)
    if not beginning:
        raise FileError(f"{file} is empty")
    if beginning.startswith(POINTER):
        raise FileError(f"{file} is a git-lfs pointer and not the file itself: run git lfs pull")
    if beginning.lstrip()[:1] == b"<":
        raise FileError(f"{file} is an HTML or XML page: the download failed")


def _check_contents(name: str, values: dict[str, Any], file: Path) -> None:
    """Raise FileError for a field of another type than in `FIELDS`."""
    for key, (kind, in_words) in FIELDS.get(name, {}).items():
        value = values.get(key)
        if not isinstance(value, kind) and (value is not None or name == "tokenizer.json"):
            raise FileError(f"{file}: {key}={shown(values.get(key))}: expected {in_words}")
    if name == "tokenizer.json":
        for token in values["added_tokens"]:
            if not isinstance(token, dict) or not isinstance(token.get("content"), str):
                raise FileError(f"{file}: added_tokens has {shown(token)}: expected JSON objects with a text `content`")


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would load; none where the weights have another format.

    Raises:
        FileError: a broken index, or a file of it that is missing.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        return []
    _refuse_placeholder(index)
    values = read_json(index, MAX_MODEL_JSON_BYTES)
    files = values.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise FileError(f"{index}: weight_map={shown(files)}: expected a JSON object from tensors to files, not empty")
    if not isinstance(values.get("metadata"), dict):
        raise FileError(f"{index}: metadata={shown(values.get('metadata'))}: expected a JSON object")
    for tensor, name in files.items():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name or len(name) > 255:
            raise FileError(f"{index}: weight_map.{printable(tensor)}={shown(name)}: expected a file name in this folder")
    names = sorted(set(files.values()))
    for name in names:
        if not inside(folder, name):
            raise FileError(f"{index}: {name} is a link to a file outside the folder")
        check_regular(folder / name, MAX_DATA_BYTES)
    return [folder / name for name in names]
