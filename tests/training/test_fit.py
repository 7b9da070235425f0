"""Checkpoints whose weights are not the model's: refused by name before the first step, whoever loads them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import load_int8, random_llama, trace_lines, with_lora
from peft import LoraConfig, get_peft_model
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


def bin_from(folder, change, zipped=True):
    """A checkpoint's whole model in the file that older versions of transformers wrote."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_whole_model_in_a_torch_file_fits(tmp_path, zipped):
    model = random_llama()
    model.save_pretrained(tmp_path)
    bin_from(tmp_path, lambda tensors: None, zipped)
    refuse_misfit(model, tmp_path)
    assert load_renamed(model, tmp_path) == []


def test_a_whole_model_in_a_torch_file_that_does_not_fit_is_refused(tmp_path):
    model = random_llama()
    model.save_pretrained(tmp_path)
    bin_from(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(SetupError, match=r"missing: model\.norm\.weight\)"):
        load_renamed(model, tmp_path)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SetupError, match="pytorch_model.bin is empty or cut off"):
        refuse_misfit(model, tmp_path)


@pytest.mark.parametrize("beside_an_adapter", [False, True])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_whole_model_is_no_checkpoint_of_adapters(tmp_path, kind, beside_an_adapter):
    """The Trainer reads the whole model's file first, skips all its names, and keeps the adapters as initialised."""
    model = with_lora(random_llama(), target_modules=["q_proj"])
    if beside_an_adapter:
        model.save_pretrained(tmp_path)
    random_llama().save_pretrained(tmp_path)
    if kind == "bin":
        bin_from(tmp_path, lambda tensors: None)
    with pytest.raises(SetupError, match=r"missing: .*q_proj.lora_A.default.weight.*; unexpected: lm_head.weight"):
        refuse_misfit(model, tmp_path)


@pytest.mark.parametrize("unfrozen", ["lm_head.weight", "embed_tokens.weight", "0.input_layernorm.weight"])
def test_weights_that_were_unfrozen_beside_an_adapter_are_not_resumed_in_silence(tmp_path, unfrozen):
    """PEFT does not store them."""
    model = with_lora(random_llama(), target_modules=["q_proj"])
    model.save_pretrained(tmp_path)
    refuse_misfit(model, tmp_path)
    (name,) = [name for name, _ in model.named_parameters() if name.endswith(unfrozen)]
    model.get_parameter(name).requires_grad_(True)
    with pytest.raises(SetupError, match=rf"missing: {name}\)\. .* its modules_to_save names their module"):
        refuse_misfit(model, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"bias": "all"},
        {"use_dora": True},
        {"trainable_token_indices": [1, 5]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    ],
    ids=str,
)
def test_weights_that_peft_stores_beside_or_in_an_adapter_fit(tmp_path, options):
    model = with_lora(random_llama(), **{"target_modules": ["q_proj"], **options})
    model.save_pretrained(tmp_path)
    refuse_misfit(model, tmp_path)


def test_a_whole_model_with_its_adapters_fits(tmp_path):
    model = with_lora(random_llama(), target_modules=["q_proj"])
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    refuse_misfit(model, tmp_path)


def named(*adapters):
    """A model with these adapters, of which the last is trained."""
    settings = LoraConfig(r=4, target_modules=["q_proj"])
    model = get_peft_model(random_llama(), settings, adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, settings)
    model.set_adapter(adapters[-1])
    return model


@pytest.mark.parametrize(
    ("stored", "resumed"),
    [(["a"], ["a"]), (["a", "b"], ["a", "b"]), (["default"], ["b"]), (["a", "b"], ["b"]), (["b"], ["frozen", "b"])],
    ids=str,
)
def test_an_adapter_that_is_trained_and_stored_fits(tmp_path, stored, resumed):
    """A file without a folder of an adapter's name goes to the active one, and adapters that are not trained may differ."""
    named(*stored).save_pretrained(tmp_path)
    refuse_misfit(named(*resumed), tmp_path)


@pytest.mark.parametrize(("stored", "resumed"), [(["a"], ["b"]), (["a", "c"], ["a", "b"])], ids=str)
def test_an_adapter_of_another_name_is_not_resumed_from(tmp_path, stored, resumed):
    """PEFT adds it beside the trained one, which stays as it was initialised."""
    named(*stored).save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=rf"missing: .*q_proj.lora_A.b.weight.*; unexpected: the adapter {stored[-1]}\)"):
        refuse_misfit(named(*resumed), tmp_path)


@pytest.mark.parametrize("trainer_class", [None, GNMRTrainer], ids=["callback alone", "mixin"])
def test_a_trainer_does_not_resume_from_another_adapter(trainer_for, tmp_path, trainer_class):
    settings = {**SETTINGS, "backend": "none"}
    trainer_for(
        named("a"), GNMRCallback(**settings), output_dir=str(tmp_path), save_strategy="steps", save_steps=2, max_steps=4
    ).train()
    options = {} if trainer_class is None else {"trainer_class": trainer_class}
    trainer = trainer_for(named("b"), GNMRCallback(**settings), output_dir=str(tmp_path), max_steps=4, **options)
    with pytest.raises(SetupError, match=r"missing: .*q_proj.lora_A.b.weight"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainer.state.global_step <= 2


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
