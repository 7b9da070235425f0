"""A monitored model that is copied, pickled or saved whole, and one that is restored: what is left of us on it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from conftest import load_int8, random_llama, token_rows, with_lora

from hf_gnmr import GNMRSession, SetupError, quantize_int8, restore_plain
from hf_gnmr.backends.hooks import Hook

BATCH = {k: torch.tensor(v)[None] for k, v in token_rows(1)[0].items()}
SETTINGS = {"max_o": 1, "alpha": 0.9, "alpha_init_fraction": 0.0}


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]


def steps(session, model, count=1):
    for _ in range(count):
        model(**BATCH).loss.backward()
        session.observe()
        session.decide()
        model.zero_grad()


def monitored(tiny, backend, trigger):
    if backend == "int8":
        model = with_lora(load_int8(tiny)).train()
    else:
        model = random_llama().train()
    before = len(hooks_of(model))
    session = GNMRSession(model, **SETTINGS, backend=backend, trigger=trigger)
    steps(session, model)
    assert len(hooks_of(model)) > before
    return model, session, before


def duplicates(model, tmp_path):
    torch.save(model, tmp_path / "model.pt")
    return {
        "copied": copy.deepcopy(model),
        "pickled": pickle.loads(pickle.dumps(model)),
        "saved": torch.load(tmp_path / "model.pt", weights_only=False),
    }


@pytest.mark.parametrize(
    ("backend", "trigger"), [("int8", "gnmr"), ("int8", "jacobian"), ("activation", "jacobian"), ("none", "gnmr")]
)
def test_a_copy_of_a_monitored_model_is_plain_and_trains(tiny, tmp_path, backend, trigger):
    model, session, before = monitored(tiny, backend, trigger)
    expected = model(**BATCH).loss.item()
    for how, twin in duplicates(model, tmp_path).items():
        switched = {type(m).__name__ for m in twin.modules() if "Switch" in type(m).__name__ or hasattr(type(m), "plain")}
        assert not switched or (how == "copied" and switched == {"SwitchableLinear8bitLt"}), how
        assert all(hook._function is None for hook in hooks_of(twin) if isinstance(hook, Hook)), how
        loss = twin.train()(**BATCH).loss
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=0.01), how
        restore_plain(twin)
        assert len(hooks_of(twin)) == before and not any("Switch" in type(m).__name__ for m in twin.modules()), how
    steps(session, model)
    assert session.decision is not None and session.steps_done == 2
    session.detach()


@pytest.mark.parametrize("trigger", ["gnmr", "jacobian"])
def test_restoring_a_model_leaves_no_hook_and_nothing_grows(tiny, trigger):
    model, session, before = monitored(tiny, "int8", trigger)
    restore_plain(model)
    assert len(hooks_of(model)) == before
    for _ in range(5):
        model(**BATCH).loss.backward()
        model.zero_grad()
    assert session._gradients.unread == 0 and session._gradients.step_losses == []
    session.detach()


def test_a_second_session_leaves_no_hook_of_an_interrupted_one(tiny):
    model, interrupted, before = monitored(tiny, "int8", "jacobian")
    session = GNMRSession(model, **SETTINGS)
    steps(session, model)
    assert interrupted._gradients.unread == 0
    session.detach()
    assert len(hooks_of(model)) == before


def test_the_users_hooks_survive_restoring_and_quantising():
    model = random_llama().to(torch.bfloat16).train()
    calls = []
    linear = model.model.layers[0].mlp.down_proj
    handle = linear.register_forward_hook(lambda *args: calls.append("forward"))
    linear.register_forward_pre_hook(lambda module, args, kwargs: calls.append("pre"), with_kwargs=True)
    quantize_int8(model)
    restore_plain(model)
    model(**BATCH)
    assert calls == ["pre", "forward"]
    handle.remove()
    model(**BATCH)
    assert calls == ["pre", "forward", "pre"], "the handle still removes it"


def test_a_copy_of_a_quantised_model_has_its_originals():
    model = quantize_int8(random_llama().to(torch.bfloat16))
    twin = copy.deepcopy(model)
    del model
    twin = with_lora(twin).train()
    session = GNMRSession(twin, **SETTINGS)
    steps(session, twin, 3)
    assert session.decision.active.any()
    session.detach()


def test_a_quantised_model_that_was_pickled_says_that_it_has_none():
    twin = with_lora(pickle.loads(pickle.dumps(quantize_int8(random_llama().to(torch.bfloat16))))).train()
    with pytest.raises(SetupError, match="recovery_source="):
        GNMRSession(twin, **SETTINGS)


def test_a_patched_linear_is_refused_before_any_is_converted():
    model = random_llama().to(torch.bfloat16)
    linear = model.model.layers[2].mlp.down_proj
    linear.forward = type(linear).forward.__get__(linear)
    with pytest.raises(SetupError, match=r"layers.2.mlp.down_proj has a custom forward"):
        quantize_int8(model)
    assert all(type(m) is torch.nn.Linear for name, m in model.named_modules() if name.endswith("_proj"))


def test_weights_that_are_moved_and_moved_back_between_two_passes(tiny):
    """Adversarial weight perturbation: the gradient of the step is the sum of both passes."""
    model = with_lora(load_int8(tiny)).train()
    session = GNMRSession(model, **SETTINGS)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    for _ in range(3):
        model(**BATCH).loss.backward()
        with torch.no_grad():
            before = [p.clone() for p in parameters]
            for p in parameters:
                p.add_(0.01 * p.grad.sign())
        model(**BATCH).loss.backward()
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
        reading = session.observe(micro_batches=1)
        total = torch.stack([p.grad.double().square().sum() for p in parameters]).sum().sqrt()
        assert reading.total_norm == pytest.approx(total.item(), rel=1e-5)
        optimizer.step()
        assert session.decide() is not None
        optimizer.zero_grad()
    model(**BATCH).loss.backward()
    optimizer.step()
    with pytest.raises(SetupError, match="before the optimizer's step"):
        session.observe()
    session.detach()
