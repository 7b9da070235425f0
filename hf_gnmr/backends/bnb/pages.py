"""Pages of a mapped checkpoint: released when a layer leaves the active set; the file is watched for changes.

A mapped file that is truncated while it is in use kills the process (SIGBUS, no Python error is possible); one that is
rewritten in place changes weights in the middle of training.  Size and time are compared before each use of new layers,
which catches changes made in between and cannot catch one at that very moment.  Deleting or replacing the file is harmless:
the mapping keeps the old one.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from ...config import SetupError

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
if _libc is not None:
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def give_back(tensors: Iterable[Tensor]) -> None:
    """Drop the resident pages of mapped tensors; they come back from the file when they are read. No effect outside Linux.

    Only whole pages inside a tensor are dropped: its neighbours in the file keep theirs.
    """
    if _libc is None:
        return
    for tensor in tensors:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            _libc.madvise(first, end - first, mmap.MADV_DONTNEED)


def file_backed(tensors: Iterable[Tensor]) -> list[bool]:
    """Whether each tensor lies in a mapped file: anonymous memory that is given back would read as zeros."""
    if _libc is None:
        return [True for _ in tensors]  # nothing is given back on this system
    ranges = []
    # As bytes, by line feeds: the names of mapped files may hold anything else.
    for line in filter(None, Path("/proc/self/maps").read_bytes().split(b"\n")):
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != b"0":
            first, _, end = addresses.partition(b"-")
            ranges.append((int(first, 16), int(end, 16)))
    ranges.sort()
    starts = [first for first, _ in ranges]
    result = []
    for tensor in tensors:
        address = tensor.data_ptr()
        i = bisect.bisect_right(starts, address) - 1
        result.append(i >= 0 and address + tensor.numel() * tensor.element_size() <= ranges[i][1])
    return result


class Watch:
    """Detects files that have changed since it was created.

    Args:
        files: paths; a file stays watched even if another one takes its name.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files: list[tuple[Path, int, tuple[int, int]]] = []
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            weakref.finalize(self, os.close, descriptor)
            self._files.append((file, descriptor, _size_and_time(descriptor)))

    def check(self) -> None:
        """Raise SetupError if the size or modification time of a file differs."""
        for file, descriptor, before in self._files:
            now = _size_and_time(descriptor)
            if now != before:
                raise SetupError(
                    f"{file} was changed since training began (size {before[0]:,} then, {now[0]:,} now): it holds the "
                    "original weights of the recovery path, which can no longer be trusted. Restore the file and resume "
                    "from the last checkpoint"
                )


def _size_and_time(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns
