"""Runs on CPUs that emulate BF16 products: the first line says it, every rank does the same, and settings can be forced."""

from __future__ import annotations

import json

import pytest
from conftest import trace_lines

from hf_gnmr.backends import bf16_cpu
from hf_gnmr.config import SetupError
from hf_gnmr.run import emulated
from hf_gnmr.run.recipe import RecipeError, find_recipe, load_recipe
from hf_gnmr.train import main

MINIMAL = "model: {name: m}\ndata: {name: d}\ntraining: {max_steps: 9, use_cpu: true}\n"
SETTINGS = "emulated_bf16:\n  training: {max_steps: 3}\n  data: {rows: 5}\n"
FORCED = {True: "run.bf16_products=float32", False: "run.bf16_products=native"}


def recipe(tmp_path, text, *overrides):
    file = tmp_path / "r.yaml"
    file.write_text(text)
    return load_recipe(file, overrides)


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_settings_for_such_a_cpu_apply_there_only(tmp_path, monkeypatch, slow, forced):
    monkeypatch.setattr(bf16_cpu, "has_instructions", lambda: not slow)
    monkeypatch.setattr(bf16_cpu, "slowdown", lambda: 20.0)
    monkeypatch.setattr(bf16_cpu, "_depth", 0)
    result = recipe(tmp_path, MINIMAL + SETTINGS, *([FORCED[slow]] if forced else []))
    assert (result.training["max_steps"], result.data.rows) == ((3, 5) if slow else (9, None))
    assert result.adapted == ({"training.max_steps": 3, "data.rows": 5} if slow else {})
    choice, line = emulated.kernels(result)
    assert choice is slow and ("emulated_bf16 settings apply: " in line) is slow
    again = tmp_path / "again.yaml"
    again.write_text(result.to_yaml())
    assert load_recipe(again) == result and "emulated_bf16" not in result.to_yaml() and "adapted" not in result.to_yaml()


def test_overrides_are_above_these_settings(tmp_path):
    result = recipe(tmp_path, MINIMAL + SETTINGS, FORCED[True], "training.max_steps=7")
    assert (result.training["max_steps"], result.data.rows) == (7, 5) and result.adapted == {"data.rows": 5}


def test_an_extending_recipe_inherits_and_changes_them(tmp_path):
    (tmp_path / "base.yaml").write_text(MINIMAL + SETTINGS)
    result = recipe(tmp_path, "extends: base.yaml\nemulated_bf16: {data: {rows: 6}}\n", FORCED[True])
    assert (result.training["max_steps"], result.data.rows) == (3, 6)


@pytest.mark.parametrize("kernels", list(FORCED.values()))
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("emulated_bf16: 3\n", "emulated_bf16=3: expected a section"),
        ("emulated_bf16: {training: 3}\n", "emulated_bf16.training: expected"),
        ("emulated_bf16: {trainig: {max_steps: 3}}\n", "emulated_bf16.trainig: expected one of model"),
        ("emulated_bf16: {training: {max_step: 3}}\n", "unknown key training.max_step"),
        ("emulated_bf16: {training: {max_steps: few}}\n", "training.max_steps='few': expected int"),
    ],
)
def test_errors_in_them_are_reported_on_every_machine(tmp_path, kernels, settings, message):
    with pytest.raises(RecipeError, match=message):
        recipe(tmp_path, MINIMAL + settings, kernels)


def test_quickstart_is_the_same_job_at_a_smaller_size():
    full, small = (load_recipe(find_recipe("quickstart"), [FORCED[slow]]) for slow in (False, True))
    assert not full.adapted and full.training["max_steps"] == 80 and full.model.builtin_size == "full"
    assert small.adapted.keys() <= {"model.builtin_size", "training.max_steps", "data.generate_rows"}
    assert (full.gnmr, full.lora, full.backend, full.trigger) == (small.gnmr, small.lora, small.backend, small.trigger)


@pytest.mark.parametrize("slow", [True, False])
def test_a_run_reports_it_first_and_records_it(recipe_file, tmp_path, capsys, monkeypatch, slow):
    monkeypatch.setattr(bf16_cpu, "_depth", 0)  # the tests' own session may have the kernels on already
    monkeypatch.setattr(bf16_cpu, "_override", lambda: type("Library", (), {"_destroy": lambda self: None})())
    assert main([recipe_file, FORCED[slow], "training.max_steps=1"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("BF16 products: ") and FORCED[slow] in out.splitlines()[0]
    header, _ = trace_lines(tmp_path / "run")
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["bf16_products"] == ("float32 kernels" if slow else "native")
    assert header["census"].get("bf16_products") == ("float32 kernels" if slow else None)
    assert ("GNMR: BF16 products run by float32 kernels" in out) is slow


def test_the_numbers_are_those_of_bf16(recipe_file, tmp_path):
    """The layers that GNMR lifts multiply as the BF16 model does, by whatever kernels: B is 0 in the first step."""
    for name, settings in {"bf16": ["backend.name=none"], "all": ["trigger.name=all"]}.items():
        overrides = [FORCED[True], "training.bf16=true", "training.max_steps=1", f"training.output_dir={tmp_path / name}"]
        assert main([recipe_file, *settings, *overrides]) == 0
    assert trace_lines(tmp_path / "all")[1][0]["loss"] == trace_lines(tmp_path / "bf16")[1][0]["loss"]


def test_ranks_that_disagree_are_refused(monkeypatch):
    monkeypatch.setattr(emulated, "PartialState", lambda: type("State", (), {"num_processes": 2})())
    monkeypatch.setattr(emulated, "gather_object", lambda mine: [*mine, [False, {}]])
    emulated.same_on_all_ranks("run.bf16_products", [False, {}])
    with pytest.raises(SetupError, match="run.bf16_products=auto: the ranks chose"):
        emulated.same_on_all_ranks("run.bf16_products", [True, {"training.max_steps": 3}])
