"""The decoder layers of each architecture, by structure; unknown ones by pattern, or refused."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES
from conftest import load_int8, random_llama, tiny_config, with_lora
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_gnmr import SetupError
from hf_gnmr.backends.units import canonical, decoder_layers, find_projections, find_units


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_of_each_architecture(name):
    architecture = ARCHITECTURES[name]
    expected = [(i, f"{architecture.layers}.{i}") for i in range(3)]
    model = architecture.model(architecture.config)
    assert [(index, path) for index, path, _ in decoder_layers(model)] == expected
    bare = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    assert [index for index, _, _ in decoder_layers(bare)] == [0, 1, 2], "also without a language-model head"
    model = with_lora(model, target_modules=architecture.targets)
    assert [(index, path) for index, path, _ in decoder_layers(model)] == expected


def test_peft_does_not_change_names_or_order(tiny):
    plain = [(i, n) for i, n, _ in decoder_layers(load_int8(tiny))]
    model = with_lora(load_int8(tiny))
    assert [(i, n) for i, n, _ in decoder_layers(model)] == plain
    assert [unit.name for unit in find_units(model)] == [name for _, name in plain]
    assert canonical("model.layers.0.self_attn.q_proj.base_layer.weight") == "model.layers.0.self_attn.q_proj.weight"


class Unknown(nn.Module):
    """Not a transformers model: blocks under an unknown name."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.others = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_an_unknown_architecture_is_refused_with_the_option_to_name_its_layers():
    model = Unknown()
    with pytest.raises(SetupError, match=r'layers="path.to.layers.\*".*blocks.\* \(3\), others.\* \(3\)'):
        find_units(model)
    assert [unit.name for unit in find_units(model, "blocks.*")] == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.*", "matches no module"),
        ("blocks", r"layers='blocks': expected a module name with one \* for the layer index"),
    ],
)
def test_patterns_that_are_refused(pattern, message):
    with pytest.raises(SetupError, match=message):
        find_units(Unknown(), pattern)


def test_a_list_of_the_models_depth_inside_a_layer_is_no_candidate():
    model = hf.LlamaForCausalLM(tiny_config())
    for layer in model.model.layers:
        layer.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    assert len(decoder_layers(model)) == 3


def test_wrappers_are_looked_through(tiny):
    model = with_lora(load_int8(tiny))
    assert len(find_units(torch.compile(model))) == 3


def test_trained_copies_of_modules_have_the_modules_names():
    model = get_peft_model(random_llama(), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["down_proj"]))
    names = [unit.name for unit in find_projections(model)]
    assert names[:2] == ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"] and len(names) == 6
    model.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["down_proj"]))
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name or "modules_to_save" in name)
    names = [unit.name for unit in find_projections(model)]
    assert len(names) == len(set(names)) == 9 and "model.layers.0.mlp.down_proj.modules_to_save.second" in names
