"""An earlier trace is cut where a resumed run continues: line by line, within the limits of what is read."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from hf_gnmr.files import FileError
from hf_gnmr.trace import continued
from hf_gnmr.trace.continued import cut_after, same_run

HEADER = {"schema": 1, "run_id": "a", "units": [], "config": {}, "max_o": 1, "trigger": "gnmr", "backend": "none"}


def trace(path, *lines):
    path.write_bytes(b"".join([json.dumps(HEADER).encode() + b"\n", *lines]))
    return path


def step(number, **more):
    return json.dumps({"step": number, **more}).encode() + b"\n"


@pytest.mark.parametrize(
    ("lines", "kept", "last"),
    [
        ([step(1), step(2)], 2, 2),
        ([step(1), step(2), step(3), step(4)], 2, 2),
        ([step(1), step(3)], 1, 1),
        ([step(3)], 0, 0),
        ([step(1), step(2)[:-1]], 1, 1),
        ([step(1), b"{]\n", step(2)], 1, 1),
        ([step(1), b"[1]\n", step(2)], 1, 1),
        ([step(1), b"null\n"], 1, 1),
        ([step(1), step("2")], 1, 1),
        ([step(1), step(True), step(2)], 1, 1),
        ([step(1), b'{"step": 2, "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n"], 1, 1),
        ([step(1), b'{"step": ' + b"9" * 5000 + b"}\n"], 1, 1),
        ([step(1), b'{"step": 2, "x": "\xff"}\n'], 1, 1),
    ],
)
def test_the_lines_up_to_the_step_stay_and_the_rest_is_kept_elsewhere(tmp_path, lines, kept, last):
    file = trace(tmp_path / "trace.jsonl", *lines)
    before = file.read_bytes()
    aside, step_kept = cut_after(file, 2)
    assert step_kept == last and file.read_bytes().count(b"\n") == 1 + kept
    assert (aside is None) == (kept == len(lines))
    assert before == file.read_bytes() + (b"" if aside is None else aside.read_bytes()), "no byte is lost"


@pytest.mark.parametrize("name", ["MAX_TRACE_BYTES", "MAX_TRACE_LINE_BYTES"])
def test_a_trace_beyond_a_limit_is_one_line_and_stays(tmp_path, monkeypatch, name):
    file = trace(tmp_path / "trace.jsonl", step(1, x="y" * 5000), step(2))
    before = file.read_bytes()
    monkeypatch.setattr(continued, name, 1000)
    with pytest.raises(FileError, match=r"trace\.jsonl.*: expected at most 1,000 bytes"):
        cut_after(file, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.jsonl"] and file.read_bytes() == before


def test_a_long_trace_takes_no_memory(tmp_path):
    """300 MB of steps under 200 MB more than Python itself."""
    file = tmp_path / "trace.jsonl"
    line = step(1, x="y" * 10**6)
    with file.open("wb") as out:
        out.write(json.dumps(HEADER).encode() + b"\n")
        for _ in range(150):
            out.write(line)
        for _ in range(150):
            out.write(line.replace(b'"step": 1', b'"step": 9'))
    program = f"""
import pathlib, sys
from hf_gnmr.trace.continued import cut_after, same_run
assert same_run(pathlib.Path({str(file)!r}), {HEADER!r})
print(cut_after(pathlib.Path({str(file)!r}), 5)[1])
"""

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (200 * 2**20, 200 * 2**20))

    done = subprocess.run([sys.executable, "-c", program], preexec_fn=limit, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "1\n", done.stderr[-2000:]
    assert file.stat().st_size == len(json.dumps(HEADER)) + 1 + 150 * len(line)


@pytest.mark.parametrize("content", [b"", b"[]\n", b"{", b"[" * 10**6, b"\xff\n", b"9" * 10**6])
def test_a_foreign_first_line_is_another_run(tmp_path, content):
    file = tmp_path / "trace.jsonl"
    file.write_bytes(content)
    assert not same_run(file, HEADER)
