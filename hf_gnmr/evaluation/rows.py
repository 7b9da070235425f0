"""Reading evaluation files: JSON lines, text, and WikiText's articles."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..reading import MAX_DATA_BYTES, MAX_TEXT_BYTES, FileError, open_regular, read_utf8
from ..run import rowfiles

Row = dict[str, Any]
Splits = dict[str, list[Row]]
"""Rows by split."""


def json_lines(file: Path) -> list[Row]:
    r"""One JSON object per line, which ends with ``\n`` only; empty lines are skipped, numbers keep their text.

    Raises:
        ConfigError: the file cannot be read, is empty, or holds anything else.
    """
    try:
        rows = list(rowfiles.json_lines(file, MAX_TEXT_BYTES))
    except FileError as error:
        raise ConfigError(f"{file} cannot be read as JSON lines: {error}") from error
    if not rows:
        raise ConfigError(f"{file}: expected one JSON object per line, got no rows")
    return rows


def read_text(file: Path) -> str:
    """A UTF-8 text, line ends as they are.

    Raises:
        ConfigError: the file cannot be read as such.
    """
    try:
        return read_utf8(file, MAX_TEXT_BYTES)
    except FileError as error:
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
    """Identifies a file's contents in results: 16 hexadecimal digits of its SHA-256.

    Raises:
        FileError: not a regular file.
    """
    digest = hashlib.sha256()
    with open_regular(file, MAX_DATA_BYTES) as stream:
        while part := stream.read(2**20):
            digest.update(part)
    return digest.hexdigest()[:16]


def of_equal_types(rows: list[Row], fields: tuple[str, ...]) -> list[Row]:
    """Rows of which a table with one type per column loses nothing.

    Only `fields` (empty: all) are kept. A number inside a list, such as an option, becomes the text that it has in the file;
    a column of whole numbers and of texts of digits becomes whole numbers.
    """
    kept = [{name: _texts_in(row[name]) for name in fields or row} for row in rows]
    for name in dict.fromkeys(name for row in kept for name in row):
        values = [row[name] for row in kept if name in row]
        if len({type(value) for value in values}) > 1 and all(INDEX.fullmatch(str(value)) for value in values):
            for row in kept:
                if name in row:
                    row[name] = int(str(row[name]))
    return kept


INDEX = re.compile("[0-9]{1,9}")
"""A whole number from 0, as a number or as text."""


def _texts_in(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [item if isinstance(item, (str, list, dict)) or item is None else str(item) for item in value]
