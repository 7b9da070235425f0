"""Triggers beside GNMR: their rules, their options, their state, and what they refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import lifted_by

from hf_gnmr.config import ConfigError, GNMRConfig
from hf_gnmr.control.triggers import check_trigger, make_trigger

NAMES = ["layers.0.q_proj", "layers.0.down_proj", "layers.1.q_proj", "layers.1.down_proj"]


@pytest.mark.parametrize(("name", "chosen"), [("gsnr", [1, 3]), ("jacobian", [0, 4])])
def test_ranking_triggers_take_max_o_units_every_step(name, chosen):
    recoverable = np.array([1, 1, 1, 1, 1, 0], bool)
    trigger = make_trigger(name, 6, GNMRConfig(max_o=2, alpha_init_fraction=0.0), recoverable=recoverable)
    assert not trigger.active.any()
    signal = [5.0, 1.0, 4.0, 2.0, 6.0, 100.0 if name == "jacobian" else 0.0]
    for _ in range(3):
        decision = trigger.step(np.ones(6), signal=signal)
        assert np.flatnonzero(decision.active).tolist() == chosen
    norms = np.ones(6)
    norms[2] = np.nan
    assert 2 in np.flatnonzero(trigger.step(norms, signal=signal).active), "not finite comes first"
    seen = np.ones(6, dtype=bool)
    seen[chosen[0]] = False
    assert chosen[0] not in np.flatnonzero(trigger.step(np.ones(6), seen, signal).active)
    values = np.array(signal)
    values[chosen[1]] = np.nan
    assert chosen[1] not in np.flatnonzero(trigger.step(np.ones(6), signal=values).active)


def test_static_measures_in_16_bits_and_then_keeps_the_top_quarter():
    trigger = make_trigger("static", 8, GNMRConfig(max_o=1), total_steps=100, options={"warmup": 3})
    norms = np.ones(8)
    for t in range(1, 4):
        assert trigger.exact and trigger.active.all()
        norms[[2, 6]] *= 1.5  # growing norms: GNMR above 1
        decision = trigger.step(norms)
        assert decision.step == t
    assert not trigger.exact and np.flatnonzero(trigger.active).tolist() == [2, 6], "exempt from maxO"
    state = trigger.state_dict()
    for _ in range(3):
        assert np.flatnonzero(trigger.step(np.random.default_rng(0).random(8)).active).tolist() == [2, 6]
    other = make_trigger("static", 8, GNMRConfig(max_o=1), total_steps=100, options={"warmup": 3})
    other.load_state_dict(json.loads(json.dumps(state)))
    assert not other.exact and np.flatnonzero(other.active).tolist() == [2, 6]
    half = make_trigger("static", 8, GNMRConfig(), total_steps=200, options={"warmup": 0.07, "share": 0.5})
    assert half.warmup_steps == 14 and half.lifted_units == 4


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 0.2), st.integers(0, 3))
def test_random_keeps_its_ratio_and_its_cap(ratio, seed):
    config = GNMRConfig(max_o=4, alpha_init_fraction=0.0)
    trigger = make_trigger("random", 20, config, options={"promotion_ratio": ratio, "seed": seed})
    counts, chosen = [], np.zeros(20)
    for _ in range(400):
        counts.append(int(trigger.active.sum()))
        chosen += trigger.active
        trigger.step(np.ones(20))
    assert max(counts) <= 4 and max(counts) - min(counts) <= 1
    assert np.mean(counts) == pytest.approx(20 * ratio, abs=0.1)
    if ratio > 0.05:
        assert chosen.min() > 0 and chosen.max() < 4 * chosen.mean(), "every unit has its turn"


def test_random_is_drawn_from_seed_and_step_alone():
    config = GNMRConfig(max_o=4, alpha_init_fraction=0.0)

    def choices(steps, state=None):
        trigger = make_trigger("random", 20, config, options={"promotion_ratio": 0.15})
        if state is not None:
            trigger.load_state_dict(state)
        active = []
        for _ in range(steps):
            active.append(np.flatnonzero(trigger.step(np.ones(20)).active).tolist())
        return active, trigger.state_dict()

    whole, _ = choices(10)
    first, state = choices(4)
    rest, _ = choices(6, json.loads(json.dumps(state)))
    assert whole == first + rest and len({tuple(c) for c in whole}) > 5
    other = make_trigger("random", 20, config, options={"promotion_ratio": 0.1})
    with pytest.raises(ConfigError, match="options"):
        other.load_state_dict(state)


def test_a_draw_is_held_for_its_steps_and_for_one_in_an_older_state():
    config = GNMRConfig(max_o=4, alpha_init_fraction=0.0)

    def make(**options):
        return make_trigger("random", 20, config, options={"promotion_ratio": 0.15, **options})

    lifted = lifted_by(make(hold=7), 70)
    blocks = [lifted[i : i + 7] for i in range(0, 70, 7)]
    assert all(block == [block[0]] * 7 for block in blocks) and len({tuple(block[0]) for block in blocks}) > 5
    assert [block[0] for block in blocks] == lifted_by(make(), 10), "the same draws, each longer"
    first, rest = make(hold=7), make(hold=7)
    start = lifted_by(first, 10)
    rest.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert start + lifted_by(rest, 60) == lifted
    older = make().state_dict()
    del older["options"]["hold"]
    make().load_state_dict(older)
    with pytest.raises(ConfigError, match="options"):
        make(hold=7).load_state_dict(older)


def test_listed_keeps_the_units_of_its_patterns_whatever_the_gradients():
    def make(units, recoverable=None, **options):
        return make_trigger(
            "listed",
            4,
            GNMRConfig(max_o=1, alpha_init_fraction=0.0),
            recoverable=recoverable,
            options={"units": units, **options},
            names=NAMES,
        )

    trigger = make(["*.down_proj"])
    assert lifted_by(trigger, 3) == [[1, 3]] * 3 and trigger.most_active() == 2, "exempt from maxO"
    assert np.flatnonzero(trigger.step([1, 1, 1e9, np.inf]).active).tolist() == [1, 3]
    assert trigger.options_dict()["units"] == ["layers.0.down_proj", "layers.1.down_proj"]
    assert make(["layers.1.*", "layers.1.q_proj", "layers.0.q_proj"]).options_dict()["units"] == [
        NAMES[2],
        NAMES[3],
        NAMES[0],
    ]
    assert lifted_by(make(["*.q_proj"], [True, True, False, True]), 1) == [[0]], "no unit without a recovery path"
    # 1.5 units on average: the first always, the second in every other step; a resumed run keeps the fraction
    half = make(["layers.1.q_proj", "layers.0.q_proj", "*.down_proj"], promotion_ratio=0.375)
    assert half.most_active() == 2
    whole = lifted_by(half, 8)
    assert sorted(map(len, whole)) == [1] * 4 + [2] * 4 and all(2 in step for step in whole) and [0, 2] in whole
    first = make(["layers.1.q_proj", "layers.0.q_proj", "*.down_proj"], promotion_ratio=0.375)
    start = lifted_by(first, 3)
    rest = make(["layers.1.q_proj", "layers.0.q_proj", "*.down_proj"], promotion_ratio=0.375)
    rest.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert start + lifted_by(rest, 5) == whole
    with pytest.raises(ConfigError, match="options"):
        make(["*.q_proj"]).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("units", "recoverable", "names", "message"),
    [
        (
            ["*.donw_proj"],
            None,
            NAMES,
            r"units='\*.donw_proj' matches no unit: expected a name from .*q_proj to .*down_proj",
        ),
        (["layers.1.down_proj"], [True, True, True, False], NAMES, "without a recovery path"),
        (["*"], None, (), "needs the names"),
    ],
)
def test_a_list_that_fits_no_unit_is_refused_by_name(units, recoverable, names, message):
    with pytest.raises(ConfigError, match=message):
        make_trigger(
            "listed",
            4,
            GNMRConfig(max_o=1),
            recoverable=recoverable,
            total_steps=9,
            options={"units": units},
            names=names,
        )


WARM_UP = GNMRConfig(max_o=4, fidelity_warmup=0.5, alpha_init_fraction=0.0)


@pytest.mark.parametrize(("name", "lifted"), [("random", 20), ("gnmr", 20), ("gsnr", 20), ("none", 0)])
def test_a_fidelity_warm_up_lifts_all_units_that_can_be(name, lifted):
    options = {"promotion_ratio": 0.1} if name == "random" else {}
    trigger = make_trigger(name, 20, WARM_UP, total_steps=10, options=options)
    for _ in range(5):
        assert int(trigger.active.sum()) == lifted
        trigger.step(np.ones(20), signal=np.ones(20))
    assert trigger.active.sum() <= 4


def test_static_refuses_a_fidelity_warm_up():
    with pytest.raises(ConfigError, match="has its own warm-up"):
        make_trigger("static", 20, WARM_UP, total_steps=1000)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("listed", {}, "expected units"),
        ("listed", {"units": []}, r"units=\[\]"),
        ("listed", {"units": "*"}, r"units='\*'"),
        ("listed", {"units": ["*"], "trace": "t"}, "expected units"),
        ("listed", {"units": [3]}, r"units=\[3\]"),
        ("listed", {"units": ["*"], "promotion_ratio": 1.5}, "promotion_ratio=1.5"),
        ("random", {}, "promotion_ratio or trace"),
        ("random", {"promotion_ratio": 2.0}, "promotion_ratio=2.0"),
        ("random", {"promotion_ratio": 0.1, "seed": -1}, "seed=-1"),
        ("random", {"promotion_ratio": 0.1, "hold": 0}, "hold=0"),
        ("random", {"promotion_ratio": 0.1, "hold": 2.0}, "hold=2.0"),
        ("static", {"warmup": 0}, "warmup=0"),
        ("static", {"warmup": 1.5}, "warmup=1.5"),
        ("static", {"share": 0, "warmup": 5}, "share=0"),
        ("gnmr", {"share": 0.5}, "it belongs to static"),
        ("gsnr", {"window": 5}, "it has none"),
        ("mean", {}, "trigger='mean'"),
    ],
)
def test_options_are_refused_without_and_with_units(name, options, message):
    with pytest.raises(ConfigError, match=message):
        check_trigger(name, options)
    with pytest.raises(ConfigError, match=message):
        make_trigger(name, 8, GNMRConfig(max_o=2), total_steps=50, options=options, names=[f"unit.{i}" for i in range(8)])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("listed", {"units": ["unit.1"], "promotion_ratio": 0.5}, "4 units on average, but the list has 1"),
        ("random", {"promotion_ratio": 0.9}, "max_o allows 2"),
        ("random", {"trace": "/gone"}, "trace='/gone'"),
        ("static", {"warmup": 50}, "nothing would follow"),
    ],
)
def test_options_that_do_not_fit_the_units_are_refused(name, options, message):
    check_trigger(name, options)
    with pytest.raises(ConfigError, match=message):
        make_trigger(name, 8, GNMRConfig(max_o=2), total_steps=50, options=options, names=[f"unit.{i}" for i in range(8)])
