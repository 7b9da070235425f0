"""Models for a run: what they are loaded from, and adapters that depend on the seed and on their names only."""

from __future__ import annotations

import pytest
import torch
from conftest import load_bf16, load_int8

from hf_gnmr import GNMRConfig, SetupError
from hf_gnmr.run.models import (
    add_adapters,
    architecture_config,
    build_from_scratch,
    check_depth,
    import_gguf,
    load_adapter,
    load_base,
    load_tokenizer,
    model_source,
    scratch_tokenizer,
)
from hf_gnmr.run.sections import LoraSection, ModelSection, RecipeError

SIZES = {
    "model_type": "llama",
    "vocab_size": 288,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def scratch(dtype=None, **changes):
    return ModelSection("scratch", tokenizer="bytes", architecture={**SIZES, **changes}, dtype=dtype)


def adapters(model):
    return {name: p.detach().float() for name, p in model.named_parameters() if "lora_" in name}


def test_adapters_do_not_depend_on_the_bases_dtype(tiny):
    over_bf16, over_int8 = (adapters(add_adapters(load(tiny), LoraSection(r=4), 5)) for load in (load_bf16, load_int8))
    assert over_bf16.keys() == over_int8.keys() and len(over_bf16) == 2 * 7 * 3
    assert all(torch.equal(over_bf16[name], over_int8[name]) for name in over_bf16)


def test_adapters_are_drawn_from_the_seed_and_their_names(tiny):
    first = adapters(add_adapters(load_bf16(tiny), LoraSection(r=4), 5))
    few = adapters(add_adapters(load_bf16(tiny), LoraSection(r=4, target_modules=["q_proj"]), 5))
    assert len(few) == 2 * 3 and all(torch.equal(few[name], first[name]) for name in few)
    other = adapters(add_adapters(load_bf16(tiny), LoraSection(r=4, target_modules=["q_proj"]), 6))
    for name, values in few.items():
        if "lora_A" in name:
            assert 0.9 / 8 < values.abs().max() <= 1 / 8, "uniform within 1/√64"
            assert not torch.equal(values, other[name])
        else:
            assert not values.any()


def test_an_adapter_is_loaded_or_refused_by_name(tiny, tmp_path):
    saved = add_adapters(load_bf16(tiny), LoraSection(r=4), 5)
    saved.save_pretrained(tmp_path / "adapter")
    section = LoraSection(r=4, init_adapter=str(tmp_path / "adapter"))
    loaded = adapters(add_adapters(load_bf16(tiny), section, 99))
    assert all(torch.equal(loaded[name], values) for name, values in adapters(saved).items())
    with pytest.raises(RecipeError, match="lora.init_adapter=.*does not fit"):
        add_adapters(load_bf16(tiny), LoraSection(r=8, init_adapter=section.init_adapter), 99)
    few = add_adapters(load_bf16(tiny), LoraSection(r=4, target_modules=["q_proj"]), 5)
    with pytest.raises(RecipeError, match="lora.init_adapter=.*does not fit: 0 tensors missing, 36 unexpected"):
        load_adapter(few, str(tmp_path / "adapter"), "lora.init_adapter")
    with pytest.raises(RecipeError, match="here='/gone': no such folder"):
        load_adapter(few, "/gone", "here")


def test_targets_that_match_nothing_are_refused(tiny):
    with pytest.raises(RecipeError, match=r"lora \(target_modules=\['nothing'\]\)"):
        add_adapters(load_bf16(tiny), LoraSection(target_modules=["nothing"]), 0)


@pytest.mark.parametrize("name", ["/gone/model", "./gone", "~/gone/model", "a/b/c"])
def test_a_folder_that_does_not_exist_is_refused(name):
    with pytest.raises(RecipeError, match=f"model.name='{name}': no such folder"):
        model_source(ModelSection(name))


def test_a_folder_or_hub_id_is_its_own_source(tiny):
    assert model_source(ModelSection(tiny)) == tiny
    assert model_source(ModelSection("owner/model")) == "owner/model"


@pytest.mark.parametrize(
    ("section", "gnmr", "lora", "message"),
    [
        ({}, GNMRConfig(max_o=4), None, "gnmr.max_o=4: expected at most 3, the model's decoder layers"),
        ({}, None, LoraSection(layers_to_transform=[0, 3]), "expected layers from 0 to 2"),
        ({"architecture": {"hidden_size": 65}}, None, None, "model.architecture.hidden_size=65: .* has 64"),
    ],
)
def test_what_does_not_fit_the_depth_is_refused_before_weights_are_loaded(tiny, section, gnmr, lora, message):
    with pytest.raises(RecipeError, match=message):
        check_depth(tiny, ModelSection(tiny, **section), gnmr, lora)


def test_what_fits_the_depth_is_accepted(tiny):
    section = ModelSection(tiny, architecture={"hidden_size": 64, "dtype": "float32"})
    check_depth(tiny, section, GNMRConfig(max_o=3), LoraSection(layers_to_transform=[0, 2]))
    check_depth(tiny, section, GNMRConfig(max_o=0.25), None)


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_model_from_scratch_depends_on_the_seed_only(dtype, expected):
    first, again, other = (build_from_scratch(scratch(dtype), seed) for seed in (1, 1, 2))
    assert {p.dtype for p in first.parameters()} == {expected}
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_an_unknown_model_type_is_refused():
    with pytest.raises(RecipeError, match="model.architecture={'model_type': 'nosuch'"):
        build_from_scratch(scratch(model_type="nosuch"), 0)


def test_an_architecture_of_which_no_model_can_be_built_is_refused():
    section = scratch()
    section.attn_implementation = "nosuch"
    with pytest.raises(RecipeError, match="model.architecture: cannot build a model from it: .*nosuch"):
        build_from_scratch(section, 0)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused():
    size = len(scratch_tokenizer(scratch()))
    assert architecture_config(scratch()).vocab_size == 288 >= size
    with pytest.raises(RecipeError, match=f"vocab_size=8: expected at least {size}, the tokens of bytes"):
        scratch_tokenizer(scratch(vocab_size=8))


def test_a_tokenizer_gets_a_padding_token(tiny_lm):
    tokenizer = load_tokenizer(tiny_lm, ModelSection(tiny_lm))
    assert tokenizer.is_fast and tokenizer.pad_token_id is not None


@pytest.mark.parametrize("load", [load_tokenizer, lambda source, section: load_base(source, section, "none")])
def test_a_folder_without_a_model_is_refused_by_name(tmp_path, load):
    with pytest.raises(RecipeError, match="model.name='mine': the .* cannot be loaded"):
        load(str(tmp_path), ModelSection("mine"))


@pytest.mark.parametrize(("backend", "quantised"), [("int8", True), ("none", False)])
def test_a_base_is_stored_as_its_backend_stores_it(tiny, backend, quantised):
    model = load_base(tiny, ModelSection(tiny), backend)
    assert (model.model.layers[0].mlp.up_proj.weight.dtype == torch.int8) is quantised
    assert model.model.norm.weight.dtype == torch.bfloat16


def test_a_gguf_file_is_not_written_over_a_folder(tmp_path):
    file = tmp_path / "model.gguf"
    with pytest.raises(SetupError, match="no such file"):
        import_gguf(file, tmp_path / "new")
    file.write_bytes(b"")
    with pytest.raises(SetupError, match="exists already: remove it, or choose another folder"):
        import_gguf(file, tmp_path)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(SetupError, match="exists already"):
        import_gguf(file, tmp_path / "link")
    with pytest.raises(SetupError, match=r"cannot be created: .*nowhere is no folder that may be written"):
        import_gguf(file, tmp_path / "nowhere" / "model")
