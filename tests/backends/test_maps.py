"""The map of this process's memory is read whatever the names of mapped files are."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from hf_gnmr.backends.bnb.pages import file_backed


@pytest.mark.parametrize("name", [b"a\x0bb", "a\u2028b".encode(), "a\x85b".encode(), b"a\rb", b"a\xffb", b"a b", b"plain"])
def test_names_of_mapped_files(tmp_path, name):
    path = os.path.join(os.fsencode(tmp_path), name)
    with open(path, "wb+") as file:
        file.write(bytes(2 * mmap.PAGESIZE))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 2 * mmap.PAGESIZE)
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        assert file_backed([tensor, torch.zeros(4)]) == [True, False]
        del tensor
        mapped.close()
