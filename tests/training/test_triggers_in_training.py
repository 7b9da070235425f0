"""Triggers under a Trainer and in a custom loop: figures, resuming bit for bit, and signals that take part in no step."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import load_int8, random_llama, token_rows, trace_lines, with_lora
from synthetic import stationary, write_trace
from transformers import TrainerCallback

from hf_gnmr import GNMRCallback, GNMRConfig, GNMRSession
from hf_gnmr.backends.units import find_projections
from hf_gnmr.config import ConfigError
from hf_gnmr.control.triggers import TRIGGERS, check_trigger, make_trigger
from hf_gnmr.files import FileError
from hf_gnmr.trace.lifted import resolve_trigger_options
from hf_gnmr.trace.replay import differences
from hf_gnmr.trace.series import read_series
from hf_gnmr.training.options import Options

IDS = torch.tensor([row["input_ids"] for row in token_rows(8, 16)])
OPTIONS = {
    "random": {"promotion_ratio": 0.1},
    "static": {"warmup": 2},
    "listed": {"units": ["*.down_proj"], "promotion_ratio": 0.07},
}
"""Trigger options for the 21 projections of the tiny model."""


def backward(model, ids, scale=1.0):
    (model(input_ids=ids, labels=ids).loss * scale).backward()


# -- under a Trainer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trigger", sorted(TRIGGERS))
def test_every_trigger_trains_and_leaves_its_figures(trainer_for, tmp_path, trigger):
    callback = GNMRCallback(backend="activation", trigger=trigger, trigger_options=OPTIONS.get(trigger), max_o=3)
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
    settings = {"trigger_options": OPTIONS.get(trigger), "max_o": 3, "alpha": 0.9, "alpha_init_fraction": 0.0}

    def run(folder, **arguments):
        callback = GNMRCallback(backend="activation", trigger=trigger, **settings)
        return trainer_for(random_llama(), callback, **{**common, **arguments}, output_dir=str(tmp_path / folder))

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


@pytest.mark.parametrize("trigger", ["gsnr", "jacobian", "random", "static"])
def test_every_trigger_lifts_int8_layers_too(tiny, trainer_for, tmp_path, trigger):
    options = {**OPTIONS, "random": {"promotion_ratio": 0.3}}
    callback = GNMRCallback(trigger=trigger, trigger_options=options.get(trigger), max_o=1)
    trainer_for(with_lora(load_int8(tiny)), callback).train()
    _, lines = trace_lines(tmp_path / "run")
    assert any(line["active"] for line in lines)
    if trigger == "static":
        assert [len(line["active"]) for line in lines] == [3, 3, 1, 1, 1, 1]


@pytest.mark.parametrize("trigger", ["gsnr", "jacobian"])
def test_a_skipped_window_enters_no_signal(trainer_for, tmp_path, trigger):
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


def test_gsnr_resumes_in_another_folder_and_takes_no_other_runs_means(trainer_for, tmp_path):
    common = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}

    def run(folder, seed=0, **arguments):
        callback = GNMRCallback(backend="activation", trigger="gsnr", max_o=3)
        return trainer_for(
            random_llama(), callback, **{**common, "seed": seed, **arguments}, output_dir=str(tmp_path / folder)
        )

    run("a").train()
    run("b", seed=5, max_steps=3).train()  # another run, with a checkpoint of the same name
    run("b", max_steps=6).train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    a = trace_lines(tmp_path / "a")[1]
    lines = [json.loads(line) for line in (tmp_path / "b" / "trace.jsonl").read_text().splitlines()[1:]]
    assert [line["signal"] for line in a[3:]] == [line["signal"] for line in lines]


def test_gsnr_without_its_file_starts_from_scratch_with_a_warning(trainer_for, tmp_path):
    common = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "constant"}
    trainer_for(random_llama(), GNMRCallback(backend="activation", trigger="gsnr"), max_steps=3, **common).train()
    (tmp_path / "run" / "checkpoint-3" / "gnmr_trigger.safetensors").unlink()
    resumed = trainer_for(random_llama(), GNMRCallback(backend="activation", trigger="gsnr"), **common)
    with pytest.warns(UserWarning, match="running means of trigger 'gsnr' start from scratch"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))


def test_the_file_of_a_trigger_replaces_nothing_but_a_file(trainer_for, tmp_path):
    """A checkpoint's folder may hold anything under its name, and no half-written file stays."""
    callback = GNMRCallback(backend="activation", trigger="gsnr")

    class Place(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                (tmp_path / "run" / "checkpoint-3" / "gnmr_trigger.safetensors").mkdir(parents=True)

    trainer = trainer_for(random_llama(), Place(), callback, max_steps=3, save_strategy="steps", save_steps=3)
    with pytest.raises(FileError, match="gnmr_trigger.safetensors is a folder: expected a file name"):
        trainer.train()
    assert not list((tmp_path / "run" / "checkpoint-3").glob(".*"))


def test_random_takes_its_ratio_from_a_trace(trainer_for, tmp_path):
    trainer_for(random_llama(), GNMRCallback(backend="activation", max_o=4, alpha=0.9, alpha_init_fraction=0.0)).train()
    ratio = json.loads((tmp_path / "run" / "summary.json").read_text())["promotion_ratio"]
    assert ratio > 0
    recoverable, trace = np.ones(21, dtype=bool), str(tmp_path / "run" / "trace.jsonl")
    options = resolve_trigger_options(check_trigger("random", {"trace": trace}), (), recoverable)
    trigger = make_trigger("random", 21, GNMRConfig(max_o=4, alpha_init_fraction=0.0), options=options)
    assert trigger.options_dict()["promotion_ratio"] == ratio


def test_listed_makes_a_trace_that_is_replayed_exactly(trainer_for, tmp_path):
    callback = GNMRCallback(backend="activation", trigger="listed", trigger_options=OPTIONS["listed"], max_o=3)
    trainer_for(random_llama(), callback).train()
    series = read_series(tmp_path / "run" / "trace.jsonl")
    assert differences(series) == []
    assert {series.names[i].rpartition(".")[2] for i in np.flatnonzero(series.active.any(axis=0))} == {"down_proj"}
    assert set(series.active.sum(axis=1).tolist()) == {1, 2}, "0.07 of 21 is 1.47"


def test_a_path_among_the_options_is_saved_in_checkpoints_as_text(trainer_for, tmp_path):
    write_trace(tmp_path / "other.jsonl", stationary(20, 3), max_o=2, alpha=1.1, alpha_init_fraction=0.0)
    callback = GNMRCallback(
        backend="activation", unit="layer", trigger="listed", max_o=1, trigger_options={"trace": tmp_path / "other.jsonl"}
    )
    trainer_for(random_llama(), callback, save_strategy="steps", save_steps=3).train()
    assert (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").is_file()


def test_trigger_options_are_a_dict():
    with pytest.raises(ConfigError, match=r"trigger_options=\['units'\]: expected a dict"):
        GNMRCallback(backend="activation", trigger="listed", trigger_options=["units"])


def test_a_list_that_matches_no_unit_is_refused_by_name(trainer_for):
    callback = GNMRCallback(backend="activation", trigger="listed", trigger_options={"units": ["*.donw_proj"]})
    with pytest.raises(
        ConfigError, match=r"units='\*.donw_proj' matches no unit: expected a name from .*q_proj to .*down_proj"
    ):
        trainer_for(random_llama(), callback).train()


@pytest.mark.parametrize(
    ("trigger", "options", "message"),
    [
        ("listed", {}, "expected units"),
        ("random", {"promotion_ratio": 0.1, "seed": -1}, "seed=-1"),
        ("static", {"warmup": 0}, "warmup=0"),
        ("gnmr", {"share": 0.5}, "it belongs to static"),
        ("gsnr", {"window": 5}, "it has none"),
        ("mean", {}, "trigger='mean'"),
    ],
)
def test_trigger_options_are_checked_before_there_are_units(trigger, options, message):
    with pytest.raises(ConfigError, match=message):
        Options(backend="activation", trigger=trigger, trigger_options=options)


# -- in a custom loop ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trigger", ["gsnr", "jacobian"])
def test_a_loop_without_accelerate_takes_the_signal_once_a_step(trigger):
    def run(parts):
        model = random_llama()
        session = GNMRSession(
            model, total_steps=4, backend="activation", trigger=trigger, max_o=2, gradient_accumulation_steps=len(parts)
        )
        signals = []
        for _ in range(3):
            for part in parts:
                backward(model, part, 1 / len(parts))
            signals.append(session.observe().signal)
            session.decide()
            model.zero_grad()
        model.eval()
        backward(model, IDS)  # not part of a training step
        model.train()
        model.zero_grad()
        session.discard()
        session.close()
        return np.array(signals)

    np.testing.assert_allclose(run([IDS]), run([IDS[:4], IDS[4:]]), rtol=1e-2)


def test_no_trigger_changes_the_saved_bytes():
    saved_bytes = {}
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
        saved_bytes[name] = session.backend.step_figures()["saved_bytes"]
        session.close()
    assert len(set(saved_bytes.values())) == 1, saved_bytes


@pytest.mark.parametrize("order", ["one after the other", "two forwards first"])
def test_the_gain_of_a_backward_that_failed_is_discarded(order):
    """In a window of two micro-batches a third one fails in the middle; the loop continues without it."""

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


def test_a_session_returns_to_an_earlier_step():
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


def test_a_custom_loop_saves_the_signal_with_the_session(tmp_path):
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
