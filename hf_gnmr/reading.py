"""What comes from outside is read within limits: recipes, traces, results, configurations, rows of data.

Only regular files are read (a FIFO would block, a device never ends), up to a size; their contents are nested to a depth and
hold numbers of a length that no honest file exceeds.  The limits are the constants below; docs/SECURITY.md lists them.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_YAML_BYTES = 2**20
"""Of a recipe or an override. Recipes have a few kB; a list of 20,000 units has 800 kB. Parsing takes seconds a MB."""
MAX_YAML_NODES = 50_000
"""Scalars, lists and mappings of a recipe, every alias counted with all that it stands for: a few aliases of aliases stand
for billions of values, which messages, pydantic and `dataclasses.asdict` would write out."""
MAX_YAML_KEYS = 10_000
"""Keys of all mappings of a recipe."""
MAX_EXTENDS = 32
"""Recipes in a chain of `extends`; the shipped ones have five."""
MAX_DEPTH = 64
"""Lists and mappings inside each other, in YAML and JSON. Parsers and writers recurse; Python stops them at about 1,000."""
MAX_DIGITS = 100
"""Digits of a whole number in YAML and JSON. Conversion takes quadratic time, and beyond 4,300 digits Python refuses it."""
MAX_JSON_BYTES = 64 * 2**20
"""Of a JSON file (summary, results, configuration, trainer_state.json): parsed, it takes up to 24 times its size."""
MAX_MODEL_JSON_BYTES = 512 * 2**20
"""Of a JSON file in a model's folder that transformers reads (tokenizers of large vocabularies have 40 MB)."""
MAX_TRACE_LINE_BYTES = 16 * 2**20
"""Of a line of a trace: about 2 MB for 20,000 units."""
MAX_TRACE_BYTES = 16 * 2**30
"""Of a trace, which is read line by line: 100,000 steps of 1,000 units have 8 GB."""
MAX_ROW_BYTES = 64 * 2**20
"""Of a line of JSON lines: the longest document."""
MAX_DATA_BYTES = 2**40
"""Of a data file that is read row by row (JSON lines, Parquet)."""
MAX_TEXT_BYTES = 2 * 2**30
"""Of a data file that is read whole: text, a JSON list of rows."""
MAX_PAGE_BYTES = 2**20
"""Of a file of a run's folder that the report shows as it is (recipe, environment)."""
SHIPPED = (Path(__file__).parent / "recipes", Path(__file__).parents[1] / "recipes")
"""Folders of the recipes that come with the package: installed, and in the repository."""
KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}


def kind_of(mode: int) -> str:
    """What is in the place of a regular file, in words, from its `st_mode`."""
    return next((name for is_kind, name in KINDS.items() if is_kind(mode)), "something else")


class FileError(ValueError):
    """A file that is missing, foreign or broken; the message names it."""


