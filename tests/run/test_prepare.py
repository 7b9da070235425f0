"""Either kind of data in one form, and a model whose random state the seed sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer

from hf_gnmr.run.prepare import ROWS, TEXT, find_model, kind_of, prepare_model, prepare_tokenizer
from hf_gnmr.run.recipe import RecipeError, load_recipe
from hf_gnmr.run.sections import DataSection

TOKENIZER = byte_tokenizer()


@pytest.mark.parametrize("eval_rows", [0, 4])
@pytest.mark.parametrize("text", [None, "question"])
def test_each_kind_of_data_has_the_same_form(rows_file, text, eval_rows):
    section = DataSection(rows_file, text=text, max_length=32, eval_rows=eval_rows)
    kind = kind_of(section)
    assert kind is (ROWS if text is None else TEXT)
    kind.check(section)
    data = kind.read(section, 0)(TOKENIZER)
    assert (data.held_out_set is not None) == (eval_rows > 0)
    assert eval_rows == 0 or len(data.held_out_set) == eval_rows
    assert data.counts["tokens"] > 0 and f"{data.counts['tokens']:,} tokens" in data.lines[0]
    assert len(data.lines) == (2 if text is None and eval_rows else 1)
    batch = data.collator([data.training_set[i] for i in range(2)])
    assert batch["input_ids"].shape == batch["labels"].shape and batch["input_ids"].dtype == torch.int64
    assert callable(data.figures)


def test_rows_are_read_before_there_is_a_tokenizer(rows_file):
    """So that a missing column is reported before anything of the model is loaded."""
    with pytest.raises(RecipeError, match="no column 'ask'"):
        ROWS.read(DataSection(rows_file, prompt="ask"), 0)


def test_a_model_leaves_the_random_state_that_the_seed_sets(recipe_file):
    recipe = load_recipe(recipe_file)
    source = find_model(recipe)
    tokenizer = prepare_tokenizer(recipe, source, units_are_layers=True)
    assert tokenizer.pad_token_id is not None
    draws = []
    for state in (1, 2):
        torch.manual_seed(state)
        model = prepare_model(recipe, source, 5)
        draws.append((torch.rand(3).tolist(), np.random.rand(3).tolist()))
    assert draws[0] == draws[1] and model.config.use_cache is False


def test_units_that_are_no_layers_are_not_compared_with_the_depth(recipe_file):
    recipe = load_recipe(recipe_file, ["gnmr.max_o=4"])
    source = find_model(recipe)
    prepare_tokenizer(recipe, source, units_are_layers=False)
    with pytest.raises(RecipeError, match="expected at most 3, the model's decoder layers"):
        prepare_tokenizer(recipe, source, units_are_layers=True)


def test_a_model_from_scratch_has_no_source(recipe_file):
    recipe = load_recipe(recipe_file)
    recipe.model.name = "scratch"
    assert find_model(recipe) is None


def test_a_history_too_long_for_the_models_units_is_refused_before_weights_are_loaded(recipe_file, monkeypatch):
    recipe = load_recipe(recipe_file, ["gnmr.delta=10000"])
    source = find_model(recipe)
    prepare_tokenizer(recipe, source, units_are_layers=True)
    monkeypatch.setattr("hf_gnmr.config.MAX_HISTORY", 29_999)
    with pytest.raises(RecipeError, match="gnmr.delta=10000: expected at most 9,999 for 3 units"):
        prepare_tokenizer(recipe, source, units_are_layers=True)


@pytest.mark.parametrize(("unit", "fits"), [("layer", True), ("experts", True), ("expert", False)])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_count_as_units_of_a_history(unit, fits, model_type):
    from hf_gnmr import GNMRConfig
    from hf_gnmr.run.models import architecture_config, check_history
    from hf_gnmr.run.sections import ModelSection

    experts = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}[model_type]
    sizes = {"model_type": model_type, "num_hidden_layers": 48, experts: 128}
    config = architecture_config(ModelSection("scratch", tokenizer="bytes", architecture=sizes))
    if fits:
        check_history(config, GNMRConfig(delta=1000), unit)
        return
    with pytest.raises(RecipeError, match="gnmr.delta=1000: expected at most 244 for 6,144 units"):
        check_history(config, GNMRConfig(delta=1000), unit)
