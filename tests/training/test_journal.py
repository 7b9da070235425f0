"""What a run writes to disk and reports: trace lines, odd windows, gradients that are not finite, units out of reach."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from conftest import trace_lines
from torch import nn

from hf_gnmr import Controller, GNMRConfig
from hf_gnmr.backends.units import Unit
from hf_gnmr.control.triggers import TRIGGERS
from hf_gnmr.training.gradients import Reading
from hf_gnmr.training.journal import Journal, OddWindows, say_not_finite, say_out_of_reach, write_summary

UNITS = [Unit(i, i, f"model.layers.{i}", nn.Module(), ()) for i in range(10)]


def reading_of(norms, seen=None, signal=None):
    norms = np.array(norms, dtype=float)
    seen = np.ones(len(norms), dtype=bool) if seen is None else np.array(seen)
    signal = None if signal is None else np.array(signal, dtype=float)
    return Reading(norms, seen, float(np.sqrt(np.square(norms).sum())), 1.5, 0.001, 1, 0.0, signal)


def write_step(journal, step, reading, decision, active, **changes):
    values = {"micro_batches": 1, "skipped": None, "withheld": False, "step_ms": 10.0, "controller_ms": 1.0}
    journal.step(step=step, reading=reading, decision=decision, active=active, **{**values, "recovery_bytes": 0, **changes})


def test_a_line_has_the_set_during_its_step_and_the_decision_appears_in_the_next(tmp_path):
    controller = Controller(3, GNMRConfig(max_o=1, alpha=1.5, alpha_init_fraction=0.0), total_steps=3)
    journal = Journal(tmp_path / "trace.jsonl", {"run_id": "x"}, None)
    decisions = []
    for step, norms in enumerate(([1, 1, 1], [1, 9, 1], [1, 1, 1]), start=1):
        active, reading = controller.active, reading_of(norms)
        decisions.append(controller.step(reading.norms, reading.seen))
        write_step(journal, step, reading, decisions[-1], active)
    journal.close()
    journal.close()
    _, lines = trace_lines(tmp_path)
    assert [line["active"] for line in lines] == [[], [], [1]]
    assert np.flatnonzero(decisions[1].active).tolist() == lines[2]["active"] and lines[1]["triggered"] == [1]
    assert lines[0]["loss"] == 1.5 and lines[0]["norms"] == [1.0, 1.0, 1.0]


def test_units_without_a_gradient_and_skipped_steps_have_no_figures(tmp_path):
    journal = Journal(tmp_path / "trace.jsonl", {"run_id": "x"}, None)
    reading = reading_of([2, 0], seen=[True, False], signal=[0.5, np.nan])
    write_step(journal, 1, reading, None, np.array([True, False]), skipped="a reason", more={"moved": 3})
    journal.close()
    (line,) = trace_lines(tmp_path)[1]
    assert line["norms"] == [2.0, None] and line["gnmr"] is None and line["triggered"] == []
    assert line["active"] == [0] and line["skipped"] == "a reason"
    assert line["moved"] == 3 and line["signal"] == [0.5, "nan"]


def test_a_full_disk_ends_the_trace_and_not_the_training(tmp_path, monkeypatch, capsys):
    journal = Journal(tmp_path / "trace.jsonl", {"run_id": "x"}, None)

    def full(self, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_gnmr.trace.file.TraceWriter.write", full)
    with pytest.warns(UserWarning, match="the trace ends before step 1"):
        write_step(journal, 1, reading_of([1]), None, np.array([False]))
    write_step(journal, 2, reading_of([1]), None, np.array([False]))
    journal.close()
    out = capsys.readouterr().out
    assert out.count("NO TRACE from step 1 on") == 1 and "No space left on device" in out


def test_a_resumed_run_reports_a_foreign_trace_and_keeps_it(tmp_path, capsys):
    Journal(tmp_path / "trace.jsonl", {"run_id": "other"}, None).close()
    (tmp_path / "summary.json").write_text("{}")
    Journal(tmp_path / "trace.jsonl", {"run_id": "mine"}, 3).close()
    out = capsys.readouterr().out
    assert "resumed at step 3, but" in out and "is not (or no longer) the trace of this run: a new one begins" in out
    assert "earlier trace lines were set aside" in out
    assert (tmp_path / "trace.1.jsonl").exists() and (tmp_path / "summary.1.json").exists()


def test_a_trace_that_others_change_is_reported_once_and_its_summary_keeps_its_number(tmp_path, capsys):
    journal = Journal(tmp_path / "trace.jsonl", {"run_id": "mine"}, None)
    write_step(journal, 1, reading_of([1]), None, np.array([False]))
    (tmp_path / "trace.jsonl").unlink()
    (tmp_path / "trace.jsonl").write_text("another's")
    with pytest.warns(UserWarning, match="was replaced by another file during the run"):
        write_step(journal, 2, reading_of([1]), None, np.array([False]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_step(journal, 3, reading_of([1]), None, np.array([False]))
    journal.close()
    assert capsys.readouterr().out.count("GNMR: step 2: ") == 1
    assert (journal.path.name, journal.summary.name) == ("trace.1.jsonl", "summary.1.json")
    assert (tmp_path / "trace.jsonl").read_text() == "another's"


def test_no_summary_without_a_trace(tmp_path):
    with pytest.warns(UserWarning, match="no summary.json: TraceError: .*no such trace"):
        assert write_summary(tmp_path / "trace.jsonl", 3) is None


@pytest.mark.parametrize(
    ("lengths", "reported"),
    [([2, 2, 2], True), ([2, 3, 2, 2, 2], True), ([2, 2], False), ([2, 4, 2, 2, 2, 2], False), ([4, 2, 2, 2], False)],
    ids=str,
)
def test_windows_are_reported_once_if_none_of_the_first_three_was_full(capsys, lengths, reported):
    windows = OddWindows(4)
    for length in lengths:
        windows.saw(length)
    out = capsys.readouterr().out
    assert out.count("NO DECISION so far") == reported
    assert not reported or "instead of gradient_accumulation_steps=4" in out


@pytest.mark.parametrize(
    ("norms", "withheld", "message"),
    [
        ([1, np.nan, 1], True, "step 7: gradient not finite in layer 1; the optimizer's update was withheld"),
        ([np.inf, 1, np.inf], False, "step 7: gradient not finite in layers 0, 2\n"),
        ([1, 1, 1], True, "step 7: gradient not finite outside the layers; the optimizer's update was withheld"),
        ([np.nan] * 10, False, "in layers 0, 1, 2, 3, 4, 5, 6, 7, …"),
    ],
)
def test_gradients_that_are_not_finite_are_reported(capsys, norms, withheld, message):
    say_not_finite(7, UNITS, reading_of(norms), withheld)
    assert message in capsys.readouterr().out


def test_finite_gradients_are_not_reported(capsys):
    say_not_finite(7, UNITS, reading_of([1, 2, 3]), False)
    assert capsys.readouterr().out == ""


def test_units_that_cannot_be_helped_are_reported_by_name(capsys):
    reading = reading_of([1, 1, 0, 1], seen=[True, True, False, True], signal=[1.0, np.nan, np.nan, 2.0])
    idle = np.array([True, False, True, False])
    say_out_of_reach(UNITS[:4], idle, reading, "jacobian")
    out = capsys.readouterr().out
    assert "LIFTING CHANGES NOTHING for 1 of 4 units (model.layers.0):" in out
    assert "NO SIGNAL of trigger 'jacobian' from 1 of 4 units (model.layers.1):" in out and "frozen embeddings" in out
    say_out_of_reach(UNITS[:4], np.zeros(4, dtype=bool), reading, "gsnr")
    assert capsys.readouterr().out.rstrip().endswith("from 1 of 4 units (model.layers.1): it will not lift them")
    say_out_of_reach(UNITS[:4], np.zeros(4, dtype=bool), reading_of([1, 1, 1, 1]), "gnmr")
    assert capsys.readouterr().out == ""


def test_the_reason_is_that_of_the_triggers_signal_whatever_the_triggers_name(capsys, monkeypatch):
    monkeypatch.setitem(TRIGGERS, "custom", type("Custom", (TRIGGERS["jacobian"],), {"name": "custom"}))
    reading = reading_of([1, 1], signal=[1.0, np.nan])
    say_out_of_reach(UNITS[:2], np.zeros(2, dtype=bool), reading, "custom")
    assert (
        "NO SIGNAL of trigger 'custom' from 1 of 2 units" in (out := capsys.readouterr().out) and "frozen embeddings" in out
    )
