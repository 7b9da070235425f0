"""Recipes are checked before anything is loaded, and each error names key, value and what was expected."""

from __future__ import annotations

import dataclasses
import pathlib
import warnings

import pytest
import yaml

from hf_gnmr.run.recipe import RecipeError, find_recipe, load_recipe

REPOSITORY = pathlib.Path(__file__).parents[2]
SHIPPED = sorted((REPOSITORY / "recipes").glob("*.yaml"))


def write(tmp_path, text):
    file = tmp_path / "r.yaml"
    file.write_text("model: {name: m}\ndata: {name: d}\n" + text)
    return file


@pytest.mark.parametrize("text", ["2e-5", "2.0e-5", "2E-05", "0.00002", "'2e-5'", '"2.0e-5"', ".2e-4"])
def test_numbers_are_read_as_numbers(tmp_path, text):
    file = write(tmp_path, f"training: {{learning_rate: {text}}}\n")
    assert load_recipe(file).training["learning_rate"] == 2e-5
    assert load_recipe(write(tmp_path, ""), [f"training.learning_rate={text}"]).training["learning_rate"] == 2e-5


def test_the_traps_of_yaml_1_1_are_avoided(tmp_path):
    file = write(tmp_path, "training: {save_strategy: no, seed: 010, output_dir: 1:30}\nlora: {r: 8, lora_dropout: 0}\n")
    recipe = load_recipe(file)
    assert recipe.training["save_strategy"] == "no"
    assert recipe.training["seed"] == 10
    assert recipe.training["output_dir"] == "1:30"


@pytest.mark.parametrize(
    ("override", "expected"), [("overwrite=true", True), ("resume=auto", "auto"), ("resume=false", False)]
)
def test_flags_are_read_as_flags(tmp_path, override, expected):
    run = load_recipe(write(tmp_path, ""), [f"run.{override}"]).run
    assert getattr(run, override.partition("=")[0]) == expected


def test_a_quoted_flag_is_read_as_a_flag(tmp_path):
    assert load_recipe(write(tmp_path, "training: {bf16: 'false'}\n")).training["bf16"] is False


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rat=1e-3", "unknown key training.learning_rat: did you mean training.learning_rate"),
        ("gnmr.maxO=3", "unknown key gnmr.maxO: did you mean gnmr.max_o"),
        ("gnmr.t_loc=3", "did you mean gnmr.t_lock"),
        ("trainig.max_steps=3", "unknown section trainig: did you mean training"),
        ("lora.target_module=q_proj", "did you mean lora.target_modules"),
        ("training.learning_rate=fast", "training.learning_rate='fast': expected float"),
        ("training.learning_rate=-1e-3", "training.learning_rate=-0.001: expected a finite number, at least 0"),
        ("training.learning_rate=.nan", "training.learning_rate=nan: expected a finite number"),
        ("training.max_grad_norm=null", "training.max_grad_norm=None: expected float"),
        ("training.max_steps=2.5", "training.max_steps=2.5: expected int"),
        ("training.max_steps=0", "training.max_steps=0: expected a finite number, at least 1"),
        ("training.per_device_train_batch_size=0", "at least 1"),
        ("training.save_strategy=sometimes", "training.save_strategy='sometimes': expected 'no', 'steps', 'epoch'"),
        ("training.optim=adamw_troch", "training.optim='adamw_troch': did you mean 'adamw_torch'?"),
        ("training.bf16=2", "training.bf16=2: expected bool"),
        ("training.seed=true", "training.seed=True: expected int"),
        ("trigger.name=null", "trigger.name=None: expected str"),
        ("backend.name=null", "backend.name=None: expected str"),
        ("trigger.3=1", "unknown key trigger.3: "),
        ("backend.3=1", "unknown key backend.3: "),
        ("gnmr.3=1", "unknown key gnmr.3: "),
        ("training.3=1", "unknown key training.3: "),
        ("gnmr.max_o=2.0", "gnmr.max_o=2.0: expected a whole number of units"),
        ("gnmr.max_o=-1", "gnmr.max_o=-1"),
        ("gnmr.alpha=.nan", "gnmr.alpha=nan: expected a finite number above 0"),
        ("gnmr.beta=-1", "gnmr.beta=-1.0"),
        ("gnmr.delta=0", "gnmr.delta=0"),
        ("gnmr.t_lock=-1", "gnmr.t_lock=-1"),
        ("gnmr.t_lock=0.5", "gnmr.t_lock=0.5"),
        ("gnmr.alpha_init_fraction=1.5", "gnmr.alpha_init_fraction=1.5: expected a share of the steps from 0 to 1"),
        ("lora.lora_dropout=1.5", "lora.lora_dropout=1.5: expected a finite number, at least 0 and at most 1"),
        ("lora.r=0", "lora.r=0"),
        ("lora.target_modules=3", "lora.target_modules=3"),
        ("run.resume=true", "run.resume=True"),
        ("max_steps=3", "expected section.key=value"),
        ("training.max_steps", "expected section.key=value"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path, override, message):
    with pytest.raises(RecipeError) as error:
        load_recipe(write(tmp_path, ""), [override])
    assert message in str(error.value)


