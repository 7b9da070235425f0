"""Small files, written whole or not at all, and read as what they should be.

JSON has no inf and no nan: values that are not finite are the strings "inf", "-inf" and "nan" in everything written here.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


class FileError(ValueError):
    """A file that is missing, foreign or broken; the message names it."""


def plain(value: Any) -> Any:
    """`value` with floats that are not finite as strings, containers included."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file (UTF-8) whole or not at all."""
    file = Path(path)
    partial = partial_name(file)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FileError: no such file, or something else in it.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileError(f"{path}: expected a JSON object, got a {type(value).__name__}")
    return value


def free_name(path: Path) -> Path:
    """The first of ``trace.1.jsonl``, ``trace.2.jsonl``, … that does not exist."""
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate


def partial_name(path: Path) -> Path:
    """Where a file is written before it takes its place; hidden, and of this process."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def printable(text: str, most: int = 120) -> str:
    """Text for a page or a terminal: no control characters, and no longer than `most`."""
    clean = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"
