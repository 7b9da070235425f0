"""Norms of the gradient as the optimizer would use it: unclipped, accumulated, unscaled, once per step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from conftest import load_int8, token_rows, trace_lines, with_lora
from transformers import Trainer

from hf_gnmr import GNMRCallback, SetupError
from hf_gnmr.backends.units import find_units
from hf_gnmr.training.gradients import GradientNorms, StepVector


def run(trainer_for, tiny, tmp_path, callback=None, model=None, **changes):
    model = model or with_lora(load_int8(tiny))
    trainer_for(model, callback or GNMRCallback(), **changes).train()
    return trace_lines(tmp_path / "run")[1]


def norms(lines):
    return np.array([[float(v) for v in line["norms"]] for line in lines])


def test_first_step_norms_do_not_depend_on_clipping(trainer_for, tiny, tmp_path):
    runs = [run(trainer_for, tiny, tmp_path, max_grad_norm=clip, max_steps=2) for clip in (1.0, 0.05, 0.0)]
    first = [norms(lines)[0] for lines in runs]
    assert np.array_equal(first[0], first[1]) and np.array_equal(first[0], first[2])
    assert runs[1][0]["grad_norm"] > 0.1, "a total of 0.05 would be the clipped norm"


@pytest.mark.parametrize("checkpointing", ["off", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_norms_are_those_of_the_accumulated_gradient(trainer_for, tiny, tmp_path, accumulation, checkpointing):
    """Compared with the gradients themselves, read by hand without clipping."""
    seen = []

    class Look(GNMRCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            units = [p for unit in self.units for p in unit.parameters]
            seen.append(
                (
                    [np.sqrt(sum(float(p.grad.double().square().sum()) for p in unit.parameters)) for unit in self.units],
                    np.sqrt(sum(float(p.grad.double().square().sum()) for p in units)),
                )
            )
            super().on_pre_optimizer_step(args, state, control, **kwargs)

    model = with_lora(load_int8(tiny), lora_dropout=0.1)
    options = {
        "max_grad_norm": 0.0,
        "max_steps": 3,
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": 4 // accumulation,
    }
    if checkpointing != "off":
        options |= {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing == "reentrant"},
        }
    lines = run(trainer_for, tiny, tmp_path, Look(), model, **options)
    assert len(lines) == 3 == len(seen), "one reading per optimizer step"
    np.testing.assert_allclose(norms(lines), np.array([unit for unit, _ in seen]), rtol=1e-5)
    np.testing.assert_allclose([line["grad_norm"] for line in lines], [total for _, total in seen], rtol=1e-5)
    assert [line["micro_batches"] for line in lines] == [accumulation] * 3


def test_norms_with_and_without_checkpointing_agree_at_every_clip(trainer_for, tiny, tmp_path):
    first = []
    for clip, checkpointing in itertools.product([1.0, 0.05, 0.0], [None, True, False]):
        options = {"max_grad_norm": clip, "max_steps": 1, "gradient_accumulation_steps": 2}
        if checkpointing is not None:
            options |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing}}
        first.append(norms(run(trainer_for, tiny, tmp_path, **options))[0])
    np.testing.assert_allclose(first, np.broadcast_to(first[0], (9, 3)), rtol=1e-6)


def test_the_same_global_batch_in_other_micro_batches_gives_the_same_series(trainer_for, tiny, tmp_path):
    series = [
        norms(run(trainer_for, tiny, tmp_path, per_device_train_batch_size=8 // k, gradient_accumulation_steps=k))
        for k in (1, 2, 4)
    ]
    for other in series[1:]:
        np.testing.assert_allclose(other, series[0], rtol=0.03)  # 8-bit products depend on the rows beside


def test_a_loss_that_ignores_the_accumulation_scales_the_norms_and_no_ratio(trainer_for, tiny, tmp_path):
    """A `compute_loss_func` that takes the mean of its own micro-batch: the Trainer then sums k means."""

    def mean_of_this_batch(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    measured = {}
    for k in (1, 2, 4):
        options = {"per_device_train_batch_size": 8 // k, "gradient_accumulation_steps": k, "learning_rate": 1e-6}
        lines = run(trainer_for, tiny, tmp_path, compute_loss_func=mean_of_this_batch, **options)
        assert len(lines) == 6, "one reading per optimizer step"
        measured[k] = norms(lines), np.array([line["gnmr"] for line in lines])
    for k in (2, 4):
        np.testing.assert_allclose(measured[k][0] / measured[1][0], k, rtol=0.03)
        np.testing.assert_allclose(measured[k][1], measured[1][1], rtol=0.03)


def test_logged_loss_is_the_one_in_the_trace(trainer_for, tiny, tmp_path):
    trainer = trainer_for(with_lora(load_int8(tiny)), GNMRCallback(), gradient_accumulation_steps=2)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    np.testing.assert_allclose([line["loss"] for line in trace_lines(tmp_path / "run")[1]], logged, atol=2e-3)


def test_a_custom_loss_has_norms_and_no_loss_in_the_trace(trainer_for, tiny, tmp_path):
    def loss_from_logits(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    lines = run(trainer_for, tiny, tmp_path, compute_loss_func=loss_from_logits)
    assert all(line["loss"] is None for line in lines)
    assert (norms(lines) > 0).all()


def test_a_loss_from_hidden_states_is_seen(trainer_for, tiny, tmp_path):
    class Hidden(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs.pop("labels")
            return model(**inputs, output_hidden_states=True).hidden_states[-1].float().square().mean()

    lines = run(trainer_for, tiny, tmp_path, trainer_class=Hidden)
    assert (norms(lines) > 0).all() and all(line["loss"] is None for line in lines)


def test_a_loss_that_bypasses_the_model_is_refused(trainer_for, tiny):
    class Inner(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model.get_base_model()(**inputs).loss

    trainer = trainer_for(with_lora(load_int8(tiny)), GNMRCallback(), trainer_class=Inner)
    with pytest.raises(SetupError, match="no gradient was seen at step 1"):
        trainer.train()


def test_a_loss_scale_is_divided_out(tiny):
    model = with_lora(load_int8(tiny)).train()
    batch = {k: torch.tensor([row[k] for row in token_rows(4)]) for k in ("input_ids", "labels")}

    class Scaler:
        scale = torch.tensor(65536.0)

        def is_enabled(self):
            return True

        def _get_scale_async(self):
            return self.scale

    readings = []
    for scale in (None, 65536.0, 32768.0):
        scaler = None if scale is None else Scaler()
        if scaler is not None:
            scaler.scale = torch.tensor(scale)
        monitor = GradientNorms(model, find_units(model), scaler)
        (model(**batch).loss * (scale or 1.0)).backward()
        readings.append(monitor.read())
        assert monitor.read() is None
        monitor.remove()
        model.zero_grad()
    for reading in readings[1:]:
        np.testing.assert_allclose(reading.norms, readings[0].norms, rtol=1e-5)
        assert reading.loss == pytest.approx(readings[0].loss, rel=1e-5)


@pytest.mark.parametrize("factor", [1e-15, 1e18])
def test_norms_of_parameters_are_combined_without_overflow(tiny, factor):
    model = with_lora(load_int8(tiny)).train()
    batch = {k: torch.tensor([row[k] for row in token_rows(2)]) for k in ("input_ids", "labels")}
    monitor = GradientNorms(model, find_units(model))
    (model(**batch).loss * factor).backward()
    reading = monitor.read()
    assert (reading.norms > 0).all() and np.isfinite(reading.norms).all()


def test_an_interrupted_backward_does_not_silence_the_next(tiny):
    model = with_lora(load_int8(tiny)).train()
    batch = {k: torch.tensor([row[k] for row in token_rows(2)]) for k in ("input_ids", "labels")}
    monitor = GradientNorms(model, find_units(model))

    def stop(grad):
        raise RuntimeError("out of memory, say")

    loss = model(**batch).loss
    handle = next(p for p in model.parameters() if p.requires_grad).register_hook(stop)
    with pytest.raises(RuntimeError, match="say"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    model(**batch).loss.backward()
    assert monitor.read() is not None


def test_evaluation_and_frozen_forwards_leave_no_hook_behind(tiny):
    model = with_lora(load_int8(tiny))
    monitor = GradientNorms(model, find_units(model))
    ids = torch.tensor([token_rows(1)[0]["input_ids"]])
    with torch.no_grad():
        model.train()(input_ids=ids, labels=ids)
    model.eval()(input_ids=ids, labels=ids).loss.backward()
    assert monitor.read() is None


def test_adapters_of_several_dtypes_are_gathered_in_groups(tiny, monkeypatch):
    """As over several devices: one fused call for each (device, dtype), one vector to the host."""
    model = with_lora(load_int8(tiny)).train()
    for p in find_units(model)[1].parameters:
        p.data = p.data.to(torch.bfloat16)
    monitor = GradientNorms(model, find_units(model))
    calls, norm = [], torch._foreach_norm

    def counted(grads, *args):
        calls.append({g.dtype for g in grads})
        return norm(grads, *args)

    batch = {k: torch.tensor([row[k] for row in token_rows(4)]) for k in ("input_ids", "labels")}
    model(**batch).loss.backward()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_foreach_norm", counted)
        monitor.norms.measure()
    reading = monitor.read()
    assert calls == [{torch.float32}, {torch.bfloat16}]
    for unit, value in zip(find_units(model), reading.norms, strict=True):
        squares = [p.grad.double().square().sum() for p in unit.parameters]
        assert value == pytest.approx(float(torch.stack(squares).sum().sqrt()), rel=1e-5)
    monitor.remove()


def test_the_parts_of_a_steps_vector_come_back_under_their_names_in_one_transfer(monkeypatch):
    transfers, to = [], torch.Tensor.to

    def counted(self, *args, **kwargs):
        transfers.append(args)
        return to(self, *args, **kwargs)

    vector = StepVector([4, 2])
    vector.add("norms", torch.tensor([3.0, 0.25]))
    vector.add("scale", torch.tensor([65536.0]))
    vector.add("empty", torch.zeros(0))
    vector.add("loss", torch.tensor([float("inf")]))
    assert "scale" in vector and "weight" not in vector
    assert vector.device == torch.device("cpu") and vector.indices == [4, 2]
    monkeypatch.setattr(torch.Tensor, "to", counted)
    parts = vector.fetch()
    assert transfers == [("cpu", torch.float64)]
    assert {name: values.tolist() for name, values in parts.items()} == {
        "norms": [3.0, 0.25],
        "scale": [65536.0],
        "empty": [],
        "loss": [float("inf")],
    }
    assert all(values.dtype == np.float64 for values in parts.values())
