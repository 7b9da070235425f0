"""Triggers beside GNMR: their signals against explicit formulas, their rules, their state, and what they refuse."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from conftest import load_int8, random_llama, token_rows, trace_lines, with_lora
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import stationary, write_trace

from hf_gnmr import GNMRCallback, GNMRConfig, GNMRSession
from hf_gnmr.backends.units import find_projections, find_units
from hf_gnmr.config import ConfigError
from hf_gnmr.control.triggers import TRIGGERS, check_trigger, make_trigger
from hf_gnmr.trace.file import read_trace
from hf_gnmr.trace.lifted import resolve_trigger_options
from hf_gnmr.trace.metrics import summarise
from hf_gnmr.trace.replay import differences
from hf_gnmr.trace.series import read_series
from hf_gnmr.training.options import Options
from hf_gnmr.training.signals import Gsnr, Jacobian

IDS = torch.tensor([row["input_ids"] for row in token_rows(8, 16)])
ONE = torch.ones(1)


def backward(model, ids, scale=1.0):
    (model(input_ids=ids, labels=ids).loss * scale).backward()


# -- signals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gsnr_is_the_formula(scale):
    model = random_llama()
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
            if t > 1:  # in the first step v - m² is 0, and float64 itself leaves rounding of it
                assert found[i] == pytest.approx(expected, rel=1e-3), (t, unit.name)
            else:
                assert found[i] == pytest.approx((g**2).mean() / 1e-12, rel=1e-3)
    assert signal.state_bytes == 8 * sum(u.parameters[0].numel() for u in units)


def test_gsnr_in_chunks_is_the_same(monkeypatch):
    results = []
    for chunk in (2**24, 5000):
        monkeypatch.setattr("hf_gnmr.training.signals.CHUNK", chunk)
        model = random_llama()
        signal = Gsnr(find_projections(model))
        for t in range(3):
            model.zero_grad()
            backward(model, IDS[t : t + 2])
            values = signal.combine(signal.values(ONE).double().numpy())
        results.append(values)
    np.testing.assert_array_equal(*results)


def test_gsnr_keeps_what_is_not_finite_out_and_says_nan_of_what_has_no_gradient():
    model = random_llama()
    units = find_projections(model)
    signal = Gsnr(units)
    for t in range(2):
        model.zero_grad()
        backward(model, IDS[t : t + 2])
        signal.combine(signal.values(ONE).double().numpy())
    before = {name: t.clone() for name, t in signal.tensors().items()}
    units[0].parameters[0].grad.fill_(float("nan"))
    units[1].parameters[0].grad[0, 0] = float("inf")
    units[2].parameters[0].grad = None
    found = signal.combine(signal.values(ONE).double().numpy())
    after = signal.tensors()
    for i in range(3):
        assert all(torch.equal(before[f"{name}.{i}"], after[f"{name}.{i}"]) for name in ("mean", "spread"))
    assert not torch.equal(before["spread.3"], after["spread.3"])
    assert np.isnan(found[:3]).all() and np.isfinite(found[3:]).all()
    assert after["weight"][:4].tolist() == pytest.approx([1.9, 1.9, 1.9, 2.71])
    before = {name: t.clone() for name, t in after.items()}
    signal.combine(signal.values(ONE, skips=True).double().numpy())
    assert all(torch.equal(before[n], t) for n, t in signal.tensors().items()), "a loss scaler skips the whole update"


def test_gsnr_masks_on_the_device_what_the_host_learns_later(monkeypatch):
    """The way of an accelerator, on which whether a gradient is finite is known only after the step's one transfer."""
    ours, theirs = (Gsnr(find_projections(random_llama())) for _ in range(2))

    def on_device(signal):
        """As if its parameters were on an accelerator: entered first, masked, mended in `combine`."""
        values = signal.values(ONE)
        return signal.combine(values.double().numpy())

    real = torch.device("cpu")
    for t in range(4):
        generator = torch.Generator().manual_seed(t)
        for signal in (ours, theirs):
            generator.manual_seed(t)
            for i, p in enumerate(signal._parameters):
                p.grad = torch.randn(p.shape, generator=generator)
                if t == 2 and i == 1:
                    p.grad[0, 0] = float("nan")
        a = on_device(ours)
        finite = [bool(torch.isfinite(p.grad).all()) for p in theirs._parameters]
        theirs._entered = list(range(len(finite)))
        theirs._weight = 0.9 * theirs._weight + 1
        sums = torch.full((2, len(finite)), torch.nan, device=real)
        sums[1] = torch.tensor(finite).float()
        theirs._enter(theirs._entered, ONE, {i: torch.tensor(f) for i, f in enumerate(finite)}, sums)
        b = theirs.combine(sums.flatten().double().numpy())
        np.testing.assert_allclose(a, b, rtol=1e-5)
    for name, tensor in ours.tensors().items():
        torch.testing.assert_close(tensor, theirs.tensors()[name], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("trigger", ["gsnr", "jacobian"])
def test_what_is_no_step_enters_no_signal(trainer_for, tmp_path, trigger):
    """Five batches an epoch, windows of two: the third window of an epoch is short."""
    callback = GNMRCallback(backend="activation", trigger=trigger, max_o=2)
    trainer_for(random_llama(), callback, rows=token_rows(20), gradient_accumulation_steps=2, max_steps=6).train()
    _, lines = trace_lines(tmp_path / "run")
    assert [bool(line["skipped"]) for line in lines] == [False, False, True] * 2
    assert [line.get("signal") is None for line in lines] == [False, False, True] * 2
    assert [line["saved_tokens"] for line in lines] == [64] * 6
    if trigger == "gsnr":
        steps = [sum(0.9**k for k in range(4))]
        assert callback.session.signal.tensors()["weight"].tolist() == pytest.approx(steps * 21)


@pytest.mark.parametrize("trigger", ["gsnr", "jacobian"])
def test_a_loop_without_accelerate_takes_the_signal_once_a_step(trigger):
    def run(parts):
        model = random_llama()
        session = GNMRSession(
            model, total_steps=4, backend="activation", trigger=trigger, max_o=2, gradient_accumulation_steps=len(parts)
        )
        found = []
        for _ in range(3):
            for part in parts:
                backward(model, part, 1 / len(parts))
            found.append(session.observe().signal)
            session.decide()
            model.zero_grad()
        model.eval()
        backward(model, IDS)  # of no training step
        model.train()
        model.zero_grad()
        session.discard()
        session.close()
        return np.array(found)

    np.testing.assert_allclose(run([IDS]), run([IDS[:4], IDS[4:]]), rtol=1e-2)


def test_no_trigger_changes_what_is_kept():
    kept = {}
    for name in TRIGGERS:
        model = random_llama()
        session = GNMRSession(
            model,
            total_steps=999,
            backend="activation",
            trigger=name,
            max_o=0,
            trigger_options={"random": {"promotion_ratio": 0.0}, "listed": {"units": ["*"], "promotion_ratio": 0.0}}.get(
                name, {}
            ),
        )
        session.backend.apply(np.zeros(21, dtype=bool))
        backward(model, IDS)
        kept[name] = session.backend.step_figures()["saved_bytes"]
        session.close()
    assert len(set(kept.values())) == 1, kept


@pytest.mark.parametrize("by_layer", [False, True])
def test_the_jacobian_proxy_is_the_ratio_of_gradient_norms_over_all_micro_batches(by_layer):
    model = random_llama()
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


@pytest.mark.parametrize("order", ["one after the other", "two forwards first"])
def test_the_gain_of_a_backward_that_broke_off_is_forgotten(order):
    """In a window of two micro-batches another one breaks in the middle; the loop goes on without it."""

    def gains(breaks):
        model = random_llama()
        session = GNMRSession(
            model, backend="activation", trigger="jacobian", max_o=2, alpha_init_fraction=0.0, gradient_accumulation_steps=2
        )

        def fail(grad):
            raise MemoryError

        def doomed():
            handle = model.model.layers[1].register_forward_hook(lambda m, a, out: out.register_hook(fail) and None)
            loss = model(input_ids=IDS[4:], labels=IDS[4:]).loss
            handle.remove()
            return loss

        first = model(input_ids=IDS[:2], labels=IDS[:2]).loss
        broken = doomed() if breaks and order == "two forwards first" else None
        first.backward()
        if breaks:
            before = [p.grad.clone() for p in model.parameters()]
            with pytest.raises(MemoryError):
                (doomed() if broken is None else broken).backward()
            for p, grad in zip(model.parameters(), before, strict=True):
                p.grad = grad
        model(input_ids=IDS[2:4], labels=IDS[2:4]).loss.backward()
        reading = session.observe()
        session.decide()
        session.close()
        return reading

    whole, broken = gains(False), gains(True)
    assert broken.backwards == whole.backwards == 2 and broken.loss == whole.loss
    np.testing.assert_array_equal(broken.norms, whole.norms)
    np.testing.assert_array_equal(broken.signal, whole.signal)


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


def test_a_draw_that_is_held_stays_for_so_many_steps_and_an_older_state_has_it_at_one():
    config = GNMRConfig(max_o=4, alpha_init_fraction=0.0)

    def make(**more):
        return make_trigger("random", 20, config, options={"promotion_ratio": 0.15, **more})

    found = lifted_by(make(hold=7), 70)
    blocks = [found[i : i + 7] for i in range(0, 70, 7)]
    assert all(block == [block[0]] * 7 for block in blocks) and len({tuple(block[0]) for block in blocks}) > 5
    assert [block[0] for block in blocks] == lifted_by(make(), 10), "the same draws, each longer"
    first, rest = make(hold=7), make(hold=7)
    start = lifted_by(first, 10)
    rest.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert start + lifted_by(rest, 60) == found
    older = make().state_dict()
    del older["options"]["hold"]
    make().load_state_dict(older)
    with pytest.raises(ConfigError, match="options"):
        make(hold=7).load_state_dict(older)


def test_random_takes_its_ratio_from_a_trace(trainer_for, tmp_path):
    trainer_for(random_llama(), GNMRCallback(backend="activation", max_o=4, alpha=0.9, alpha_init_fraction=0.0)).train()
    ratio = json.loads((tmp_path / "run" / "summary.json").read_text())["promotion_ratio"]
    assert ratio > 0
    config, trace = GNMRConfig(max_o=4, alpha_init_fraction=0.0), str(tmp_path / "run" / "trace.jsonl")
    trigger = from_trace("random", 21, config, trace=trace)
    assert trigger.options_dict()["promotion_ratio"] == ratio


NAMES = ["layers.0.q_proj", "layers.0.down_proj", "layers.1.q_proj", "layers.1.down_proj"]


def from_trace(name, units, config, trace, names=(), recoverable=None, **more):
    """A trigger that repeats what a trace lifted, as a session makes it."""
    mask = np.ones(units, dtype=bool) if recoverable is None else np.array(recoverable)
    options = resolve_trigger_options(check_trigger(name, {"trace": trace}), names, mask)
    return make_trigger(name, units, config, options=options, names=names, recoverable=mask, **more)


def lifted_by(trigger, steps):
    found = []
    for _ in range(steps):
        found.append(np.flatnonzero(trigger.active).tolist())
        trigger.step(np.ones(trigger.num_units))
    return found


def test_listed_keeps_the_units_of_its_patterns_whatever_the_gradients_say():
    def make(units, recoverable=None, **more):
        return make_trigger(
            "listed",
            4,
            GNMRConfig(max_o=1, alpha_init_fraction=0.0),
            recoverable=recoverable,
            options={"units": units, **more},
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
    assert lifted_by(make(["*.q_proj"], [True, True, False, True]), 1) == [[0]], "not what has no recovery path"
    # 1.5 units in the mean: the first always, the second in every other step, and a fraction is carried over a resume
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


def test_listed_takes_the_most_lifted_units_of_a_trace(tmp_path):
    norms = stationary(200, 6, seed=3, spikes=0.3)
    write_trace(tmp_path / "trace.jsonl", norms, max_o=2, alpha=1.2, beta=1.1, alpha_init_fraction=0.0, fidelity_warmup=0.05)
    trace = read_trace(tmp_path / "trace.jsonl")
    lines = trace.steps[10:]  # behind the warm-up
    counts = np.bincount([unit for line in lines for unit in line["active"]], minlength=6)
    order = np.argsort(-counts, kind="stable").tolist()
    names = [f"model.layers.{i}" for i in range(6)]
    trigger = from_trace(
        "listed",
        6,
        GNMRConfig(max_o=2, alpha_init_fraction=0.0),
        trace=str(tmp_path / "trace.jsonl"),
        names=names,
    )
    assert trigger.options_dict()["units"] == [names[i] for i in order] and trigger.options_dict()["trace"] is None
    assert trigger.options_dict()["promotion_ratio"] == pytest.approx(counts.sum() / (6 * 190))
    found = lifted_by(trigger, 1000)
    assert sum(map(len, found)) == pytest.approx(1000 * counts.sum() / 190, abs=1)
    assert all(sorted(order[: len(step)]) == step for step in found)
    again = make_trigger(
        "listed", 6, GNMRConfig(max_o=2, alpha_init_fraction=0.0), options=trigger.options_dict(), names=names
    )
    assert lifted_by(again, 1000) == found, "what a trace came to is an option of its own"
    config = GNMRConfig(max_o=2, alpha_init_fraction=0.0)
    other = from_trace("listed", 6, config, trace=str(tmp_path), names=names)
    assert other.options_dict() == trigger.options_dict(), "the folder of a run will do"
    with pytest.raises(ConfigError, match="a unit 'model.layers.2' with a recovery path, unlike this run"):
        from_trace(
            "listed",
            6,
            GNMRConfig(),
            trace=str(tmp_path),
            names=names,
            total_steps=10,
            recoverable=[True, True, False, True, True, True],
        )
    renamed = [*names[:5], "lm"]
    for others, message in ((names[:5], "has 6 units, this run 5"), (renamed, "unit 'model.layers.5', this run 'lm'")):
        with pytest.raises(ConfigError, match=message):
            from_trace(
                "listed",
                len(others),
                GNMRConfig(),
                trace=str(tmp_path / "trace.jsonl"),
                names=others,
                total_steps=10,
            )


def test_listed_counts_the_steps_that_the_report_counts(tmp_path):
    norms = np.ones((40, 3))
    norms[2, 0] = 9  # lifted through a row of skipped steps, but in one step that counts
    norms[24:34:2, 2] = 9
    write_trace(
        tmp_path / "trace.jsonl",
        norms,
        max_o=1,
        alpha=1.2,
        beta=None,
        t_lock=0,
        alpha_init_fraction=0.0,
        skipped=range(4, 24),
    )
    trigger = from_trace(
        "listed",
        3,
        GNMRConfig(max_o=1, alpha_init_fraction=0.0),
        trace=str(tmp_path),
        names=[f"model.layers.{i}" for i in range(3)],
    )
    assert trigger.options_dict()["units"] == ["model.layers.2", "model.layers.0", "model.layers.1"]
    assert trigger.options_dict()["promotion_ratio"] == summarise(read_trace(tmp_path / "trace.jsonl"))["promotion_ratio"]


@pytest.mark.parametrize("name", ["listed", "random"])
@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("line", "active", [77]),
        ("line", "active", None),
        ("header", "units", "x"),
        ("header", "config", None),
        ("header", "config", {"fidelity_warmup": "half"}),
        ("unit", "recoverable", None),
        ("file", "", "no trace\n"),
    ],
)
def test_a_trace_that_says_nothing_is_refused_by_its_name(tmp_path, name, where, key, value):
    path = tmp_path / "trace.jsonl"
    write_trace(path, stationary(20, 4), max_o=2, alpha=1.1, alpha_init_fraction=0.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    target = {"line": lines[7], "header": lines[0], "unit": lines[0]["units"][1], "file": {}}[where]
    target[key] = value
    path.write_text(value if where == "file" else "".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match="trace="):
        from_trace(
            name,
            4,
            GNMRConfig(max_o=2, alpha_init_fraction=0.0),
            trace=str(path),
            names=[f"model.layers.{i}" for i in range(4)],
        )


def test_a_path_among_the_options_goes_into_checkpoints_as_text(trainer_for, tmp_path):
    write_trace(tmp_path / "other.jsonl", stationary(20, 3), max_o=2, alpha=1.1, alpha_init_fraction=0.0)
    callback = GNMRCallback(
        backend="activation", unit="layer", trigger="listed", max_o=1, trigger_options={"trace": tmp_path / "other.jsonl"}
    )
    trainer_for(random_llama(), callback, save_strategy="steps", save_steps=3).train()
    assert (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").is_file()
    with pytest.raises(ConfigError, match=r"trigger_options=\['units'\]: expected a dict"):
        GNMRCallback(backend="activation", trigger="listed", trigger_options=["units"])


def test_listed_makes_a_trace_that_is_replayed_exactly(trainer_for, tmp_path):
    callback = GNMRCallback(backend="activation", trigger="listed", trigger_options=MORE["listed"], max_o=3)
    trainer_for(random_llama(), callback).train()
    series = read_series(tmp_path / "run" / "trace.jsonl")
    assert differences(series) == []
    assert {series.names[i].rpartition(".")[2] for i in np.flatnonzero(series.active.any(axis=0))} == {"down_proj"}
    assert set(series.active.sum(axis=1).tolist()) == {1, 2}, "0.07 of 21 is 1.47"


def test_a_list_that_fits_no_unit_is_refused_by_name(trainer_for):
    with pytest.raises(
        ConfigError, match=r"units='\*.donw_proj' matches no unit: expected a name from .*q_proj to .*down_proj"
    ):
        trainer_for(
            random_llama(), GNMRCallback(backend="activation", trigger="listed", trigger_options={"units": ["*.donw_proj"]})
        ).train()
    with pytest.raises(ConfigError, match="without a recovery path"):
        make_trigger(
            "listed",
            4,
            GNMRConfig(max_o=1),
            recoverable=[True, True, True, False],
            total_steps=9,
            options={"units": ["layers.1.down_proj"]},
            names=NAMES,
        )
    with pytest.raises(ConfigError, match="needs the names"):
        make_trigger("listed", 4, GNMRConfig(max_o=1), total_steps=9, options={"units": ["*"]})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("listed", {}, "expected units"),
        ("listed", {"units": []}, r"units=\[\]"),
        ("listed", {"units": "*"}, r"units='\*'"),
        ("listed", {"units": ["*"], "trace": "t"}, "expected units"),
        ("listed", {"units": [3]}, r"units=\[3\]"),
        ("listed", {"units": ["*"], "promotion_ratio": 1.5}, "promotion_ratio=1.5"),
        ("listed", {"units": ["unit.1"], "promotion_ratio": 0.5}, "4 units on average, but the list has 1"),
        ("random", {}, "promotion_ratio or trace"),
        ("random", {"promotion_ratio": 2.0}, "promotion_ratio=2.0"),
        ("random", {"promotion_ratio": 0.9}, "max_o allows 2"),
        ("random", {"trace": "/gone"}, "trace='/gone'"),
        ("random", {"promotion_ratio": 0.1, "seed": -1}, "seed=-1"),
        ("random", {"promotion_ratio": 0.1, "hold": 0}, "hold=0"),
        ("random", {"promotion_ratio": 0.1, "hold": 2.0}, "hold=2.0"),
        ("static", {"warmup": 0}, "warmup=0"),
        ("static", {"warmup": 1.5}, "warmup=1.5"),
        ("static", {"warmup": 50}, "nothing would follow"),
        ("static", {"share": 0, "warmup": 5}, "share=0"),
        ("gnmr", {"share": 0.5}, "it belongs to static"),
        ("gsnr", {"window": 5}, "it has none"),
        ("mean", {}, "trigger='mean'"),
    ],
)
def test_what_is_not_allowed(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_trigger(name, 8, GNMRConfig(max_o=2), total_steps=50, options=options, names=[f"unit.{i}" for i in range(8)])
    if not any(part in message for part in ("max_o", "/gone", "nothing would", "on average")):  # known without any unit
        with pytest.raises(ConfigError, match=message):
            Options(backend="activation", trigger=name, trigger_options=options)


# -- under a Trainer -------------------------------------------------------------------------------------------------------

MORE = {
    "random": {"promotion_ratio": 0.1},
    "static": {"warmup": 2},
    "listed": {"units": ["*.down_proj"], "promotion_ratio": 0.07},
}


@pytest.mark.parametrize("trigger", sorted(TRIGGERS))
def test_every_trigger_trains_and_leaves_its_figures(trainer_for, tmp_path, trigger):
    callback = GNMRCallback(backend="activation", trigger=trigger, trigger_options=MORE.get(trigger), max_o=3)
    model = random_llama()
    trainer_for(model, callback).train()
    header, lines = trace_lines(tmp_path / "run")
    assert header["trigger"] == trigger and len(lines) == 6
    assert header["census"]["trigger_bytes"] == (
        8 * sum(u.parameters[0].numel() for u in find_projections(model)) if trigger == "gsnr" else 0
    )
    if trigger in ("gsnr", "jacobian"):
        order = np.argsort(np.array(lines[2]["signal"]) * (1 if trigger == "gsnr" else -1), kind="stable")
        assert sorted(order[:3].tolist()) == lines[3]["active"]
    else:
        assert "signal" not in lines[0]
    if trigger == "static":
        assert [len(line["active"]) for line in lines] == [21, 21, 5, 5, 5, 5]
        assert lines[0]["saved_bytes"] > 3 * lines[2]["saved_bytes"], "16 bits in the warm-up"
    assert not any(m._backward_hooks for m in model.modules())


@pytest.mark.parametrize("trigger", ["gnmr", "gsnr", "jacobian", "static", "random"])
def test_every_trigger_resumes_bit_for_bit(trainer_for, tmp_path, trigger):
    common = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    settings = {"trigger_options": MORE.get(trigger), "max_o": 3, "alpha": 0.9, "alpha_init_fraction": 0.0}

    def run(folder, **more):
        callback = GNMRCallback(backend="activation", trigger=trigger, **settings)
        return trainer_for(random_llama(), callback, **{**common, **more}, output_dir=str(tmp_path / folder))

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


def test_gsnr_goes_on_in_another_folder_and_takes_nobody_elses_means(trainer_for, tmp_path):
    common = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}

    def run(folder, seed=0, **more):
        callback = GNMRCallback(backend="activation", trigger="gsnr", max_o=3)
        return trainer_for(random_llama(), callback, **{**common, "seed": seed, **more}, output_dir=str(tmp_path / folder))

    run("a").train()
    run("b", seed=5, max_steps=3).train()  # another run, with a checkpoint of the same name
    run("b", max_steps=6).train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    a = trace_lines(tmp_path / "a")[1]
    lines = [json.loads(line) for line in (tmp_path / "b" / "trace.jsonl").read_text().splitlines()[1:]]
    assert [line["signal"] for line in a[3:]] == [line["signal"] for line in lines]


