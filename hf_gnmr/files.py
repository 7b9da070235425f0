"""Small files: written atomically, never over anything but a regular file, read within the limits of `reading`.

JSON has no inf and no nan, so values that are not finite are written as the strings "inf", "-inf" and "nan".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .reading import FileError, kind_of, read_json
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
    """Write a text file (UTF-8) atomically. Halves of a surrogate pair, which JSON may hold, are written as ``\\ud800``.

    Raises:
        FileError: `path` leads to something other than a regular file.
    """
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically; behind a symbolic link, the file that it points to.

    Raises:
        FileError: `path` leads to something other than a regular file.
    """
    with replacing(path) as partial:
        partial.write_bytes(content)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A place for a new file, which takes the name `path` once it is whole; after an error nothing of it is left.

    Raises:
        FileError: `path` leads to something other than a regular file.
    """
    file = regular(path)
    partial = partial_name(file)
    try:
        yield partial
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def regular(path: str | os.PathLike[str]) -> Path:
    """The regular file, or the free place, that a path leads to once its symbolic links are followed.

    Raises:
        FileError: a folder, device (``/dev/null``), FIFO or socket, none of which may be renamed or replaced.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    except OSError as error:  # a loop of links, or a file where a folder is expected
        raise FileError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise FileError(f"{path} is {kind_of(mode)}: expected a file name")
    return Path(os.path.realpath(path))


def writable(path: str | os.PathLike[str]) -> None:
    """Refuse a name under which no file can be written, before anything is computed for it.

    Raises:
        FileError: no name at all, a folder that does not exist or may not be written (behind a link: that of the file that
            it points to), or something other than a regular file.
    """
    name = os.fspath(path)
    if not name or name.endswith(os.sep):
        raise FileError(f"{name!r} names no file: expected a file name")
    file = regular(path)
    folder = file.parent if os.path.islink(path) else Path(path).parent
    if not folder.is_dir():
        raise FileError(f"{path}: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"{path}: {folder} may not be written")


def replaceable(path: str | os.PathLike[str], ours: Callable[[bytes], bool], what: str) -> None:
    """Refuse to replace a file that is not ours.

    Args:
        path: where a file is to be written.
        ours: whether a file that begins with these bytes (up to `BEGINNING`) is of the kind that is written.
        what: that kind, in words.

    Raises:
        FileError: any other existing file, an empty one included, or something other than a regular file.
    """
    file = regular(path)
    if not file.exists():
        return
    try:
        with file.open("rb") as stream:
            beginning = stream.read(BEGINNING)
    except OSError as error:
        raise FileError(f"{path} exists and cannot be read: {error.strerror}") from error
    if not ours(beginning):
        raise FileError(f"{path} exists and is not {what}: name another file, or remove it first")


BEGINNING = 1024
"""Bytes by which a file's kind is recognised."""


def free_name(path: Path) -> Path:
    """The first of ``trace.1.jsonl``, ``trace.2.jsonl``, … that does not exist."""
    return numbered(path, free_number(path))


def numbered(path: Path, number: int) -> Path:
    """``trace.3.jsonl`` for ``trace.jsonl`` and 3."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def free_number(*paths: Path) -> int:
    """The first number under which none of these files has been set aside: files that belong together keep one number."""
    number = 1
    while any(os.path.lexists(numbered(path, number)) for path in paths):
        number += 1
    return number


def partial_name(path: Path) -> Path:
    """Where a file is written before it is renamed to `path`: hidden, and specific to this process."""
    name = path.name if len(os.fsencode(path.name)) <= LONGEST else hashlib.sha256(os.fsencode(path.name)).hexdigest()
    return path.with_name(f".{name}.{os.getpid()}.partial")


LONGEST = 200
"""Bytes of a name that leave room for what is put around it: file systems take 255."""
