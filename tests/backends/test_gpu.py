"""The same promises on a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import load_bf16, load_int8, logits_and_gradients, random_llama, token_rows, trace_lines, with_lora

from hf_gnmr import GNMRCallback
from hf_gnmr.backends import Fp8Backend, LowBitBackend
from hf_gnmr.backends.bnb.int8 import Int8Backend
from hf_gnmr.backends.fewbit.fp8 import why_not
from hf_gnmr.backends.formats import E2M1, E3M2, E4M3, E5M2, quantise
from hf_gnmr.backends.units import find_units

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def logits(model):
    ids = torch.tensor([row["input_ids"] for row in token_rows(4)], device="cuda")
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_both_ends_bit_for_bit_and_the_reported_bytes(tiny):
    bf16 = logits(load_bf16(tiny, device_map={"": 0}).eval())
    plain = logits(load_int8(tiny, device_map={"": 0}).eval())
    model = with_lora(load_int8(tiny, device_map={"": 0})).eval()
    backend = Int8Backend(model, find_units(model), eval_path="active")
    assert torch.equal(logits(model), plain)
    before = torch.cuda.memory_allocated()
    backend.reserve(3)
    slots = torch.cuda.memory_allocated() - before
    assert backend.store.slot_bytes <= slots < backend.store.slot_bytes + 3 * 512
    for _ in range(3):
        backend.apply(backend.recoverable)
        assert torch.equal(logits(model), bf16)
        backend.apply(~backend.recoverable)
        assert torch.equal(logits(model), plain)
    assert torch.cuda.memory_allocated() - before == slots, "allocated once"


@pytest.mark.parametrize("options", [{"recovery": "device"}, {"pin_memory": True}], ids=["device", "pinned"])
def test_the_other_stores_bit_for_bit(tiny, options):
    bf16 = logits(load_bf16(tiny, device_map={"": 0}).eval())
    model = with_lora(load_int8(tiny, device_map={"": 0})).eval()
    backend = Int8Backend(model, find_units(model), eval_path="active", **options)
    backend.reserve(3)
    backend.apply(backend.recoverable)
    assert torch.equal(logits(model), bf16)


def test_training_lifts_layers(tiny, trainer_for, tmp_path):
    model = with_lora(load_int8(tiny, device_map={"": 0}))
    callback = GNMRCallback(max_o=2, alpha=0.9, alpha_init_fraction=0)
    trainer_for(model, callback, use_cpu=False, bf16=True).train()
    _, lines = trace_lines(tmp_path / "run")
    assert len(lines) == 6 and any(line["active"] for line in lines)
    assert all(line["loss"] is not None for line in lines)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layers_on_two_devices(tiny, trainer_for, tmp_path):
    """`device_map` over two GPUs: norms are gathered device by device, and each layer's originals go to its own."""
    devices = {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.layers.2": 1,
        "model.norm": 1,
        "lm_head": 1,
    }
    model = with_lora(load_int8(tiny, device_map=devices))
    trainer_for(model, GNMRCallback(max_o=2, alpha=0.9, alpha_init_fraction=0), use_cpu=False).train()
    _, lines = trace_lines(tmp_path / "run")
    norms = np.array([line["norms"] for line in lines], dtype=float)
    assert np.isfinite(norms).all() and (norms > 0).all() and any(line["active"] for line in lines)


@pytest.mark.parametrize("form", [E2M1, E3M2, E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", ["token", "tensor", "block"])
def test_formats_round_as_on_a_cpu(form, dtype, scaling):
    x = (torch.randn(64, 200) * torch.logspace(-6, 6, 64)[:, None]).to(dtype)
    x[3], x[7, 5] = 0, 1e20
    assert torch.equal(quantise(x.cuda(), form, scaling).cpu(), quantise(x, form, scaling))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_few_bits(dtype):
    """All lifted: the plain training, bit for bit; the GPU's FP8 product (where it has one) beside its emulation."""
    ids = torch.tensor([row["input_ids"] for row in token_rows(6, 16)], device="cuda")

    def same(a, b):
        return torch.equal(a[0], b[0]) and all(torch.equal(a[1][n], b[1][n]) for n in a[1])

    model = random_llama(dtype).cuda()
    plain = logits_and_gradients(model, ids)
    lowbit = LowBitBackend(model, find_units(model), bits_recovery=16)
    assert not torch.equal(logits_and_gradients(model, ids)[0], plain[0])
    lowbit.apply(lowbit.recoverable)
    assert same(logits_and_gradients(model, ids), plain)
    lowbit.remove()
    emulated = Fp8Backend(model, find_units(model), emulate=True)
    slow = logits_and_gradients(model, ids)
    emulated.remove()
    if why_not(torch.device("cuda")):
        pytest.skip("no FP8 on this GPU")
    backend = Fp8Backend(model, find_units(model))
    assert backend.engine == "scaled_mm"
    fast = logits_and_gradients(model, ids)
    close = {"rtol": 0.02, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.02}
    torch.testing.assert_close(fast[0], slow[0], **close)
    for name, grad in fast[1].items():
        size = slow[1][name].abs().max()
        torch.testing.assert_close(grad / size, slow[1][name] / size, rtol=0.1, atol=0.02)
    backend.apply(backend.recoverable)
    assert same(logits_and_gradients(model, ids), plain)
    backend.remove()


def test_training_in_the_gpus_fp8(trainer_for, tmp_path):
    if why_not(torch.device("cuda")):
        pytest.skip("no FP8 on this GPU")
    callback = GNMRCallback(backend="fp8", max_o=2, alpha=0.9, alpha_init_fraction=0, beta=None)
    trainer_for(random_llama().cuda(), callback, use_cpu=False, bf16=True).train()
    header, lines = trace_lines(tmp_path / "run")
    assert header["census"]["engine"] == "scaled_mm" and any(line["active"] for line in lines)
    assert all(line["loss"] > 0 for line in lines)
