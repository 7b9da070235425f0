"""A task's data: rows and text from a local folder or built in; what is on the Hub is left to lm-eval and datasets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ..config import ConfigError
from ..run.rowfiles import holds_half
from .rows import Splits, file_hash, read_text
from .tasks import Request, Task

BUILTIN = "builtin"
"""The value of --data that stands for the project's own rows."""


def data_files(request: Request, folder: Path) -> dict[str, Path]:
    """The local files of a task, by split.

    Raises:
        ConfigError: a file is missing or ambiguous; the message names the option, the folder and the pattern.
    """
    files = {}
    for split, patterns in request.task.files.items():
        expected = " or ".join(patterns)
        matches = next((m for pattern in patterns if (m := sorted(folder.glob(pattern)))), [])
        if not matches:
            raise ConfigError(f"--data {folder}: no {expected} in it, which {request.label} needs")
        if len(matches) > 1:
            raise ConfigError(f"--data {folder}: {', '.join(m.name for m in matches)} all match {expected}: leave one")
        files[split] = matches[0]
    return files


def fingerprint(request: Request, data: str | None) -> dict[str, str]:
    """The files that a task reads, each with a hash; or the source of its rows, where they are no local files."""
    if data is None or data == BUILTIN:
        return {"data": "Hub" if data is None else BUILTIN}
    return {f"{file.parent.name}/{file.name}": file_hash(file) for file in data_files(request, Path(data)).values()}


def splits_of(request: Request, data: str | None) -> Splits | None:
    """A task's rows by split, checked; None: lm-eval fetches them from the Hub.

    Raises:
        ConfigError: files, rows or values that are missing or wrong, or a subject without rows.
    """
    task = request.task
    if data is None:
        return None
    if data == BUILTIN:
        return _of_subject(request, _builtin(task), "the built-in rows")
    files = data_files(request, Path(data))
    splits = {split: task.read(file) for split, file in files.items()}
    for split, rows in splits.items():
        for number, row in enumerate(rows, 1):
            error = "half of a surrogate pair: expected text" if holds_half(row) else task.row_error(row)
            if error is not None:
                raise ConfigError(f"{files[split]}, row {number}: {error}")
    return _of_subject(request, splits, str(files[task.scored_split]))


def _builtin(task: Task) -> Splits:
    if task.builtin is None:
        raise ConfigError(f"--data {BUILTIN}: {task.name} has no built-in rows; expected a folder with its files")
    return task.builtin()


def _of_subject(request: Request, splits: Splits, source: str) -> Splits:
    """Only the rows of the requested subject."""
    if request.subject is None:
        return splits
    selected = {split: [row for row in rows if row["subject"] == request.subject] for split, rows in splits.items()}
    scored = request.task.scored_split
    if not selected[scored]:
        available = sorted({row["subject"] for row in splits[scored]})
        raise ConfigError(f"--tasks {request.label}: expected one of the subjects of {source}: {', '.join(available)}")
    return selected


def check_shots(request: Request, splits: Splits | None, shots: int | None) -> None:
    """Raise ConfigError where --shots is negative, or more than the rows that a task has for it."""
    if shots is not None and shots < 0:
        raise ConfigError(f"--shots {shots}: expected 0 or more")
    task = request.task
    if not shots or splits is None or task.shots_from is None:
        return
    available = len(splits[task.shots_from])
    if task.subjects is not None:
        by_subject = Counter(row["subject"] for row in splits[task.shots_from])
        available = min(by_subject[row["subject"]] for row in splits[task.scored_split])
    if shots > available:
        raise ConfigError(f"--shots {shots}: {request.label} has {available} examples to show")


def text_of(request: Request, data: str | None) -> str:
    """The whole text of a task that is scored by token; a local file's as it is."""
    task = request.task
    if data == BUILTIN:
        return "".join(row["page"] for row in _builtin(task)[task.scored_split])
    if data is not None:
        return read_text(data_files(request, Path(data))[task.scored_split])
    from datasets import load_dataset

    assert task.hub_text is not None
    return "".join(load_dataset(*task.hub_text, split=task.scored_split)["text"])
