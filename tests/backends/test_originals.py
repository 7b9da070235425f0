"""The original weights behind 8-bit ones: located through transformers' key mapping, checked, or refused."""

from __future__ import annotations

import pathlib

import pytest
import torch
from conftest import load_bf16, load_int8, save_llama, with_lora
from safetensors.torch import load_file, save_file
from switching import lift, logits, switched

from hf_gnmr import SetupError

NAME = "model.layers.1.mlp.down_proj.weight"
WAYS = r"recovery_source=.*recovery=\"dequantize\""


@pytest.mark.parametrize(("dtype", "mapped"), [(torch.bfloat16, True), (torch.float16, False)])
def test_mapped_originals_are_not_resident_and_a_copy_is_reported(dtype, mapped, tmp_path):
    folder = save_llama(tmp_path / "llama", dtype=dtype)
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


def test_weights_of_another_model_are_refused(tiny, tmp_path):
    def nudge(weights):
        weights[NAME] += 0.01 * torch.randn_like(weights[NAME])

    with pytest.raises(SetupError, match=r"layers.1.mlp.down_proj.*does not quantise to the 8-bit codes.*" + WAYS):
        switched(with_lora(load_int8(tiny)), recovery_source=edited(tiny, tmp_path, nudge))


def test_wrong_shapes_are_refused(tiny, tmp_path):
    def shrink(weights):
        weights[NAME] = weights[NAME][:32].contiguous()

    with pytest.raises(SetupError, match=r"down_proj is \(64, 128\) in the model and \(32, 128\)"):
        switched(with_lora(load_int8(tiny)), recovery_source=edited(tiny, tmp_path, shrink))


def test_missing_tensors_are_refused(tiny, tmp_path):
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


@pytest.mark.parametrize("folder", [".", "gone"], ids=["without safetensors", "moved"])
def test_a_folder_without_safetensors_and_a_folder_that_moved_are_refused(folder, tiny, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(SetupError, match=WAYS):
        switched(with_lora(load_int8(tiny)), recovery_source=tmp_path / folder)


def test_a_truncated_checkpoint_is_refused_by_file_name(tiny, tmp_path):
    folder = edited(tiny, tmp_path, lambda weights: None)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(SetupError, match="model.safetensors cannot be read as safetensors"):
        switched(with_lora(load_int8(tiny)), recovery_source=folder)


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