def test_a_session_goes_back_to_an_earlier_step():
    model = random_llama()
    session = GNMRSession(model, total_steps=9, backend="activation", trigger="gsnr", max_o=3)

    def step(t):
        model.zero_grad()
        backward(model, IDS[t : t + 2])
        session.observe()
        return session.decide().active.tolist()

    step(0)
    state = session.state_dict()
    first = [step(1), step(2)]
    session.load_state_dict(state)
    assert [step(1), step(2)] == first and session.steps_done == 3
    session.close()


def test_a_fidelity_warm_up_is_kept_or_refused():
    config = GNMRConfig(max_o=4, fidelity_warmup=0.5, alpha_init_fraction=0.0)
    for name, counts in (("random", [20] * 5), ("gnmr", [20] * 5), ("gsnr", [20] * 5), ("none", [0] * 5)):
        options = {"promotion_ratio": 0.1} if name == "random" else {}
        trigger = make_trigger(name, 20, config, total_steps=10, options=options)
        found = []
        for _ in range(5):
            found.append(int(trigger.active.sum()))
            trigger.step(np.ones(20), signal=np.ones(20))
        assert found == counts, name
        assert trigger.active.sum() <= 4
    with pytest.raises(ConfigError, match="has its own warm-up"):
        make_trigger("static", 20, config, total_steps=1000)


def test_gsnr_without_its_file_starts_from_scratch_and_says_so(trainer_for, tmp_path):
    common = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
    trainer_for(random_llama(), GNMRCallback(backend="activation", trigger="gsnr"), max_steps=3, **common).train()
    (tmp_path / "run" / "checkpoint-3" / "gnmr_trigger.safetensors").unlink()
    again = trainer_for(random_llama(), GNMRCallback(backend="activation", trigger="gsnr"), **common)
    with pytest.warns(UserWarning, match="running means of trigger 'gsnr' start from scratch"):
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
        model = random_llama()
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
