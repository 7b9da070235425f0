"""The controller against worked vectors, a slow reference, and the properties it promises."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_controller import ReferenceController

from hf_gnmr.config import ConfigError, GNMRConfig
from hf_gnmr.control.controller import top_units
from hf_gnmr.control.gnmr import Controller
from hf_gnmr.control.triggers import make_trigger

pytestmark = pytest.mark.filterwarnings("ignore:max_o=0")

VECTORS = [json.loads(line) for line in (pathlib.Path(__file__).parent / "controller_vectors.jsonl").open()]


def floats(values):
    return np.array([float(v) for v in values])


@pytest.mark.parametrize("case", VECTORS, ids=[case["name"] for case in VECTORS])
def test_every_step_of_the_worked_vectors(case):
    settings_of_case = dict(case["config"])
    recoverable = settings_of_case.pop("recoverable", None)
    config = GNMRConfig(
        alpha_init_fraction=settings_of_case.pop("alpha_warmup_steps") / 1000,
        fidelity_warmup=settings_of_case.pop("fidelity_warmup_steps", 0) / 1000,
        **settings_of_case,
    )
    controller = Controller(case["n_units"], config, total_steps=1000, recoverable=recoverable)
    for norms, expected in zip(case["norms"], case["expected"], strict=True):
        decision = controller.step(floats(norms))
        assert decision.step == expected["t"]
        assert decision.alpha == expected["alpha"]
        np.testing.assert_allclose(decision.gnmr, floats(expected["gnmr"]), rtol=1e-12)
        np.testing.assert_allclose(decision.delta_gnmr, floats(expected["delta_gnmr"]), rtol=1e-12)
        np.testing.assert_allclose(decision.risk, floats(expected["risk"]), rtol=1e-12)
        assert np.flatnonzero(decision.triggered).tolist() == expected["triggered"]
        assert np.flatnonzero(decision.active).tolist() == expected["active_next"]


# Few distinct values, so that ties, zeros and repeated spikes are common; occasionally any float.
norm = st.one_of(
    st.sampled_from([0.0, 1.0, 2.0, 4.0, 8.0, 0.5, 1024.0, math.inf, math.nan]),
    st.floats(min_value=1e-6, max_value=1e6),
)


@st.composite
def scenario(draw):
    units = draw(st.integers(1, 6))
    steps = draw(st.integers(1, 25))
    return {
        "units": units,
        "norms": draw(st.lists(st.lists(norm, min_size=units, max_size=units), min_size=steps, max_size=steps)),
        "recoverable": draw(st.lists(st.booleans(), min_size=units, max_size=units)),
        "alpha": draw(st.sampled_from([0.4, 0.9, 1.1, 1.5])),
        "alpha_init": draw(st.sampled_from([1.5, 3.0])),
        "alpha_init_steps": draw(st.integers(0, 5)),
        "beta": draw(st.sampled_from([None, 1.3, 2.0])),
        "delta": draw(st.integers(1, 6)),
        "max_o": draw(st.integers(0, 7)),
        "t_lock": draw(st.integers(0, 4)),
        "fidelity_warmup_steps": draw(st.integers(0, 4)),
    }


def controller_and_reference(s):
    config = GNMRConfig(
        alpha=s["alpha"],
        alpha_init=s["alpha_init"],
        alpha_init_fraction=s["alpha_init_steps"] / 1000,
        beta=s["beta"],
        delta=s["delta"],
        max_o=s["max_o"],
        t_lock=s["t_lock"],
        fidelity_warmup=s["fidelity_warmup_steps"] / 1000,
    )
    controller = Controller(s["units"], config, total_steps=1000, recoverable=s["recoverable"])
    names = (
        "alpha",
        "alpha_init",
        "alpha_init_steps",
        "beta",
        "delta",
        "max_o",
        "t_lock",
        "fidelity_warmup_steps",
        "recoverable",
    )
    return controller, ReferenceController(s["units"], **{name: s[name] for name in names})


@settings(max_examples=300, deadline=None)
@given(scenario())
def test_agrees_with_the_slow_reference(s):
    controller, reference = controller_and_reference(s)
    assert np.flatnonzero(controller.active).tolist() == reference.initial_active()
    for norms in s["norms"]:
        decision, expected = controller.step(norms), reference.step(norms)
        assert decision.alpha == expected["alpha"]
        for name in ("gnmr", "delta_gnmr", "risk"):
            np.testing.assert_allclose(getattr(decision, name), expected[name], rtol=1e-12)
        if near_tie(expected["risk"]):
            return  # two risks closer than rounding: either order is right, and the histories diverge from here
        assert np.flatnonzero(decision.triggered).tolist() == expected["triggered"]
        assert np.flatnonzero(decision.active).tolist() == expected["active"]


def near_tie(risk):
    finite = sorted([r for r in risk if math.isfinite(r)] + [1.0])
    return any(0 < b - a < 1e-9 * max(1.0, b) for a, b in itertools.pairwise(finite))


@settings(max_examples=200, deadline=None)
@given(scenario())
def test_budget_and_history_are_never_violated(s):
    controller, _ = controller_and_reference(s)
    for t, norms in enumerate(s["norms"], start=1):
        decision = controller.step(norms)
        assert not (decision.active & ~np.array(s["recoverable"])).any()
        if t + 1 > s["fidelity_warmup_steps"]:
            assert decision.active.sum() <= s["max_o"]
        assert np.isfinite(controller.monitor.norm_sum).all()
        assert np.isfinite(controller.monitor.window).all()
        assert not np.isnan(decision.risk).any()
        bad = ~np.isfinite(np.array(norms))
        assert np.isposinf(decision.gnmr[bad]).all() and np.isposinf(decision.delta_gnmr[bad]).all()


@settings(max_examples=150, deadline=None)
@given(scenario(), st.data())
def test_state_through_json_continues_exactly(s, data):
    cut = data.draw(st.integers(0, len(s["norms"])))
    straight, _ = controller_and_reference(s)
    first, _ = controller_and_reference(s)
    for norms in s["norms"][:cut]:
        straight.step(norms)
        first.step(norms)
    text = json.dumps(first.state_dict(), sort_keys=True, allow_nan=False)
    resumed, _ = controller_and_reference(s)
    resumed.load_state_dict(json.loads(text))
    np.testing.assert_array_equal(resumed.active, straight.active)
    for norms in s["norms"][cut:]:
        expected, decision = straight.step(norms), resumed.step(norms)
        for name in ("gnmr", "delta_gnmr", "risk", "triggered", "active"):
            np.testing.assert_array_equal(getattr(expected, name), getattr(decision, name))


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, math.inf]), min_size=1, max_size=12), st.integers(0, 13))
def test_seats_go_by_risk_then_by_index(risk, seats):
    pool = np.arange(len(risk))
    chosen = top_units(np.array(risk), pool, seats)
    assert sorted(chosen.tolist()) == sorted(sorted(pool.tolist(), key=lambda b: (-risk[b], b))[:seats])


def test_a_constant_loss_scale_changes_no_ratio_and_one_spike_is_seen():
    controller = Controller(3, GNMRConfig(max_o=1, alpha_init_fraction=0))
    for _ in range(8):
        calm = controller.step([1e-3, 5.0, 2e4])
        assert not calm.triggered.any()
    spike = controller.step([1e-3, 5.0, 2e6])
    assert np.flatnonzero(spike.triggered).tolist() == [2]
    assert np.flatnonzero(spike.active).tolist() == [2]


@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [math.nan, math.inf]], ids=["nan", "inf", "nan, then inf"])
def test_one_non_finite_norm_lifts_that_unit_and_leaves_the_history_clean(bad):
    controller = Controller(4, GNMRConfig(max_o=2, alpha_init_fraction=0, t_lock=0))
    for norm_of_unit_1 in bad:
        for _ in range(3):
            controller.step([1.0, 1.0, 1.0, 1.0])
        decision = controller.step([1.0, norm_of_unit_1, 1.0, 1.0])
        assert np.flatnonzero(decision.active).tolist() == [1]
        after = controller.step([1.0, 1.0, 1.0, 1.0])
        assert np.isfinite(after.gnmr).all() and after.gnmr[1] == 1.0
        assert not after.active.any()


@pytest.mark.parametrize(("name", "expected"), [("none", [False] * 3), ("all", [True, False, True])])
def test_fixed_triggers_score_but_never_move(name, expected):
    trigger = make_trigger(name, 3, GNMRConfig(max_o=1, alpha_init_fraction=0), recoverable=np.array([True, False, True]))
    assert trigger.active.tolist() == expected
    for norms in [[1.0, 1.0, 1.0]] * 3 + [[1.0, 99.0, 1.0]]:
        decision = trigger.step(norms)
        assert decision.active.tolist() == expected
    assert decision.gnmr[1] == 99.0


def test_an_extended_run_starts_no_phase_a_second_time():
    config = GNMRConfig(max_o=1, fidelity_warmup=0.5, alpha_init_fraction=0.5)
    short = Controller(3, config, total_steps=4)
    for _ in range(4):
        short.step([1.0, 1.0, 1.0])
    longer = Controller(3, config, total_steps=20)
    longer.load_state_dict(short.state_dict())
    for _ in range(4):
        decision = longer.step([1.0, 1.0, 1.0])
        assert decision.alpha == config.alpha and not decision.active.any()


def test_wrong_norms_are_refused_by_name():
    controller = Controller(3, GNMRConfig(alpha_init_fraction=0))
    with pytest.raises(ValueError, match=r"shape \(2,\).*\(3,\)"):
        controller.step([1.0, 2.0])
    with pytest.raises(ValueError, match="norm of unit 1 is -1.0"):
        controller.step([1.0, -1.0, 1.0])


def test_state_of_another_setup_is_refused_by_name():
    state = Controller(3, GNMRConfig(alpha_init_fraction=0)).state_dict()
    with pytest.raises(ConfigError, match="num_units=3, this run has 4"):
        Controller(4, GNMRConfig(alpha_init_fraction=0)).load_state_dict(state)
    with pytest.raises(ConfigError, match="version 99"):
        Controller(3, GNMRConfig(alpha_init_fraction=0)).load_state_dict({**state, "version": 99})
    with pytest.raises(ConfigError, match="trigger='gnmr', this run has 'none'"):
        make_trigger("none", 3, GNMRConfig(alpha_init_fraction=0)).load_state_dict(state)
    with pytest.raises(ConfigError, match="config="):
        Controller(3, GNMRConfig(alpha_init_fraction=0, alpha=1.2)).load_state_dict(state)


@pytest.mark.parametrize("field", GNMRConfig().to_dict())
def test_a_setting_that_is_younger_than_the_state_had_its_default(field):
    """Every field in turn stands for one that was added after the state was written."""
    settings = {"alpha_init_fraction": 0.025, "t_lock": 1}
    state = Controller(3, GNMRConfig(**settings), total_steps=100).state_dict()
    older = {**state, "config": {k: v for k, v in state["config"].items() if k != field}}
    Controller(3, GNMRConfig(**settings), total_steps=100).load_state_dict(older)
    other = {"max_o": 2, "delta": 7, "t_lock": 2}.get(field, 0.5)
    with pytest.raises(ConfigError, match="config="):
        Controller(3, GNMRConfig(**{**settings, field: other}), total_steps=100).load_state_dict(older)


def spiking_norms(units, steps):
    """One unit in ten spikes in each step; (steps, units), the same pattern for every number of units."""
    norms = np.tile(np.arange(1.0, 11.0), (steps, units // 10))
    for step in range(steps):
        norms[step, step % 10 :: 10] *= 10
    return norms


@pytest.mark.parametrize("units", [10, 10_000])
def test_the_state_holds_a_window_and_a_few_numbers_per_unit(units):
    delta = 5
    controller = Controller(units, GNMRConfig(max_o=0.25, alpha_init_fraction=0, delta=delta))
    for norms in spiking_norms(units, 40):
        controller.step(norms)
    sizes = {name: np.size(value) for name, value in controller.state_dict().items() if isinstance(value, list)}
    assert sizes.pop("window") == delta * units
    assert set(sizes.values()) == {units}
    held = {**vars(controller), **vars(controller.monitor), **vars(controller.policy)}
    assert sum(value.size for value in held.values() if isinstance(value, np.ndarray)) <= (delta + 7) * units


def instructions(controller, norms):
    """Python instructions that the decisions over these norms run, in the package and in what it calls."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for row in norms:
            controller.step(row)
    finally:
        sys.settrace(before)
    return count


def test_a_decision_runs_no_python_per_unit():
    """What a decision costs in time is measured by eval/controller_cost.py."""
    counts = []
    for units in (10, 10_000):
        controller = Controller(units, GNMRConfig(max_o=0.25, alpha_init_fraction=0))
        counts.append(instructions(controller, spiking_norms(units, 12)))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("trigger", ["gnmr", "none", "all"])
@pytest.mark.parametrize(("delta", "units", "fits"), [(10_000, 150, True), (10_000, 151, False), (100, 20_160, False)])
def test_a_history_is_bounded_before_it_is_made(trigger, delta, units, fits):
    config = GNMRConfig(delta=delta, alpha_init_fraction=0)
    if fits:
        assert make_trigger(trigger, units, config).monitor.window.size == delta * units
        return
    with pytest.raises(ConfigError, match=f"delta={delta}: expected at most .* for {units:,} units .*got {delta * units:,}"):
        make_trigger(trigger, units, config)
