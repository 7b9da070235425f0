"""A file that one process appends to, and that notices what others do to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

TAIL = 64
"""Bytes at the end of what was written that are compared before more is written."""


class Appended:
    """A file opened to append.

    Args:
        path: a regular file, or a free place.
        new: create the file; it must not exist.
    """

    def __init__(self, path: Path, *, new: bool) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT | os.O_EXCL if new else 0)
        self._descriptor: int | None = os.open(path, flags, 0o666)
        self._size = os.fstat(self._descriptor).st_size
        self._tail = os.pread(self._descriptor, TAIL, max(0, self._size - TAIL))

    def write(self, content: bytes) -> None:
        """Append; what was written before an error (a full disk) stays."""
        assert self._descriptor is not None
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._tail = (self._tail + content)[-TAIL:]
        self._size = os.fstat(self._descriptor).st_size

    def fault(self) -> str | None:
        """What became of the file since the last write: "deleted" (or moved away), "replaced", "truncated" (overwritten, or
        appended to by others); None: nothing."""
        assert self._descriptor is not None
        try:
            named = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return "deleted"
        own = os.fstat(self._descriptor)
        if not os.path.samestat(own, named):
            return "replaced"
        place = self._size - len(self._tail)
        if own.st_size != self._size or os.pread(self._descriptor, len(self._tail), place) != self._tail:
            return "truncated"
        return None

    def lines(self) -> Iterator[bytes]:
        """The lines of the opened file, whatever its name leads to by now."""
        assert self._descriptor is not None
        with os.fdopen(os.dup(self._descriptor), "rb") as stream:
            stream.seek(0)
            yield from stream

    def close(self) -> None:
        """May be called more than once."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
