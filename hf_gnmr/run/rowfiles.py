"""Rows of local files, as they are written: JSON lines, a JSON list, Parquet.

`datasets.load_dataset` infers one type for a whole column, so that one 2.5 makes every 2 of it a 2.0 and a text that looks
like a date becomes one; and it takes a file's name as a pattern.  Here an existing path is that file, and a number keeps the
text that it has in the file.
"""

from __future__ import annotations

import codecs
import datetime
import itertools
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..reading import (
    MAX_DATA_BYTES,
    MAX_DIGITS,
    MAX_ROW_BYTES,
    MAX_TEXT_BYTES,
    FileError,
    lines_of,
    open_regular,
    parse_json,
    read_bytes,
)

Row = dict[str, Any]
PARQUET = ".parquet"
ENDINGS = (".json", ".jsonl", PARQUET)
"""Of local files with rows."""
HALF = re.compile("[\\ud800-\\udfff]")
ROWS_AT_A_TIME = 1000
"""Of a Parquet file."""


class Written(float):
    """A number that prints as it was written: 2.50, 1e5. With a format (``{:.1f}``) it is formatted as a float."""

    text: str

    def __new__(cls, text: str) -> Written:
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __reduce__(self) -> tuple[type[Written], tuple[str]]:
        return Written, (self.text,)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else self.text


def _whole(text: str) -> int | float | str:
    """A whole number; as text where Python would refuse to convert it, or print it otherwise (-0)."""
    if len(text) > MAX_DIGITS:
        return text
    return int(text) if text != "-0" else Written(text)


AS_WRITTEN: dict[str, Any] = {"parse_int": _whole, "parse_float": Written, "parse_constant": Written, "strict": False}
"""How numbers of rows are read; not strict: control characters inside strings are accepted."""


def written(value: Any) -> Any:
    """A value of a row as it is written into a text: true and false as in JSON, decimals and dates of Parquet as text.

    Other values stay as they are.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return Written(format(value, "f"))
    return str(value) if isinstance(value, (datetime.date, datetime.time)) else value


def holds_half(value: Any) -> bool:
    """Whether a value holds half of a surrogate pair: JSON may (``\\ud800``), but it is no character, and no tokenizer
    takes it."""
    if isinstance(value, str):
        return HALF.search(value) is not None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(holds_half, items))


def local_file(name: str) -> Path | None:
    """The existing file or folder of this name, taken literally; where there is none, with ``~`` as the home folder."""
    path = Path(name)
    if path.exists() or not name.startswith("~"):
        return path if path.exists() else None
    try:
        path = path.expanduser()
    except RuntimeError:  # no such user
        return None
    return path if path.exists() else None


def rows_of(path: Path) -> Iterator[Row]:
    """The rows of a .json, .jsonl or .parquet file, in order.

    JSON may be one object per line, a list of objects or texts (a text is the column ``text``), or one object of columns.

    Raises:
        FileError: the file cannot be read, holds no row, or is beyond a limit.
    """
    empty = True
    for row in _parquet(path) if path.suffix.lower() == PARQUET else _json(path):
        empty = False
        yield row
    if empty:
        raise FileError(f"{path}: expected rows, got none")


def rows_of_folder(folder: str, subset: str | None, split: str) -> Iterator[Row] | None:
    """The rows of a split of a local folder, as they are written.

    `datasets` decides, by names and a dataset card, which files make up a split, and what ``train[:10%]+test`` means; the
    files are read here.

    Returns:
        None if the split has files of other kinds (CSV, compressed ones), which `datasets` must read.

    Raises:
        FileError: see `rows_of`; whatever `datasets` raises for a folder, subset or split that it does not know.
    """
    from datasets import ReadInstruction, load_dataset_builder

    splits = load_dataset_builder(folder, subset).config.data_files or {}
    files = {str(name): [Path(file) for file in members] for name, members in splits.items()}
    named = {part.partition("[")[0].strip() for part in split.split("+")}
    if not named <= files.keys() or not all(f.suffix.lower() in ENDINGS for name in named for f in files[name]):
        return None
    if split in files:
        return itertools.chain.from_iterable(map(rows_of, files[split]))
    tables = {name: [row for file in files[name] for row in rows_of(file)] for name in named}
    parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in tables.items()})
    return itertools.chain.from_iterable(tables[part.splitname][part.from_ : part.to] for part in parts)


def json_lines(path: Path, most: int = MAX_DATA_BYTES) -> Iterator[Row]:
    r"""The objects of a file of JSON lines; a line ends with ``\n`` only, empty ones are skipped.

    Raises:
        FileError: the file cannot be read, a line is no JSON object, or is beyond a limit.
    """
    with open_regular(path, most) as file:
        for number, line in enumerate(lines_of(file, path, MAX_ROW_BYTES), start=1):
            text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip(b" \t\r\n")
            if text:
                row = parse_json(text, f"{path}, line {number}", **AS_WRITTEN)
                if not isinstance(row, dict):
                    raise FileError(f"{path}, line {number}: expected a JSON object, got a {type(row).__name__}")
                yield row


def _json(path: Path) -> Iterator[Row]:
    if _begins_with(path, b"["):
        rows = _whole_file(path)
        for number, row in enumerate(rows):
            if not isinstance(row, (dict, str)):
                raise FileError(f"{path}, row {number}: expected a JSON object, got a {type(row).__name__}")
            yield row if isinstance(row, dict) else {"text": row}
        return
    rows_read = json_lines(path)
    try:
        first = next(rows_read, None)
    except FileError as error:  # perhaps one object over several lines
        try:
            columns = _whole_file(path)
        except FileError:
            raise error from None
        yield from _of_columns(columns, path)
        return
    if first is not None:
        yield first
        yield from rows_read


def _begins_with(path: Path, mark: bytes) -> bool:
    with open_regular(path, MAX_DATA_BYTES) as file:
        start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n")
    return start.startswith(mark)


def _whole_file(path: Path) -> Any:
    return parse_json(read_bytes(path, MAX_TEXT_BYTES), str(path), **AS_WRITTEN)


def _of_columns(value: Any, path: Path) -> list[Row]:
    """The rows of an object of columns, lists or (as pandas writes it) objects by index; any other object is one row."""
    if not isinstance(value, dict):
        raise FileError(f"{path}: expected JSON objects, got a {type(value).__name__}")
    for kind in (list, dict):
        columns = list(value.values())
        if columns and all(isinstance(column, kind) for column in columns) and len({len(c) for c in columns}) == 1:
            values = [list(column.values()) if isinstance(column, dict) else column for column in columns]
            return [dict(zip(value, row, strict=True)) for row in zip(*values, strict=True)]
    return [value]


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    with open_regular(path, MAX_DATA_BYTES) as file:
        try:
            for batch in parquet.ParquetFile(file).iter_batches(ROWS_AT_A_TIME):
                yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise FileError(f"{path} cannot be read as Parquet: {error}") from error
