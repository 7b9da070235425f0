"""A file of lines that one process appends to, and that notices what others do to it."""

from __future__ import annotations

import bisect
import contextlib
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

TAIL = 64
"""Bytes at the end of what was written that are compared before more is written."""


class Appended:
    """A file opened to append lines.

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
        self._sums = array("Q", map(_sum, self.lines()))
        """One number for each line, by which lines that others wrote or changed are recognised."""

    def write(self, line: bytes) -> None:
        """Append a line, whole or not at all."""
        assert self._descriptor is not None
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:  # a full disk
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._tail = (self._tail + line)[-TAIL:]
        self._size = os.fstat(self._descriptor).st_size
        self._sums.append(_sum(line))

    def fault(self, *, thorough: bool = False) -> str | None:
        """What became of the file since the last write: "deleted" (or moved away), "replaced", "truncated" (overwritten, or
        appended to by others); None: nothing.

        Args:
            thorough: compare every line, which reads the whole file; otherwise the size and the last bytes.
        """
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
        if thorough and array("Q", map(_sum, self.lines())) != self._sums:
            return "truncated"
        return None

    def lines(self) -> Iterator[bytes]:
        """The lines of the opened file, whatever its name leads to by now."""
        assert self._descriptor is not None
        with os.fdopen(os.dup(self._descriptor), "rb") as stream:
            stream.seek(0)
            yield from stream

    def own_lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines that are still as they were written, with their numbers (from 0): as many as are in order."""
        number_of = {value: number for number, value in enumerate(self._sums)}
        numbers = [number_of.get(_sum(line), -1) for line in self.lines()]
        kept = _longest_increasing(numbers)
        for place, line in enumerate(self.lines()):
            if place in kept:
                yield numbers[place], line

    def close(self) -> None:
        """May be called more than once."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _longest_increasing(numbers: Sequence[int]) -> set[int]:
    """The places of a longest increasing part of `numbers`; negative ones are left out."""
    lasts: list[int] = []
    places: list[int] = []
    before: dict[int, int | None] = {}
    for place, number in enumerate(numbers):
        if number >= 0:
            length = bisect.bisect_left(lasts, number)
            before[place] = places[length - 1] if length else None
            lasts[length : length + 1] = [number]
            places[length : length + 1] = [place]
    kept: set[int] = set()
    current = places[-1] if places else None
    while current is not None:
        kept.add(current)
        current = before[current]
    return kept


def _sum(line: bytes) -> int:
    return zlib.crc32(line) << 32 | len(line) & 0xFFFFFFFF
