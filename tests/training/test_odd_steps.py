"""Steps that the controller does not expect: gradients of zeros, no backward, one backward more, infinite losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import load_int8, token_rows, trace_lines, with_lora
from transformers import Trainer, TrainerCallback

from hf_gnmr import GNMRCallback, GNMRSession, SetupError
from hf_gnmr.trace.replay import replay
from hf_gnmr.trace.series import read_series
from hf_gnmr.training.mixin import GNMRTrainer

ROW = token_rows(1)
BATCH = {k: torch.tensor(ROW[0][k])[None] for k in ("input_ids", "labels")}


def trained(trainer_for, tiny, tmp_path, trainer_class, callback=None, *others, **changes):
    """A run on 64 copies of one row at a learning rate of 1e-9: every norm equals the others, all layers at once."""
    options = {"rows": ROW * 64, "learning_rate": 1e-9, "max_steps": 12, **changes}
    model = options.pop("model", None) or with_lora(load_int8(tiny))
    trainer_for(model, callback or GNMRCallback(), *others, trainer_class=trainer_class, **options).train()
    return trace_lines(tmp_path / "run")[1]


def assert_calm(lines, without=()):
    """No layer is triggered, and every GNMR is 1, but for the steps without."""
    for line in lines:
        assert line["triggered"] == [], line["step"]
        if line["step"] not in without:
            np.testing.assert_allclose(line["gnmr"], 1.0, atol=0.02)


def scaled_loss(factors, attribute=None):
    """A Trainer whose loss in step n is multiplied by factors[n]."""

    class Scaled(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            factor = factors.get(self.state.global_step + 1)
            return loss if factor is None else factor(loss)

    return Scaled


# -- gradients of exact zeros --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [(1,), (2, 3), (5,)])
def test_a_loss_of_zero_is_no_observation(trainer_for, tiny, tmp_path, steps):
    lines = trained(trainer_for, tiny, tmp_path, scaled_loss(dict.fromkeys(steps, lambda loss: loss * 0.0)))
    assert len(lines) == 12
    assert_calm(lines, without=steps)
    for line in lines:
        unseen = line["step"] in steps
        assert line["norms"] == [None] * 3 if unseen else None not in line["norms"]
        assert line["gnmr"] == [None] * 3 if unseen else None not in line["gnmr"]


def test_labels_that_are_all_ignored_are_no_observation(trainer_for, tiny, tmp_path):
    """The mean over no token would be NaN; a sum is 0, and so is its gradient."""
    ignored = {"input_ids": ROW[0]["input_ids"], "labels": [-100] * 16}

    def summed(outputs, labels, num_items_in_batch=None):
        logits, labels = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / 60

    order = torch.utils.data.SequentialSampler

    class InOrder(Trainer):
        def _get_train_sampler(self, *args):
            return order(self.train_dataset)

    rows = [ignored] * 4 + ROW * 40
    lines = trained(trainer_for, tiny, tmp_path, InOrder, rows=rows, compute_loss_func=summed, max_steps=8)
    assert lines[0]["norms"] == [None] * 3
    assert_calm(lines, without=(1,))


def test_a_layer_behind_zero_weights_is_not_seen_and_the_others_are(trainer_for, tiny, tmp_path):
    """LoRA whose A and B are both zero in layer 1 until step 4: its gradients are exact zeros."""
    model = with_lora(load_int8(tiny), trained=True)
    frozen = {n: p for n, p in model.named_parameters() if p.requires_grad and ".layers.1." in n}
    kept = {n: p.detach().clone() for n, p in frozen.items()}

    class Zero(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            with torch.no_grad():
                for n, p in frozen.items():
                    p.copy_(kept[n] if state.global_step >= 3 else torch.zeros_like(p))

    lines = trained(trainer_for, tiny, tmp_path, Trainer, None, Zero(), model=model, learning_rate=0.0, max_steps=8)
    for line in lines:
        assert [n is None for n in line["norms"]] == [False, line["step"] <= 3, False]
        assert [r == 0 for r in line["risk"]] == [False, line["step"] <= 3, False]
        if line["step"] >= 4:  # the others' norms jump, since layer 1 changes; its own first norm is at step 4
            assert line["gnmr"][1] == pytest.approx(1.0, abs=0.02)


def test_all_norms_zero_in_the_first_steps_is_reported_once_with_the_layers(trainer_for, tiny, tmp_path, capsys):
    factors = dict.fromkeys(range(1, 7), lambda loss: loss * 0.0)
    trained(trainer_for, tiny, tmp_path, scaled_loss(factors), max_steps=8)
    out = capsys.readouterr().out
    assert out.count("no gradient reaches decoder layers 0, 1, 2 in the first 3 steps") == 1
    assert "Is the loss 0" in out


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_gradient_in_any_of_the_first_steps_is_refused_with_the_mend(tiny, checkpointing):
    """Reentrant checkpointing without a gradient at its input cuts the layers off; the trained head still gets one."""
    model = with_lora(load_int8(tiny), modules_to_save=["lm_head"]).train()
    if checkpointing:
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": True})
        model.get_base_model().disable_input_require_grads()
    else:
        model.get_base_model().model.register_forward_hook(lambda module, args, out: _detached(out))
    session = GNMRSession(model, max_o=1, alpha_init_fraction=0.0)
    with pytest.raises(SetupError, match="no gradient reaches the decoder layers") as error:
        for _ in range(3):
            model(**BATCH).loss.backward()
            session.observe()
            session.decide()
            model.zero_grad()
    assert session.steps_done == 3
    mends = ("enable_input_require_grads()", "'use_reentrant': False")
    assert all((mend in str(error.value)) == checkpointing for mend in mends)
    session.detach()


def _detached(out):
    out.last_hidden_state = out.last_hidden_state.detach()
    return out


# -- micro-batches without a backward ------------------------------------------------------------------------------------


def constant_in(steps, micro=None):
    """A Trainer whose `training_step` runs no backward in these steps (in one of their micro-batches, or in all)."""

    class Constant(GNMRTrainer):
        seen = 0

        def training_step(self, model, inputs, *args, **kwargs):
            Constant.seen += 1
            here = (Constant.seen - 1) % self.args.gradient_accumulation_steps
            if self.state.global_step + 1 in steps and micro in (None, here):
                return torch.tensor(0.5)
            return super().training_step(model, inputs, *args, **kwargs)

    return Constant


@pytest.mark.parametrize("steps", [(1,), (1, 2), (4,), (4, 5, 6, 7)])
def test_steps_without_a_backward_are_logged_and_training_continues(trainer_for, tiny, tmp_path, capsys, steps):
    callback = GNMRCallback()
    lines = trained(trainer_for, tiny, tmp_path, constant_in(steps), callback)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert_calm([line for line in lines if line["step"] not in steps])
    for line in lines:
        if line["step"] in steps:
            assert line["skipped"] == "0 backward passes in a window of 1 micro-batches"
            assert line["norms"] == [None] * 3 and line["gnmr"] is None and line["grad_norm"] is None
        else:
            assert line["skipped"] is None
    assert callback.controller.steps_done == 12 - len(steps)
    assert callback.summary["skipped_steps"] == len(steps)
    assert capsys.readouterr().out.count("0 backward passes in a window") == 1, "reported once"


def test_a_backward_that_is_missing_in_a_custom_loop_is_reported_once(tiny, capsys):
    model = with_lora(load_int8(tiny)).train()
    session = GNMRSession(model, max_o=1, alpha_init_fraction=0.0, gradient_accumulation_steps=2)
    decisions = []
    for passes in (2, 1, 2, 1):
        for _ in range(passes):
            model(**BATCH).loss.backward()
        session.observe()
        decisions.append(session.decide() is not None)
        model.zero_grad()
    assert decisions == [True, False, True, False]
    out = capsys.readouterr().out
    assert out.count("step 2: window of 1 micro-batches instead of 2") == 1 and out.count("(this is reported once)") == 1
    session.detach()


@pytest.mark.parametrize("micro", [0, 1, 3])
def test_a_window_with_a_backward_missing_is_a_short_window(trainer_for, tiny, tmp_path, micro):
    options = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, "max_steps": 6}
    lines = trained(trainer_for, tiny, tmp_path, constant_in((3,), micro), **options)
    assert [line["skipped"] for line in lines] == [
        "3 backward passes in a window of 4 micro-batches" if step == 3 else None for step in range(1, 7)
    ]
    if micro == 3:
        assert lines[2]["norms"] == [None] * 3, "after clipping nothing true can be read"
    else:
        assert None not in lines[2]["norms"]
    assert lines[2]["micro_batches"] == 4
    assert_calm([line for line in lines if line["step"] != 3])


def test_no_backward_in_any_of_the_first_steps_is_refused(trainer_for, tiny, tmp_path):
    with pytest.raises(SetupError, match="no gradient was seen at step 3"):
        trained(trainer_for, tiny, tmp_path, constant_in((1, 2, 3, 4)))


def test_a_nan_before_a_missing_last_backward_is_withheld(trainer_for, tiny, tmp_path):
    model = with_lora(load_int8(tiny))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    class Bad(constant_in((2,), 1)):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.state.global_step == 1 else loss

    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 3}
    lines = trained(trainer_for, tiny, tmp_path, Bad, model=model, **options)
    assert [line["update_withheld"] for line in lines] == [False, True, False]
    assert all(torch.isfinite(p).all() for n, p in model.named_parameters() if n in before)


# -- more backward passes than micro-batches -----------------------------------------------------------------------------


class OneMore(Trainer):
    """A second backward in each step, of half the loss."""

    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, dict(inputs), *args, **kwargs)
        self.accelerator.backward(0.5 * self.compute_loss(model, dict(inputs)))
        return loss


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("trigger", ["gnmr", "jacobian", "gsnr", "random"])
def test_one_more_backward_in_every_step(trainer_for, tiny, tmp_path, trigger, accumulation):
    options = {"promotion_ratio": 0.3} if trigger == "random" else None
    callback = GNMRCallback(trigger=trigger, trigger_options=options, max_o=1)
    more = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 4 // accumulation}
    lines = trained(trainer_for, tiny, tmp_path, OneMore, callback, max_steps=5, **more)
    plain = trained(trainer_for, tiny, tmp_path, Trainer, max_steps=5, **more)
    assert all(line["skipped"] is None for line in lines)
    np.testing.assert_allclose(lines[0]["norms"], (1 + 0.5 * accumulation) * np.array(plain[0]["norms"]), rtol=0.02)
    if trigger in ("jacobian", "gsnr"):
        signals = np.array([line["signal"] for line in lines], dtype=float)
        assert np.isfinite(signals[:, 1:]).all(), "layer 0 reads frozen embeddings: it has no gain"
        assert all(line["triggered"] for line in lines)


class ThrownAway(TrainerCallback):
    """A backward of the user's own in each step, whose gradients are thrown away, one way or another."""

    def __init__(self, way, when):
        self.way, self.when = way, when

    def probe(self, model):
        loss = 1000 * model(**BATCH).loss
        parameters = [p for p in model.parameters() if p.requires_grad]
        kept = [p.grad for p in parameters]
        if self.way == "autograd.grad":
            torch.autograd.grad(loss, parameters)
        elif self.way in ("zero_grad", "zero_in_place"):
            loss.backward()
            model.zero_grad(set_to_none=self.way == "zero_grad")
        elif self.way == "same tensors put back":
            model.zero_grad()
            loss.backward()
            for p, gradient in zip(parameters, kept, strict=True):
                p.grad = gradient
        else:
            kept = [None if g is None else g.clone() for g in kept]
            if "after zeros" in self.way:
                model.zero_grad(set_to_none=False)
            elif "after zero_grad" in self.way:
                model.zero_grad()
            for _ in range(2 if "twice" in self.way else 1):
                loss.backward(retain_graph=True)
            for p, gradient in zip(parameters, kept, strict=True):
                if gradient is None or "copies" in self.way:
                    p.grad = gradient
                else:
                    p.grad.copy_(gradient)

    def maybe(self, when, model):
        if self.when == when:
            self.probe(model)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.maybe("step_begin", model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.maybe("step_end", model)

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        self.maybe("substep_end", model)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.maybe("pre_optimizer_step", model)

    def on_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.maybe("optimizer_step", model)


PUT_BACK = [
    "same tensors put back",
    "copies put back",
    "copies put back after zero_grad",
    "copies put back, twice",
    "values put back",
    "values put back after zero_grad",
    "values put back after zeros",
]
THROWN_AWAY = ["zero_grad", "zero_in_place", "autograd.grad"]
QUICK = [
    *((way, "step_begin", "jacobian", True) for way in THROWN_AWAY),
    ("zero_grad", "step_end", "gnmr", False),
    ("autograd.grad", "substep_end", "jacobian", True),
    ("autograd.grad", "pre_optimizer_step", "jacobian", False),
    ("same tensors put back", "substep_end", "gnmr", True),
    ("same tensors put back", "pre_optimizer_step", "jacobian", True),
    ("copies put back", "substep_end", "jacobian", True),
    ("copies put back", "pre_optimizer_step", "gnmr", True),
    ("copies put back", "optimizer_step", "jacobian", False),
    ("values put back after zero_grad", "pre_optimizer_step", "jacobian", True),
]
EVENTS = ["step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"]
PROBES = [
    *QUICK,
    *(
        pytest.param(way, when, "jacobian", first, marks=pytest.mark.slow)
        for way in (*THROWN_AWAY, *PUT_BACK)
        for when in (EVENTS if way == "autograd.grad" else EVENTS[1:4] if way in PUT_BACK else EVENTS[::4])
        for first in (True, False)
        if (way, when, "jacobian", first) not in QUICK
    ),
]


@pytest.mark.parametrize(("way", "when", "trigger", "probe_first"), PROBES)
def test_a_backward_that_is_thrown_away_leaves_no_mark(trainer_for, tiny, tmp_path, trigger, way, when, probe_first):
    lines, plain = with_and_without_probe(trainer_for, tiny, tmp_path, trigger, ThrownAway(way, when), probe_first)
    np.testing.assert_allclose([line["loss"] for line in lines], [line["loss"] for line in plain], rtol=0.02)
    for line, before in zip(lines, plain, strict=True):
        np.testing.assert_allclose(line["norms"], before["norms"], rtol=0.05)
        assert line["micro_batches"] == before["micro_batches"] and line["skipped"] is None
    if trigger == "jacobian":
        np.testing.assert_allclose(lines[-1]["signal"][1:], plain[-1]["signal"][1:], rtol=0.05)


@pytest.mark.parametrize(("way", "when"), [("zero_grad", "step_begin"), ("values put back", "substep_end")])
def test_gsnr_survives_a_backward_that_is_thrown_away(trainer_for, tiny, tmp_path, way, when):
    lines, plain = with_and_without_probe(trainer_for, tiny, tmp_path, "gsnr", ThrownAway(way, when), True)
    np.testing.assert_allclose([line["loss"] for line in lines], [line["loss"] for line in plain], rtol=0.02)
    np.testing.assert_allclose(lines[-1]["norms"], plain[-1]["norms"], rtol=0.05)


def with_and_without_probe(trainer_for, tiny, tmp_path, trigger, probe, probe_first):
    """The steps of two runs on different rows, with clipping."""
    options = {"max_steps": 3, "max_grad_norm": 0.1, "rows": token_rows(24)}
    if probe.when == "substep_end":
        options |= {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1}
    before = trained(trainer_for, tiny, tmp_path, Trainer, GNMRCallback(trigger=trigger, max_o=1), **options)
    ours = GNMRCallback(trigger=trigger, max_o=1)
    callbacks = [probe, ours] if probe_first else [ours, probe]
    return trained(trainer_for, tiny, tmp_path, Trainer, *callbacks, **options), before


def test_micro_batches_whose_gradients_are_thrown_away_make_a_short_window(trainer_for, tiny, tmp_path):
    probe = ThrownAway("zero_grad", "substep_end")
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 3}
    lines = trained(trainer_for, tiny, tmp_path, Trainer, None, probe, **options)
    assert {line["skipped"] for line in lines} == {"1 backward passes in a window of 2 micro-batches"}


