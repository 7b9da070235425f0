"""Results of benches as data: what a file holds, and how it comes back."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "eval"))

import controller_cost
import results

from hf_gnmr import __version__
from hf_gnmr.files import FileError

PAYLOAD = {"rows": [{"units": 10, "median": 0.5}], "peak": math.nan, "losses": [math.inf, -math.inf], "label": "nan?"}


def save(folder, **changes):
    fields = {"bench": "controller_cost", "command": "python eval/x.py", "seed": 0, "payload": PAYLOAD, **changes}
    return results.save_result("x", folder=folder, **fields)


def test_a_result_records_where_it_comes_from(tmp_path):
    text = save(tmp_path / "new").read_text()
    result = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert tuple(result) == results.FIELDS
    assert result["versions"]["hf_gnmr"] == __version__ and "torch" in result["versions"]
    assert {"processor", "instruction_set", "threads"} <= set(result["machine"])
    assert result["date"][4] == result["date"][7] == "-" and result["date"].endswith("+00:00")


def test_numbers_that_are_not_finite_come_back_as_numbers(tmp_path):
    save(tmp_path)
    payload = results.read_result("x", tmp_path)["payload"]
    assert math.isnan(payload["peak"]) and payload["losses"] == [math.inf, -math.inf]
    assert payload["rows"] == PAYLOAD["rows"] and payload["label"] == "nan?"


@pytest.mark.parametrize(("content", "message"), [("{}", "missing: name, bench"), ("[]", "expected a JSON object")])
def test_a_file_that_is_no_result_is_refused(tmp_path, content, message):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(FileError, match=message):
        results.read_result("x", tmp_path)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a b"])
def test_a_name_that_is_no_file_name_is_refused_before_anything_is_measured(name, capsys):
    parser = argparse.ArgumentParser()
    results.add_save_option(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--save", name])
    assert "argument --save" in capsys.readouterr().err


def test_the_command_names_the_variables_that_change_the_measurement(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(results.REPOSITORY / "eval" / "cost.py"), "--model", "a model"])
    for name in results.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert results.command_line() == "OMP_NUM_THREADS=2 python eval/cost.py --model 'a model'"


@pytest.mark.parametrize(("seed", "text"), [(0, "seed 0."), ([1, 2], "seeds 1, 2.")])
def test_provenance_in_markdown(tmp_path, seed, text):
    save(tmp_path, seed=seed)
    line = results.provenance(results.read_result("x", tmp_path))
    assert line.startswith("`python eval/x.py`: 2") and line.endswith(text) and "thread" in line


def test_a_bench_saves_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(controller_cost, "UNITS", (10, 20))
    monkeypatch.setattr(sys, "argv", ["eval/controller_cost.py", "--steps", "5", "--save", "small"])
    monkeypatch.setattr(controller_cost, "save_result", lambda name, **fields: save_to(tmp_path, name, **fields))
    controller_cost.main()
    payload = results.read_result("small", tmp_path)["payload"]
    assert capsys.readouterr().out == controller_cost.table(payload) + "\n"
    assert [row["units"] for row in payload["milliseconds"]] == [10, 20]


def save_to(folder, name, **fields):
    return results.save_result(name, folder=folder, **fields)
