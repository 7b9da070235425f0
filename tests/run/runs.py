"""What the tests of whole runs share."""

from __future__ import annotations

from hf_gnmr.train import main

SAVING = ["training.save_strategy=steps", "training.save_steps=3"]


def refused(capsys, *arguments):
    """The one-line error of a run that must not start, before the model is loaded."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


def files_of(folder):
    """The bytes of every file in a folder, by path."""
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
