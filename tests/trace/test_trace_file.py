"""The trace on disk: one writer, opened to append, and nothing lost to what others do to the file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from hf_gnmr.config import SetupError
from hf_gnmr.files import FileError
from hf_gnmr.trace import lock
from hf_gnmr.trace.file import TraceWriter, read_trace, refuse_place

HEADER = {"run_id": "r", "units": [], "config": {}, "max_o": 1, "trigger": "gnmr", "backend": "int8"}


def steps_of(path):
    return [line["step"] for line in read_trace(path).steps]


@pytest.fixture
def writer(tmp_path):
    writer = TraceWriter(tmp_path / "trace.jsonl", HEADER)
    for step in (1, 2, 3):
        writer.write({"step": step})
    yield writer
    writer.close()


def test_the_file_is_opened_to_append(writer):
    flags = [
        fcntl.fcntl(int(number), fcntl.F_GETFL)
        for number in os.listdir("/proc/self/fd")
        if os.path.realpath(f"/proc/self/fd/{number}") == str(writer.path)
    ]
    assert flags and all(flag & os.O_APPEND for flag in flags)


def delete(path):
    path.unlink()


def move_away(path):
    path.rename(path.with_name("elsewhere.jsonl"))


def delete_the_folder(path):
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()


@pytest.mark.parametrize("do", [delete, move_away, delete_the_folder])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_deleted_trace_is_written_again_with_every_step(tmp_path, do, resumed):
    path = tmp_path / "run" / "trace.jsonl"
    writer = TraceWriter(path, HEADER)
    for step in (1, 2, 3):
        writer.write({"step": step})
    if resumed:
        writer.close()
        writer = TraceWriter(path, HEADER, resume_after=3)
    do(path)
    writer.write({"step": 4})
    assert "was deleted or moved away during the run: it was written again, with 3 steps" in writer.notice
    writer.notice = None
    writer.write({"step": 5})
    writer.close()
    assert writer.notice is None, "said once"
    assert steps_of(path) == [1, 2, 3, 4, 5]


def by_another_file(path):
    new = path.with_name("new")
    new.write_text("not ours\n")
    new.rename(path)


def by_a_copy(path):
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


def by_a_folder(path):
    path.unlink()
    path.mkdir()


def by_a_device(path):
    path.unlink()
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("do", [by_another_file, by_a_copy, by_a_folder, by_a_device])
def test_a_replaced_trace_continues_under_another_name_with_every_step(writer, tmp_path, do):
    path = writer.path
    do(path)
    before = os.lstat(path)
    writer.write({"step": 4})
    assert "was replaced by another file during the run, which is left as it is" in writer.notice
    writer.write({"step": 5})
    assert os.path.samestat(os.lstat(path), before) and (not path.is_file() or os.lstat(path).st_size == before.st_size)
    assert writer.path == tmp_path / "trace.1.jsonl" and writer.number == 1
    assert steps_of(writer.path) == [1, 2, 3, 4, 5]


def to(size):
    def truncate(path):
        os.truncate(path, size if size >= 0 else path.stat().st_size + size)

    return truncate


def overwrite(path):
    path.write_text("something else, in place, and longer than what was there before" * 20)


@pytest.mark.parametrize(
    ("do", "left"),
    [(to(0), []), (to(10), []), (to(-1), [1, 2]), (to(-12), [1, 2]), (to(-13), [1]), (overwrite, [])],
    ids=["to nothing", "in the header", "by one byte", "by the last line but one byte", "by the last line", "overwritten"],
)
def test_a_truncated_trace_continues_with_what_is_left(writer, tmp_path, do, left):
    do(writer.path)
    found = writer.path.read_bytes()
    writer.write({"step": 4})
    assert "was truncated or overwritten during the run" in writer.notice
    writer.write({"step": 5})
    assert writer.path == tmp_path / "trace.jsonl" and steps_of(writer.path) == [*left, 4, 5]
    assert (tmp_path / "trace.1.jsonl").read_bytes() == found


def test_behind_a_link_the_file_is_written_again_where_it_was(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    link = tmp_path / "trace.jsonl"
    link.symlink_to(store / "t.jsonl")
    writer = TraceWriter(link, HEADER)
    writer.write({"step": 1})
    (store / "t.jsonl").unlink()
    writer.write({"step": 2})
    writer.close()
    assert link.is_symlink() and steps_of(link) == [1, 2]
    writer = TraceWriter(link, HEADER, resume_after=1)
    writer.write({"step": 2})
    writer.close()
    assert link.is_symlink() and steps_of(store / "t.jsonl") == [1, 2]


def test_an_earlier_trace_and_its_summary_get_one_number(tmp_path):
    summary = tmp_path / "summary.json"
    (tmp_path / "summary.1.json").write_text("an earlier one, of a run whose trace is gone")
    for run in (1, 2):
        writer = TraceWriter(tmp_path / "trace.jsonl", {**HEADER, "run_id": str(run)}, None, (summary,))
        writer.close()
        if run == 1:
            summary.write_text("first")
    assert read_trace(tmp_path / "trace.2.jsonl").header["run_id"] == "1" and not summary.exists()
    assert (tmp_path / "summary.2.json").read_text() == "first" and writer.set_aside == tmp_path / "trace.2.jsonl"


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("path", ["", "/dev/null", "/dev/stdin", ".", "file/trace.jsonl", "folder/"])
def test_places_for_no_trace(tmp_path, monkeypatch, path, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    if not named and path in ("", "folder/"):
        return
    with pytest.raises(FileError):
        refuse_place(path, named=named)


@pytest.mark.parametrize(
    ("content", "refused"), [("model: x\n", True), ('{"schema": 1}\n', False), ('{"schema', False), ("", False)]
)
def test_a_file_that_the_user_names_must_be_a_trace(tmp_path, content, refused):
    file = tmp_path / "recipe.yaml"
    file.write_text(content)
    refuse_place(file, named=False)
    if refused:
        with pytest.raises(FileError, match="exists and is not a trace"):
            refuse_place(file, named=True)
    else:
        refuse_place(file, named=True)


# -- one writer ----------------------------------------------------------------------------------------------------------

OTHER = """
import sys
from hf_gnmr.trace.file import TraceWriter
writer = TraceWriter(sys.argv[1], {"run_id": "other"})
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that writes the trace."""
    command = [sys.executable, "-c", OTHER, str(tmp_path / "trace.jsonl")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("resume_after", [None, 0])
def test_a_second_process_is_refused_and_touches_nothing(other, tmp_path, resume_after):
    before = (tmp_path / "trace.jsonl").read_bytes()
    with pytest.raises(SetupError, match=rf"is being written by another run \(pid {other.pid} on {os.uname().nodename}\)"):
        TraceWriter(tmp_path / "trace.jsonl", {**HEADER, "run_id": "other"}, resume_after)
    assert (tmp_path / "trace.jsonl").read_bytes() == before and not (tmp_path / "trace.1.jsonl").exists()


@pytest.mark.parametrize("end", ["kill -9", "exit"])
def test_the_lock_ends_with_its_process(other, tmp_path, end):
    if end == "exit":
        other.stdin.close()
    else:
        other.send_signal(signal.SIGKILL)
    other.wait()
    TraceWriter(tmp_path / "trace.jsonl", HEADER).close()
    assert not list(tmp_path.glob(".*")), "the last one removes the lock's file"


def test_a_forked_worker_does_not_keep_the_lock(tmp_path):
    writer = TraceWriter(tmp_path / "trace.jsonl", HEADER)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the test is over
        os._exit(0)
    file = writer._lock
    held = lock._HELD.pop(file)  # as if this process had died: the descriptor is closed, the lock not released
    os.close(held.descriptor)
    try:
        process = subprocess.run(
            [sys.executable, "-c", OTHER, str(tmp_path / "trace.jsonl")], input="", check=False, text=True
        )
        assert process.returncode == 0
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_one_process_may_hold_a_lock_several_times(tmp_path):
    first, second = lock.hold(tmp_path / "t"), lock.hold(tmp_path / "t")
    lock.release(first)
    assert second.exists()
    lock.release(second)
    assert not second.exists()
    lock.release(second)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_reported_and_the_run_goes_on(tmp_path, monkeypatch, capsys, number):
    def flock(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="NO LOCK on .*a second run in this folder would not be refused"):
        writer = TraceWriter(tmp_path / "trace.jsonl", HEADER)
    writer.close()
    assert "GNMR: NO LOCK" in capsys.readouterr().out


def test_lines_are_plain_json(writer):
    writer.write({"step": 4, "loss": float("nan")})
    assert json.loads(writer.path.read_text().splitlines()[-1])["loss"] == "nan"


@pytest.mark.parametrize("foreign", [b"foreign line\n", b"junk"])
def test_what_others_append_is_noticed_and_spoils_no_line(writer, foreign):
    with writer.path.open("ab") as file:
        file.write(foreign)
    writer.write({"step": 4})
    assert "was truncated or overwritten during the run" in writer.notice
    writer.write({"step": 5})
    assert [line["step"] for line in read_trace(writer.path).steps] == [1, 2, 3, 4, 5][-len(read_trace(writer.path).steps) :]
    assert [line["step"] for line in read_trace(writer.path).steps][-2:] == [4, 5]


def overwrite(path, step, value):
    """Overwrite a step's line in place, with a line of the same length."""
    content = path.read_bytes()
    line = json.dumps({"step": step}).encode()
    assert len(value) == len(line)
    path.write_bytes(content)  # the same file, the same size
    with path.open("r+b") as file:
        file.seek(content.index(line))
        file.write(value)


