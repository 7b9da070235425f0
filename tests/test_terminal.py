"""Nothing from outside reaches a terminal raw, and no value is built to be shown that is not shown."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from hf_gnmr.terminal import CleanStream, clean, cleaned, error_line, printable, shown

HOSTILE = [
    "\x1b[31m",
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\x9b2J",
    "\u202e",
    "\u2066",
    "\x07",
    "\x08",
    "\x7f",
    "\ud800",
    "\u2028",
    "\x00",
    "a\rb",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("function", [clean, printable, error_line, repr, shown])
def test_control_characters_are_removed(text, function):
    result = function(f"before {text} after")
    assert all(c.isprintable() for c in result) and "before" in result and "after" in result
    result.encode("utf-8")


@pytest.mark.parametrize(
    "text", ["α ≥ 1.5 – ΔGNMR · 日本語 é\n\tx", "\r 10%|███▌  | 1/10", "\n\n\x1b[A\x1b[A", "\r", "│ ▇█ … ×"]
)
def test_what_commands_and_progress_bars_write_passes(text):
    assert clean(text) == text


@pytest.mark.parametrize(
    "value",
    [
        1,
        -2.5,
        None,
        True,
        "a'b",
        "x\n",
        b"y",
        [],
        (),
        {},
        set(),
        [1, [2, {"a": (3,)}]],
        {"a": {1}},
        (1,),
        frozenset({1}),
        float("nan"),
    ],
)
def test_short_values_are_shown_as_they_are(value):
    assert shown(value) == repr(value)


def laughs():
    value = ["ha"] * 10
    for _ in range(60):
        value = [value] * 10
    return value


def circle():
    value = [1]
    value.append(value)
    return value


@pytest.mark.parametrize(
    "make", [laughs, circle, lambda: "x" * 10**7, lambda: {i: i for i in range(10**5)}, lambda: 10**5000], ids=range(5)
)
@pytest.mark.parametrize("most", [40, 200])
def test_large_values_are_cut_before_they_are_built(make, most):
    assert len(shown(make(), most)) <= most


def test_a_command_writes_through_a_clean_stream_and_restores_its_own(capsys):
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("outside")
    logger.addHandler(handler)

    @cleaned
    def main(argv=None):
        print("out \x1b[31mred\u202e")
        print("err \x1b]0;x\x07", file=sys.stderr)
        logger.warning("log \x9b2J")
        return 3

    before = sys.stdout
    assert main() == 3 and sys.stdout is before and handler.stream is sys.stderr
    logger.removeHandler(handler)
    captured = capsys.readouterr()
    assert captured.out == "out red\ufffd\n" and captured.err == "err \ufffd]0;x\ufffd\nlog \ufffd2J\n"


def test_the_stream_passes_on_what_it_does_not_write():
    raw = io.StringIO()
    stream = CleanStream(raw)
    stream.writelines(["a\x1b[A", "b"])
    assert raw.getvalue() == "ab" and not stream.isatty() and stream.raw is raw
