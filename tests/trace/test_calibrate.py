"""Calibration: targets met where they can be, on held-out steps too; errors and notes where not."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import yaml
from synthetic import stationary, write_trace

from hf_gnmr.cli import main
from hf_gnmr.config import ConfigError
from hf_gnmr.run.recipe import find_recipe, load_recipe
from hf_gnmr.script import as_script
from hf_gnmr.trace.calibrate import calibrate, held_out_steps
from hf_gnmr.trace.replay import replay
from hf_gnmr.trace.series import read_series


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """3,000 steps of 12 units without drift."""
    path = tmp_path_factory.mktemp("t") / "trace.jsonl"
    return read_series(write_trace(path, stationary(3000, 12), alpha=1.5, alpha_init_fraction=0.0, max_o=3))


def tolerance(share, pairs=900 * 12):
    """Without drift: three standard errors of a count of pairs that come in threes (a spike lasts two steps, a lock one)."""
    return 3 * math.sqrt(3 / (share * pairs))


@pytest.mark.parametrize(
    ("wanted", "beta"),
    [
        (0.02, True),
        (0.02, False),
        *(pytest.param(share, beta, marks=pytest.mark.slow) for share in (0.005, 0.1) for beta in (True, False)),
    ],
)
def test_a_promotion_ratio_is_met_on_held_out_steps_too(series, wanted, beta):
    proposal = calibrate(series, "promotion_ratio", wanted, beta=beta)
    assert proposal.fitted == pytest.approx(wanted, rel=0.02)
    assert proposal.held_out == pytest.approx(wanted, rel=tolerance(wanted))
    assert (proposal.settings["beta"] is None) != beta and proposal.steps == (2100, 900)
    again = replay(series, proposal.settings)
    held = held_out_steps(len(series), 0.3)
    assert proposal.held_out == again.figures(series, held)["promotion_ratio"]
    assert np.mean(proposal.tenths) == pytest.approx(again.figures(series)["promotion_ratio"])


@pytest.mark.parametrize("wanted", [0.002, 0.01, 0.1])
def test_an_exceedance_is_met(series, wanted):
    proposal = calibrate(series, "exceedance", wanted)
    assert proposal.fitted == pytest.approx(wanted, rel=0.05) and proposal.held_out == pytest.approx(
        wanted, rel=tolerance(wanted)
    )
    figures = replay(series, proposal.settings).figures(series)
    assert figures["gnmr_exceedance"] == pytest.approx(wanted, rel=0.15)
    assert figures["delta_gnmr_exceedance"] == pytest.approx(wanted, rel=0.15)


def test_bytes_a_step_are_met(series):
    proposal = calibrate(series, "bytes_per_step", 60.0)  # each lifted unit adds 100
    assert proposal.fitted == pytest.approx(60.0, rel=0.02) and proposal.held_out == pytest.approx(60.0, rel=tolerance(0.05))


def test_a_first_phase_gets_a_separate_alpha_where_it_needs_one(tmp_path):
    norms = stationary(2000, 8)
    norms[:150] *= np.linspace(0.2, 3.0, 150)[:, None]  # norms that rise while the history is short
    proposal = calibrate(read_series(write_trace(tmp_path / "trace.jsonl", norms)), "exceedance", 0.01)
    assert proposal.settings["alpha_init_fraction"] == 0.1
    assert proposal.settings["alpha_init"] > 1.3 * proposal.settings["alpha"]
    level = calibrate(read_series(write_trace(tmp_path / "level.jsonl", stationary(2000, 8))), "exceedance", 0.01)
    assert level.settings["alpha_init_fraction"] == 0.0


@pytest.mark.parametrize(("size", "share"), [(1000, 0.3), (77, 0.5), (50, 0.1)])
def test_held_out_blocks_are_spread_over_the_run(size, share):
    held = held_out_steps(size, share)
    assert held.mean() == pytest.approx(share, abs=0.04)
    assert held[: size // 2].any() and held[size // 2 :].any()


@pytest.mark.slow
def test_the_command_and_its_fragment(series, tmp_path, capsys):
    recipe = tmp_path / "base.yaml"
    recipe.write_text("model: {name: builtin}\ndata: {name: builtin}\n")
    output = tmp_path / "tuned.yaml"
    arguments = ["calibrate", str(series.path), "--promotion-ratio", "0.02"]
    arguments += ["--output", str(output), "--extends", str(recipe)]
    assert main(arguments) == 0
    text = output.read_text()
    printed = capsys.readouterr().out
    assert text == as_script(printed) and "held out" in text and "open loop" in text
    tuned = load_recipe(output)
    fragment = yaml.safe_load(text)["gnmr"]
    assert dataclasses.asdict(tuned.gnmr) == fragment, "all that the figures depend on"
    assert fragment["max_o"] == 3 and printed.startswith("# hf-gnmr calibrate ") and "--promotion-ratio 0.02" in text
    deeper = tmp_path / "a" / "b.yaml"
    deeper.parent.mkdir()
    assert main([*arguments[:4], "--extends", str(recipe), "--output", str(deeper)]) == 2 and not deeper.exists()
    assert "expected a recipe below" in capsys.readouterr().err, "a recipe extends only what is below its folder"
    shipped = str(find_recipe("quickstart"))
    assert main([*arguments[:4], "--extends", shipped, "--output", str(deeper)]) == 0
    assert load_recipe(deeper).gnmr == tuned.gnmr, "the package's recipes are found wherever the fragment is"
    capsys.readouterr()
    assert main(arguments) == 2 and "exists already" in capsys.readouterr().err
    assert main([*arguments[:4], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == fragment


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--promotion-ratio", "0.9"], "cannot be met: with everything triggered it is 0.2499"),
        (["--promotion-ratio", "0"], "expected a value above 0"),
        (["--exceedance", "1.5"], "exceedance=1.5"),
        (["--exceedance", "0.1", "--held-out", "0"], "held_out=0.0"),
        (["--bytes-per-step", "soon"], "--bytes-per-step"),
    ],
)
def test_what_cannot_be_met_is_an_error(series, arguments, message, capsys):
    assert main(["calibrate", str(series.path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_is_not_met_is_reported_and_in_the_exit_status(tmp_path, capsys):
    warm = write_trace(tmp_path / "warm.jsonl", stationary(500, 6), fidelity_warmup=0.2)
    assert main(["calibrate", str(warm), "--promotion-ratio", "0.05"]) == 1
    assert "NOT MET: 2" in capsys.readouterr().out
    constant = write_trace(tmp_path / "constant.jsonl", np.ones((500, 6)))
    assert main(["calibrate", str(constant), "--exceedance", "0.01"]) == 1
    out = capsys.readouterr().out
    assert "NOT MET" in out and "alpha: 1.0001" in out, "above the tie, not at it"
    norms = stationary(500, 6)
    norms[np.random.default_rng(0).random(500) < 0.05, 0] = np.inf
    broken = write_trace(tmp_path / "broken.jsonl", norms)
    assert main(["calibrate", str(broken), "--exceedance", "0.005"]) == 2
    assert "norms that are not finite are" in capsys.readouterr().err
    assert main(["calibrate", str(broken), "--exceedance", "0.05"]) == 0
    assert main(["calibrate", str(warm), "--exceedance", "0.05", "--max-o", "400"]) == 2
    assert "max_o=400: expected at most 6, the trace's number of recoverable units" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["calibrate", str(warm), "--exceedance", "0.05", "--max-o", "x"])
    assert "'x' is not a number" in capsys.readouterr().err
    assert main(["calibrate", str(warm), "--exceedance", "0.05", "--extends", "gone.yaml"]) == 2


def test_alpha_below_one_and_a_hostile_path(tmp_path, capsys):
    folder = tmp_path / "a\ngnmr: {alpha: 9}\n"
    folder.mkdir()
    file = write_trace(folder / "trace.jsonl", stationary(500, 6), alpha=0.4, alpha_init_fraction=0.0, beta=None)
    assert main(["calibrate", str(file), "--exceedance", "0.9"]) == 0
    fragment = yaml.safe_load(capsys.readouterr().out)
    assert list(fragment) == ["gnmr"] and 0.5 < fragment["gnmr"]["alpha"] < 1 and fragment["gnmr"]["beta"] is None


def test_traces_that_lack_what_a_target_needs(tmp_path, capsys):
    nothing = write_trace(tmp_path / "a.jsonl", stationary(200, 3), bytes_added=0)
    assert main(["calibrate", str(nothing), "--bytes-per-step", "1kB"]) == 2
    assert "does not record what lifted units add, or they add nothing" in capsys.readouterr().err
    short = write_trace(tmp_path / "b.jsonl", stationary(30, 3))
    assert main(["calibrate", str(short), "--exceedance", "0.1"]) == 2 and "30 steps" in capsys.readouterr().err
    watched = read_series(write_trace(tmp_path / "c.jsonl", stationary(200, 2), recoverable=[False, False]))
    with pytest.raises(ConfigError, match="no recoverable unit"):
        calibrate(watched, "exceedance", 0.1)
