"""INT8 ↔ BF16 on every architecture: census, one layer at a time, both ends bit for bit, a training run."""

from __future__ import annotations

from collections import Counter

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES
from conftest import trace_lines, with_lora
from torch import nn
from transformers import BitsAndBytesConfig

from hf_gnmr import GNMRCallback, SetupError
from hf_gnmr.backends.bnb.int8 import Int8Backend
from hf_gnmr.backends.bnb.switchable import SwitchableLinear8bitLt
from hf_gnmr.backends.units import find_units
from hf_gnmr.control.gnmr import Controller
from hf_gnmr.training.census import census_lines, take_census

IDS = torch.randint(3, 120, (4, 16), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def arch(request, tmp_path_factory):
    """The architecture and a BF16 checkpoint of it, biases not zero."""
    architecture = ARCHITECTURES[request.param]
    folder = tmp_path_factory.mktemp("arch") / "model"
    torch.manual_seed(0)
    model = architecture.model(architecture.config).to(torch.bfloat16)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data.normal_(std=0.1)
    model.save_pretrained(folder)
    return architecture, str(folder)


def load(arch, *, int8):
    architecture, folder = arch
    options = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)} if int8 else {}
    return architecture.model.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def states(model):
    """Hidden states before each decoder layer, and the logits."""
    with torch.no_grad():
        out = model(input_ids=IDS, output_hidden_states=True, use_cache=False)
    return [*out.hidden_states, out.logits]


def lifted(*on):
    active = np.zeros(3, dtype=bool)
    active[list(on)] = True
    return active


def test_both_ends_bit_for_bit_and_each_layer_by_itself(arch):
    architecture, _ = arch
    bf16 = states(load(arch, int8=False))
    model = load(arch, int8=True)
    plain = states(model)
    assert not torch.equal(plain[-1], bf16[-1])
    model = with_lora(model, target_modules=architecture.targets).eval()
    units = find_units(model)
    assert [(u.layer, u.name) for u in units] == [(i, f"{architecture.layers}.{i}") for i in range(3)]
    backend = Int8Backend(model, units, eval_path="active")

    def agree(ours, theirs):
        return [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]

    assert all(agree(states(model), plain))
    for layer in range(3):
        backend.apply(lifted(layer))
        # Up to the input of the lifted layer nothing changes; from its output on everything does.
        assert agree(states(model), plain) == [True] * (layer + 1) + [False] * (4 - layer), f"layer {layer}"
    backend.apply(lifted(0, 1, 2))
    assert all(agree(states(model), bf16)), "all lifted: bit for bit the BF16 model"
    model.train()
    assert torch.equal(states(model)[-1], bf16[-1])
    model.eval()
    backend.apply(lifted())
    assert all(agree(states(model), plain))


def test_the_census_says_what_is_switched_and_what_is_not(arch):
    architecture, _ = arch
    model = with_lora(load(arch, int8=True), target_modules=architecture.targets)
    units = find_units(model)
    backend = Int8Backend(model, units)
    census = take_census(units, backend, Controller(len(units), total_steps=10))
    assert census["units"] == census["recoverable_units"] == 3
    assert census["modules_switched"] == 3 * architecture.switched
    matrices = Counter()
    for unit in units:
        for name, p in unit.module.named_parameters():
            if p.ndim >= 2 and ".lora_" not in name:
                matrices[p.dtype] += p.numel() * p.element_size()
    rows = sum(m.out_features for m in model.modules() if isinstance(m, SwitchableLinear8bitLt))
    low = matrices[torch.int8] + 4 * rows
    assert census["bytes_low"] == low
    assert census["bytes_recovery"] == 2 * matrices[torch.int8]
    assert census["bytes_not_switched"] == matrices[torch.bfloat16]
    assert census["share_switched"] == pytest.approx(low / (low + matrices[torch.bfloat16]), abs=1e-4)
    words = "\n".join(census_lines(census, backend))
    if architecture.experts:
        assert census["modules_not_switched"][architecture.experts] == 3
        assert census["share_switched"] < 0.5
        assert f"NOT switched: 3 {architecture.experts}" in words
    else:
        assert census["modules_not_switched"] == {}
        assert "100.0% of the layers' frozen weight bytes (none left out)" in words
    assert any(m.bias is not None for modules in backend.modules for m in modules) == architecture.bias


def test_heads_embeddings_and_towers_are_left_alone(arch):
    architecture, _ = arch
    model = load(arch, int8=True)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    before = head.weight.detach().clone()
    peft = with_lora(model, target_modules=architecture.targets)
    units = find_units(peft)
    backend = Int8Backend(peft, units)
    backend.apply(np.ones(3, dtype=bool))
    assert type(model.get_output_embeddings()) is nn.Linear
    assert torch.equal(head.weight, before)
    assert (head.weight is embedding.weight) == architecture.tied
    switched = {name for name, m in model.named_modules() if isinstance(m, SwitchableLinear8bitLt)}
    assert all(name.startswith(f"{architecture.layers}.") for name in switched)
    others = {name for name, m in model.named_modules() if type(m) is bnb.nn.Linear8bitLt}
    assert all("vision" in name or "projector" in name for name in others)
    backend.remove()
    assert not any(isinstance(m, SwitchableLinear8bitLt) for m in model.modules())


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_adapters_on_fused_experts_of_which_a_step_uses_few(name, tmp_path, trainer_for):
    """A batch of two tokens reaches few of the experts; the others' adapters get no or zero gradients."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    architecture.model(architecture.config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = with_lora(load((architecture, str(tmp_path / "model")), int8=True), target_modules="all-linear")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 120, (64, 3)).tolist()]
    callback = GNMRCallback(max_o=1, alpha=1e6, alpha_init=1e6, beta=None)
    trainer_for(model, callback, rows=rows, per_device_train_batch_size=1, learning_rate=1e-6).train()
    lines = trace_lines(tmp_path / "run")[1]
    norms = np.array([line["norms"] for line in lines], dtype=float)
    assert np.isfinite(norms).all()
    assert (norms > 0).all()
    assert not any(line["triggered"] for line in lines)


def test_linears_that_bitsandbytes_passes_over_are_refused(tmp_path, trainer_for):
    """Falcon's linears are a class of their own: transformers' 8-bit loading leaves them in 16 bits, with a warning only."""
    config = hf.FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
    hf.FalconForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = hf.FalconForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    with pytest.raises(SetupError, match="not an 8-bit model: its linears are FalconLinear"):
        trainer_for(with_lora(model), GNMRCallback()).train()


def test_training_with_layers_going_up_and_down(arch, trainer_for, tmp_path):
    architecture, _ = arch
    model = with_lora(load(arch, int8=True), target_modules=architecture.targets)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 120, (64, 16)).tolist()]
    trainer_for(model, GNMRCallback(max_o=1, alpha=0.9, alpha_init_fraction=0.0), rows=rows).train()
    header, lines = trace_lines(tmp_path / "run")
    assert [unit["name"] for unit in header["units"]] == [f"{architecture.layers}.{i}" for i in range(3)]
    assert len(lines) == 6
    assert np.isfinite([line["norms"] for line in lines]).all()
    assert np.array([line["norms"] for line in lines]).min() > 0
    assert len({tuple(line["active"]) for line in lines}) >= 2, "the choice moved"
