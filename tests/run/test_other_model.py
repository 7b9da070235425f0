"""Another model over a recipe: what describes the old one does not count for the new one."""

from __future__ import annotations

import pytest
import yaml

from hf_gnmr.run.plan import main as plan_main
from hf_gnmr.run.plan import plan
from hf_gnmr.run.recipe import load_recipe
from hf_gnmr.run.sections import RecipeError

PAPER = "recipes/llama2_13b_lora.yaml"
OLD = {
    "name": "someone/old",
    "architecture": {"model_type": "llama", "hidden_size": 5120},
    "revision": "v1",
    "layers": "transformer.blocks.*",
    "trust_remote_code": True,
    "attn_implementation": "eager",
    "llm_int8_threshold": 5.0,
}
LLAMA = "{model_type: llama, vocab_size: 288, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 3,"
LLAMA += " num_attention_heads: 4, num_key_value_heads: 2}"


@pytest.fixture
def base(tmp_path):
    recipe = {"model": OLD, "data": {"name": "builtin"}, "backend": {"name": "int8", "recovery_source": "/old/originals"}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path / "base.yaml"


def by_override(base, changes):
    return load_recipe(
        base, [f"{section}.{key}={value}" for section, keys in changes.items() for key, value in keys.items()]
    )


def by_extends(base, changes):
    child = base.with_name("child.yaml")
    child.write_text(yaml.safe_dump({"extends": base.name, **changes}))
    return load_recipe(child)


def by_two_steps(base, changes):
    between = base.with_name("between.yaml")
    between.write_text(yaml.safe_dump({"extends": base.name, "training": {"max_steps": 3}}))
    return by_extends(between, changes)


WAYS = [by_override, by_extends, by_two_steps]


@pytest.mark.parametrize("change", WAYS)
def test_what_describes_the_old_model_is_dropped(base, change):
    recipe = change(base, {"model": {"name": "someone/new"}})
    model = recipe.model
    assert (model.name, model.architecture, model.revision, model.layers) == ("someone/new", None, None, None)
    assert model.trust_remote_code is False, "the old author was trusted, not the new one"
    assert recipe.backend.options.recovery_source is None
    assert (model.attn_implementation, model.llm_int8_threshold) == ("eager", 5.0), "these describe the run"


@pytest.mark.parametrize("change", WAYS)
def test_what_is_stated_with_the_new_name_counts(base, change):
    given = {"name": "someone/new", "architecture": {"model_type": "gpt2"}, "revision": "v2"}
    recipe = change(base, {"model": given, "backend": {"recovery_source": "/new/originals"}})
    assert (recipe.model.architecture, recipe.model.revision) == ({"model_type": "gpt2"}, "v2")
    assert str(recipe.backend.options.recovery_source) == "/new/originals" and recipe.model.layers is None


@pytest.mark.parametrize("change", WAYS)
@pytest.mark.parametrize("changes", [{"name": "someone/old"}, {"revision": "v2"}], ids=str)
def test_the_same_model_keeps_them(base, change, changes):
    recipe = change(base, {"model": changes})
    assert recipe.model.architecture == OLD["architecture"] and recipe.model.layers == OLD["layers"]
    assert str(recipe.backend.options.recovery_source) == "/old/originals"


def test_a_model_from_scratch_is_built_from_the_architecture_below(tmp_path):
    (tmp_path / "child.yaml").write_text(
        yaml.safe_dump({"extends": "base.yaml", "lora": False, "backend": {"name": "none"}})
    )
    model = {**OLD, "tokenizer": None}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"model": model, "data": {"name": "builtin"}}))
    recipe = load_recipe(tmp_path / "child.yaml", ["model.name=scratch", "model.tokenizer=bytes"])
    assert recipe.model.architecture == OLD["architecture"] and recipe.model.revision is None


def test_a_known_model_in_place_of_one_from_scratch_has_its_own_tokenizer():
    recipe = load_recipe("recipes/activation_small.yaml", ["model.name=someone/new"])
    assert recipe.model.tokenizer is None and recipe.model.architecture is None


def test_the_plan_has_the_new_models_figures(tiny_lm):
    figures = plan(load_recipe(PAPER, [f"model.name={tiny_lm}", "gnmr.max_o=2"]), rows=100)
    assert figures["parameters"] == 147_904 and figures["architecture"] == tiny_lm


def test_without_the_new_models_configuration_there_is_no_plan(capsys):
    assert plan_main([PAPER, "model.name=meta-llama/Llama-2-7b-hf"]) == 2
    captured = capsys.readouterr()
    assert "model.name='meta-llama/Llama-2-7b-hf': its configuration cannot be loaded" in captured.err
    assert captured.err.count("\n") == 1 and "13,015,864,320" not in captured.out


def test_an_architecture_that_cannot_be_checked_is_said_to_be_the_recipes(capsys):
    assert plan_main([PAPER, "model.name=nobody/x", f"model.architecture={LLAMA}", "gnmr.max_o=2", "--rows", "10"]) == 0
    out = capsys.readouterr().out
    assert "architecture: as the recipe states it for nobody/x, whose own configuration is not available here" in out


def test_a_stated_architecture_is_checked_by_the_plan_too(tiny_lm):
    recipe = load_recipe(PAPER, [f"model.name={tiny_lm}", f"model.architecture={LLAMA}", "gnmr.max_o=2"])
    assert plan(recipe, rows=10)["architecture"] == tiny_lm
    recipe.model.architecture = {**recipe.model.architecture, "hidden_size": 65}
    with pytest.raises(RecipeError, match=r"model.architecture.hidden_size=65: .* has 64"):
        plan(recipe, rows=10)
