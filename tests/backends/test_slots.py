"""Slots on the device: filled in parallel with the computation, allocated once, never beyond the bound."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from conftest import load_bf16, load_int8, save_llama, with_lora
from hypothesis import given, settings
from hypothesis import strategies as st
from switching import active, backend_for, logits, play_accelerator
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_gnmr import ConfigError, GNMRCallback, GNMRSession, SetupError
from hf_gnmr.backends.bnb.int8 import Int8Backend
from hf_gnmr.backends.bnb.stores.slots import Slots
from hf_gnmr.backends.units import find_units


@pytest.fixture
def slotted(monkeypatch):
    """The store `host` as on an accelerator."""
    play_accelerator(monkeypatch)


class SlowCopy:
    """A slow copy that waits for its gate and records the threads it ran in."""

    def __init__(self, seconds):
        self.seconds, self.threads, self.count, self.gate = seconds, set(), 0, threading.Event()

    def __call__(self, destination, source):
        if not self.gate.wait(timeout=30):
            raise TimeoutError("something waits for this copy that should not")
        time.sleep(self.seconds)
        self.threads.add(threading.current_thread().name)
        self.count += 1
        destination.copy_(source)


def slow_slots(tiny, seconds):
    model = with_lora(load_int8(tiny)).eval()
    backend = backend_for(model)
    copy = SlowCopy(seconds)
    backend.store._copy = copy
    return model, backend, copy


def test_copies_run_in_parallel_and_only_the_layer_that_needs_them_waits(slotted, tiny):
    model, backend, copy = slow_slots(tiny, 0.02)
    backend.reserve(1)
    expected = logits(load_bf16(tiny).eval())
    # The gate opens after layers 0 and 1: if they or the decision waited for a copy, the test would fail.
    handle = model.get_base_model().model.layers[2].register_forward_pre_hook(lambda m, a: copy.gate.set())
    backend.apply(active(2))
    assert copy.count == 0, "the decision does not wait"
    lifted = logits(model)
    assert copy.count == 7, "the layer itself does"
    handle.remove()
    assert torch.equal(lifted, logits(model)) and copy.count == 7
    assert all(name.startswith("hf_gnmr") for name in copy.threads)
    backend.apply(active())
    backend.apply(active(2))
    logits(model)
    assert copy.count == 7, "a layer that returns soon is not copied again"
    backend.apply(active(0))
    backend.apply(active(1))
    logits(model)
    assert copy.count == 21 and backend.store.copied == 3
    assert not torch.equal(logits(model), expected)
    backend.remove()
    assert not [t for t in threading.enumerate() if t.name.startswith("hf_gnmr")]


def test_slots_are_allocated_once_and_never_exceed_the_bound(slotted, tiny):
    model = with_lora(load_int8(tiny)).eval()
    backend = backend_for(model)
    backend.reserve(2)
    buffers = [buffer.data_ptr() for slots in backend.store._by_device.values() for buffer in slots.buffers]
    assert backend.store.slot_bytes == backend.recovery_bytes_bound(2) == backend.census()["slot_bytes"]
    for on in ((0, 1), (1, 2), (0,), (2, 0), ()):
        backend.apply(active(*on))
        logits(model)
        assert [b.data_ptr() for s in backend.store._by_device.values() for b in s.buffers] == buffers
    views = {view.untyped_storage().data_ptr() for view in backend.store._views.values()}
    assert views <= set(buffers)
    assert backend.host_bytes == 0, "a mapped checkpoint takes no anonymous memory of the host"


def test_evaluation_on_the_recovery_path_streams_through_one_slot(slotted, tiny):
    model = with_lora(load_int8(tiny)).eval()
    backend = Int8Backend(model, find_units(model), eval_path="recovery")
    backend.reserve(0)
    assert len(next(iter(backend.store._by_device.values())).buffers) == 1
    expected = logits(load_bf16(tiny).eval())
    assert torch.equal(logits(model), expected) and torch.equal(logits(model), expected)
    assert backend.store.copied == 6
    backend.store.reserve(2)
    backend.apply(active(0, 1))
    logits(model)
    backend.paths[0].in_eval = backend.paths[1].in_eval = True
    backend.paths[2].in_eval = False
    copied = backend.store.copied
    logits(model)
    assert backend.store.copied == copied + 1, "only the one that evaluation evicted"


def test_a_failed_copy_is_never_ignored(slotted, tiny):
    model, backend, copy = slow_slots(tiny, 0)
    copy.gate.set()

    def broken(destination, source):
        raise OSError("the disk is gone")

    backend.reserve(3)
    backend.store._copy = broken
    backend.apply(active(1))
    for _ in range(9):
        with pytest.raises(OSError, match="the disk is gone"):
            logits(model)
    backend.store._copy = copy
    backend.apply(active(0, 1, 2))
    assert torch.equal(logits(model), logits(load_bf16(tiny).eval())), "copied again, completely"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 3), max_size=3)), min_size=2, max_size=8))
def test_units_of_different_size_never_see_the_weights_of_another(uneven, steps):
    """Decisions and evaluations of the whole model on the recovery path, in any order, through three slots."""
    model, expected, plain = uneven
    with pytest.MonkeyPatch.context() as patch:
        play_accelerator(patch)
        backend = Int8Backend(model, find_units(model), eval_path="recovery")
        assert len(set(backend.store.weights.tolist())) > 1
        backend.reserve(3)
        for whole, units in steps:
            backend.apply(active(*units, of=4))
            for unit in range(4):
                backend.paths[unit].in_eval = whole or unit in units
            mixed = logits(model)
            assert not whole or torch.equal(mixed, expected)
            assert units or whole or torch.equal(mixed, plain)
            for unit in units if not whole else ():  # a whole evaluation may have evicted lifted units
                assert all(module in backend.store._views for module in backend.modules[unit])
        backend.remove()


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Four layers, of which three have only their attention in 8 bits."""
    folder = save_llama(tmp_path_factory.mktemp("uneven") / "llama", num_hidden_layers=4)
    skip = ["lm_head", *(f"model.layers.{i}.mlp" for i in (1, 2, 3))]
    quantization = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantization)
    model = with_lora(model, target_modules=["q_proj"]).eval()
    return model, logits(load_bf16(folder).eval()), logits(model)