# -- losses --------------------------------------------------------------------------------------------------------------


def test_a_loss_that_the_loop_divides_in_place_is_recorded_as_it_was(tiny, tmp_path):
    model = with_lora(load_int8(tiny)).train()
    session = GNMRSession(model, max_o=1, alpha_init_fraction=0.0, gradient_accumulation_steps=2)
    with torch.no_grad():
        expected = model(**BATCH).loss.item()
    for _ in range(2):
        loss = model(**BATCH).loss
        loss /= 2
        loss.backward()
    assert session.observe().loss == pytest.approx(expected, rel=1e-3)
    session.decide()
    session.detach()


def test_a_noted_loss_that_is_divided_in_place_is_recorded_as_it_was(tiny):
    model = with_lora(load_int8(tiny)).train()
    session = GNMRSession(model, max_o=1, alpha_init_fraction=0.0)
    loss = model(input_ids=BATCH["input_ids"]).logits.float().square().mean()
    session.note_loss(loss)
    expected = loss.item()
    loss.backward()
    with torch.no_grad():
        loss /= 2
    assert session.observe().loss == pytest.approx(expected, rel=1e-6)
    session.decide()
    session.detach()


INFINITE = {
    "divided by zero": lambda loss: loss / 0.0,
    "times inf": lambda loss: loss * float("inf"),
    "times nan": lambda loss: loss * float("nan"),
    "log of zero": lambda loss: (loss * 0.0).log(),
}