def open_regular(path: str | os.PathLike[str], most: int) -> BinaryIO:
    """Open a regular file of at most `most` bytes; never waits for a FIFO's writer.

    Raises:
        FileError: no such file, another kind of file, or a larger one.
    """
    check_regular(path, most)  # without opening it: a device may act when it is opened
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        _check_status(path, os.fstat(descriptor), most)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular(path: str | os.PathLike[str], most: int) -> None:
    """Refuse what is no regular file of at most `most` bytes, without opening it.

    Raises:
        FileError: see `open_regular`.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    _check_status(path, status, most)


def _check_status(path: str | os.PathLike[str], status: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileError(f"{path} cannot be read: expected a regular file, got {kind_of(status.st_mode)}")
    if status.st_size > most:
        raise FileError(f"{path}: expected at most {most:,} bytes, got {status.st_size:,}")


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """The contents of a regular file of at most `most` bytes.

    Raises:
        FileError: see `open_regular`; or the file has grown beyond it.
    """
    try:
        with open_regular(path, most) as file:
            # As much as the file has: `read` takes memory for as much as it is asked for.
            size = min(os.fstat(file.fileno()).st_size, most)
            contents = file.read(size + 1)
            while len(contents) > size and len(contents) <= most:  # it has grown, or is of /proc, where sizes are 0
                part = file.read(min(2**20, most + 1 - len(contents)))
                if not part:
                    break
                contents += part
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(contents) > most:
        raise FileError(f"{path}: expected at most {most:,} bytes, got more")
    return contents


def read_utf8(path: str | os.PathLike[str], most: int) -> str:
    """The text of a regular file, without a byte order mark; line ends as they are.

    Raises:
        FileError: see `read_bytes`; or it is not UTF-8.
    """
    contents = read_bytes(path, most)
    try:
        return contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} cannot be read: not UTF-8 ({error.reason} at byte {error.start:,})") from error


def lines_of(file: BinaryIO, path: str | os.PathLike[str], most: int, first: int = 1) -> Iterator[bytes]:
    r"""The lines of an open file, each with its ``\n``, which the last one may lack; no other character ends a line.

    Args:
        file: see `open_regular`.
        path: for messages.
        most: bytes of a line.
        first: number of the first line, for messages.

    Raises:
        FileError: a longer line, or an error of the file system.
    """
    number = first
    while True:
        try:
            line = file.readline(most + 1)
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
        if not line:
            return
        if len(line) > most:
            raise FileError(f"{path}, line {number}: expected at most {most:,} bytes, got more")
        yield line
        number += 1


def parse_json(text: str | bytes, where: str, **hooks: Any) -> Any:
    """The value of a JSON text, within `MAX_DEPTH` and `MAX_DIGITS`.

    Args:
        text: UTF-8, with or without a byte order mark.
        where: begins the message.
        hooks: `parse_int` and `parse_float`, as of `json.loads`.

    Raises:
        FileError: not JSON, or beyond a limit.
    """
    try:
        if isinstance(text, bytes):
            text = text.removeprefix(codecs.BOM_UTF8).decode("utf-8")
        value = json.loads(text, **{"parse_int": whole_number, **hooks})
    except RecursionError:
        raise FileError(f"{where}: expected at most {MAX_DEPTH} levels of nesting, got more") from None
    except ValueError as error:
        # The decoder's message has a position and no contents; a UnicodeDecodeError's own text would show bytes.
        why = error.reason if isinstance(error, UnicodeDecodeError) else error
        raise FileError(f"{where}: not JSON ({why})") from error
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _refuse_depth(value, where)
    return value


def whole_number(text: str) -> int:
    """A whole number from its digits.

    Raises:
        ValueError: more digits than `MAX_DIGITS`.
    """
    if len(text.lstrip("+-")) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(text):,} digits: expected at most {MAX_DIGITS}")
    return int(text)


def _refuse_depth(value: Any, where: str) -> None:
    """Raise FileError for a value of more than `MAX_DEPTH` levels; without recursion, level by level."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        members = (
            item for container in level for item in (container.values() if isinstance(container, dict) else container)
        )
        level = [item for item in members if isinstance(item, (dict, list))]
        if not level:
            return
    raise FileError(f"{where}: expected at most {MAX_DEPTH} levels of nesting, got more")


def read_json(path: str | os.PathLike[str], most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        FileError: no such file, not JSON, not an object, or beyond a limit.
    """
    value = parse_json(read_bytes(path, most), f"{path} cannot be read as JSON")
    if not isinstance(value, dict):
        raise FileError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def inside(folder: Path, name: str) -> bool:
    """Whether the file `name` of a folder really lies in it: not a link that leads out of it.

    In the Hub's cache the files of a snapshot are links to the blobs of the same model, and count as its own.
    """
    target, home = (folder / name).resolve(), folder.resolve()
    if target.is_relative_to(home):
        return True
    return home.parent.name == "snapshots" and target.is_relative_to(home.parents[1] / "blobs")
