"""Diagnosis: figures of traces whose answer is known, and the advice that follows."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
from synthetic import stationary, write_trace

from hf_gnmr.cli import main
from hf_gnmr.config import ConfigError
from hf_gnmr.trace.bounds import block_interval, psi1, wilson
from hf_gnmr.trace.diagnose import diagnose
from hf_gnmr.trace.series import read_series
from hf_gnmr.trace.theorems import THRESHOLDS


def findings(path, norms, **settings):
    series = read_series(write_trace(path / "trace.jsonl", norms, **{"alpha_init_fraction": 0.0, **settings}))
    return {f.name.partition(" (")[0]: f for f in diagnose(series)}


def test_efficacy_is_the_share_of_selections_that_are_still_above_a_step_later(tmp_path):
    norms = np.ones((120, 4))
    for start in range(20, 110, 3):
        norms[start : start + 2, 1] = 3.0  # spikes of two steps: each first one is followed by another
    answer = findings(tmp_path, norms, alpha=1.3, beta=None, max_o=1)["controller efficacy"]
    selected = 60  # both steps of each of 30 spikes trigger
    assert answer.figures["selections"] == selected and answer.figures["pi"] == pytest.approx(0.5)
    assert answer.figures["units"] == [
        {"name": "model.layers.1", "selections": 60, "still_above": 30, "interval": wilson(30, 60)}
    ]
    assert answer.figures["rate_when_not_selected"] < 0.1 and "likelier than others" in answer.advice
    single = norms.copy()
    single[21::3, 1] = 1.0
    short = findings(tmp_path / "b", single, alpha=1.3, beta=None, max_o=1)["controller efficacy"]
    assert short.figures["pi"] == 0.0 and "nothing about the next step" in short.advice


def test_wilson_and_psi1():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3))
    assert wilson(0, 50)[0] == 0.0 and wilson(50, 50)[1] == 1.0
    assert psi1(np.full(5, 2.0)) == 0.0 and math.isnan(psi1(np.array([])))
    two = np.array([0.5, 1.5])  # |x| = 0.5 always: exp(0.5 / K) = 2
    assert psi1(two) == pytest.approx(0.5 / math.log(2), rel=1e-6)
    # For an exponential variable, mean exp(|x| / K) is 2 at a K between 1 and 2.
    assert 1.0 < psi1(np.random.default_rng(0).exponential(1.0, 200_000)) < 2.0


def test_the_bound_holds_with_the_reported_c_and_not_with_a_larger_one(tmp_path):
    answer = findings(tmp_path, stationary(600, 6), alpha=1.5)["exceedance bound"]
    table = answer.figures["table"]
    assert all(row["bound"] >= row["measured"] * (1 - 1e-6) for row in table)
    assert min(row["bound"] / row["measured"] for row in table if row["measured"]) == pytest.approx(1.0, rel=1e-3)
    assert answer.figures["largest_c"] > 0 and all(row["second_term"] < row["bound"] for row in table)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("level", "one α serves"), ("falling", "Norms fall"), ("rising", "Norms grow"), ("apart", "Units drift apart")],
)
def test_drift_is_seen(tmp_path, name, advice):
    level = stationary(400, 5, spikes=0.0)
    falling = level * np.linspace(3.0, 1.0, 400)[:, None]
    rising = level * np.linspace(1.0, 3.0, 400)[:, None]
    apart = (
        level * np.where(np.arange(5) % 2, 1.0, 0.0) * np.linspace(1, 3, 400)[:, None]
        + level * np.where(np.arange(5) % 2, 0.0, 1.0) * np.linspace(3, 1, 400)[:, None]
    )
    norms = {"level": level, "falling": falling, "rising": rising, "apart": apart}[name]
    answer = findings(tmp_path, norms)["history mean"]
    assert advice in answer.advice
    if name == "falling":
        assert answer.figures["drift"]["median"] == pytest.approx(1.1 / 2.9, rel=0.15)


def test_overlap_and_choices(tmp_path):
    answers = findings(tmp_path, stationary(500, 30), alpha=1.5, beta=1.5, max_o=3)
    kinds = answers["overlap of the triggers"].figures
    assert kinds["by_gnmr"] + kinds["by_delta_gnmr"] + kinds["by_both"] + kinds["not_finite"] == kinds["triggers"] > 100
    assert answers["units always or never chosen"].figures["always"] == []
    off = findings(tmp_path / "off", stationary(500, 6), alpha=1.5, beta=None)["overlap of the triggers"]
    assert off.figures["by_delta_gnmr"] == 0 and "Δ-GNMR is off" in off.advice
    norms = stationary(200, 4, spikes=0.0)
    norms[20:, 2] *= np.geomspace(2, 1e6, 180)
    stuck = findings(tmp_path / "stuck", norms, alpha=1.4, max_o=1)["units always or never chosen"]
    assert stuck.figures["always"] == ["model.layers.2"] and stuck.figures["share_of_the_busiest_tenth"] > 0.9
    assert stuck.figures["never"] == ["model.layers.3"], "as in the trace itself"
    flicker = np.ones((300, 3))
    flicker[20::2, 0] = 3.0
    answer = findings(tmp_path / "f", flicker, alpha=1.2, beta=None, t_lock=0, max_o=1)["oscillation"]
    assert "a longer T_lock would calm them" in answer.advice
    rates = answer.figures["switches_per_lifted_step"]
    assert rates["0"] == pytest.approx(2.0, rel=0.02) and rates["1"] < 0.1, "a lock of one step bridges every gap"


def test_not_finite_norms_and_unseen_units_break_nothing(tmp_path):
    norms = stationary(100, 4)
    norms[30, 1], norms[40, 2] = np.inf, np.nan
    seen = np.ones((100, 4), dtype=bool)
    seen[:, 3] = False
    answers = findings(tmp_path, norms, seen=seen)
    assert answers["overlap of the triggers"].figures["not_finite"] == 2
    assert math.isfinite(answers["exceedance bound"].figures["kappa_max"])
    silent = stationary(100, 4) * [1, 1, 0, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bound = findings(tmp_path / "silent", silent)["exceedance bound"]
        assert bound.figures["largest_c"] > 0.1 and all(row["bound"] < 1.01 for row in bound.figures["table"])


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_a_trace_without_a_finite_norm_above_0_has_no_bound(tmp_path, value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = findings(tmp_path, np.full((100, 3), value))
    assert answers["exceedance bound"].says.startswith("no unit has two finite norms")
    assert answers["history mean"].says.startswith("no finite norm")


def test_c_holds_for_each_unit_by_itself(tmp_path):
    norms = stationary(800, 5)
    norms[:, 0] = stationary(800, 1, seed=3, spikes=0.2)[:, 0]
    series = read_series(write_trace(tmp_path / "trace.jsonl", norms, alpha=1.5))
    figures = next(f for f in diagnose(series) if "Theorem 2" in f.name).figures
    c = figures["largest_c_of_each_unit"]
    assert 0 < c <= figures["largest_c"]

    def holds(c):
        for unit in range(5):
            n = series.norms[:, unit]
            kappa, t = psi1(n), np.arange(1, 800)

            def term(size, kappa=kappa):
                return min((size / kappa) ** 2, size / kappa)

            for alpha in THRESHOLDS:
                measured = np.mean(series.gnmr[1:, unit] >= alpha)
                bound = np.exp(-c * term(alpha - 1)) + np.mean(2 * np.exp(-c * t * term((alpha - 1) / alpha)))
                if measured > bound:
                    return False
        return True

    assert holds(0.999 * c) and not holds(1.01 * c)


@pytest.mark.parametrize(
    ("trigger", "options"), [("random", {"promotion_ratio": 0.3}), ("all", None), ("static", {"warmup": 20})]
)
def test_triggers_that_do_not_use_thresholds_are_given_no_advice_about_them(tmp_path, trigger, options):
    answers = findings(tmp_path, stationary(300, 6), trigger=trigger, options=options, max_o=3)
    for name in answers.keys() - {"exceedance bound", "history mean"}:
        assert not any(words in answers[name].advice for words in ("raise α", "T_lock", "adds next to nothing", "lower"))


def test_intervals_of_events_in_runs_are_wider():
    generator = np.random.default_rng(0)
    good = np.repeat(generator.random(60) < 0.5, 20)  # sixty spells of twenty equal steps each
    numbers = np.ones(1200)
    low, high = block_interval(good.astype(float), numbers)
    narrow = wilson(int(good.sum()), 1200)
    assert high - low > 2.5 * (narrow[1] - narrow[0])
    alone = generator.random(1200) < 0.5
    low, high = block_interval(alone.astype(float), numbers)
    narrow = wilson(int(alone.sum()), 1200)
    assert high - low < 1.4 * (narrow[1] - narrow[0])
    assert block_interval(np.zeros(5), np.ones(5)) == wilson(0, 5)


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
