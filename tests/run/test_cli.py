"""The command line `hf-gnmr`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_gnmr.cli import COMMANDS
from hf_gnmr.cli import main as cli


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--help"], 0), (["train", "--help"], 0), (["nope"], 2), ([], 2)], ids=str
)
def test_help_and_unknown_commands(arguments, status):
    with pytest.raises(SystemExit) as stop:
        cli(arguments)
    assert stop.value.code == status


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli([command, "--help"])
    assert stop.value.code == 0 and "usage:" in capsys.readouterr().out


def test_a_missing_gguf_file_is_named(capsys):
    assert cli(["import-gguf", "/gone.gguf", "/tmp/never"]) == 2
    assert "/gone.gguf: no such file" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error(tmp_path):
    """As in `hf-gnmr plan RECIPE | head -0`: the pipe is closed before the first line is written."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "hf_gnmr.cli", "plan", "activation_60m"]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    os.close(write)
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr[-2000:]
