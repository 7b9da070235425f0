"""Text for messages, pages and terminals: cut to a length, without control characters.

Names and values that come from files may hold escape sequences, which a terminal would obey, or be large.  Messages show
values through `shown`; the commands write through `cleaned`, so that no single `print` has to remember it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, TextIO

SHOWN = 200
"""Characters of a value that a message shows: enough for any sensible setting."""
ERROR = 2_000
"""Characters of an error's line: several values and paths."""
REPLACED = "\ufffd"
ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours and cursor movements; removed as a whole."""
PROGRESS = re.compile(r"\r|\n*(?:\x1b\[A)*")
"""What progress bars write by itself: back to the beginning of the line, or up to the line of another bar."""
SUSPICIOUS = re.compile(r"[^\n\t\x20-\x7e\xa1-\xac\xae-\u05ff\u2010-\u2027\u2030-\u205e\u2070-\ud7ff\uff01-\uff5e]")
"""Characters outside the ranges that certainly hold no control character: looked at one by one."""


def printable(text: str, most: int = 120) -> str:
    """Text for a page or a terminal: no control characters, at most `most` characters."""
    text = text[: most + 1]
    clean = "".join(c if c.isprintable() else REPLACED for c in text)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def shown(value: Any, most: int = SHOWN) -> str:
    """`repr(value)`, at most `most` characters of it.

    No more is built than is shown: what shares its parts, or holds itself, costs no more than anything else.
    """
    parts: list[str] = []
    length = 0
    for part in _parts(value, most):
        parts.append(part)
        length += len(part)
        if length > most:
            return "".join(parts)[: most - 1] + "…"
    return "".join(parts)


def _parts(value: Any, most: int) -> Iterator[str]:
    kind = type(value)
    if kind in (list, tuple, set) and value:
        opening, closing = "[]" if kind is list else "()" if kind is tuple else "{}"
        yield opening
        for number, item in enumerate(value):
            if number:
                yield ", "
            yield from _parts(item, most)
        yield ",)" if kind is tuple and len(value) == 1 else closing
    elif kind is dict and value:
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            if number:
                yield ", "
            yield from _parts(key, most)
            yield ": "
            yield from _parts(item, most)
        yield "}"
    elif isinstance(value, (str, bytes)):
        yield repr(value[: most + 1])
    elif kind is int and value.bit_length() > 4 * most:
        yield f"<a whole number of about {int(value.bit_length() * 0.30103):,} digits>"
    else:
        yield repr(value)


def error_line(error: BaseException | str) -> str:
    """An error as the commands print it: one line of at most `ERROR` characters, without control characters."""
    return f"error: {printable(' '.join(str(error).split()), ERROR)}"


TRACEBACK = "--traceback"
TRACEBACK_HELP = "after an error, also print where it came about"
_state = {"traceback": False}
"""Whether the command that runs was given `TRACEBACK`."""


def refused(error: BaseException) -> int:
    """Print an error as one line, after its traceback where that was asked for; returns the exit status.

    An error of another package keeps its type before its text, because the text alone may be a bare key or a number.
    """
    if _state["traceback"]:
        traceback.print_exception(error)
    print(error_line(described(error)), file=sys.stderr)
    return 2


def described(error: BaseException, *, hint: bool = True) -> str:
    """An error's text; for a foreign one with its type, and (`hint`) how to see where it came about."""
    if is_own(error):
        return str(error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    named = f"{text}: {printable(str(error.filename))}" if isinstance(error, OSError) and error.filename else text
    suffix = f" ({TRACEBACK} shows where)" if hint and not _state["traceback"] else ""
    return f"{type(error).__name__}: {printable(' '.join(named.split()), ERROR // 2)}{suffix}"


def is_own(error: BaseException) -> bool:
    """Whether an error's class is this package's, so that its text is written for the reader."""
    return type(error).__module__.partition(".")[0] == __name__.partition(".")[0]


def keep_traceback(error: BaseException) -> None:
    """Let the commands raise this error as it is: it came about in the middle of a training, not from an input."""
    error.in_training = True  # type: ignore[attr-defined]


def clean(text: str) -> str:
    """Text in which nothing moves the cursor, changes colours or turns the direction of writing; line ends stay."""
    if PROGRESS.fullmatch(text):
        return text
    # Progress bars begin with a return to the beginning of their line.
    start = "\r" if text.startswith("\r") else ""
    text = text[len(start) :].replace("\r\n", "\n")
    return start + SUSPICIOUS.sub(_without_control, ESCAPE.sub("", text))


def _without_control(match: re.Match[str]) -> str:
    # Cc: control, Cf: format (bidirectional overrides among them), Cs: halves of a pair, which no stream can encode.
    return REPLACED if unicodedata.category(match[0]) in ("Cc", "Cf", "Cs", "Zl", "Zp") else match[0]


class CleanStream:
    """A text stream through which no control character passes."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream
        """The stream itself, for what moves the cursor on purpose."""

    def write(self, text: str) -> int:
        self.raw.write(clean(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["raw"], name)


def raw_stream(stream: Any) -> TextIO:
    """The stream below `CleanStream`."""
    raw: TextIO = stream.raw if isinstance(stream, CleanStream) else stream
    return raw


def cleaned(main: Callable[[Any], int]) -> Callable[..., int]:
    """A command whose standard output and error, and whose loggers, write through `CleanStream`.

    This is the one place at which an error that a command does not expect becomes a line and the exit status 2.  After one
    that came about in the middle of a training the streams stay, because the interpreter prints its traceback.
    """

    @functools.wraps(main)
    def command(argv: list[str] | None = None) -> int:
        if isinstance(sys.stdout, CleanStream):
            return main(argv)
        out, err = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = CleanStream(out), CleanStream(err)  # type: ignore[assignment]
        _loggers_to(err, sys.stderr)
        status = None
        arguments = sys.argv[1:] if argv is None else argv
        _state["traceback"] = TRACEBACK in arguments
        try:
            status = main(argv)
            return status
        except (SystemExit, KeyboardInterrupt):
            status = 2
            raise
        except BrokenPipeError:
            raise
        except Exception as error:
            if getattr(error, "in_training", False):
                raise
            status = refused(error)
            return status
        finally:
            if status is not None:
                _loggers_to(sys.stderr, err)
                sys.stdout, sys.stderr = out, err

    return command


def _loggers_to(old: Any, new: Any) -> None:
    """Handlers that write to one stream write to another."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                with contextlib.suppress(ValueError, AttributeError):  # a closed stream, or one that cannot be set
                    handler.setStream(new)