@pytest.mark.parametrize(("text", "kind"), [("10", int), ("0.25", float)])
def test_max_o_keeps_its_kind(tmp_path, text, kind):
    assert type(load_recipe(write(tmp_path, ""), [f"gnmr.max_o={text}"]).gnmr.max_o) is kind


def test_beta_may_be_none(tmp_path):
    assert load_recipe(write(tmp_path, ""), ["gnmr.beta=null"]).gnmr.beta is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {name: d}\n", "model: the section is missing"),
        ("model: {name: m}\n", "data: the section is missing"),
        ("model: {revision: m}\ndata: {name: d}\n", "model.name is missing"),
        ("model: m\ndata: {name: d}\n", "model='m': expected a section of key: value lines"),
        ("model: {name: m}\ndata: {name: d}\ngnmr: {max_o: 1, max_o: 3}\n", "duplicate key 'max_o'"),
        ("[1, 2]\n", "expected a recipe with the sections"),
        ("model: {name: [\n", "is not valid YAML"),
        ("model: !!python/object/apply:os.system [echo]\n", "is not valid YAML"),
    ],
)
def test_missing_sections_and_broken_files_are_refused(tmp_path, text, message):
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(file)


@pytest.mark.parametrize("path", SHIPPED, ids=[p.stem for p in SHIPPED])
def test_shipped_recipes_are_valid_round_trip_and_are_executable(path, tmp_path):
    recipe = load_recipe(path)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(recipe.to_yaml())
    assert load_recipe(resolved) == recipe
    text = yaml.safe_load(recipe.to_yaml())
    assert text["gnmr"] == dataclasses.asdict(recipe.gnmr)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env -S hf-gnmr train"
    assert any(line.startswith("#   accelerate launch") or line.startswith("#   make") for line in lines[:8])
    assert path.stat().st_mode & 0o111, "recipes are executable"


@pytest.mark.parametrize("name", ["one_gpu", "ddp", "cpu"])
def test_accelerate_reads_the_configurations_in_the_repository(name):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(REPOSITORY / "recipes" / "accelerate" / f"{name}.yaml"))
    assert config.use_cpu == (name == "cpu") and config.num_processes == (2 if name == "ddp" else 1)
    assert config.distributed_type.value == ("MULTI_GPU" if name == "ddp" else "NO") and config.mixed_precision == "no"


def test_a_file_that_is_not_text_is_refused(tmp_path):
    file = tmp_path / "r.yaml"
    file.write_bytes(b"model: {name: \xff\xfe}")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(file)


def test_a_resolved_recipe_reads_back_as_itself(tmp_path):
    recipe = load_recipe(write(tmp_path, "training: {learning_rate: 2e-5}\ngnmr: {max_o: 3, beta: null}\n"))
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(recipe.to_yaml())
    assert load_recipe(resolved) == recipe


def test_the_papers_13b_setting():
    recipe = load_recipe(find_recipe("llama2_13b_lora"))
    assert recipe.gnmr.max_o == 10 and recipe.gnmr.t_lock == 1 and recipe.gnmr.delta == 5
    assert (recipe.gnmr.alpha_init, recipe.gnmr.alpha, recipe.gnmr.beta) == (1.5, 1.1, 1.5)
    assert (recipe.lora.r, recipe.lora.lora_alpha, recipe.lora.lora_dropout) == (8, 16, 0.05)
    training = recipe.training
    assert training["learning_rate"] == 2e-5 and training["weight_decay"] == 0 and training["max_grad_norm"] == 1
    assert training["per_device_train_batch_size"] * training["gradient_accumulation_steps"] * 2 == 32
    assert recipe.data.max_length == 1024 and training["num_train_epochs"] == 3


def test_recipes_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("smollm2_135m_lora").name == "smollm2_135m_lora.yaml"
    assert find_recipe("recipes/smollm2_135m_lora.yaml").name == "smollm2_135m_lora.yaml"
    with pytest.raises(RecipeError, match="no recipe file 'nope'; available by name: .*llama2_13b_lora"):
        find_recipe("nope")


def test_recipes_extend_each_other(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {name: x}\ndata: {name: y, max_length: 64}\nlora: {r: 4}\n")
    (tmp_path / "more.yaml").write_text("extends: base.yaml\ndata: {max_length: 32}\nlora: false\nbackend: {name: none}\n")
    recipe = load_recipe(tmp_path / "more.yaml", ["model.name=z"])
    assert (recipe.model.name, recipe.data.name, recipe.data.max_length, recipe.lora) == ("z", "y", 32, None)


@pytest.mark.parametrize(
    ("extends", "message"), [("r.yaml", "extends itself"), ("nowhere.yaml", "cannot be read"), ("3", "extends=3")]
)
def test_a_recipe_that_extends_nothing_usable_is_refused(tmp_path, extends, message):
    (tmp_path / "r.yaml").write_text(f"extends: {extends}\n")
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "r.yaml")


def test_an_override_that_is_given_twice_is_reported(tmp_path, recipe_file):
    with pytest.warns(UserWarning, match="'gnmr.alpha' is given twice: 1.4 counts, 1.2 does not"):
        assert load_recipe(recipe_file, ["gnmr.alpha=1.2", "gnmr.alpha=1.4"]).gnmr.alpha == 1.4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_recipe(recipe_file, ["gnmr.alpha=1.4", "gnmr.alpha=1.4"])
