"""Shared by the tests of evaluation, as a plugin (`pytest_plugins`): short runs to evaluate, and the command line in short.

Test modules import it before pytest knows it as a plugin, so its assertions stay plain: PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
from conftest import write_recipe

from hf_gnmr.cli import main as cli
from hf_gnmr.train import main as train

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
"""The public data sets' files, where there are any."""
SCRIPT = pathlib.Path(__file__).parents[2] / "eval" / "downstream.sh"
STORED = pathlib.Path(__file__).parents[1] / "stored" / "evaluation"
"""Two results of the tiny model on two built-in items each, with the table of both, as version 0.1.0 wrote them; absolute
paths replaced."""
RUNS = {
    "gnmr": [],
    "bf16": ["backend.name=none"],
    "nothing": ["training.learning_rate=0", "training.max_steps=1"],
    "nothing-bf16": ["training.learning_rate=0", "training.max_steps=1", "backend.name=none"],
}
"""Overrides of a small recipe by run."""


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory, tiny_lm, rows_file):
    """Folder of the runs in RUNS: gnmr, BF16, and one of each whose adapter does nothing; with their recipe small.yaml."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = write_recipe(folder / "small.yaml", tiny_lm, rows_file, lora_alpha=64, alpha=0.5, learning_rate=1e-2)
    for name, overrides in RUNS.items():
        assert train([recipe, f"training.output_dir={folder / name}", *overrides]) == 0
    return folder


@pytest.fixture(scope="module")
def runs(trained_runs, tmp_path_factory):
    """A module's own copy of `trained_runs`, without results."""
    return copied(trained_runs, tmp_path_factory.mktemp("copy") / "runs")


@pytest.fixture
def inside_tmp_path(tmp_path, monkeypatch):
    """What is written to the working directory goes to the test's folder."""
    monkeypatch.chdir(tmp_path)


def evaluate(*arguments, tasks=("hellaswag",), status=0):
    """``hf-gnmr eval`` on the built-in rows."""
    assert cli(["eval", *map(str, arguments), "--data", "builtin", "--tasks", *tasks, "--offline"]) == status


def result(folder, precision, task="hellaswag"):
    return json.loads((pathlib.Path(folder) / precision / f"{task}.json").read_text())


def copied(run, to):
    """A copy of a run without its results."""
    shutil.copytree(run, to, ignore=shutil.ignore_patterns("eval"))
    return to


def no_model_is_built(monkeypatch):
    """Fail where a model is loaded."""
    monkeypatch.setattr("hf_gnmr.evaluation.evaluate.build", lambda *arguments: pytest.fail("a model was loaded"))
