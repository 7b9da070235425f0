"""One bad input: tried in a process that is forked for it, under limits, and judged by what came out.

The worker (`worker.py`) imports everything once.  Each case runs in a fork of it, in a folder of its own, with limits on CPU
time, memory, file size and wall time.  `judge` puts what came out into one of `KINDS`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("clear", "accepted", "traceback", "unclear", "hang", "late")
GOOD = ("clear", "accepted")
CPU_SECONDS, WALL_SECONDS = 60, 90
MEMORY = 4 * 2**30
"""Bytes of address space beyond what the worker has."""
FILE_BYTES = 2**28
TAIL = 4000
OWN_ERRORS = {"ConfigError", "RecipeError", "SetupError", "FileError", "TraceError", "YamlError", "ValueError", "TypeError"}
INTERNAL = re.compile(
    r"'NoneType' object|object has no attribute|not subscriptable|is not iterable|unhashable type|not supported between"
    r"|unsupported operand|object cannot be interpreted|must be str, not|expected str, bytes or os.PathLike"
    r"|takes \d+ positional"
    r"|list index out of range|: invalid literal for int|(?<!\()could not convert string|can't multiply|broadcast|ambiguous"
)
"""What Python or numpy say about our own lines: no reader can act on it."""


@dataclass
class Place:
    """The folder of a case, and what the worker has made for all cases."""

    folder: Path
    shared: Path
    """`model` (a tiny LLaMA with its tokenizer), `rows.jsonl`, `run` (a finished run), `results` (evaluations)."""

    def file(self, name: str, content: str | bytes) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return str(path)

    def copy(self, name: str, to: str | None = None) -> Path:
        """A copy of something shared."""
        target = self.folder / (to or name)
        shutil.copytree(self.shared / name, target, symlinks=True)
        return target


@dataclass(frozen=True)
class Case:
    """One bad input.

    `run` makes it in the folder of the case and gives it to a command (returning its exit status) or calls the API
    (`api`: what it returns is shown).
    """

    id: str
    run: Callable[[Place], Any] = field(compare=False)
    names: tuple[str, ...]
    """A clear message has at least one of these: the key, the file, the argument."""
    about: str
    """The input, for people."""
    api: bool = False
    slow: bool = False


@dataclass
class Outcome:
    """What came out of a case."""

    id: str
    kind: str
    line: str
    """The last line of the output."""
    seconds: float
    about: str = ""
    output: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def attempt(case: Case, place: Place, loaded: Callable[[], bool]) -> Outcome:
    """Run a case in a fork of this process, and judge it."""
    place.folder.mkdir(parents=True)
    out, report = place.folder.parent / "output.txt", place.folder.parent / "report.json"
    report.unlink(missing_ok=True)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _in_child(case, place, out, report, loaded)
    status = _wait(child, WALL_SECONDS)
    seconds = time.monotonic() - start
    output = out.read_text(encoding="utf-8", errors="replace") if out.exists() else ""
    ended = json.loads(report.read_text()) if report.exists() else {}
    kind = judge(case, status, ended, output)
    lines = [line for line in output.splitlines() if line.strip()]
    refusals = [line for line in lines if "error: " in line]
    line = [*lines, *refusals][-1] if lines else ""
    if case.api:
        line = f"{ended.get('error') or 'returned'}: {ended.get('text', '')}"
    outcome = Outcome(case.id, kind, line[:600], round(seconds, 2), case.about[:300], output[-TAIL:])
    shutil.rmtree(place.folder, ignore_errors=True)
    return outcome


def _wait(child: int, seconds: float) -> int | None:
    """The child's wait status; None: it was killed after so many seconds."""
    descriptor = os.pidfd_open(child)
    ready, _, _ = select.select([descriptor], [], [], seconds)
    os.close(descriptor)
    if not ready:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has started
    return status if ready else None


def _in_child(case: Case, place: Place, out: Path, report: Path, loaded: Callable[[], bool]) -> None:
    """Never returns."""
    status = 70
    try:
        os.setsid()
        os.chdir(place.folder)
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        limit(MEMORY)
        result: dict[str, Any] = {}
        try:
            value = case.run(place)
            result["text"] = repr(value)[:400]
            status = value if not case.api and isinstance(value, int) else 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 70
        except BaseException as error:
            result |= {"error": type(error).__name__, "text": str(error), "own": _own(error)}
            traceback.print_exc()
            status = 71
        result |= {"status": status, "loaded": loaded()}
        sys.stdout.flush()
        sys.stderr.flush()
        report.write_text(json.dumps(result))
    finally:
        os._exit(0)


def _own(error: BaseException) -> list[str]:
    return [cls.__name__ for cls in type(error).__mro__]


def limit(memory: int) -> None:
    """CPU time, address space beyond what is in use, and file size of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def judge(case: Case, status: int | None, ended: dict[str, Any], output: str) -> str:
    """One of `KINDS`."""
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
        return "hang"
    if not ended:  # it died of another signal
        return "traceback"
    if case.api:
        if "error" not in ended:
            return "accepted"
        if ended["error"] not in OWN_ERRORS and not {"ConfigError", "SetupError", "FileError"} & set(ended["own"]):
            return "traceback"
        return "clear" if is_clear(ended["text"], case.names) else "unclear"
    if ended["status"] in (70, 71):
        return "traceback"
    if ended["status"] in (0, 1):  # 1: `plan` does not fit, `calibrate` misses its target
        return "accepted" if "Traceback" not in output else "unclear"
    lines = [line for line in output.splitlines() if re.match(r"(hf[-_]gnmr[\w. -]*: )?error: ", line)]
    if len(lines) != 1 or "Traceback" in output or not is_clear(lines[0], case.names):
        return "unclear"
    return "late" if ended["loaded"] else "clear"


def is_clear(message: str, names: tuple[str, ...]) -> bool:
    """Whether a message names what is wrong and says why, in words for the reader."""
    if not any(name in message for name in names) or INTERNAL.search(message) or message.count("\n") > 2:
        return False
    return len(message) < 2100
