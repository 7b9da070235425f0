"""The decoder layers of each architecture, by structure; unknown ones by pattern, or refused."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from conftest import load_int8, tiny_config, with_lora
from torch import nn

from hf_gnmr import SetupError
from hf_gnmr.units import canonical, decoder_layers, find_units

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = {**SMALL, "num_key_value_heads": 2}

ARCHITECTURES = {
    "model.layers": [
        (hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED)),
        (hf.MistralForCausalLM, hf.MistralConfig(**GROUPED)),
        (hf.Qwen2ForCausalLM, hf.Qwen2Config(**GROUPED)),
        (hf.Qwen3ForCausalLM, hf.Qwen3Config(**GROUPED, head_dim=8)),
        (hf.Gemma2ForCausalLM, hf.Gemma2Config(**GROUPED, head_dim=8)),
        (hf.Phi3ForCausalLM, hf.Phi3Config(**GROUPED, pad_token_id=0)),
        (hf.MixtralForCausalLM, hf.MixtralConfig(**GROUPED, num_local_experts=3)),
    ],
    "transformer.h": [
        (hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32)),
        (hf.BloomForCausalLM, hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=4)),
    ],
    "model.decoder.layers": [
        (hf.OPTForCausalLM, hf.OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=3,
                                         num_attention_heads=4, word_embed_proj_dim=32, max_position_embeddings=32)),
    ],
    "gpt_neox.layers": [(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**SMALL))],
}
CASES = [(name, cls, config) for name, models in ARCHITECTURES.items() for cls, config in models]


@pytest.mark.parametrize(("name", "cls", "config"), CASES, ids=[cls.__name__ for _, cls, _ in CASES])
def test_layers_of_each_architecture(name, cls, config):
    layers = decoder_layers(cls(config))
    assert [(index, path) for index, path, _ in layers] == [(i, f"{name}.{i}") for i in range(3)]


def test_the_language_layers_of_a_multimodal_model():
    text = {**GROUPED, "head_dim": 8, "num_hidden_layers": 3}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
              "image_size": 28, "patch_size": 14}
    config = hf.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = hf.Gemma3ForConditionalGeneration(config)
    assert [path for _, path, _ in decoder_layers(model)] == [f"model.language_model.layers.{i}" for i in range(3)]


def test_peft_does_not_change_names_or_order(tiny):
    plain = [(i, n) for i, n, _ in decoder_layers(load_int8(tiny))]
    model = with_lora(load_int8(tiny))
    assert [(i, n) for i, n, _ in decoder_layers(model)] == plain
    assert [unit.name for unit in find_units(model)] == [name for _, name in plain]
    assert canonical("model.layers.0.self_attn.q_proj.base_layer.weight") == "model.layers.0.self_attn.q_proj.weight"


class Unknown(nn.Module):
    """No transformers model: blocks under a name of their own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.others = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_an_unknown_architecture_is_refused_with_the_option_and_found_by_pattern():
    model = Unknown()
    with pytest.raises(SetupError, match=r'layers="path.to.layers.\*".*blocks.\* \(3\), others.\* \(3\)'):
        find_units(model)
    assert [unit.name for unit in find_units(model, "blocks.*")] == ["blocks.0", "blocks.1", "blocks.2"]
    with pytest.raises(SetupError, match="matches no module"):
        find_units(model, "layers.*")
    with pytest.raises(SetupError, match="one \\* for the layer index"):
        find_units(model, "blocks")


def test_a_list_as_long_as_the_model_is_deep_inside_a_layer_is_no_candidate():
    model = hf.LlamaForCausalLM(tiny_config())
    for layer in model.model.layers:
        layer.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    assert len(decoder_layers(model)) == 3


def test_wrappers_are_looked_through(tiny):
    model = with_lora(load_int8(tiny))
    assert len(find_units(torch.compile(model))) == 3
