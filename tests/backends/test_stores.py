"""Stores of recovery weights: the original model bit for bit in each, the same run, and the bytes that they report."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from architectures import ARCHITECTURES
from conftest import load_bf16, load_int8, save_llama, trace_lines, with_lora
from switching import IDS, active, backend_for, logits, play_accelerator
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BitsAndBytesConfig

from hf_gnmr import GNMRCallback, quantize_int8, read_trace


@pytest.fixture
def slotted(monkeypatch):
    """The store `host` as on an accelerator."""
    play_accelerator(monkeypatch)


@pytest.mark.parametrize("kind", ["plain", "biased", "fp16 checkpoint", "in memory"])
@pytest.mark.parametrize("store", ["in place", "slots", "device"])
def test_every_store_gives_the_original_model_bit_for_bit(store, kind, tmp_path, request):
    folder = save_llama(
        tmp_path / "llama",
        dtype=torch.float16 if kind == "fp16 checkpoint" else torch.bfloat16,
        attention_bias=kind == "biased",
        mlp_bias=kind == "biased",
    )
    if store == "slots":
        request.getfixturevalue("slotted")
    expected = logits(load_bf16(folder).eval())
    model = with_lora(quantize_int8(load_bf16(folder)) if kind == "in memory" else load_int8(folder)).eval()
    plain = logits(model)
    backend = backend_for(model, recovery="device" if store == "device" else "host")
    backend.reserve(3)
    for on in ((), (1,), (0, 2), (0, 1, 2), (2,)):
        backend.apply(active(*on))
        mixed = logits(model)
        assert torch.equal(mixed, plain) == (on == ()) and torch.equal(mixed, expected) == (len(on) == 3), on
    backend.apply(active(0, 1, 2))
    assert torch.equal(logits(model.train()), expected)
    backend.remove()
    assert torch.equal(logits(model.eval()), plain)


@pytest.mark.parametrize("store", ["slots", "device"])
def test_transposed_weights_in_every_store(store, tmp_path, request):
    """GPT-2's Conv1D; its checkpoint has (in, out)."""
    if store == "slots":
        request.getfixturevalue("slotted")
    architecture = ARCHITECTURES["gpt2"]
    torch.manual_seed(0)
    architecture.model(architecture.config).to(torch.bfloat16).save_pretrained(tmp_path / "gpt2")
    expected = logits(architecture.model.from_pretrained(tmp_path / "gpt2", dtype=torch.bfloat16).eval())
    model = architecture.model.from_pretrained(
        tmp_path / "gpt2", dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    model = with_lora(model, target_modules=architecture.targets).eval()
    backend = backend_for(model, recovery="device" if store == "device" else "host")
    backend.apply(active(0, 1, 2))
    assert torch.equal(logits(model), expected)


def test_gradients_are_the_same_in_every_store(tiny, request):
    gradients = {}
    for store in ("in place", "device", "slots"):
        if store == "slots":
            request.getfixturevalue("slotted")
        model = with_lora(load_int8(tiny), trained=True).train()
        backend = backend_for(model, recovery="device" if store == "device" else "host")
        backend.reserve(2)
        backend.apply(active(0, 2))
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients[store] = [p.grad for p in model.parameters() if p.requires_grad]
    for store in ("device", "slots"):
        assert all(torch.equal(a, b) for a, b in zip(gradients[store], gradients["in place"], strict=True)), store


@pytest.mark.parametrize("recovery", ["host", "device", "slots"])
def test_training_in_every_store_gives_the_same_run(tiny, trainer_for, tmp_path, recovery, request):
    if recovery == "slots":
        request.getfixturevalue("slotted")
    callback = GNMRCallback(max_o=2, alpha=0.9, alpha_init_fraction=0, recovery=recovery.replace("slots", "host"))
    trainer_for(with_lora(load_int8(tiny)), callback).train()
    header, lines = trace_lines(tmp_path / "run")
    reference = GNMRCallback(max_o=2, alpha=0.9, alpha_init_fraction=0, trace_path=tmp_path / "reference.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_gnmr.backends.bnb.int8.is_accelerator", lambda device: False)
        trainer_for(with_lora(load_int8(tiny)), reference).train()
    assert reference.summary["promotion_ratio"] == callback.summary["promotion_ratio"] > 0
    assert max(line["recovery_bytes"] for line in lines) <= header["census"]["recovery_bytes_bound"]
    assert (recovery == "device") == (header["census"]["recovery_bytes_bound"] == 0)
    assert [line["norms"] for line in read_trace(tmp_path / "reference.jsonl").steps] == [line["norms"] for line in lines]


def test_the_size_of_both_paths_resident_is_reported_to_the_byte(tmp_path):
    folder = save_llama(tmp_path / "llama", hidden_size=256, intermediate_size=512)
    model = with_lora(load_int8(folder))
    backend = backend_for(model, recovery="device")
    store = backend.store
    weights = int(store.weights.sum())
    held = sum(residual.nbytes for residual, _ in store._residuals.values())
    held += sum(workspace.nbytes for workspace in store._workspaces.values())
    assert backend.resident_bytes == held
    assert held - 6 * store.exceptions - sum(w.nbytes for w in store._workspaces.values()) == weights
    assert 0.005 < store.exceptions / weights < 0.05 and backend.recovery_bytes_bound(3) == 0
    assert f"{store.exceptions:,} exceptions" in backend.census()["recovery_path"]


def test_a_closed_store_releases_its_memory(tmp_path):
    folder = save_llama(tmp_path / "llama", dtype=torch.float16)
    backend = backend_for(with_lora(load_int8(folder)))
    copies = [weakref.ref(original.weight) for original in backend.store.originals.values()]
    assert backend.resident_bytes > 0 and all(copy() is not None for copy in copies)
    backend.remove()
    gc.collect()
    assert not any(copy() is not None for copy in copies)


@pytest.mark.parametrize("recovery", ["host", "device", "dequantize"])
def test_a_switch_makes_no_tensor(recovery, tiny):
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    backend = backend_for(with_lora(load_int8(tiny)), recovery=recovery)
    backend.reserve(1)
    with Count():
        for unit in (0, 1, 2, 0, 1):
            backend.apply(active(unit))
    assert Count.calls == 0
