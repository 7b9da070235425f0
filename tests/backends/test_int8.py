"""The INT8 backend: both ends bit for bit, real INT8 in training, originals found, checked or refused."""

from __future__ import annotations

import copy
import json
import logging
import pathlib

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from bitsandbytes.autograd._functions import MatMul8bitLt
from conftest import load_bf16, load_int8, save_llama, token_rows, trace_lines, with_lora
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_gnmr import GNMRCallback, SetupError, quantize_int8, restore_plain
from hf_gnmr.backends.bnb.bf16_product import dequantize
from hf_gnmr.backends.bnb.int8 import Int8Backend
from hf_gnmr.backends.bnb.switchable import SwitchableLinear8bitLt
from hf_gnmr.backends.units import find_units
from hf_gnmr.config import ConfigError

IDS = torch.tensor([row["input_ids"] for row in token_rows(4)])


def logits(model, autocast=None):
    with torch.no_grad(), torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        return model(input_ids=IDS).logits


def switched(model, eval_path="active", **options):
    units = find_units(model)
    return Int8Backend(model, units, eval_path=eval_path, **options), units


def lift(backend, *units):
    active = np.zeros(len(backend.recoverable), dtype=bool)
    active[list(units)] = True
    backend.apply(active)


def linears(model):
    return [m for m in model.modules() if isinstance(m, bnb.nn.Linear8bitLt)]


