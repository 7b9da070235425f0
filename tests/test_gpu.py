"""The same promises on a CUDA device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import load_bf16, load_int8, token_rows, trace_lines, with_lora

from hf_gnmr import GNMRCallback
from hf_gnmr.backends.int8 import Int8Backend
from hf_gnmr.units import find_units

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def logits(model):
    ids = torch.tensor([row["input_ids"] for row in token_rows(4)], device="cuda")
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_both_ends_bit_for_bit_and_the_bytes_that_are_accounted_for(tiny):
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
    devices = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1, "model.layers.2": 1,
               "model.norm": 1, "lm_head": 1}
    model = with_lora(load_int8(tiny, device_map=devices))
    trainer_for(model, GNMRCallback(max_o=2, alpha=0.9, alpha_init_fraction=0), use_cpu=False).train()
    _, lines = trace_lines(tmp_path / "run")
    norms = np.array([line["norms"] for line in lines], dtype=float)
    assert np.isfinite(norms).all() and (norms > 0).all() and any(line["active"] for line in lines)
