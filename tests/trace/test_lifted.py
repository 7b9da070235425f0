"""What a trace lifted: its promotion ratio, its units in order, and trigger options that refer to it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest
from synthetic import BREAKAGES, break_trace, stationary, write_trace

from hf_gnmr.config import ConfigError, GNMRConfig
from hf_gnmr.control.triggers import check_trigger, make_trigger
from hf_gnmr.trace.file import read_trace
from hf_gnmr.trace.lifted import LiftedRecord, resolve_trigger_options
from hf_gnmr.trace.metrics import summarise

NAMES = [f"model.layers.{i}" for i in range(6)]
ALL = np.ones(6, dtype=bool)


@pytest.fixture
def path(tmp_path):
    """200 steps of 6 units, of which the first 10 are a fidelity warm-up."""
    norms = stationary(200, 6, seed=3, spikes=0.3)
    settings = {"max_o": 2, "alpha": 1.2, "beta": 1.1, "alpha_init_fraction": 0.0, "fidelity_warmup": 0.05}
    return write_trace(tmp_path / "trace.jsonl", norms, **settings)


def lifted_steps(path):
    """How many steps behind the warm-up each unit was lifted in, from the lines themselves."""
    lines = read_trace(path).steps[10:]
    return np.bincount([unit for line in lines for unit in line["active"]], minlength=6)


def test_the_warm_up_enters_neither_the_ratio_nor_the_order(path):
    record, steps = LiftedRecord(str(path)), lifted_steps(path)
    assert record.promotion_ratio() == pytest.approx(steps.sum() / (6 * 190))
    assert record.most_lifted(NAMES, ALL) == [NAMES[i] for i in np.argsort(-steps, kind="stable")]


def test_the_folder_of_a_run_will_do(path):
    assert LiftedRecord(path.parent).most_lifted(NAMES, ALL) == LiftedRecord(path).most_lifted(NAMES, ALL)


def test_steps_are_counted_as_in_the_summary_and_ties_go_by_index(tmp_path):
    norms = np.ones((40, 3))
    norms[2, 0] = 9  # lifted through a row of skipped steps, but in one step that counts
    norms[24:34:2, 2] = 9
    settings = {"max_o": 1, "alpha": 1.2, "beta": None, "t_lock": 0, "alpha_init_fraction": 0.0}
    path = write_trace(tmp_path / "trace.jsonl", norms, skipped=range(4, 24), **settings)
    record = LiftedRecord(path)
    assert record.most_lifted(NAMES[:3], ALL[:3]) == [NAMES[2], NAMES[0], NAMES[1]]
    assert record.promotion_ratio() == summarise(read_trace(path))["promotion_ratio"]
    still = LiftedRecord(write_trace(tmp_path / "none.jsonl", norms, trigger="none"))
    assert still.most_lifted(NAMES[:3], ALL[:3]) == NAMES[:3] and still.promotion_ratio() == 0.0


def test_only_recoverable_units_are_listed(tmp_path):
    recoverable = np.array([True, False, True, True])
    path = write_trace(tmp_path / "trace.jsonl", stationary(60, 4, spikes=0.3), max_o=1, recoverable=recoverable)
    assert sorted(LiftedRecord(path).most_lifted(NAMES[:4], recoverable)) == [NAMES[0], NAMES[2], NAMES[3]]


def test_names_that_a_trace_shortens_are_returned_as_given(path):
    header, *lines = path.read_text().splitlines()
    long = "model." + "x" * 300
    changed = json.loads(header)
    changed["units"][4]["name"] = long
    path.write_text("\n".join([json.dumps(changed), *lines]) + "\n")
    record = LiftedRecord(path)
    assert long not in record.series.names
    assert long in record.most_lifted([*NAMES[:4], long, NAMES[5]], ALL)


@pytest.mark.parametrize(
    ("names", "recoverable", "difference"),
    [
        (NAMES[:5], ALL[:5], "has 6 units, this run 5"),
        ([*NAMES, "lm"], [True] * 7, "has 6 units, this run 7"),
        ([*NAMES[:5], "lm"], ALL, "has a unit 'model.layers.5', this run 'lm'"),
        (NAMES, [True, True, False, True, True, True], "has a unit 'model.layers.2' with a recovery path, unlike this run"),
    ],
)
def test_a_trace_over_other_units_is_refused(path, names, recoverable, difference):
    record = LiftedRecord(path)
    with pytest.raises(ConfigError, match=f"trace='.*' {difference}: expected a trace over the same units"):
        record.most_lifted(names, np.array(recoverable))


@pytest.mark.parametrize(("where", "key", "value"), BREAKAGES)
def test_a_broken_trace_is_refused_by_its_name(path, where, key, value):
    break_trace(path, where, key, value)
    with pytest.raises(ConfigError, match=f"^trace={str(path)!r}: "):
        LiftedRecord(path)


def test_a_missing_trace_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="trace='/gone': .*no such trace"):
        LiftedRecord("/gone")


@pytest.mark.parametrize("settings", [{"recoverable": [False] * 4}, {"skipped": range(1, 21)}])
def test_a_trace_without_a_pair_has_no_promotion_ratio(tmp_path, settings):
    record = LiftedRecord(write_trace(tmp_path / "trace.jsonl", stationary(20, 4), **settings))
    with pytest.raises(ConfigError, match="no step or no recoverable unit"):
        record.promotion_ratio()


@dataclass(frozen=True)
class Plain:
    """Options of a trigger that knows no traces."""

    share: float = 0.5


@pytest.mark.parametrize("options", [Plain(), check_trigger("random", {"promotion_ratio": 0.1}), check_trigger("gnmr")])
def test_options_without_a_trace_are_returned_unchanged(options):
    assert resolve_trigger_options(options, NAMES, ALL) is options


@pytest.mark.parametrize("as_path", [True, False])
def test_options_of_random_take_the_ratio_of_the_trace(path, as_path):
    options = check_trigger("random", {"trace": path if as_path else str(path), "seed": 5})
    resolved = resolve_trigger_options(options, NAMES, ALL)
    ratio = LiftedRecord(path).promotion_ratio()
    assert resolved == check_trigger("random", {"promotion_ratio": ratio, "seed": 5})


def test_options_of_listed_take_units_and_ratio_of_the_trace(path):
    resolved = resolve_trigger_options(check_trigger("listed", {"trace": str(path)}), NAMES, ALL)
    trigger = make_trigger("listed", 6, GNMRConfig(max_o=2, alpha_init_fraction=0.0), options=resolved, names=NAMES)
    order = LiftedRecord(path).most_lifted(NAMES, ALL)
    assert trigger.options_dict()["units"] == order and trigger.options_dict()["trace"] is None
    lifted = 0
    for _ in range(1000):
        lifted += int(trigger.active.sum())
        trigger.step(np.ones(6))
    assert lifted == pytest.approx(1000 * lifted_steps(path).sum() / 190, abs=1)