@pytest.mark.parametrize("kind", INFINITE)
def test_a_loss_that_is_not_finite_withholds_the_update_and_training_continues(trainer_for, tiny, tmp_path, kind, capsys):
    model = with_lora(load_int8(tiny))
    lines = trained(trainer_for, tiny, tmp_path, scaled_loss({3: INFINITE[kind]}), model=model, max_steps=6)
    assert [line["update_withheld"] for line in lines] == [False, False, True, False, False, False]
    assert all(torch.isfinite(p).all() for p in model.parameters() if p.requires_grad)
    assert_calm([lines[i] for i in (0, 1, 3, 4, 5)])
    assert "step 3: gradient not finite in layers 0, 1, 2" in capsys.readouterr().out


def test_a_loss_that_is_infinite_with_finite_gradients_is_reported(trainer_for, tiny, tmp_path, capsys):
    class Added(GNMRTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss + (float("inf") if self.state.global_step == 1 else 0.0)

    def custom(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    lines = trained(trainer_for, tiny, tmp_path, Added, max_steps=3, compute_loss_func=custom)
    assert [line["loss"] for line in lines][1] == "inf" and not any(line["update_withheld"] for line in lines)
    assert "step 2: loss inf, with finite gradients" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [256.0, 512.0, 65536.0, 300.0])
def test_a_trainer_may_weigh_its_loss_as_it_likes(trainer_for, tiny, tmp_path, factor, capsys):
    factors = dict.fromkeys(range(1, 8), lambda loss: loss * factor)
    lines = trained(trainer_for, tiny, tmp_path, scaled_loss(factors), max_steps=4)
    assert len(lines) == 4 and "SCALER" not in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "reported"), [(65536.0, True), (512.0, True), (300.0, False), (1.0, False)])
