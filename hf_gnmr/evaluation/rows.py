"""Reading evaluation files: JSON lines, text, and WikiText's articles."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

from ..config import ConfigError

Row = dict[str, Any]
Splits = dict[str, list[Row]]
"""Rows by split."""


def json_lines(file: Path) -> list[Row]:
    """One JSON object per line; empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, is empty, or holds anything else.
    """
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON lines: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{file}: expected one JSON object per line, got no rows or lines that are no JSON objects")
    return rows


def read_text(file: Path) -> str:
    """A UTF-8 text.

    Raises:
        ConfigError: the file cannot be read as such.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as text: {error}") from error


def wikitext_rows(file: Path) -> list[Row]:
    """WikiText's articles as lm-eval expects them: one `page` per row."""
    return [{"page": page} for page in pages(read_text(file))]


def pages(text: str) -> list[str]:
    """WikiText's articles. Each begins at a first-level heading, a line `` = Title = ``."""
    starts = [m.start() for m in re.finditer(r"(?m)^ = (?!=).+(?<! =) = ?$", text)] or [0]
    bounds = [*starts, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds) if text[a:b].strip()]


def file_hash(file: Path) -> str:
    """Identifies a file's contents in results: 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
