"""Regular files are read whole, up to a size, whatever their size claims to be."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from hf_gnmr.reading import FileError, lines_of, open_regular, read_bytes, read_utf8


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_file_up_to_the_limit_is_read_whole(tmp_path, size):
    (tmp_path / "f").write_bytes(bytes(size))
    assert read_bytes(tmp_path / "f", 100) == bytes(size)


@pytest.mark.parametrize("size", [101, 10**6])
def test_a_larger_file_is_refused(tmp_path, size):
    (tmp_path / "f").write_bytes(bytes(size))
    with pytest.raises(FileError, match="expected at most 100 bytes"):
        read_bytes(tmp_path / "f", 100)


@pytest.mark.parametrize("most", [10, 10**6])
def test_a_file_whose_size_is_unknown_is_read_up_to_the_limit(most):
    if not pathlib.Path("/proc/self/maps").is_file():
        pytest.skip("no /proc")
    if most == 10:
        with pytest.raises(FileError, match="got more"):
            read_bytes("/proc/self/maps", most)
    else:
        assert read_bytes("/proc/self/maps", most).endswith(b"\n")


def test_the_limit_takes_no_memory(tmp_path):
    (tmp_path / "f").write_text("x")
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))\n"
        f"from hf_gnmr.reading import read_bytes; assert read_bytes({str(tmp_path / 'f')!r}, 2**40) == b'x'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("contents", ["a\u2028b\x85c\x0bd\re\n", "", "no end", "\n\n"])
def test_lines_end_at_a_line_feed(tmp_path, contents):
    (tmp_path / "f").write_bytes(contents.encode())
    with open_regular(tmp_path / "f", 1000) as file:
        lines = list(lines_of(file, "f", 100))
    assert b"".join(lines).decode() == contents and all(line.count(b"\n") <= 1 for line in lines)


@pytest.mark.parametrize(("length", "fits"), [(99, True), (100, False), (10**6, False)])
def test_a_line_has_a_limit(tmp_path, length, fits):
    (tmp_path / "f").write_bytes(b"short\n" + b"x" * length + b"\n")
    with open_regular(tmp_path / "f", 10**7) as file:
        if fits:
            assert len(list(lines_of(file, "f", 100))) == 2
        else:
            with pytest.raises(FileError, match="f, line 2: expected at most 100 bytes"):
                list(lines_of(file, "f", 100))


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "missing", "null character", "not UTF-8", "dangling link"])
def test_what_cannot_be_read_is_named(tmp_path, kind):
    path = tmp_path / "f"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "not UTF-8":
        path.write_bytes(b"\xff\xfe")
    elif kind == "dangling link":
        path.symlink_to(tmp_path / "gone")
    target = {"device": "/dev/zero", "null character": "a\0b"}.get(kind, str(path))
    with pytest.raises(FileError, match="cannot be read"):
        read_utf8(target, 100)
