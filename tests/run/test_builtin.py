"""The built-in base: built once, complete or not at all, loadable by transformers, and good for a whole run."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import trace_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_gnmr.run import builtin
from hf_gnmr.run.builtin import build_tokenizer, pretrained_base
from hf_gnmr.run.recipe import find_recipe, load_recipe
from hf_gnmr.train import main

TOKENIZER = build_tokenizer()


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_the_tokenizer_gives_any_text_back(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"], skip_special_tokens=True) == text or any(
        token in text for token in ("<pad>", "<s>", "</s>")
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def base(cache):
    return pretrained_base(cache, steps=6)


def test_the_folder_is_whole_and_loads(base, cache):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(base)
    assert model.config.num_hidden_layers == 6 and len(tokenizer) <= model.config.vocab_size
    record = json.loads((base / "pretraining.json").read_text())
    assert record["steps"] == 6 and record["seed"] == 0 and record["tokens"] > 0
    assert sorted(p.name for p in cache.iterdir()) == [base.name], "nothing half-made is left"


def test_a_second_call_reuses_it_and_other_settings_get_another_folder(base, cache, capsys):
    weights = (base / "model.safetensors").stat().st_mtime_ns
    assert pretrained_base(cache, steps=6) == base
    assert "reusing" in capsys.readouterr().out
    assert (base / "model.safetensors").stat().st_mtime_ns == weights
    assert pretrained_base(cache, steps=5) != base


def test_a_broken_folder_is_built_again(cache):
    folder = pretrained_base(cache, steps=4)
    before = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    assert pretrained_base(cache, steps=4) == folder
    assert (folder / "model.safetensors").read_bytes() == before, "the same settings give the same weights"


def test_an_interrupted_pre_training_leaves_nothing(cache, monkeypatch):
    monkeypatch.setattr(builtin, "_pretrain", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    before = sorted(p.name for p in cache.iterdir())
    with pytest.raises(KeyboardInterrupt):
        pretrained_base(cache, steps=3)
    assert sorted(p.name for p in cache.iterdir()) == before


def test_the_quickstart_recipe_runs_on_it(base, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "STEPS", 6)
    monkeypatch.setenv("HF_GNMR_CACHE", str(base.parent))
    overrides = [
        f"training.output_dir={tmp_path / 'run'}",
        "training.max_steps=3",
        "data.rows=64",
        "data.eval_rows=4",
        "data.generate_rows=4",
        "data.max_new_tokens=8",
    ]
    assert load_recipe(find_recipe("quickstart")).model.name == "builtin"
    assert main(["quickstart", *overrides]) == 0
    header, lines = trace_lines(tmp_path / "run")
    assert len(header["units"]) == 6 and header["max_o"] == 2 and len(lines) == 3
    assert "exact_match" in json.loads((tmp_path / "run" / "results.json").read_text())


def test_steps_below_one_are_refused(cache):
    with pytest.raises(ValueError, match="steps=0: expected at least 1"):
        pretrained_base(cache, steps=0)
