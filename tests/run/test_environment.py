"""What is recorded of the machine and the precision of a run."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from transformers import TrainingArguments

from hf_gnmr import __version__
from hf_gnmr.run.environment import PACKAGES, environment, environment_in_words, peak_memory, precision


@pytest.mark.parametrize(
    ("launcher", "settings", "expected"),
    [
        ("bf16", {}, "bf16"),
        ("bf16", {"fp16": True}, "fp16"),
        ("no", {}, "off"),
        ("no", {"bf16": True}, "bf16"),
        (None, {}, "off"),
    ],
)
def test_the_recorded_precision_is_the_recipes_and_else_the_launchers(launcher, settings, expected, monkeypatch):
    if launcher is None:
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    else:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    assert precision(type("Arguments", (), {"bf16": False, "fp16": False, **settings})) == expected


def test_an_environment_is_plain_json_and_names_what_a_run_depends_on(tmp_path, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, seed=3, report_to=[])
    record = environment(arguments, {"rows": 7})
    assert json.loads(json.dumps(record)) == record
    assert record["hf_gnmr"] == __version__ and record["packages"].keys() == set(PACKAGES)
    assert (record["seed"], record["device"], record["world_size"], record["precision"]) == (3, "cpu", 1, "off")
    assert record["data"] == {"rows": 7} and record["command"] == sys.argv and record["threads"] == torch.get_num_threads()
    words = environment_in_words(arguments)
    assert words.startswith("runs on: cpu (") and "autocast off" in words and "\n" not in words


def test_peak_memory_grows_with_what_is_held():
    before = peak_memory()
    held = torch.ones(16 * 2**20)  # 64 MiB
    after = peak_memory()
    assert before.keys() == after.keys()
    if not torch.cuda.is_available() and sys.platform != "win32":
        assert after["peak_process_bytes"] >= max(before["peak_process_bytes"], held.nbytes)
