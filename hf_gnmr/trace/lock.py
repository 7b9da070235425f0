"""One process writes a trace: a lock beside it, which the system releases when the process ends, however it ends.

The lock is `flock` on ``.trace.jsonl.lock``.  Within one process it may be held several times (a run holds its folder from
its first check on, and the writer of the trace holds it again).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..config import SetupError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

WITHOUT = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, getattr(errno, "ENOTSUP", errno.EOPNOTSUPP)}
"""Errors of a file system that has no locks."""


@dataclass
class _Held:
    descriptor: int
    times: int


_HELD: dict[Path, _Held] = {}


def lock_file(trace: Path) -> Path:
    """The lock of a trace, beside the file that links lead to."""
    real = Path(os.path.realpath(trace))
    return real.with_name(f".{real.name}.lock")


def hold(trace: Path) -> Path:
    """Take the lock of a trace, whose folder exists; `release` gives back what is returned.

    Raises:
        SetupError: another process holds it; the message names its pid and host.
        OSError: the folder cannot be written.
    """
    file = lock_file(trace)
    if file in _HELD:
        _HELD[file].times += 1
        return file
    while True:
        descriptor = _open(file)
        try:
            _take(descriptor, file, trace)
        except BaseException:
            os.close(descriptor)
            raise
        # The last holder removes the file: this may be a file that no longer has a name.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                break
        os.close(descriptor)
    with contextlib.suppress(OSError):  # opened for reading only: it is another user's
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    _HELD[file] = _Held(descriptor, 1)
    return file


def release(file: Path) -> None:
    """Give back a lock that `hold` returned."""
    held = _HELD.get(file)
    if held is None:  # in a forked child
        return
    held.times -= 1
    if held.times:
        return
    del _HELD[file]
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(held.descriptor), os.stat(file)):
            file.unlink()
    os.close(held.descriptor)


def renew(file: Path, trace: Path) -> None:
    """Take a held lock again, if its file was removed with its folder.

    If another run took it in the meantime, that run has the trace's name, and this one's trace continues under another.
    """
    held = _HELD.get(file)
    if held is None:
        return
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(held.descriptor), os.stat(file)):
            return
    del _HELD[file]
    try:
        hold(trace)
    except (SetupError, OSError):
        _HELD[file] = held
        return
    _HELD[file].times = held.times
    os.close(held.descriptor)


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(file, os.O_RDONLY)


def _take(descriptor: int, file: Path, trace: Path) -> None:
    if fcntl is None:
        _warn(file, "this system has no flock")
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid, _, host = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip().partition(" ")
        holder = f"pid {pid} on {host}" if pid.isdigit() else "an unknown process"
        raise SetupError(
            f"{trace} is being written by another run ({holder}): wait until it ends or stop it, or give another folder"
        ) from error
    except OSError as error:
        if error.errno not in WITHOUT:
            raise
        _warn(file, str(error))


def _warn(file: Path, why: str) -> None:
    text = f"NO LOCK on {file} ({why}): a second run in this folder would not be refused, and their traces would mix"
    print(f"GNMR: {text}", flush=True)
    warnings.warn(text, stacklevel=4)


def _forget() -> None:
    """In a forked child: a worker that outlives its parent must not keep the parent's locks."""
    for held in _HELD.values():
        with contextlib.suppress(OSError):
            os.close(held.descriptor)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