@pytest.mark.parametrize("value", [b'{"step": 7}', b"\0" * 11, b'\n{"step":2}'], ids=["another step", "zeros", "two lines"])
def test_a_line_that_was_overwritten_long_before_the_end_is_noticed_at_close(tmp_path, value):
    writer = TraceWriter(tmp_path / "trace.jsonl", HEADER)
    for step in range(1, 40):
        writer.write({"step": step})
    overwrite(writer.path, 2, value)
    writer.write({"step": 40})
    assert writer.notice is None, "only the end is compared while the run goes on"
    found = writer.path.read_bytes()
    writer.close()
    assert "it continues with the 39 steps that can still be read" in writer.notice
    assert steps_of(writer.path) == [1, *range(3, 41)]
    assert (tmp_path / "trace.1.jsonl").read_bytes() == found


def test_a_run_whose_folder_was_removed_takes_its_lock_again(tmp_path):
    writer = TraceWriter(tmp_path / "run" / "trace.jsonl", HEADER)
    writer.write({"step": 1})
    delete_the_folder(writer.path)
    writer.write({"step": 2})
    script = "import sys\nfrom pathlib import Path\nfrom hf_gnmr.trace.lock import hold\nhold(Path(sys.argv[1]))"
    second = subprocess.run(
        [sys.executable, "-c", script, str(writer.path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert f"is being written by another run (pid {os.getpid()} on " in second.stderr
    writer.close()
    assert steps_of(writer.path) == [1, 2] and not list((tmp_path / "run").glob(".*"))


def test_where_another_run_took_the_removed_folder_both_traces_are_kept(tmp_path):
    """The other run has the name; this one continues under a number."""
    writer = TraceWriter(tmp_path / "run" / "trace.jsonl", HEADER)
    writer.write({"step": 1})
    delete_the_folder(writer.path)
    script = (
        "import sys\nfrom hf_gnmr.trace.file import TraceWriter\n"
        f"writer = TraceWriter(sys.argv[1], {HEADER!r})\nwriter.write({{'step': 1}})\n"
        "print('holds', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(writer.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "holds\n"
        writer.write({"step": 2})
        writer.close()
        assert (tmp_path / "run" / ".trace.jsonl.lock").exists()
        other.communicate("")
    assert steps_of(tmp_path / "run" / "trace.jsonl") == [1] and steps_of(tmp_path / "run" / "trace.1.jsonl") == [1, 2]


def test_two_writers_in_one_process_lose_nothing(tmp_path):
    """As in a notebook whose cell runs again after an interrupted training: the second one has the name."""
    first = TraceWriter(tmp_path / "trace.jsonl", {**HEADER, "run_id": "first"})
    first.write({"step": 1})
    second = TraceWriter(tmp_path / "trace.jsonl", {**HEADER, "run_id": "second"})
    for step in (2, 3):
        first.write({"step": step})
        second.write({"step": step})
    first.close()
    second.close()
    runs = {read_trace(path).header["run_id"]: path for path in (first.path, second.path)}
    assert runs == {"first": first.path, "second": tmp_path / "trace.jsonl"}
    assert steps_of(first.path) == [1, 2, 3] and steps_of(second.path) == [2, 3]


@pytest.mark.parametrize("tail", [b'{"step": 3', b"\0" * 5000, b"x" * 5000 + b"\n", b'{"step": 3}\n{"step": 4}\n'])
def test_a_resumed_trace_keeps_its_lines_and_the_rest_beside_it(tmp_path, tail):
    writer = TraceWriter(tmp_path / "trace.jsonl", HEADER)
    for step in (1, 2):
        writer.write({"step": step})
    writer.close()
    with writer.path.open("ab") as file:
        file.write(tail)
    resumed = TraceWriter(writer.path, HEADER, resume_after=2)
    assert resumed.continued and resumed.missing == 0
    assert resumed.set_aside.read_bytes() == tail
    resumed.write({"step": 3})
    resumed.close()
    assert steps_of(writer.path) == [1, 2, 3] and resumed.notice is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.after-step-2.jsonl", "trace.jsonl"]


def test_a_line_that_a_full_disk_cuts_is_taken_back(tmp_path, monkeypatch):
    writer = TraceWriter(tmp_path / "trace.jsonl", HEADER)
    writer.write({"step": 1})
    write, calls = os.write, []

    def full(descriptor, content):
        calls.append(1)
        if len(calls) == 1:
            return write(descriptor, bytes(content[:5]))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            writer.write({"step": 2})
    writer.write({"step": 2})
    writer.close()
    assert writer.notice is None and steps_of(writer.path) == [1, 2]