@pytest.fixture(scope="module", params=["plain", "biased", "fp16 checkpoint", "outliers"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "llama"
    if request.param == "biased":
        return save_llama(folder, attention_bias=True, mlp_bias=True)
    if request.param == "fp16 checkpoint":
        return save_llama(folder, dtype=torch.float16)
    save_llama(folder)
    if request.param == "outliers":
        weights = load_file(folder / "model.safetensors")
        for name, tensor in weights.items():
            if name.endswith("layernorm.weight"):
                tensor[5] = 40.0  # hidden states then exceed LLM.int8's threshold in one column
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_all_lifted_equals_the_bf16_model_bit_for_bit(checkpoint):
    expected = logits(load_bf16(checkpoint).eval())
    model = with_lora(load_int8(checkpoint)).eval()  # B = 0
    backend, units = switched(model)
    lift(backend, *range(len(units)))
    assert torch.equal(logits(model), expected)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    model.train()  # no dropout: the recovery path does not depend on the mode
    assert torch.equal(logits(model), expected)


def test_all_lifted_with_trained_adapters_equals_bf16_under_autocast(checkpoint):
    reference = with_lora(load_bf16(checkpoint), trained=True).eval()
    model = with_lora(load_int8(checkpoint), trained=True).eval()
    model.load_state_dict({k: v for k, v in reference.state_dict().items() if "lora_" in k}, strict=False)
    backend, units = switched(model)
    lift(backend, *range(len(units)))
    assert torch.equal(logits(model, torch.bfloat16), logits(reference, torch.bfloat16))


def test_none_lifted_equals_plain_bitsandbytes_in_eval_and_stays_the_same_in_train(checkpoint):
    expected = logits(load_int8(checkpoint).eval())
    model = with_lora(load_int8(checkpoint))
    switched(model)
    assert torch.equal(logits(model.eval()), expected)
    assert torch.equal(logits(model.train()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_path_in_training_is_the_real_int8_product(tiny, dtype):
    model = with_lora(load_int8(tiny))
    plain = copy.deepcopy(linears(model)[0]).train()
    backend, _ = switched(model)
    module = linears(model)[0].train()
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    y = x.detach().clone().requires_grad_()
    ours, real = module(x), MatMul8bitLt.apply(y, plain.weight, None, None, module.state)
    assert torch.equal(ours, real) and ours.dtype == dtype
    ours.sum().backward()
    real.sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert not torch.equal(plain(x.detach()), ours), "plain bitsandbytes trains on dequantised weights on the CPU"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_recovery_path_computes_in_bf16_and_returns_the_input_dtype(checkpoint, dtype):
    model = with_lora(load_int8(checkpoint))
    backend, units = switched(model)
    lift(backend, *range(len(units)))
    original = load_bf16(checkpoint)
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    module = model.get_base_model().model.layers[1].self_attn.q_proj.base_layer
    out = module(x)
    expected = original.model.layers[1].self_attn.q_proj(x.to(torch.bfloat16))
    assert out.dtype == dtype
    assert torch.equal(out, expected.to(dtype))
    out.float().sum().backward()
    assert x.grad.dtype == dtype and x.grad.abs().sum() > 0
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(module(x), expected.to(dtype)), "FP16 autocast must not turn the BF16 path into FP16"


def test_biases_keep_value_and_dtype_over_many_toggles(tmp_path):
    folder = save_llama(tmp_path / "llama", attention_bias=True)
    model = with_lora(load_int8(folder))
    before = {n: p.clone() for n, p in model.named_parameters() if n.endswith("bias")}
    assert before
    backend, units = switched(model)
    for step in range(10):
        lift(backend, *([step % len(units)]))
        for module in linears(model):
            module(torch.randn(3, module.in_features, dtype=torch.float16))
    backend.remove()
    for name, p in model.named_parameters():
        if name in before:
            assert p.dtype == before[name].dtype and torch.equal(p, before[name])


def test_a_trainable_bias_gets_its_true_gradient_on_both_paths(tmp_path):
    folder = save_llama(tmp_path / "llama", attention_bias=True)
    model = with_lora(load_int8(folder), bias="lora_only")
    backend, _ = switched(model)
    module = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    assert module.bias.requires_grad
    for active in ([], [0]):
        lift(backend, *active)
        module.bias.grad = None
        module(torch.randn(2, 5, 64, dtype=torch.bfloat16)).sum().backward()
        assert torch.equal(module.bias.grad, torch.full_like(module.bias, 10.0))


@pytest.mark.parametrize("when", ["before any forward", "after a forward", "after deepcopy", "after saving in 8 bits"])
def test_lifted_layer_runs_the_original_weight(tiny, tmp_path, when):
    base = load_int8(tiny)
    if when == "after saving in 8 bits":
        base.save_pretrained(tmp_path / "int8")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "int8", dtype=torch.bfloat16)
    model = with_lora(base).eval()
    if when == "after a forward":
        logits(model)
    codes = [m.weight.data.clone() for m in linears(model)]
    scales = [(m.weight.SCB if m.state.SCB is None else m.state.SCB).clone() for m in linears(model)]
    backend, units = switched(model, recovery_source=tiny if when == "after saving in 8 bits" else None)
    lift(backend, 1)
    if when == "after deepcopy":
        model = copy.deepcopy(model)
    module = model.get_base_model().model.layers[1].mlp.down_proj.base_layer
    original = load_bf16(tiny).model.layers[1].mlp.down_proj
    x = torch.randn(7, 128, dtype=torch.bfloat16)
    assert torch.equal(module(x), original(x))
    state = module.state
    assert (dequantize(state.CB, state.SCB).float() - original.weight.float()).abs().max() < 0.08 / 127 * 1.01
    lift(backend)
    logits(model)
    for m, code, scale in zip(linears(model), codes, scales, strict=True):
        assert torch.equal(m.weight.data, code) and torch.equal(m.state.CB, code) and torch.equal(m.state.SCB, scale)


def test_dequantize_recovery_is_the_product_with_dequantised_codes(tiny):
    model = with_lora(load_int8(tiny))
    backend, units = switched(model, recovery="dequantize")
    assert backend.bytes_added.sum() == 0 and "DEQUANTISED" in backend.census()["recovery_path"]
    lift(backend, 0)
    module = linears(model)[0].train()
    weight = (module.state.CB.float() * module.state.SCB[:, None] / 127).to(torch.bfloat16)
    x = torch.randn(3, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    torch.nn.functional.linear(y, weight).float().square().sum().backward()
    module(x).float().square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0.02, atol=1e-3)
    assert torch.equal(module(x), torch.nn.functional.linear(x, weight))


def test_a_model_converted_in_memory_needs_no_checkpoint(tiny):
    reference = load_bf16(tiny).eval()
    expected = logits(reference)
    loaded = logits(load_int8(tiny).eval())
    model = quantize_int8(load_bf16(tiny)).eval()
    model.config._name_or_path = "/gone"
    assert torch.equal(logits(model), loaded), "the conversion must quantise as loading does"
    model = with_lora(model).eval()
    backend, units = switched(model)
    assert backend.resident_bytes == backend.bytes_recovery.sum() and backend.bytes_added.sum() == 0
    lift(backend, *range(len(units)))
    assert torch.equal(logits(model), expected)
    backend.remove()
    assert not [k for m in model.modules() for k in m.__dict__ if "gnmr" in k]


def test_a_converted_model_trains_as_a_loaded_one(tiny, tmp_path, trainer_for):
    traces = []
    for load in (load_int8, lambda folder: quantize_int8(load_bf16(folder))):
        trainer_for(with_lora(load(tiny)), GNMRCallback(max_o=1, alpha=0.9, alpha_init_fraction=0)).train()
        traces.append([(line["norms"], line["active"]) for line in trace_lines(tmp_path / "run")[1]])
    assert traces[0] == traces[1]


def test_conversion_refuses_weights_that_are_not_bf16(tmp_path):
    folder = save_llama(tmp_path / "llama", dtype=torch.float32)
    from transformers import AutoModelForCausalLM

    with pytest.raises(SetupError, match=r"float32.*dtype=torch.bfloat16"):
        quantize_int8(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    mixed = load_bf16(folder)
    mixed.model.layers[2].mlp.down_proj.float()
    with pytest.raises(SetupError, match="model.layers.2.mlp.down_proj is torch.float32"):
        quantize_int8(mixed)
    assert not linears(mixed), "nothing is converted unless everything can be"


def test_after_remove_the_model_is_plain_again(tiny):
    model = with_lora(load_int8(tiny), trained=True)
    keys = set(model.state_dict())
    before = logits(model.eval())
    backend, units = switched(model)
    lift(backend, 0)
    assert set(model.state_dict()) == keys, "keys must not depend on which layers are lifted"
    notes = logging.getLogger("bitsandbytes.autograd._functions")
    assert len(notes.filters) == 1
    backend.remove()
    backend.remove()
    assert not notes.filters
    assert {type(m) for m in linears(model)} == {bnb.nn.Linear8bitLt}
    assert not [k for m in model.modules() for k in m.__dict__ if "gnmr" in k]
    assert torch.equal(logits(model), before)


def test_own_state_dict_goes_back_in_with_a_layer_lifted(tiny):
    model = with_lora(load_int8(tiny))
    backend, _ = switched(model)
    lift(backend, 1)
    before = logits(model.train())
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state, strict=True)
    assert torch.equal(logits(model), before)

    fresh = with_lora(load_int8(tiny))
    assert state.keys() == {k for k in fresh.state_dict() if not k.endswith("weight_format")} | {
        k for k in state if k.endswith("weight_format")
    }
    fresh.load_state_dict(state, strict=True)
    fresh_backend, _ = switched(fresh)
    lift(fresh_backend, 1)
    assert torch.equal(logits(fresh.train()), before)
    weights = [k for k in state if k.endswith("base_layer.weight")]
    assert {state[k].dtype for k in weights} == {torch.int8}, "a byte a weight, lifted or not"


def test_merging_and_unmerging_after_training_is_lossy_by_one_step_at_most(tiny, trainer_for):
    """PEFT's own arithmetic on 8-bit weights; no part of ours is left in it."""
    model = with_lora(load_int8(tiny), trained=True)
    trainer_for(model, GNMRCallback(max_o=2, alpha=0.5, alpha_init_fraction=0), max_steps=3).train()

    def values():
        return [
            (
                m.weight.data.float() * (m.weight.SCB if m.state.SCB is None else m.state.SCB)[:, None] / 127,
                (m.weight.SCB if m.state.SCB is None else m.state.SCB) / 127,
            )
            for m in linears(model)
        ]

    before = values()
    model.merge_adapter()
    merged = values()
    model.unmerge_adapter()
    changed = 0
    for (ours, step), (_, merged_step), (theirs, _) in zip(values(), merged, before, strict=True):
        assert ((ours - theirs).abs() <= 0.55 * (step + merged_step)[:, None]).all()  # rounded twice, and in FP16 between
        changed += int((ours != theirs).sum())
    assert changed > 0


def test_accelerate_device_hooks_do_not_pin_the_old_forward(tiny):
    model = with_lora(load_int8(tiny)).eval()
    for module in linears(model):
        add_hook_to_module(module, AlignDevicesHook("cpu"))
    backend, units = switched(model)
    lift(backend, *range(len(units)))
    assert torch.equal(logits(model), logits(load_bf16(tiny).eval()))
    backend.remove()
    assert torch.equal(logits(model), logits(load_int8(tiny).eval()))


def test_empty_input_on_both_paths(tiny):
    model = with_lora(load_int8(tiny))
    backend, _ = switched(model)
    for active in ([], [0]):
        lift(backend, *active)
        assert linears(model)[0](torch.zeros(0, 64, dtype=torch.bfloat16)).shape == (0, 64)


# -- originals ---------------------------------------------------------------------------------------------------


def test_mapped_originals_are_not_resident_and_a_copy_is_said(tmp_path):
    for dtype, mapped in ((torch.bfloat16, True), (torch.float16, False)):
        folder = save_llama(tmp_path / str(dtype), dtype=dtype)
        backend, _ = switched(with_lora(load_int8(folder)))
        total = int(backend.bytes_recovery.sum())
        assert backend.resident_bytes == (0 if mapped else total)
        assert backend.bytes_added.sum() == (total if mapped else 0)
        assert ("note" in backend.census()) is not mapped


def test_sharded_checkpoint(tmp_path):
    model = load_bf16(save_llama(tmp_path / "one"))
    model.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    switchable = with_lora(load_int8(tmp_path / "many")).eval()
    backend, units = switched(switchable)
    lift(backend, 0, 1, 2)
    assert torch.equal(logits(switchable), logits(model.eval()))


def edited(tiny, tmp_path, change):
    """A copy of the checkpoint with its tensors changed; returns the folder."""
    weights = load_file(pathlib.Path(tiny) / "model.safetensors")
    change(weights)
    folder = tmp_path / "edited"
    folder.mkdir()
    (folder / "config.json").write_text((pathlib.Path(tiny) / "config.json").read_text())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


NAME = "model.layers.1.mlp.down_proj.weight"
WAYS = r"recovery_source=.*recovery=\"dequantize\""


def test_weights_of_another_model_are_refused(tiny, tmp_path):
    def nudge(weights):
        weights[NAME] += 0.01 * torch.randn_like(weights[NAME])

    with pytest.raises(SetupError, match=r"layers.1.mlp.down_proj.*does not quantise to the 8-bit codes.*" + WAYS):
        switched(with_lora(load_int8(tiny)), recovery_source=edited(tiny, tmp_path, nudge))


def test_wrong_shapes_and_missing_tensors_are_refused(tiny, tmp_path):
    def shrink(weights):
        weights[NAME] = weights[NAME][:32].contiguous()

    with pytest.raises(SetupError, match=r"down_proj is \(64, 128\) in the model and \(32, 128\)"):
        switched(with_lora(load_int8(tiny)), recovery_source=edited(tiny, tmp_path, shrink))
    (tmp_path / "edited" / "model.safetensors").unlink()
    (tmp_path / "edited" / "config.json").unlink()
    (tmp_path / "edited").rmdir()
    with pytest.raises(SetupError, match="no weight for 1 of 21 8-bit modules, the first: model.layers.1.mlp.down_proj"):
        switched(with_lora(load_int8(tiny)), recovery_source=edited(tiny, tmp_path, lambda w: w.pop(NAME)))


def test_a_pre_quantised_checkpoint_is_refused_with_the_two_ways_out(tiny, tmp_path):
    load_int8(tiny).save_pretrained(tmp_path / "int8")
    model = with_lora(load_int8(tmp_path / "int8"))
    with pytest.raises(SetupError, match="already holds 8-bit weights.*" + WAYS):
        switched(model)
    backend, units = switched(model, recovery_source=tiny)
    lift(backend, 0, 1, 2)
    assert torch.equal(logits(model.eval()), logits(load_bf16(tiny).eval()))
    backend, _ = switched(model, recovery="dequantize")
    assert backend.census()["recovery"] == "dequantize"


def test_a_folder_without_safetensors_and_a_folder_that_moved_are_refused(tiny, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for source in (tmp_path, tmp_path / "gone"):
        with pytest.raises(SetupError, match=WAYS):
            switched(with_lora(load_int8(tiny)), recovery_source=source)


def test_a_truncated_checkpoint_is_refused_by_file_name(tiny, tmp_path):
    folder = edited(tiny, tmp_path, lambda weights: None)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(SetupError, match="model.safetensors cannot be read as safetensors"):
        switched(with_lora(load_int8(tiny)), recovery_source=folder)


def test_wrong_options():
    for field, value in (("recovery", "disk"), ("eval_path", "bf16"), ("recovery_source", 3)):
        with pytest.raises(ConfigError, match=f"{field}={value!r}"):
            GNMRCallback(**{field: value})
    with pytest.raises(ConfigError, match="not read with recovery='dequantize'"):
        GNMRCallback(recovery="dequantize", recovery_source="x")


# -- after training ----------------------------------------------------------------------------------------------


def test_after_training_saving_merging_and_reloading_work_and_nothing_stays(tiny, tmp_path, trainer_for):
    model = with_lora(load_int8(tiny))
    trainer_for(model, GNMRCallback(max_o=2, alpha=0.5, alpha_init_fraction=0)).train()
    _, lines = trace_lines(tmp_path / "run")
    assert any(line["active"] for line in lines), "the run must have lifted something for this to mean anything"
    assert {type(m) for m in linears(model)} == {bnb.nn.Linear8bitLt}
    assert not model._forward_hooks
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(k.startswith("base_model.model.model.layers.") and ".lora_" in k for k in saved)

    for base in (load_int8(tiny), load_bf16(tiny)):
        reloaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
        for name, tensor in reloaded.state_dict().items():
            if ".lora_" in name:
                assert torch.equal(tensor, model.state_dict()[name])
    assert torch.equal(logits(PeftModel.from_pretrained(load_int8(tiny), tmp_path / "adapter").eval()), logits(model.eval()))
    adapted = logits(model.eval())
    merged = model.merge_and_unload()
    assert (logits(merged) - adapted).abs().max() < 0.1
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(load_int8(tmp_path / "merged").eval()), logits(merged))
    assert "gnmr" not in json.dumps(json.loads((tmp_path / "merged" / "config.json").read_text())).lower()


def test_a_merge_in_the_middle_of_training_is_not_served_stale_weights(tiny):
    model = with_lora(load_int8(tiny), trained=True)
    backend, _ = switched(model)
    lift(backend, 1)
    model.merge_adapter()
    with pytest.raises(SetupError, match="weight of a switched module was replaced"):
        logits(model.eval())
    lift(backend)
    merged = logits(model.eval())
    restore_plain(model)
    assert {type(m) for m in linears(model)} == {bnb.nn.Linear8bitLt}
    assert torch.equal(logits(model.eval()), merged)


def test_switching_is_one_object_a_unit(tiny):
    model = with_lora(load_int8(tiny))
    backend, units = switched(model)
    assert all(isinstance(m, SwitchableLinear8bitLt) for m in linears(model))
    assert len({id(m._gnmr_path) for m in linears(model)}) == len(units)
    assert backend.apply(np.array([True, False, True])) == 2
    assert backend.apply(np.array([True, True, False])) == 2
    assert backend.apply(np.array([True, True, False])) == 0


# -- checkpoint keys that are not module names -----------------------------------------------------------------------


def test_renamed_and_fused_checkpoint_keys_go_through_transformers_own_mapping(tmp_path):
    from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

    folder = pathlib.Path(save_llama(tmp_path / "llama", num_key_value_heads=4))
    expected = logits(load_bf16(folder).eval())
    model = with_lora(load_int8(folder)).eval()

    weights = load_file(folder / "model.safetensors")
    old = {}
    for name, tensor in weights.items():
        if ".q_proj" in name:
            parts = [weights[name.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            old[name.replace("self_attn.q_proj", "attention.qkv")] = torch.cat(parts)
        elif ".k_proj" not in name and ".v_proj" not in name:
            old[name.replace("self_attn", "attention")] = tensor
    (tmp_path / "old").mkdir()
    save_file(old, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    model.get_base_model()._weight_conversions = [
        WeightRenaming(r"\.attention\.", ".self_attn."),
        WeightConverter("self_attn.qkv.weight", [f"self_attn.{p}_proj.weight" for p in "qkv"], [Chunk(dim=0)]),
    ]
    backend, units = switched(model, recovery_source=tmp_path / "old")
    assert backend.resident_bytes == 3 * 3 * 64 * 64 * 2, "only what had to be cut out of a fused tensor is copied"
    lift(backend, *range(len(units)))
    assert torch.equal(logits(model), expected)


def test_gpt2_with_its_transposed_weights_and_other_prefix(tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=32)
    whole = GPT2LMHeadModel(config).to(torch.bfloat16)
    for name, p in whole.named_parameters():
        if name.endswith("bias"):
            p.data.normal_(std=0.1)
    bare = GPT2Model(config).to(torch.bfloat16)
    bare.load_state_dict(whole.transformer.state_dict())
    bare.save_pretrained(tmp_path / "gpt2")  # keys h.0.… without the prefix, as the original checkpoint has them
    assert "h.0.attn.c_attn.weight" in load_file(tmp_path / "gpt2" / "model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2", dtype=torch.bfloat16).eval()
    model = with_lora(load_int8(tmp_path / "gpt2"), target_modules=["c_attn", "c_proj", "c_fc"]).eval()
    plain = logits(load_int8(tmp_path / "gpt2").eval())
    backend, units = switched(model)
    assert torch.equal(logits(model), plain)
    lift(backend, *range(len(units)))
    assert torch.equal(logits(model), logits(reference))
    assert not torch.equal(plain, logits(reference))


def test_each_way_to_evaluate_an_adapted_model_gives_a_result_of_its_own(tiny):
    """Base, BF16 with adapter, INT8 with adapter, the same with two layers lifted, merged: none is mistaken for another."""
    found = {"base": logits(load_bf16(tiny).eval())}
    model = with_lora(load_bf16(tiny), trained=True).eval()
    adapter = {k: v for k, v in model.state_dict().items() if "lora_" in k}
    found["BF16 + adapter"] = logits(model)
    int8 = with_lora(load_int8(tiny), trained=True).eval()
    int8.load_state_dict(adapter, strict=False)
    found["INT8 + adapter"] = logits(int8)
    backend, _ = switched(int8)
    lift(backend, 0, 2)
    found["INT8 + adapter, layers 0 and 2 in BF16"] = logits(int8)
    with int8.disable_adapter():
        found["INT8, layers 0 and 2 in BF16, adapter off"] = logits(int8)
    backend.remove()
    found["merged into INT8"] = logits(int8.merge_and_unload().eval())
    names = list(found)
    for i, a in enumerate(names):
        for b in names[:i]:
            assert not torch.equal(found[a], found[b]), (a, b)
