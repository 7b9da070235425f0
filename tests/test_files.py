"""Files are written whole, over nothing but regular files of our own, and no device is ever renamed."""

from __future__ import annotations

import errno
import os

import pytest
from conftest import place

from hf_gnmr.files import FileError, free_number, numbered, regular, replaceable, replacing, writable, write_json, write_text

KINDS = ["folder", "fifo", "socket", "loop", "below a file", "link to a device", "link to a folder"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", [lambda p: write_text(p, "x"), lambda p: write_json(p, {})], ids=["text", "json"])
def test_nothing_but_regular_files_is_replaced(tmp_path, kind, write):
    path = place(tmp_path, kind)
    before = None if kind == "below a file" else os.lstat(path)
    with pytest.raises(FileError, match=str(path)):
        write(path)
    assert before is None or os.path.samestat(os.lstat(path), before)
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize("device", ["/dev/null", "/dev/stdout", "/dev/full", "/dev/fd/0"])
def test_devices_are_refused(device):
    if not os.path.exists(device) or os.path.isfile(device):
        pytest.skip("not a device here")
    with pytest.raises(FileError):
        write_text(device, "x")
    assert os.path.exists(device) and not os.path.isfile(device)


def test_behind_a_link_its_target_is_written_and_the_link_stays(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    target.unlink()
    write_text(link, "again")
    assert link.is_symlink() and target.read_text() == "again" and regular(link) == target


def test_only_files_of_the_kind_are_replaceable(tmp_path):
    file = tmp_path / "file"

    def check():
        replaceable(file, lambda text: text.startswith(b"ours"), "a file of ours")

    check()
    file.write_text("ours, of any length")
    check()
    for content in ("theirs", ""):
        file.write_text(content)
        with pytest.raises(FileError, match="exists and is not a file of ours"):
            check()


def test_files_that_belong_together_get_one_number(tmp_path):
    trace, summary = tmp_path / "trace.jsonl", tmp_path / "summary.json"
    (tmp_path / "trace.1.jsonl").write_text("")
    (tmp_path / "summary.2.json").symlink_to("/nowhere")
    assert free_number(trace, summary) == 3
    assert numbered(trace, 3).name == "trace.3.jsonl" and numbered(summary, 3).name == "summary.3.json"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_place_for_a_file_is_known_before_one_is_written(tmp_path, kind):
    with pytest.raises(FileError, match=str(tmp_path)):
        writable(place(tmp_path, kind))


@pytest.mark.parametrize("name", ["", "folder/", "nowhere/file", "link"])
def test_names_of_no_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("nowhere/file")
    with pytest.raises(FileError, match="names no file: expected a file name|nowhere is not a folder"):
        writable(name)


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    writable(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(FileError, match=f"{tmp_path} may not be written"):
        writable(tmp_path / "file")


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127])
def test_the_longest_names_can_be_written(tmp_path, name):
    write_text(tmp_path / name, "x")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path, existing):
    file = tmp_path / "file"
    if existing:
        file.write_text("old")

    def fill():
        with replacing(file) as partial:
            partial.write_text("half of the n")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        fill()
    assert [path.name for path in tmp_path.iterdir()] == (["file"] if existing else [])
    assert not existing or file.read_text() == "old"
