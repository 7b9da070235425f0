"""Small files: written atomically, read within the limits of `reading`.

JSON has no inf and no nan, so values that are not finite are written as the strings "inf", "-inf" and "nan".
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from .reading import FileError, read_json
from .terminal import printable

__all__ = ["FileError", "free_name", "partial_name", "plain", "printable", "read_json", "write_json", "write_text"]


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


def free_name(path: Path) -> Path:
    """The first of ``trace.1.jsonl``, ``trace.2.jsonl``, … that does not exist."""
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate


def partial_name(path: Path) -> Path:
    """Where a file is written before it is renamed to `path`: hidden, and specific to this process."""
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
