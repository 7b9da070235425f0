"""Replays: exactly the recorded decisions under the recorded settings, and what other settings would have decided."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import load_int8, with_lora
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import stationary, write_trace

from hf_gnmr import GNMRCallback
from hf_gnmr.cli import main
from hf_gnmr.config import ConfigError, GNMRConfig
from hf_gnmr.control.gnmr import Controller
from hf_gnmr.trace.replay import differences, recorded, replay
from hf_gnmr.trace.replay_table import settings_grid
from hf_gnmr.trace.series import read_series


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    alpha=st.floats(0.5, 2.0),
    beta=st.none() | st.floats(0.5, 2.0),
    delta=st.integers(1, 7),
    max_o=st.integers(0, 5),
    t_lock=st.integers(0, 3),
    phase=st.sampled_from([0.0, 0.1, 0.5]),
    warmup=st.sampled_from([0.0, 0.2]),
    trigger=st.sampled_from(["gnmr", "none", "all", "gsnr", "jacobian", "random", "static"]),
)
def test_a_replay_under_the_recorded_settings_is_the_record(
    tmp_path_factory, seed, alpha, beta, delta, max_o, t_lock, phase, warmup, trigger
):
    generator = np.random.default_rng(seed)
    norms = generator.lognormal(0, 1, (30, 5))
    norms[generator.random((30, 5)) < 0.05] = np.inf
    norms[generator.random((30, 5)) < 0.05] = np.nan
    norms[generator.random((30, 5)) < 0.05] = 0.0
    seen = generator.random((30, 5)) > 0.1
    options = {"random": {"promotion_ratio": max_o / 10, "seed": seed}, "static": {"warmup": 4}}.get(trigger)
    path = write_trace(
        tmp_path_factory.mktemp("t") / "trace.jsonl",
        norms,
        trigger=trigger,
        options=options,
        seen=seen,
        skipped=tuple(np.flatnonzero(generator.random(30) < 0.1) + 1),
        signal=generator.random((30, 5)) if trigger in ("gsnr", "jacobian") else None,
        recoverable=[True, True, False, True, True],
        alpha=alpha,
        beta=beta,
        delta=delta,
        max_o=max_o,
        t_lock=t_lock,
        alpha_init_fraction=phase,
        fidelity_warmup=0.0 if trigger == "static" else warmup,
    )
    series = read_series(path)
    assert differences(series) == []
    figures = recorded(series).figures(series)
    assert figures == replay(series, recorded_trigger=True).figures(series) and figures["unit_steps_as_recorded"] == 1.0


@pytest.mark.parametrize(
    "changes", [{"alpha": 1.1}, {"delta": 3, "beta": None}, {"max_o": 3, "t_lock": 2, "alpha_init_fraction": 0.0}]
)
def test_other_settings_are_what_a_controller_with_them_decides(tmp_path, changes):
    norms = stationary(60, 6)
    series = read_series(write_trace(tmp_path / "trace.jsonl", norms, alpha=1.5, alpha_init_fraction=0.1))
    controller = Controller(6, GNMRConfig(**{**series.header["config"], **changes}), total_steps=60)
    replayed = replay(series, changes)
    for step in range(60):
        assert np.array_equal(replayed.active[step], controller.active)
        decision = controller.step(norms[step])
        assert np.array_equal(replayed.gnmr[step], decision.gnmr) and np.array_equal(replayed.risk[step], decision.risk)
        assert np.array_equal(replayed.triggered[step], decision.triggered)


def test_the_trace_of_a_real_run(tiny, trainer_for, tmp_path):
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(max_o=1, alpha=0.9, alpha_init_fraction=0.0), max_steps=8).train()
    series = read_series(tmp_path / "run")
    assert differences(series) == [] and series.active.any()
    figures, summary = recorded(series).figures(series), json.loads((tmp_path / "run" / "summary.json").read_text())
    for name in ("promotion_ratio", "hit_max_o_rate", "gnmr_exceedance", "delta_gnmr_exceedance", "switches"):
        assert figures[name] == summary[name]
    assert figures["mean_recovery_bytes"] == pytest.approx(series.recovery_bytes.mean())


def test_a_resumed_run(tiny, trainer_for, tmp_path):
    settings = {"max_o": 1, "alpha": 0.9, "alpha_init": 1.2, "alpha_init_fraction": 0.3}
    for resume in (None, str(tmp_path / "run" / "checkpoint-4")):
        trainer = trainer_for(
            with_lora(load_int8(tiny)), GNMRCallback(**settings), max_steps=8, save_strategy="steps", save_steps=4
        )
        trainer.train(resume_from_checkpoint=resume)
    series = read_series(tmp_path / "run")
    assert len(series) == 8 and differences(series) == []


PHASES = {"alpha": 1.2, "alpha_init": 4.0, "alpha_init_fraction": 0.25, "max_o": 2}


@pytest.mark.parametrize("missing", [range(1, 201), range(150, 260)])
def test_schedules_go_by_the_steps_number_where_lines_are_missing(tmp_path, missing):
    norms = stationary(400, 5)
    whole = read_series(write_trace(tmp_path / "whole.jsonl", norms, **PHASES))
    part = read_series(write_trace(tmp_path / "part.jsonl", norms, missing=missing, **PHASES))
    replayed = replay(part, {"max_o": 2})
    kept = np.isin(whole.step, part.step)
    assert np.array_equal(replayed.alpha, whole.alpha[kept])
    assert (replayed.active == whole.active[kept]).mean() > 0.99, "except for the first locks"


def test_a_history_that_begins_with_a_late_trace_begins_the_first_phase_too(tmp_path):
    late = write_trace(tmp_path / "late.jsonl", stationary(100, 5), total_steps=400, **PHASES)
    text = late.read_text().splitlines()
    moved = [json.dumps({**json.loads(line), "step": json.loads(line)["step"] + 300}) for line in text[1:]]
    late.write_text("\n".join([text[0], *moved]) + "\n")
    assert differences(read_series(late)) == ["the trace begins at step 301: the history before it is unknown"]


def test_what_differs_from_the_record_is_reported(tmp_path):
    norms = stationary(60, 3)
    file = write_trace(tmp_path / "trace.jsonl", norms, alpha=1.1, alpha_init_fraction=0.0)
    text = file.read_text().splitlines()
    record = json.loads(text[21])
    record["active"] = [0, 1, 2]
    (tmp_path / "changed.jsonl").write_text("\n".join([*text[:21], json.dumps(record), *text[22:]]) + "\n")
    assert differences(read_series(tmp_path / "changed.jsonl")) == ["active differs in 1 of 60 steps, first in step 21"]
    (tmp_path / "gap.jsonl").write_text("\n".join([*text[:21], *text[22:]]) + "\n")
    assert differences(read_series(tmp_path / "gap.jsonl"))[0].startswith("steps are missing after step 20: ")
    header = json.loads(text[0])
    del header["trigger_options"]
    header["trigger"] = "random"
    (tmp_path / "old.jsonl").write_text("\n".join([json.dumps(header), *text[1:]]) + "\n")
    assert "the header has no options of trigger 'random'" in differences(read_series(tmp_path / "old.jsonl"))[0]


def test_the_command(tmp_path, capsys):
    write_trace(tmp_path / "trace.jsonl", stationary(80, 5), alpha=1.3, alpha_init_fraction=0.0, max_o=2)
    assert main(["replay", str(tmp_path), "--set", "alpha=1.2,1.6", "--set", "max_o=1,2", "--set", "beta=off"]) == 0
    out = capsys.readouterr().out
    assert out.count("alpha=") == 4 and "alpha=1.6, max_o=2, beta=off" in out and "open loop" in out
    assert "equals the recorded decisions exactly" in out and "4 settings over 80 steps" in out
    assert main(["replay", str(tmp_path), "--set", "alpha=1.2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [r["settings"] for r in rows] == ["recorded", "alpha=1.2"]
    assert rows[1]["promotion_ratio"] > rows[0]["promotion_ratio"]
    assert main(["replay", str(tmp_path / "none")]) == 2 and "no such trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "alpha"], "--set alpha: expected FIELD=VALUE"),
        (["--set", "gamma=1"], "--set gamma=1: expected FIELD=VALUE"),
        (["--set", "alpha=high"], "expected a number (or off: no β), got 'high'"),
        (["--set", "alpha=-1"], "alpha=-1"),
        (["--set", "max_o=1.5"], "max_o=1.5"),
        (["--set", "max_o=9"], "max_o=9: expected at most 5, the trace's number of recoverable units"),
        (["--set", "alpha=1", "--set", "alpha=2"], "alpha is set twice"),
    ],
)
def test_wrong_settings_of_the_command_are_errors(tmp_path, capsys, arguments, message):
    write_trace(tmp_path / "trace.jsonl", stationary(20, 5), max_o=2)
    assert main(["replay", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_grid_of_settings():
    assert settings_grid([]) == [{}]
    assert settings_grid(["beta=off,1.5", "delta=3"]) == [{"beta": None, "delta": 3}, {"beta": 1.5, "delta": 3}]
    with pytest.raises(ConfigError, match="--set delta=x"):
        settings_grid(["delta=x"])


def test_the_commands_do_not_import_torch(tmp_path):
    write_trace(tmp_path / "trace.jsonl", stationary(120, 3))
    code = (
        "import sys; from hf_gnmr.cli import main; "
        f"assert main(['replay', {str(tmp_path)!r}]) == 0; assert main(['diagnose', {str(tmp_path)!r}]) == 0; "
        f"assert main(['calibrate', {str(tmp_path)!r}, '--exceedance', '0.05']) == 0; "
        "assert not {'torch', 'transformers', 'bitsandbytes'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