def test_in_a_custom_loop_a_constant_power_of_two_is_reported_once_and_never_refused(tiny, factor, reported, capsys):
    model = with_lora(load_int8(tiny)).train()
    session = GNMRSession(model, max_o=1, alpha_init_fraction=0.0)
    for step in range(5):
        (model(**BATCH).loss * factor).backward()
        session.observe()
        session.decide()
        model.zero_grad()
        assert ("IS THERE A LOSS SCALER?" in capsys.readouterr().out) == (reported and step == 2)
    session.detach()


def test_one_steps_weight_says_nothing(tiny, capsys):
    model = with_lora(load_int8(tiny)).train()
    session = GNMRSession(model, max_o=1, alpha_init_fraction=0.0)
    for factor in (256.0, 512.0, 1024.0, float("inf"), 512.0):
        (model(**BATCH).loss * factor).backward()
        session.observe()
        session.decide()
        model.zero_grad()
    assert "SCALER" not in capsys.readouterr().out
    session.detach()


# -- where it began ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trigger", ["gnmr", "jacobian", "gsnr"])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_if_no_norm_is_finite_the_layer_whose_forward_failed_is_lifted(
    trainer_for, tiny, tmp_path, culprit, trigger, capsys
):
    model = with_lora(load_int8(tiny))
    layer = model.get_base_model().model.layers[culprit]
    state = {"step": 0}

    def fail(module, args, output):
        if module.training and state["step"] == 2:
            return (output[0] * float("inf"), *output[1:]) if isinstance(output, tuple) else output * float("nan")
        return None

    layer.register_forward_hook(fail)

    class Count(TrainerCallback):
        def on_step_begin(self, args, control_state, control, **kwargs):
            state["step"] = control_state.global_step

    callback = GNMRCallback(max_o=1, trigger=trigger)
    lines = trained(trainer_for, tiny, tmp_path, Trainer, callback, Count(), model=model, max_steps=5)
    assert lines[2]["first_not_finite"] == culprit and lines[2]["update_withheld"]
    assert lines[3]["active"] == [culprit]
    assert all("first_not_finite" not in line for line in (lines[0], lines[1], lines[3], lines[4]))
    series = read_series(tmp_path / "run")
    again = replay(series, recorded_trigger=True)
    assert np.array_equal(again.active, series.active) and np.array_equal(again.triggered, series.triggered)
    out = capsys.readouterr().out
    assert f"the forward of {culprit} was the first that was not finite" in out


def test_inputs_that_are_not_finite_already_accuse_no_layer(tiny):
    model = with_lora(load_int8(tiny)).train()
    model.get_base_model().model.embed_tokens.register_forward_hook(lambda module, args, output: output * float("nan"))
    session = GNMRSession(model, max_o=1, alpha_init_fraction=0.0)
    model(**BATCH).loss.backward()
    reading = session.observe()
    assert not reading.finite and reading.first_not_finite is None
    assert session.decide().active.tolist() == [True, False, False]
    session.detach()
