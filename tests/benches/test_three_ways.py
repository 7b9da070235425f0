"""One recipe three ways through the command line: the files, the keys of table.json, and the saved result."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "eval"))

import results
import three_ways


@pytest.mark.slow
def test_three_ways_of_a_small_recipe(recipe_file, tmp_path, monkeypatch):
    out, folder = tmp_path / "ways", tmp_path / "results"
    arguments = ["training.max_steps=3", "--out", str(out), "--rounds", "2", "--save", "small"]
    monkeypatch.setattr(sys, "argv", ["three_ways.py", str(recipe_file), *arguments])
    monkeypatch.setattr(three_ways, "save_result", lambda name, **fields: results.save_result(name, folder=folder, **fields))
    assert three_ways.main() == 0
    table = json.loads((out / "table.json").read_text())
    assert set(table) == {"runs", "step_time_ratios"} and set(table["runs"]) == {"bf16", "int8", "gnmr"}
    assert set(table["step_time_ratios"]) == {"int8", "gnmr", "bf16", "all", "median_seconds_int8"}
    payload = results.read_result("small", folder)["payload"]
    assert (out / "table.md").read_text() == three_ways.table(payload) + "\n"


def test_a_recipe_without_adapters_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["three_ways.py", "lowbit_small", "--out", str(tmp_path / "ways")])
    assert three_ways.main() == 2
    assert "lora: expected a section with an adapter, got none" in capsys.readouterr().err
    assert not (tmp_path / "ways").exists()
