"""Runs written by version 0.1.0 (tests/stored), killed after step 6, resume from their checkpoint to the stored steps."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import shutil

import numpy as np
import pytest
from conftest import bf16_in_hardware, trace_lines

from hf_gnmr import GNMRCallback
from hf_gnmr.run.folder import is_whole
from hf_gnmr.run.recipe import load_recipe
from hf_gnmr.train import main

STORED = pathlib.Path(__file__).parents[1] / "stored"
_spec = importlib.util.spec_from_file_location("stored_make", STORED / "make.py")
assert _spec is not None and _spec.loader is not None
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)

KILLED_AFTER, CHECKPOINT, STEPS = 6, 4, 8
SUMMARY_FIGURES = ("steps", "promotion_ratio", "hit_max_o_rate", "switches", "steps_on_recovery_by_layer", "missing_steps")
"""Figures of a summary that depend on the decisions alone."""


@pytest.fixture(scope="module", params=list(make.RUNS))
def resumed(request, tmp_path_factory):
    """A stored run's name, and its folder after it was resumed and finished."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    make.setting(folder)
    run = folder / name
    shutil.copytree(STORED / name, run)
    (run / "summary.json").unlink()
    lines = (run / "trace.jsonl").read_text().splitlines(keepends=True)
    (run / "trace.jsonl").write_text("".join(lines[: 1 + KILLED_AFTER]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["stored.yaml", *make.overrides(name), "run.resume=auto"]) == 0
    return name, run


def test_a_stored_run_resumes_to_the_stored_steps(resumed):
    name, run = resumed
    (header, lines), (stored_header, stored_lines) = trace_lines(run), trace_lines(STORED / name)
    # Nothing was set aside but what follows the checkpoint: the trace was recognised as this run's.
    assert not (run / "trace.1.jsonl").exists()
    assert header | {"census": None} == stored_header | {"census": None}
    assert header["census"].keys() == stored_header["census"].keys()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[:CHECKPOINT] == stored_lines[:CHECKPOINT], "lines up to the checkpoint stay as they are"
    assert all(line.keys() == stored.keys() for line, stored in zip(lines, stored_lines, strict=True))
    after, stored_after = lines[CHECKPOINT:], stored_lines[CHECKPOINT:]
    assert any(line["active"] for line in stored_after), "the stored steps must lift something"
    for field in ("active", "triggered"):
        assert [line[field] for line in after] == [line[field] for line in stored_after], field
    # The stored runs multiplied BF16 with the CPU's own kernels; where they are emulated, float32 kernels round elsewhere.
    rtol = 1e-3 if bf16_in_hardware() else 5e-2
    for field in ("loss", "grad_norm", "norms"):
        np.testing.assert_allclose(
            [line[field] for line in after], [line[field] for line in stored_after], rtol=rtol, err_msg=field
        )


def test_lines_past_the_checkpoint_are_set_aside_as_they_were(resumed):
    name, run = resumed
    stored = (STORED / name / "trace.jsonl").read_text().splitlines()
    aside = (run / f"trace.after-step-{CHECKPOINT}.jsonl").read_text().splitlines()
    assert aside == stored[1 + CHECKPOINT : 1 + KILLED_AFTER]


def test_the_finished_run_has_the_stored_figures(resumed):
    name, run = resumed
    summary, stored = (json.loads((folder / "summary.json").read_text()) for folder in (run, STORED / name))
    assert summary.keys() - stored.keys() == {"run_id"}, "as the trace's header has had it from the start"
    assert stored.keys() <= summary.keys()
    assert {key: summary[key] for key in SUMMARY_FIGURES} == {key: stored[key] for key in SUMMARY_FIGURES}
    assert (run / "adapter_model.safetensors").is_file() and (run / "results.json").is_file()
    assert (run / "recipe.1.yaml").read_text() == (STORED / name / "recipe.yaml").read_text()


@pytest.mark.parametrize("name", list(make.RUNS))
def test_a_stored_checkpoint_builds_an_equal_callback(name):
    checkpoint = STORED / name / f"checkpoint-{CHECKPOINT}"
    assert is_whole(checkpoint)
    stored = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]["GNMRCallback"]
    callback = GNMRCallback(**stored["args"])
    assert callback.state()["args"] == stored["args"]
    recipe = load_recipe(STORED / name / "recipe.yaml")
    assert callback.config == recipe.gnmr and callback.options.backend == recipe.backend.name
    rebuilt = GNMRCallback.from_state(stored)
    assert rebuilt.options == callback.options and rebuilt.config == callback.config
    assert rebuilt.state()["attributes"] == stored["attributes"], "a callback that has not run hands its state on"
