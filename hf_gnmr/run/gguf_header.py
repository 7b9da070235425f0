"""A GGUF file's header, checked before the gguf library reads it.

The library makes an object for everything that the header's counts promise.  Here the header is walked without keeping
anything: every count is within a limit, and every length within the file.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

from ..reading import MAX_DATA_BYTES, FileError, open_regular
from ..terminal import shown

MAX_KEYS = 10_000
"""Of a header's metadata; files have about 40."""
MAX_TENSORS = 2**16
"""Of a file."""
MAX_ELEMENTS = 2**22
"""Of all arrays in the metadata: tokens, scores and merges of the largest vocabularies are 1.5 million."""
MAX_NAME = 2**16
"""Bytes of a key or of a tensor's name."""
MAX_DIMENSIONS = 8
"""Of a tensor; GGML has at most 4."""
VERSIONS = (2, 3)
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a metadata value, by its type."""
TEXT, ARRAY = 8, 9


def check_gguf(path: Path) -> int:
    """Refuse a GGUF file whose header promises more than the limits, or more than the file holds.

    Returns:
        the number of weights in all tensors.

    Raises:
        FileError: naming the file, the place in its header, and what was expected.
    """
    with open_regular(path, MAX_DATA_BYTES) as file:
        try:
            return Header(file, path).walk()
        except OSError as error:
            raise FileError(f"{path} cannot be read: {error.strerror or error}") from error


class Header:
    """A walk through the header of an open file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.order = "<"
        self.elements = 0

    def walk(self) -> int:
        """See `check_gguf`."""
        if self.file.read(4) != b"GGUF":
            raise FileError(f"{self.path}: expected a GGUF file, got other contents")
        version = self.number("I", "version")
        if version & 0xFFFF == 0:  # written on a machine with the other order of bytes
            self.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in VERSIONS:
            raise FileError(f"{self.path}: GGUF version {version}: expected 2 or 3")
        tensors = self.count("Q", "number of tensors", MAX_TENSORS)
        keys = self.count("Q", "number of keys", MAX_KEYS)
        for number in range(keys):
            key = self.text(f"key {number}", MAX_NAME)
            where = f"key {shown(key.decode(errors='replace'))}"
            self.value(self.number("I", f"{where}: type"), where)
        return sum(self.tensor(number) for number in range(tensors))

    def tensor(self, number: int) -> int:
        """The number of weights of a tensor."""
        name = self.text(f"tensor {number}", MAX_NAME)
        where = f"tensor {shown(name.decode(errors='replace'))}"
        dimensions = self.count("I", f"{where}: number of dimensions", MAX_DIMENSIONS)
        weights = math.prod(self.number("Q", f"{where}: dimensions") for _ in range(dimensions))
        self.number("I", f"{where}: type")
        offset = self.number("Q", f"{where}: offset")
        # No format stores a weight in less than a bit.
        if offset > self.size or weights > 8 * (self.size - offset):
            raise FileError(
                f"{self.path}, {where}: expected weights within the file of {self.size:,} bytes, got {weights:,}"
            )
        return weights

    def value(self, kind: int, where: str) -> None:
        """Step over a metadata value."""
        if kind == TEXT:
            self.step(self.number("Q", f"{where}: length"), where)
        elif kind == ARRAY:
            kind = self.number("I", f"{where}: type of its elements")
            count = self.count("Q", f"{where}: number of elements", MAX_ELEMENTS)
            self.elements += count
            if self.elements > MAX_ELEMENTS:
                raise FileError(f"{self.path}, {where}: expected at most {MAX_ELEMENTS:,} elements in all arrays, got more")
            if kind == TEXT:
                for _ in range(count):
                    self.step(self.number("Q", f"{where}: length"), where)
            elif kind in SIZES:
                self.step(count * SIZES[kind], where)
            else:
                raise FileError(f"{self.path}, {where}: expected an array of numbers or texts, got type {kind}")
        elif kind in SIZES:
            self.step(SIZES[kind], where)
        else:
            raise FileError(f"{self.path}, {where}: expected a GGUF type, got {kind}")

    def count(self, code: str, what: str, most: int) -> int:
        """A number that says how many things follow; each takes a byte at least."""
        value = self.number(code, what)
        if value > min(most, self.size):
            raise FileError(f"{self.path}, {what}: expected at most {min(most, self.size):,}, got {value:,}")
        return value

    def text(self, what: str, most: int) -> bytes:
        """A short text."""
        length = self.count("Q", f"{what}: length of its name", most)
        content = self.file.read(length)
        if len(content) < length:
            self.cut(what)
        return content

    def step(self, length: int, what: str) -> None:
        """Step over bytes."""
        if length > self.size - self.file.tell():
            raise FileError(f"{self.path}, {what}: expected at most the rest of the file, got {length:,} bytes")
        self.file.seek(length, os.SEEK_CUR)

    def number(self, code: str, what: str) -> int:
        """The next number."""
        content = self.file.read(struct.calcsize(code))
        if len(content) < struct.calcsize(code):
            self.cut(what)
        return int(struct.unpack(self.order + code, content)[0])

    def cut(self, what: str) -> None:
        """Raise FileError: the file ends here."""
        raise FileError(f"{self.path}, {what}: the file is cut off within its header")