def test_slots_on_two_devices_are_counted_on_both(slotted, tiny):
    model = with_lora(load_int8(tiny))
    backend = backend_for(model)
    backend.store._devices = [torch.device("cpu"), torch.device("cpu", 0), torch.device("cpu", 0)]
    for units in range(4):
        backend.reserve(units)
        assert backend.store.slot_bytes == backend.recovery_bytes_bound(units)
    assert backend.recovery_bytes_bound(1) == 2 * 73_728, "on each device any of its units may be the lifted one"


def test_a_warm_up_that_the_slots_cannot_hold_is_refused(slotted, tiny):
    model = with_lora(load_int8(tiny))
    with pytest.raises(
        ConfigError,
        match="fidelity_warmup=0.5 lifts all 3 units.*recovery='host' holds only 1 of them.*use recovery='device'",
    ):
        GNMRSession(model, max_o=1, total_steps=10, fidelity_warmup=0.5)
    GNMRSession(model, max_o=1, total_steps=10, fidelity_warmup=0.5, recovery="device").detach()
    GNMRSession(model, max_o=3, total_steps=10, fidelity_warmup=0.5).detach()


def test_pinning_is_for_accelerators(tiny):
    with pytest.raises(SetupError, match="pin_memory=True is for copies to an accelerator"):
        backend_for(with_lora(load_int8(tiny)), pin_memory=True)
    with pytest.raises(ConfigError, match="pin_memory=True.*recovery='host' only"):
        GNMRCallback(recovery="device", pin_memory=True)


def test_an_accelerator_has_slots(slotted, tiny):
    assert isinstance(backend_for(with_lora(load_int8(tiny))).store, Slots)
