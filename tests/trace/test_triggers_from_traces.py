"""Triggers that repeat what a recorded run lifted: read from traces of the controller, no model."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic import BREAKAGES, break_trace, lifted_by, stationary, write_trace

from hf_gnmr.config import ConfigError, GNMRConfig
from hf_gnmr.control.triggers import check_trigger, make_trigger
from hf_gnmr.trace.file import read_trace
from hf_gnmr.trace.lifted import resolve_trigger_options
from hf_gnmr.trace.metrics import summarise


def from_trace(name, units, config, trace, names=(), recoverable=None, total_steps=None):
    """A trigger that repeats what a trace lifted, as a session makes it."""
    mask = np.ones(units, dtype=bool) if recoverable is None else np.array(recoverable)
    options = resolve_trigger_options(check_trigger(name, {"trace": trace}), names, mask)
    return make_trigger(name, units, config, options=options, names=names, recoverable=mask, total_steps=total_steps)


@pytest.fixture
def lifted_trace(tmp_path):
    """The folder of a run over six units with spikes, after a warm-up of ten steps."""
    norms = stationary(200, 6, seed=3, spikes=0.3)
    write_trace(tmp_path / "trace.jsonl", norms, max_o=2, alpha=1.2, beta=1.1, alpha_init_fraction=0.0, fidelity_warmup=0.05)
    return tmp_path


CONFIG = GNMRConfig(max_o=2, alpha_init_fraction=0.0)
NAMES = [f"model.layers.{i}" for i in range(6)]


def test_listed_takes_the_most_lifted_units_of_a_trace(lifted_trace):
    lines = read_trace(lifted_trace / "trace.jsonl").steps[10:]  # after the warm-up
    counts = np.bincount([unit for line in lines for unit in line["active"]], minlength=6)
    order = np.argsort(-counts, kind="stable").tolist()
    trigger = from_trace("listed", 6, CONFIG, trace=str(lifted_trace / "trace.jsonl"), names=NAMES)
    assert trigger.options_dict()["units"] == [NAMES[i] for i in order] and trigger.options_dict()["trace"] is None
    assert trigger.options_dict()["promotion_ratio"] == pytest.approx(counts.sum() / (6 * 190))
    lifted = lifted_by(trigger, 1000)
    assert sum(map(len, lifted)) == pytest.approx(1000 * counts.sum() / 190, abs=1)
    assert all(sorted(order[: len(step)]) == step for step in lifted)
    rebuilt = make_trigger("listed", 6, CONFIG, options=trigger.options_dict(), names=NAMES)
    assert lifted_by(rebuilt, 1000) == lifted, "the resolved options are complete"


def test_the_folder_of_a_run_stands_for_its_trace(lifted_trace):
    by_file = from_trace("listed", 6, CONFIG, trace=str(lifted_trace / "trace.jsonl"), names=NAMES)
    by_folder = from_trace("listed", 6, CONFIG, trace=str(lifted_trace), names=NAMES)
    assert by_folder.options_dict() == by_file.options_dict()


def test_a_trace_with_other_recovery_paths_is_refused(lifted_trace):
    recoverable = [True, True, False, True, True, True]
    with pytest.raises(ConfigError, match="a unit 'model.layers.2' with a recovery path, unlike this run"):
        from_trace("listed", 6, GNMRConfig(), str(lifted_trace), NAMES, recoverable, total_steps=10)


@pytest.mark.parametrize(
    ("names", "message"),
    [(NAMES[:5], "has 6 units, this run 5"), ([*NAMES[:5], "lm"], "unit 'model.layers.5', this run 'lm'")],
)
def test_a_trace_of_other_units_is_refused(lifted_trace, names, message):
    with pytest.raises(ConfigError, match=message):
        from_trace("listed", len(names), GNMRConfig(), str(lifted_trace / "trace.jsonl"), names, total_steps=10)


def test_listed_counts_the_steps_that_the_report_counts(tmp_path):
    norms = np.ones((40, 3))
    norms[2, 0] = 9  # lifted through a series of skipped steps, but in only one step that counts
    norms[24:34:2, 2] = 9
    write_trace(
        tmp_path / "trace.jsonl",
        norms,
        max_o=1,
        alpha=1.2,
        beta=None,
        t_lock=0,
        alpha_init_fraction=0.0,
        skipped=range(4, 24),
    )
    trigger = from_trace(
        "listed",
        3,
        GNMRConfig(max_o=1, alpha_init_fraction=0.0),
        trace=str(tmp_path),
        names=[f"model.layers.{i}" for i in range(3)],
    )
    assert trigger.options_dict()["units"] == ["model.layers.2", "model.layers.0", "model.layers.1"]
    assert trigger.options_dict()["promotion_ratio"] == summarise(read_trace(tmp_path / "trace.jsonl"))["promotion_ratio"]


@pytest.mark.parametrize("name", ["listed", "random"])
@pytest.mark.parametrize(("where", "key", "value"), BREAKAGES)
def test_a_trace_that_cannot_be_used_is_refused_by_name(tmp_path, name, where, key, value):
    path = tmp_path / "trace.jsonl"
    write_trace(path, stationary(20, 4), max_o=2, alpha=1.1, alpha_init_fraction=0.0)
    break_trace(path, where, key, value)
    with pytest.raises(ConfigError, match="trace="):
        from_trace(
            name,
            4,
            GNMRConfig(max_o=2, alpha_init_fraction=0.0),
            trace=str(path),
            names=[f"model.layers.{i}" for i in range(4)],
        )
