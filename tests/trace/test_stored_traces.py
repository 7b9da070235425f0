"""Traces and summaries as version 0.1.0 wrote them: still read, replayed exactly, summarised to the same figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_gnmr.files import plain
from hf_gnmr.trace.file import read_trace
from hf_gnmr.trace.metrics import summarise
from hf_gnmr.trace.replay import differences
from hf_gnmr.trace.series import read_series

STORED = Path(__file__).resolve().parents[1] / "stored"
TRACES = sorted(STORED.glob("traces/*.jsonl"))
RUNS = sorted(path.parent for path in STORED.glob("*/trace.jsonl"))
LAST_STEP = 8


def test_the_stored_files_are_found():
    assert len(TRACES) == 7 and len(RUNS) == 5


@pytest.mark.parametrize("path", [*TRACES, *RUNS], ids=lambda path: path.stem)
def test_a_replay_under_the_recorded_settings_equals_the_record(path):
    series = read_series(path)
    assert len(series) > 0 and differences(series) == []


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_the_summary_of_the_trace_is_the_stored_summary(run):
    stored = json.loads((run / "summary.json").read_text())
    summary = plain(summarise(read_trace(run / "trace.jsonl"), LAST_STEP))
    assert summary == {key: stored[key] for key in summary}
    assert list(summary) == [key for key in stored if key in summary], "the same order"
