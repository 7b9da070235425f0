"""The table of scalar fields: a new entry reaches the arrays, the summary and the page without another edit."""

from __future__ import annotations

import json

import numpy as np
import pytest
from synthetic import stationary, write_trace

from hf_gnmr.trace import fields
from hf_gnmr.trace.fields import Figure, Row, Scalar
from hf_gnmr.trace.metrics import summarise
from hf_gnmr.trace.report import page
from hf_gnmr.trace.series import read_series

KEYS = [
    *("steps", "skipped_steps", "missing_steps", "non_finite_steps", "withheld_updates", "backend", "trigger", "units"),
    *("recoverable_units", "max_o", "promotion_ratio", "hit_max_o_rate", "gnmr_exceedance", "delta_gnmr_exceedance"),
    *("switches", "dwell", "steps_on_recovery_by_layer", "peak_saved_bytes", "trigger_bytes", "gss_max"),
    *("peak_recovery_bytes", "recovery_bytes_bound", "resident_bytes", "bytes_low", "bytes_recovery", "step_ms"),
    *("controller_ms", "controller_share", "first_loss", "last_loss", "trace_cut"),
]
LABELS = [
    *("backend", "trigger", "steps", "skipped", "missing", "not finite", "units", "maxO", "promotion ratio"),
    *("hit-maxO rate", "GNMR ≥ α", "ΔGNMR ≥ β", "switches", "mean dwell, steps", "ΔM, peak bytes", "ΔM, bound"),
    *("resident bytes", "saved activations, peak bytes", "global spike score, highest", "controller, ms a step"),
    *("controller, share of the step", "first loss", "last loss"),
]


@pytest.fixture
def trace(tmp_path):
    """Ten steps, each with the field `stalled` and bytes of saved activations."""
    path = write_trace(tmp_path / "trace.jsonl", stationary(10, 3), max_o=1)
    header, *lines = path.read_text().splitlines()
    records = [{**json.loads(line), "stalled": 0.1 * i, "saved_bytes": 7 + i} for i, line in enumerate(lines)]
    path.write_text("\n".join([header, *map(json.dumps, records)]) + "\n")
    return path


def labels_of_rows(text):
    """Labels of the page's table of runs, in order."""
    body = text.partition("<tbody>")[2].partition("</tbody>")[0]
    return [row.partition("</td>")[0].replace("&amp;", "&") for row in body.split("<tr><td>")[1:]]


def test_the_summary_and_the_page_keep_their_order(trace):
    series = read_series(trace)
    assert list(summarise(series)) == KEYS
    assert labels_of_rows(page([series], ["run"])) == LABELS


def test_a_new_entry_reaches_series_summary_and_page(trace, monkeypatch):
    stalled = Scalar(
        "stalled",
        "share of the step that waited for data",
        (Figure("stalled_share", fields.mean, after="step_ms", row=Row("waiting", share=True, after="switches")),),
    )
    monkeypatch.setattr(fields, "SCALARS", (*fields.SCALARS, stalled))
    series = read_series(trace)
    assert series.stalled.tolist() == pytest.approx([0.1 * i for i in range(10)])
    summary = summarise(series)
    assert summary["stalled_share"] == pytest.approx(0.45)
    assert list(summary)[list(summary).index("step_ms") + 1] == "stalled_share"
    text = page([series], ["run"])
    assert "<td>waiting</td><td>45.00%</td>" in text
    assert labels_of_rows(text)[LABELS.index("switches") + 1] == "waiting"


def test_an_entry_without_places_comes_last_and_one_without_a_row_is_not_shown(trace, monkeypatch):
    plain = Scalar("stalled", "", (Figure("last_stalled", fields.last, row=Row("stalled last")),), attribute="waiting")
    hidden = Scalar("saved_bytes_low", "", (Figure("hidden", fields.peak),))
    monkeypatch.setattr(fields, "SCALARS", (*fields.SCALARS, plain, hidden))
    series = read_series(trace)
    assert series.waiting[-1] == pytest.approx(0.9) and np.isnan(series.saved_bytes_low).all()
    assert list(summarise(series)) == [*KEYS, "last_stalled", "hidden"] and summarise(series)["hidden"] is None
    assert labels_of_rows(page([series], ["run"])) == [*LABELS, "stalled last"]


@pytest.mark.parametrize(
    ("addition", "message"),
    [(("a", 2, None), "'a': exists already"), (("c", 3, "d"), "'c' with after='d': expected one of a, b")],
)
def test_a_key_that_exists_or_follows_no_key_is_an_error(addition, message):
    with pytest.raises(ValueError, match=message):
        fields.placed({"a": 0, "b": 1}, [addition])


def test_columns_have_the_types_that_the_table_states(trace):
    series = read_series(trace)
    for scalar in fields.SCALARS:
        column = getattr(series, scalar.column)
        assert column.shape == (10,) and column.dtype == np.dtype(scalar.dtype), scalar.name
        assert scalar.meaning, scalar.name
    assert series.saved_bytes[0] == 7.0 and np.isnan(series.saved_tokens).all()
    with pytest.raises(AttributeError, match="no attribute 'lossy'"):
        _ = series.lossy


@pytest.mark.parametrize(
    ("values", "expected"), [([], None), ([np.nan, np.nan], None), ([1.0, np.nan], 0.5), ([1.0, 2.0], 1.5)], ids=str
)
def test_a_mean_of_what_no_line_records_is_unknown_and_not_zero(values, expected):
    assert fields.mean(np.array(values), np.ones(len(values), dtype=bool)) == expected
