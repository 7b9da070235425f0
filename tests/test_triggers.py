"""Triggers beside GNMR: their signals against explicit formulas, their rules, their state, and what they refuse."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from conftest import load_int8, token_rows, trace_lines, with_lora
from hypothesis import given, settings
from hypothesis import strategies as st
from test_activation import llama

from hf_gnmr import GNMRCallback, GNMRConfig, GNMRSession
from hf_gnmr.config import ConfigError
from hf_gnmr.options import Options
from hf_gnmr.signals import Gsnr, Jacobian
from hf_gnmr.triggers import TRIGGERS, make_trigger
from hf_gnmr.units import find_projections, find_units

IDS = torch.tensor([row["input_ids"] for row in token_rows(8, 16)])
ONE = torch.ones(1)


def backward(model, ids, scale=1.0):
    (model(input_ids=ids, labels=ids).loss * scale).backward()


# -- signals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gsnr_is_the_formula(scale):
    model = llama()
    units = find_projections(model)
    signal = Gsnr(units)
    m = [np.zeros(u.parameters[0].shape) for u in units]
    v = [np.zeros(u.parameters[0].shape) for u in units]
    for t in range(1, 7):
        model.zero_grad()
        backward(model, IDS[t % 4 : t % 4 + 2], scale)
        found = signal.combine(signal.values(torch.tensor([scale])).double().numpy())
        for i, unit in enumerate(units):
            g = unit.parameters[0].grad.double().numpy() / scale
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.9 * v[i] + 0.1 * g * g
            mean, square = m[i] / (1 - 0.9**t), v[i] / (1 - 0.9**t)
            expected = (mean**2 / (np.maximum(square - mean**2, 0) + 1e-12)).mean()
            if t > 3:  # before, variances are next to 0 and what fp32 leaves of them is rounding
                assert found[i] == pytest.approx(expected, rel=0.02), (t, unit.name)
    assert signal.state_bytes == 8 * sum(u.parameters[0].numel() for u in units)


def test_gsnr_keeps_what_is_not_finite_out_and_says_nan_of_what_has_no_gradient():
    model = llama()
    units = find_projections(model)
    signal = Gsnr(units)
    for _ in range(2):
        model.zero_grad()
        backward(model, IDS)
        signal.values(ONE)
    before = {name: t.clone() for name, t in signal.tensors().items()}
    units[0].parameters[0].grad.fill_(float("nan"))
    units[1].parameters[0].grad[0, 0] = float("inf")
    units[2].parameters[0].grad = None
    found = signal.combine(signal.values(ONE).double().numpy())
    after = signal.tensors()
    for i in range(3):
        assert torch.equal(before[f"m.{i}"], after[f"m.{i}"]) and torch.equal(before[f"v.{i}"], after[f"v.{i}"])
    assert not torch.equal(before["m.3"], after["m.3"])
    assert np.isfinite(found[[0, 1, 3]]).all() and math.isnan(found[2])
    assert after["count"][:4].tolist() == [2, 2, 2, 3]


@pytest.mark.parametrize("by_layer", [False, True])
def test_the_jacobian_proxy_is_the_ratio_of_gradient_norms_over_all_micro_batches(by_layer):
    model = llama()
    units = (find_units if by_layer else find_projections)(model)
    signal = Jacobian(units)
    seen = {i: [0.0, 0.0] for i in range(len(units))}

    def watch(i):
        def hook(module, args, output):
            x = args[0].detach().requires_grad_()
            out = output[0] if isinstance(output, tuple) else output

            def grad(dy):
                seen[i][1] += float(dy.double().norm() ** 2)
                if not by_layer:
                    seen[i][0] += float((dy @ module.weight).double().norm() ** 2)

            out.register_hook(grad)
            if by_layer and args[0].requires_grad:
                args[0].register_hook(lambda dx: seen[i].__setitem__(0, seen[i][0] + float(dx.double().norm() ** 2)))
            return None if x is None else output

        return hook

    for i, unit in enumerate(units):
        unit.module.register_forward_hook(watch(i))
    for part in (IDS[:4], IDS[4:]):
        backward(model, part)
    found = signal.combine(signal.values(ONE).double().numpy())
    for i in range(len(units)):
        assert found[i] == pytest.approx(math.sqrt(seen[i][0] / seen[i][1]), rel=1e-4)
    backward(model, IDS)
    signal.discard()
    assert np.isnan(signal.combine(signal.values(ONE).double().numpy())).all(), "forgotten"
    signal.remove()
    assert not any(m._backward_hooks for m in model.modules())


# -- rules ---------------------------------------------------------------------------------------------------------------


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
        found = []
        for _ in range(steps):
            found.append(np.flatnonzero(trigger.step(np.ones(20)).active).tolist())
        return found, trigger.state_dict()

    whole, _ = choices(10)
    first, state = choices(4)
    rest, _ = choices(6, json.loads(json.dumps(state)))
    assert whole == first + rest and len({tuple(c) for c in whole}) > 5
    other = make_trigger("random", 20, config, options={"promotion_ratio": 0.1})
    with pytest.raises(ConfigError, match="options"):
        other.load_state_dict(state)


def test_random_takes_its_ratio_from_a_trace(trainer_for, tmp_path):
    trainer_for(llama(), GNMRCallback(backend="activation", max_o=4, alpha=0.9, alpha_init_fraction=0.0)).train()
    ratio = json.loads((tmp_path / "run" / "summary.json").read_text())["promotion_ratio"]
    assert ratio > 0
    config, trace = GNMRConfig(max_o=4, alpha_init_fraction=0.0), str(tmp_path / "run" / "trace.jsonl")
    trigger = make_trigger("random", 21, config, options={"trace": trace})
    assert trigger.given["promotion_ratio"] == ratio


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("random", {}, "promotion_ratio or trace"), ("random", {"promotion_ratio": 2.0}, "promotion_ratio=2.0"),
        ("random", {"promotion_ratio": 0.9}, "max_o allows 2"), ("random", {"trace": "/gone"}, "trace='/gone'"),
        ("random", {"promotion_ratio": 0.1, "seed": -1}, "seed=-1"), ("static", {"warmup": 0}, "warmup=0"),
        ("static", {"warmup": 1.5}, "warmup=1.5"), ("static", {"warmup": 50}, "nothing would be left"),
        ("static", {"share": 0, "warmup": 5}, "share=0"), ("gnmr", {"share": 0.5}, "it belongs to static"),
        ("gsnr", {"window": 5}, "gsnr has none"), ("mean", {}, "trigger='mean'"),
    ],
)
def test_what_is_not_allowed(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_trigger(name, 8, GNMRConfig(max_o=2), total_steps=50, options=options)
    if "belongs" in message or name == "mean":
        with pytest.raises(ConfigError, match=message):
            Options(backend="activation", trigger=name, trigger_options=options)


# -- under a Trainer -------------------------------------------------------------------------------------------------------

MORE = {"random": {"promotion_ratio": 0.1}, "static": {"warmup": 2}}


@pytest.mark.parametrize("trigger", sorted(TRIGGERS))
def test_every_trigger_trains_and_leaves_its_figures(trainer_for, tmp_path, trigger):
    callback = GNMRCallback(backend="activation", trigger=trigger, trigger_options=MORE.get(trigger), max_o=3)
    model = llama()
    trainer_for(model, callback).train()
    header, lines = trace_lines(tmp_path / "run")
    assert header["trigger"] == trigger and len(lines) == 6
    assert header["census"]["trigger_bytes"] == (8 * sum(u.parameters[0].numel() for u in find_projections(model)) if
                                                 trigger == "gsnr" else 0)
    if trigger in ("gsnr", "jacobian"):
        order = np.argsort(np.array(lines[2]["signal"]) * (1 if trigger == "gsnr" else -1), kind="stable")
        assert sorted(order[:3].tolist()) == lines[3]["active"]
    else:
        assert "signal" not in lines[0]
    if trigger == "static":
        assert [len(line["active"]) for line in lines] == [21, 21, 5, 5, 5, 5]
        assert lines[0]["saved_bytes"] > 3 * lines[2]["saved_bytes"], "16 bits in the warm-up"
    assert not any(m._backward_hooks for m in model.modules())


@pytest.mark.parametrize("trigger", ["gsnr", "jacobian", "static", "random"])
def test_every_trigger_resumes_bit_for_bit(trainer_for, tmp_path, trigger):
    common = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}

    def run(folder, **more):
        callback = GNMRCallback(backend="activation", trigger=trigger, trigger_options=MORE.get(trigger), max_o=3)
        return trainer_for(llama(), callback, **{**common, **more}, output_dir=str(tmp_path / folder))

    straight = run("straight")
    straight.train()
    run("cut", max_steps=3).train()
    resumed = run("cut")
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    a, b = (trace_lines(tmp_path / name)[1] for name in ("straight", "cut"))
    keys = ("norms", "active", "loss", "signal", "saved_bytes")
    assert [[line.get(k) for k in keys] for line in a] == [[line.get(k) for k in keys] for line in b]
    for p, q in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_gsnr_without_its_file_starts_anew_and_says_so(trainer_for, tmp_path):
    common = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
    trainer_for(llama(), GNMRCallback(backend="activation", trigger="gsnr"), max_steps=3, **common).train()
    (tmp_path / "run" / "checkpoint-3" / "gnmr_trigger.safetensors").unlink()
    again = trainer_for(llama(), GNMRCallback(backend="activation", trigger="gsnr"), **common)
    with pytest.warns(UserWarning, match="running means of trigger 'gsnr' start anew"):
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))


@pytest.mark.parametrize("trigger", ["gsnr", "jacobian", "random", "static"])
def test_they_work_with_int8_layers_too(tiny, trainer_for, tmp_path, trigger):
    more = {**MORE, "random": {"promotion_ratio": 0.3}}
    callback = GNMRCallback(trigger=trigger, trigger_options=more.get(trigger), max_o=1)
    trainer_for(with_lora(load_int8(tiny)), callback).train()
    _, lines = trace_lines(tmp_path / "run")
    assert any(line["active"] for line in lines)
    if trigger == "static":
        assert [len(line["active"]) for line in lines] == [3, 3, 1, 1, 1, 1]


def test_a_loop_of_ones_own_saves_the_signal_with_the_session(tmp_path):
    def train(steps, state=None):
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = GNMRSession(model, total_steps=6, backend="activation", trigger="gsnr", max_o=3)
        if state is not None:
            model.load_state_dict(state["model"])
            session.load_state_dict(state["session"])
        chosen = []
        for t in steps:
            backward(model, IDS[t : t + 2])
            session.observe()
            optimizer.step()
            chosen.append(session.decide().active.tolist())
            optimizer.zero_grad()
        saved = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "session": session.state_dict()}
        file = tmp_path / "state.pt"
        torch.save(saved, file)
        session.close()
        return chosen, torch.load(file, weights_only=False)

    whole, _ = train(range(6))
    first, state = train(range(3))
    rest, _ = train(range(3, 6), state)
    assert whole == first + rest
