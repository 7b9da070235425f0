"""Checkpoints whose weights are not the model's: refused by name before the first step, whoever loads them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import load_int8, random_llama, trace_lines, with_lora
from safetensors.torch import load_file, save_file
from torch import nn

from hf_gnmr import GNMRCallback, SetupError
from hf_gnmr.training.checkpoints import load_renamed
from hf_gnmr.training.fit import refuse_misfit
from hf_gnmr.training.mixin import GNMRTrainer

FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
SETTINGS = {"max_o": 1, "alpha": 0.9, "alpha_init_fraction": 0.0}


def rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def rename(tensors):
    tensors[FIRST.replace("down", "other")] = tensors.pop(FIRST)


@pytest.fixture
def adapted(tiny):
    return with_lora(load_int8(tiny), trained=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(FIRST), "missing: .*layers.0.mlp.down_proj.lora_A"),
        (lambda t: t.update({FIRST.replace("0", "8"): t[FIRST].clone()}), "unexpected: .*layers.8.mlp.down_proj.lora_A"),
        (rename, "missing: .*down_proj.lora_A.*; unexpected: .*other_proj.lora_A"),
        (
            lambda t: t.update({FIRST: torch.ones(1, 128)}),
            r"of another shape: .*lora_A.weight \(\[1, 128\] instead of \[4, 128\]",
        ),
    ],
    ids=["missing", "unexpected", "renamed", "shape"],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(adapted, tmp_path, change, message):
    adapted.save_pretrained(tmp_path)
    refuse_misfit(adapted, tmp_path)
    rewrite(tmp_path / "adapter_model.safetensors", change)
    with pytest.raises(SetupError, match=message):
        refuse_misfit(adapted, tmp_path)


def test_an_adapter_file_that_is_cut_off_is_refused(adapted, tmp_path):
    adapted.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SetupError, match="adapter_model.safetensors has .* bytes, expected"):
        refuse_misfit(adapted, tmp_path)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"bias": "lora_only"}], ids=str)
def test_adapters_of_other_kinds_fit_their_own_files(tmp_path, options):
    model = with_lora(random_llama(), target_modules=["q_proj"], **options)
    model.save_pretrained(tmp_path)
    refuse_misfit(model, tmp_path)


def test_embeddings_that_peft_saved_too_are_accepted(tmp_path):
    model = with_lora(random_llama(), target_modules=["q_proj"])
    model.save_pretrained(tmp_path, save_embedding_layers=True)
    assert any("embed_tokens" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    refuse_misfit(model, tmp_path)


def test_a_second_adapter_is_compared_with_its_own_file(tmp_path):
    model = with_lora(random_llama(), target_modules=["q_proj"])
    model.add_adapter("second", model.peft_config["default"])
    model.save_pretrained(tmp_path)
    refuse_misfit(model, tmp_path)
    rewrite(tmp_path / "second" / "adapter_model.safetensors", lambda t: t.pop(next(iter(t))))
    with pytest.raises(SetupError, match="second do not fit the model .*missing: "):
        refuse_misfit(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda t: t.update({"model.layers.9.mlp.down_proj.weight": torch.ones(2)}), "unexpected: model.layers.9"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"of another shape: model.norm.weight \(\[3\] instead"),
    ],
    ids=["missing", "unexpected", "shape"],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_whole_model_that_does_not_fit_is_refused_by_name(tmp_path, change, message, sharded):
    model = random_llama()
    model.save_pretrained(tmp_path, max_shard_size="100KB" if sharded else "5GB")
    refuse_misfit(model, tmp_path)
    assert load_renamed(model, tmp_path) == []
    if sharded:
        index = tmp_path / "model.safetensors.index.json"
        places = json.loads(index.read_text())
        file = tmp_path / places["weight_map"]["model.norm.weight"]
        rewrite(file, change)
        names = dict.fromkeys(load_file(file), file.name)
        kept = {k: v for k, v in places["weight_map"].items() if v != file.name}
        index.write_text(json.dumps({**places, "weight_map": {**kept, **names}}))
    else:
        rewrite(tmp_path / "model.safetensors", change)
    with pytest.raises(SetupError, match=message):
        refuse_misfit(model, tmp_path)
        load_renamed(model, tmp_path)


def test_tied_weights_that_are_stored_once_fit(tmp_path):
    model = random_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    refuse_misfit(model, tmp_path)
    assert load_renamed(model, tmp_path) == []


def test_a_model_of_plain_torch_is_compared_name_by_name(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    refuse_misfit(model, tmp_path)
    save_file({"0.weight": torch.ones(2, 2), "1.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(SetupError, match=r"missing: 0\.bias; unexpected: 1\.bias"):
        refuse_misfit(model, tmp_path)


@pytest.fixture
def saved(trainer_for, tiny):
    trainer = trainer_for(
        with_lora(load_int8(tiny)), GNMRCallback(**SETTINGS), save_strategy="steps", save_steps=2, max_steps=4
    )
    trainer.train()
    return trainer.args.output_dir


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("trainer_class", [None, GNMRTrainer], ids=["callback alone", "mixin"])
def test_a_trainer_is_refused_before_its_first_step(saved, trainer_for, tiny, tmp_path, trainer_class, moved, capsys):
    """A callback alone knows the folders of its own and of the interrupted training; the mixin knows the checkpoint."""
    rewrite(f"{saved}/checkpoint-2/adapter_model.safetensors", lambda t: t.pop(FIRST))
    before = trace_lines(saved)[1]
    options = {} if trainer_class is None else {"trainer_class": trainer_class}
    checkpoint, new = f"{saved}/checkpoint-2", str(tmp_path / "new")
    trainer = trainer_for(
        with_lora(load_int8(tiny)), GNMRCallback(**SETTINGS), output_dir=new if moved else saved, max_steps=4, **options
    )
    with pytest.raises(SetupError, match=f"missing: .*{FIRST.partition('model.model.')[2].removesuffix('.weight')}"):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.state.global_step <= 2 and trace_lines(saved)[1] == before


def test_a_checkpoint_of_the_same_name_from_another_run_is_not_taken_for_the_resumed_one(
    saved, trainer_for, tiny, tmp_path, capsys
):
    """And where the resumed one cannot be found, this is reported."""
    other = tmp_path / "other"
    shutil.copytree(f"{saved}/checkpoint-2", other / "checkpoint-2")
    state = json.loads((other / "checkpoint-2" / "trainer_state.json").read_text())
    state["stateful_callbacks"]["GNMRCallback"]["attributes"]["_folder"] = "/nowhere"
    (other / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(state))
    decoy = f"{saved}/checkpoint-2"
    rewrite(f"{decoy}/adapter_model.safetensors", lambda t: t.pop(FIRST))
    state["log_history"][0]["loss"] = 99.0
    with open(f"{decoy}/trainer_state.json", "w") as file:
        json.dump(state, file)
    trainer = trainer_for(with_lora(load_int8(tiny)), GNMRCallback(**SETTINGS), output_dir=saved, max_steps=4)
    trainer.train(resume_from_checkpoint=str(other / "checkpoint-2"))
    assert "NOT CHECKED whether the checkpoint's weights fit" in capsys.readouterr().out
    assert [line["step"] for line in trace_lines(saved)[1]] == [1, 2, 3, 4]
