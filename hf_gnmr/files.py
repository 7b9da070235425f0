"""Small files: written atomically, checked when read.

JSON has no inf and no nan, so values that are not finite are written as the strings "inf", "-inf" and "nan".
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
    """`value` with floats that are not finite as strings, also inside containers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file (UTF-8) atomically."""
    file = Path(path)
    partial = partial_name(file)
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        FileError: no such file, not JSON, or not an object.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise FileError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def free_name(path: Path) -> Path:
    """The first of ``trace.1.jsonl``, ``trace.2.jsonl``, … that does not exist."""
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate


def partial_name(path: Path) -> Path:
    """Where a file is written before it is renamed to `path`: hidden, and specific to this process."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def printable(text: str, most: int = 120) -> str:
    """Text for a page or a terminal: no control characters, at most `most` characters."""
    clean = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"
