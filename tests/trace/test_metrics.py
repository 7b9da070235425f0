"""The figures of a run, from hand-made traces small enough to count by hand."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_gnmr.trace.file import TraceWriter, read_trace
from hf_gnmr.trace.metrics import summarise

ALPHA, BETA = 1.1, 1.5


def line(step, active=(), gnmr=(1.0, 1.0, 1.0), delta=(1.0, 1.0, 1.0), skipped=None, **fields):
    return {
        "step": step,
        "loss": 2.0 - step / 10,
        "grad_norm": 1.0,
        "norms": [1.0, 1.0, 1.0],
        "gnmr": None if skipped else list(gnmr),
        "delta_gnmr": None if skipped else list(delta),
        "risk": None,
        "alpha": None if skipped else ALPHA,
        "beta": None if skipped else BETA,
        "triggered": [],
        "active": list(active),
        "micro_batches": 1,
        "skipped": skipped,
        "update_withheld": False,
        "step_ms": 100.0,
        "controller_ms": 1.0,
        "recovery_bytes": 10 * len(active),
        **fields,
    }


def summary_of(tmp_path, lines, max_o=2, recoverable=(True, True, True)):
    header = {
        "units": [
            {"index": i, "layer": 2 * i, "name": f"l.{2 * i}", "recoverable": r, "bytes_low": 5, "bytes_recovery": 10}
            for i, r in enumerate(recoverable)
        ],
        "run_id": "x",
        "config": {},
        "total_steps": len(lines),
        "max_o": max_o,
        "trigger": "gnmr",
        "backend": "int8",
        "census": {"recovery_bytes_bound": 20, "resident_bytes": 7},
    }
    writer = TraceWriter(tmp_path / "trace.jsonl", header)
    for entry in lines:
        writer.write(entry)
    writer.close()
    return summarise(read_trace(tmp_path / "trace.jsonl"))


def test_shares_switches_and_dwell_by_hand(tmp_path):
    summary = summary_of(
        tmp_path,
        [
            line(1),
            line(2, active=[0, 1], gnmr=(1.1, 1.0, 0.9)),
            line(3, active=[1, 2], gnmr=(1.0, 9.0, "inf"), delta=(1.5, 1.4, "inf")),
            line(4, active=[1, 2], skipped="window of 2 micro-batches instead of 4"),
            line(5, active=[1]),
        ],
    )
    assert summary["steps"] == 5 and summary["skipped_steps"] == 1
    assert summary["promotion_ratio"] == pytest.approx((0 + 2 + 2 + 1) / (4 * 3))
    assert summary["hit_max_o_rate"] == 2 / 4
    assert summary["gnmr_exceedance"] == pytest.approx(3 / 12)
    assert summary["delta_gnmr_exceedance"] == pytest.approx(2 / 12)
    assert summary["switches"] == 2 + 2 + 0 + 1
    assert summary["dwell"] == {"runs": 3, "mean": pytest.approx(7 / 3), "longest": 4, "counts": {"1": 1, "2": 1, "4": 1}}
    assert summary["steps_on_recovery_by_layer"] == {"0": 1, "2": 3, "4": 1}, "layers by the model's own index"
    assert summary["peak_recovery_bytes"] == 20 and summary["resident_bytes"] == 7
    assert summary["controller_share"] == pytest.approx(0.01)
    assert (summary["first_loss"], summary["last_loss"]) == (1.9, 1.5)


def test_units_that_are_only_monitored_enter_no_share(tmp_path):
    summary = summary_of(tmp_path, [line(1), line(2, active=[0], gnmr=(2.0, 9.0, 9.0))], 1, (True, False, False))
    assert summary["promotion_ratio"] == 0.5
    assert summary["gnmr_exceedance"] == 0.5


def test_shares_without_a_denominator_are_none(tmp_path):
    summary = summary_of(tmp_path, [line(1)], 0, (False, False, False))
    assert summary["promotion_ratio"] is None and summary["hit_max_o_rate"] is None and summary["gnmr_exceedance"] is None
    (tmp_path / "trace.jsonl").unlink()
    empty = summary_of(tmp_path, [])
    assert empty["steps"] == 0 and empty["step_ms"] is None
    json.dumps(empty, allow_nan=False)


@given(st.lists(st.sets(st.integers(0, 2)), max_size=12))
def test_dwell_adds_up_to_the_active_steps(tmp_path_factory, sets):
    folder = tmp_path_factory.mktemp("t")
    summary = summary_of(folder, [line(i + 1, active=sorted(s)) for i, s in enumerate(sets)])
    dwell = summary["dwell"]
    assert sum(int(length) * count for length, count in dwell["counts"].items()) == sum(map(len, sets))
    assert summary["switches"] == sum(len(a ^ b) for a, b in itertools.pairwise(sets))


def test_missing_lines_are_counted_and_neither_switched_nor_dwelt_over(tmp_path):
    summary = summary_of(tmp_path, [line(1), line(2, active=[0]), line(5, active=[0, 1]), line(6, active=[0])])
    assert summary["missing_steps"] == 2
    assert summary["switches"] == 1 + 1
    assert summary["dwell"]["counts"] == {"1": 2, "2": 1}
