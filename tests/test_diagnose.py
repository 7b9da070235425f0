"""Diagnosis: figures of traces whose answer is known, and the advice that follows."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from synthetic import stationary, write_trace

from hf_gnmr.cli import main
from hf_gnmr.config import ConfigError
from hf_gnmr.diagnose import diagnose, psi1, wilson
from hf_gnmr.series import read_series


def found(path, norms, **settings):
    series = read_series(write_trace(path / "trace.jsonl", norms, **{"alpha_init_fraction": 0.0, **settings}))
    return {f.name.partition(" (")[0]: f for f in diagnose(series)}


def test_efficacy_is_the_share_of_selections_that_are_still_above_a_step_later(tmp_path):
    norms = np.ones((120, 4))
    for start in range(20, 110, 3):
        norms[start : start + 2, 1] = 3.0  # spikes of two steps: each first one is followed by another
    answer = found(tmp_path, norms, alpha=1.3, beta=None, max_o=1)["controller efficacy"]
    selected = 60  # both steps of each of 30 spikes trigger
    assert answer.figures["selections"] == selected and answer.figures["pi"] == pytest.approx(0.5)
    assert answer.figures["units"] == [
        {"name": "model.layers.1", "selections": 60, "still_above": 30, "interval": wilson(30, 60)}
    ]
    assert answer.figures["rate_when_not_selected"] < 0.1 and "still at risk" in answer.advice
    single = norms.copy()
    single[21::3, 1] = 1.0
    short = found(tmp_path / "b", single, alpha=1.3, beta=None, max_o=1)["controller efficacy"]
    assert short.figures["pi"] == 0.0 and "nothing about the next step" in short.advice


def test_wilson_and_psi1():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3))
    assert wilson(0, 50)[0] == 0.0 and wilson(50, 50)[1] == 1.0
    assert psi1(np.full(5, 2.0)) == 0.0 and math.isnan(psi1(np.array([])))
    two = np.array([0.5, 1.5])  # |x| = 0.5 always: exp(0.5 / K) = 2
    assert psi1(two) == pytest.approx(0.5 / math.log(2), rel=1e-6)
    # Of an exponential variable |x| / K has mean exp 2 at a K between 1 and 2.
    assert 1.0 < psi1(np.random.default_rng(0).exponential(1.0, 200_000)) < 2.0


def test_the_bound_holds_with_the_c_that_is_told_and_not_with_a_larger_one(tmp_path):
    answer = found(tmp_path, stationary(600, 6), alpha=1.5)["exceedance bound"]
    table = answer.figures["table"]
    assert all(row["bound"] >= row["measured"] * (1 - 1e-6) for row in table)
    assert min(row["bound"] / row["measured"] for row in table if row["measured"]) == pytest.approx(1.0, rel=1e-3)
    assert answer.figures["largest_c"] > 0 and all(row["second_term"] < row["bound"] for row in table)


def test_drift_is_seen(tmp_path):
    level = stationary(400, 5, spikes=0.0)
    falling = level * np.linspace(3.0, 1.0, 400)[:, None]
    rising = level * np.linspace(1.0, 3.0, 400)[:, None]
    apart = level * np.where(np.arange(5) % 2, 1.0, 0.0) * np.linspace(1, 3, 400)[:, None] + level * np.where(
        np.arange(5) % 2, 0.0, 1.0
    ) * np.linspace(3, 1, 400)[:, None]
    for name, norms, words in (
        ("level", level, "one α serves"), ("falling", falling, "Norms fall"), ("rising", rising, "Norms grow"),
        ("apart", apart, "Units drift apart"),
    ):
        answer = found(tmp_path / name, norms)["history mean"]
        assert words in answer.advice, (name, answer)
        if name == "falling":
            assert answer.figures["drift"]["median"] == pytest.approx(1.1 / 2.9, rel=0.15)


def test_overlap_and_choices(tmp_path):
    answers = found(tmp_path, stationary(500, 30), alpha=1.5, beta=1.5, max_o=3)
    kinds = answers["overlap of the triggers"].figures
    assert kinds["by_gnmr"] + kinds["by_delta_gnmr"] + kinds["by_both"] + kinds["not_finite"] == kinds["triggers"] > 100
    assert answers["units always or never chosen"].figures["always"] == []
    off = found(tmp_path / "off", stationary(500, 6), alpha=1.5, beta=None)["overlap of the triggers"]
    assert off.figures["by_delta_gnmr"] == 0 and "Δ-GNMR is off" in off.advice
    norms = stationary(200, 4, spikes=0.0)
    norms[20:, 2] *= np.geomspace(2, 1e6, 180)
    stuck = found(tmp_path / "stuck", norms, alpha=1.4, max_o=1)["units always or never chosen"]
    assert stuck.figures["always"] == [] or stuck.figures["always"] == ["model.layers.2"]
    assert set(stuck.figures["never"]) <= {"model.layers.0", "model.layers.1", "model.layers.3"}
    flicker = np.ones((300, 3))
    flicker[20::2, 0] = 3.0
    assert "flicker" in found(tmp_path / "f", flicker, alpha=1.2, beta=None, t_lock=0, max_o=1)["oscillation"].advice


def test_not_finite_norms_and_unseen_units_break_nothing(tmp_path):
    norms = stationary(100, 4)
    norms[30, 1], norms[40, 2] = np.inf, np.nan
    seen = np.ones((100, 4), dtype=bool)
    seen[:, 3] = False
    answers = found(tmp_path, norms, seen=seen)
    assert answers["overlap of the triggers"].figures["not_finite"] == 2
    assert math.isfinite(answers["exceedance bound"].figures["kappa_max"])


def test_the_command(tmp_path, capsys):
    write_trace(tmp_path / "trace.jsonl", stationary(100, 4))
    assert main(["diagnose", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n  -> ") == 6 and "Theorem 1" in out and "Theorem 2" in out
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 6
    empty = read_series(write_trace(tmp_path / "none.jsonl", stationary(3, 2), skipped=(1, 2, 3)))
    with pytest.raises(ConfigError, match="nothing to diagnose"):
        diagnose(empty)
    assert main(["diagnose", str(tmp_path / "nowhere")]) == 2 and "no such trace" in capsys.readouterr().err
