"""Models' folders, configurations, adapters and GGUF files from outside: what cannot be used is one line, before weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml
from test_limits import command, refused

from hf_gnmr.run.architecture import MAX_LABELS, load_config, on_meta
from hf_gnmr.run.models import architecture_config, load_base, load_tokenizer
from hf_gnmr.run.sections import ModelSection, RecipeError

SIZES = {
    "model_type": "llama", "vocab_size": 288, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
ROPE = {"rope_type": "linear", "factor": 2.0}

CONFIGURATIONS = [
    ({"num_labels": 10**9}, f"num_labels=1000000000: expected at most {MAX_LABELS:,}"),
    ({"num_labels": -1}, "num_labels=-1: expected at least 0"),
    ({"num_labels": "2"}, "num_labels='2': expected a whole number"),
    ({"id2label": [1]}, "id2label=.*: expected a mapping"),
    ({"id2label": dict.fromkeys(map(str, range(MAX_LABELS + 1)), "x")}, "id2label=.*: expected at most .* labels"),
    ({"num_hidden_layers": -5}, "num_hidden_layers=-5: expected at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0: expected at least 1"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers='2': expected a whole number"),
    ({"num_hidden_layers": 2.5}, "'num_hidden_layers'.*2.5"),
    ({"hidden_size": 0}, "hidden_size=0: expected at least 1"),
    ({"hidden_size": -64}, "hidden_size=-64: expected at least 1"),
    ({"num_attention_heads": 0}, "num_attention_heads=0: expected at least 1"),
    ({"num_attention_heads": 3}, r"64.*not a multiple of the number of attention heads \(3\)"),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0: expected at least 1"),
    ({"head_dim": -4}, "head_dim=-4: expected at least 0"),
    ({"intermediate_size": -1}, "intermediate_size=-1: expected at least 0"),
    ({"max_position_embeddings": -3}, "max_position_embeddings=-3: expected at least 0"),
    ({"vocab_size": -3}, "vocab_size=-3: expected at least 1"),
    ({"rope_scaling": {**ROPE, "rope_type": "nope"}}, "rope_type='nope': not known to transformers"),
    ({"rope_scaling": {**ROPE, "rope_type": ["a"]}}, "rope_type=.'a'.: expected a name"),
    ({"rope_scaling": {**ROPE, "factor": "x"}}, "factor='x': expected a number"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type.*yarn.*factor"),
    ({"rope_scaling": "linear"}, "rope_scaling='linear': expected a mapping"),
    ({"rope_theta": "x"}, "rope_theta='x': expected a number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: expected a number"),
    ({"hidden_act": "foo"}, "hidden_act='foo': not known to transformers"),
    ({"hidden_act": 5}, "hidden_act.*expected str.*5"),
    ({"pad_token_id": 10**9}, "pad_token_id=1000000000 of vocab_size=288"),
    ({"torch_dtype": "float99"}, "torch_dtype='float99': expected the name of a dtype"),
    ({"torch_dtype": "nn"}, "torch_dtype='nn': expected the name of a dtype"),
    ({"dtype": "torch.float32"}, "dtype=.torch.float32.: expected the name of a dtype"),
    ({"dtype": 5}, "dtype=5: expected the name of a dtype"),
    ({"dtype": ["a"]}, "dtype=.'a'.: expected the name of a dtype"),
    ({"layer_types": ["a", "b"]}, "layer_types"),
    ({"layer_types": 5}, "layer_types=5: expected a list"),
    ({"quantization_config": 5}, "quantization_config=5: expected a mapping"),
    ({"auto_map": 5}, "auto_map=5: expected a mapping"),
    ({"model_type": ["a"]}, "model_type=.'a'.: expected a name"),
    ({"model_type": "nope"}, "nope"),
]


def folder_of(path, **changes):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **SIZES, **changes}))
    return str(path)


@pytest.mark.parametrize("source", ["folder", "recipe"])
@pytest.mark.parametrize(("changes", "message"), CONFIGURATIONS, ids=lambda value: str(value)[:50])
def test_a_configuration_that_cannot_be_used_names_field_and_value(tmp_path, changes, message, source):
    section = ModelSection("scratch", tokenizer="bytes", architecture={**SIZES, **changes})
    if source == "folder":
        section = ModelSection(folder_of(tmp_path / "model", **changes))
    with pytest.raises(RecipeError, match=message) as error:
        on_meta(
            load_config(section.name, section) if source == "folder" else architecture_config(section),
            section,
            torch.float32,
        )
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": ROPE}, {"torch_dtype": "bfloat16"}, {"dtype": "float32"}, {"tie_word_embeddings": True},
        {"num_labels": 3}, {"head_dim": None}, {"layer_types": ["full_attention"] * 2}, {"pad_token_id": -1},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("source", ["folder", "recipe"])
def test_honest_configurations_pass(tmp_path, changes, source):
    section = ModelSection("scratch", tokenizer="bytes", architecture={**SIZES, **changes})
    if source == "folder":
        section = ModelSection(folder_of(tmp_path / "model", **changes))
    config = load_config(section.name, section) if source == "folder" else architecture_config(section)
    assert on_meta(config, section, torch.float32).config.num_hidden_layers == 2


def test_names_of_layers_may_be_below_zero():
    """As the layer of a vision tower that a model takes its features from."""
    from hf_gnmr.run.architecture import check_sizes

    check_sizes({"vision_feature_layer": -2, "select_layer": -1, "text_config": {"sliding_window": -1}}, "x")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tiny_lm):
    return shutil.copytree(tiny_lm, tmp_path_factory.mktemp("hostile") / "model")


NAMES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "content", [DEEP, "{", "[1]" * 10**6, '{"a": ' + "9" * 5000 + "}", "\x00"], ids=lambda text: text[:8]
)
def test_a_tokenizers_files_are_one_line(tmp_path, model_folder, name, content):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / name).write_text(content)
    with pytest.raises(RecipeError, match=r"model\.name=") as error:
        load_tokenizer(str(folder), ModelSection(str(folder)))
    assert len(str(error.value)) < 1500


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizers_files_are_bounded_in_size(tmp_path, model_folder, name):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    with (folder / name).open("r+b" if (folder / name).exists() else "wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(RecipeError, match=f"{name}: expected at most 67,108,864 bytes"):
        load_tokenizer(str(folder), ModelSection(str(folder)))


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", DEEP), ("tokenizer_config.json", DEEP), ("config.json", json.dumps({**SIZES, "num_labels": 10**9}))],
    ids=["tokenizer", "tokenizer_config", "num_labels"],
)
def test_a_run_is_refused_under_limits(tmp_path, model_folder, name, content):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / name).write_text(content)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a", "answer": "b"}\n' * 8)
    recipe = {"model": {"name": str(folder)}, "data": {"name": str(rows)}, "backend": {"name": "none"}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({**recipe, "training": {"max_steps": 1, "use_cpu": True}}))
    refused(command("train", tmp_path / "r.yaml", cwd=tmp_path), f"model.name='{folder}'")


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json"])
def test_weights_that_cannot_be_read_are_one_line(tmp_path, model_folder, name):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / name).write_text("[1]")
    with pytest.raises(RecipeError, match=r"the model cannot be loaded: \w+: "):
        load_base(str(folder), ModelSection(str(folder)), "none")


# -- adapters ------------------------------------------------------------------------------------------------------------

ADAPTERS = [
    ({"init_lora_weights": "pissa_niter_1000000000"}, "init_lora_weights='pissa_niter_1000000000': expected at most 1,000"),
    ({"init_lora_weights": "pissa_niter_1_0"}, "init_lora_weights"),
    ({"init_lora_weights": "corda_niter_9999"}, "init_lora_weights"),
    ({"loftq_config": {"loftq_iter": 10**6}}, "loftq_config.loftq_iter=1000000: expected at most 1,000"),
    ({"psoft_svd_lowrank_niter": 10**6}, "psoft_svd_lowrank_niter=1000000"),
    ({"num_cayley_neumann_terms": 10**6}, "num_cayley_neumann_terms=1000000"),
    ({"depth": 10**6}, "depth=1000000"),
    ({"r": 10**6}, "r=1000000: expected a rank of at most 65,536"),
    ({"init_r": 10**6}, "init_r=1000000: expected a rank of at most 65,536"),
    ({"r": 60_000}, "expected a rank that adapter_model.safetensors has .*, got 60,000"),
    ({"rank_pattern": {"q_proj": 60_000}}, "got 60,000"),
    ({"rank_pattern": {"q_proj": 10**6}}, "rank_pattern.q_proj=1000000: expected a rank of at most"),
    ({"lora_alpha": float("inf")}, "lora_alpha=inf: expected"),
    ({"lora_alpha": float("nan")}, "lora_alpha=nan: expected a number"),
    ({"alpha_pattern": {"q_proj": float("-inf")}}, "alpha_pattern.q_proj=-inf: expected a finite number"),
    ({"lora_dropout": float("-inf")}, "lora_dropout=-inf: expected a finite number"),
    ({"megatron_config": {"a": 1}, "megatron_core": "os"}, "megatron_core='os'"),
    ({"adapters": {"0": "/somewhere"}}, "adapters=.*: expected one adapter"),
    ({"layer_replication": [[0, 10**6]]}, "layer_replication"),
    ({"layer_replication": [[-(10**6), 1]]}, r"layer_replication=.*expected a list of .first, last . 1., from 0 up"),
    ({"layer_replication": [[5, 0], [0, 2000]]}, "layer_replication"),
    ({"num_vectors": 16_000, "vector_length": 10**7}, "num_vectors=16,000 × vector_length=10,000,000: expected at most"),
]


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory):
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("adapter")
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(8, 64)}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(("values", "message"), ADAPTERS, ids=lambda value: str(value)[:50])
def test_an_adapter_that_asks_for_too_much_is_refused(adapter_folder, values, message):
    from hf_gnmr.run.adapter_config import check_adapter

    with pytest.raises(RecipeError, match=message):
        check_adapter({"r": 8, **values}, "adapter_config.json", adapter_folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "values",
    [
        {"init_lora_weights": "pissa_niter_16"}, {"init_lora_weights": True}, {"init_lora_weights": "eva"},
        {"megatron_config": None, "megatron_core": "megatron.core"}, {"loftq_config": {}},
        {"layer_replication": [[0, 4], [2, 5]]},
        {"rank_pattern": {"q_proj": 16}, "alpha_pattern": {"q_proj": 0.5}}, {"lora_alpha": 16, "lora_dropout": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_honest_adapters_pass(adapter_folder, values):
    from hf_gnmr.run.adapter_config import check_adapter

    check_adapter({"r": 8, **values}, "adapter_config.json", adapter_folder / "adapter_model.safetensors")
