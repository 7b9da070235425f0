"""PEFT's ways to adapt a model: each trains while layers are lifted and lowered and saves a stock file, or is refused."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from conftest import load_bf16, load_int8, save_llama, token_rows, trace_lines, with_lora
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoKrConfig,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from peft.utils import get_peft_model_state_dict
from transformers import BitsAndBytesConfig, LlamaModel, Trainer, TrainerCallback

from hf_gnmr import GNMRCallback, SetupError
from hf_gnmr.backends.bnb.int8 import Int8Backend
from hf_gnmr.backends.units import canonical, find_units

IDS = torch.tensor([row["input_ids"] for row in token_rows(4)])
MOVING = {"max_o": 1, "alpha": 0.9, "alpha_init_fraction": 0.0}
"""Settings under which the choice moves nearly every step."""

LORA = {
    "list": {"target_modules": ["q_proj", "down_proj"]},
    "regex": {"target_modules": r".*\.self_attn\.(q|v)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "down_proj only": {"target_modules": ["down_proj"]},
    "layers_to_transform": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "rank and alpha patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 32}},
    "rslora": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.1},
    "bias lora_only": {"bias": "lora_only"},
    "lora_bias": {"lora_bias": True},
    "dora": {"use_dora": True},
    "dora with dropout": {"use_dora": True, "lora_dropout": 0.1},
    "modules_to_save": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "norms in modules_to_save": {"modules_to_save": ["input_layernorm"]},
    "trainable tokens": {"trainable_token_indices": [1, 2]},
}


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A LLaMA whose linears have biases."""
    return save_llama(tmp_path_factory.mktemp("biased") / "llama", attention_bias=True, mlp_bias=True)


def moves(lines):
    return len({tuple(line["active"]) for line in lines}) >= 2


@pytest.mark.parametrize("kind", LORA)
def test_lora_in_every_form_trains_and_its_file_is_a_stock_one(kind, biased, trainer_for, tmp_path):
    model = with_lora(load_int8(biased), **LORA[kind])
    trainer = trainer_for(model, GNMRCallback(**MOVING))
    trainer.train()
    header, lines = trace_lines(tmp_path / "run")
    layers = [0, 2] if kind == "layers_to_transform" else [0, 1, 2]
    assert [unit["layer"] for unit in header["units"]] == layers
    norms = np.array([line["norms"] for line in lines], dtype=float)
    assert norms.shape == (6, len(layers)) and np.isfinite(norms).all() and (norms > 0).all() and moves(lines)
    assert header["census"]["modules_switched"] == 7 * len(layers), "adapted or not, a unit switches as a whole"
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    adapters = ("lora_", "modules_to_save", "bias", "trainable_tokens")
    assert all(any(part in name for part in adapters) for name in trainable), "nothing of the base became trainable"

    model.save_pretrained(tmp_path / "adapter")
    stock = with_lora(load_bf16(biased), **LORA[kind])
    assert get_peft_model_state_dict(model).keys() == get_peft_model_state_dict(stock).keys()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*")
        PeftModel.from_pretrained(load_bf16(biased), tmp_path / "adapter")
        loaded = PeftModel.from_pretrained(load_int8(biased), tmp_path / "adapter", is_trainable=True).eval()
    if "dora" in kind:
        # A plain model with DoRA over 8-bit linears fails in its second forward on a CPU: PEFT loses bitsandbytes' scales.
        for m in (model, loaded):
            Int8Backend(m, find_units(m))
    with torch.no_grad():
        expected = model.eval()(input_ids=IDS).logits
        assert torch.equal(loaded(input_ids=IDS).logits, expected)
        with model.disable_adapter():
            assert not torch.equal(model(input_ids=IDS).logits, expected), "the adapter learnt something"


def test_dora_on_the_recovery_path_is_the_bf16_model_at_the_start(tiny):
    """The magnitudes are measured on dequantised weights on both sides of their quotient, so it is 1 before training."""
    model = with_lora(load_int8(tiny), use_dora=True).eval()
    backend = Int8Backend(model, find_units(model), eval_path="recovery")
    with torch.no_grad():
        expected = load_bf16(tiny).eval()(input_ids=IDS).logits
        assert torch.equal(model(input_ids=IDS).logits, expected)
        assert torch.equal(model(input_ids=IDS).logits, expected)
    backend.remove()


OTHERS = {
    "adalora": AdaLoraConfig(
        init_r=6,
        target_r=2,
        total_step=8,
        tinit=2,
        tfinal=2,
        deltaT=1,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj"],
    ),
    "ia3": IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "vera": VeraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "lokr": LoKrConfig(r=4, target_modules=["q_proj", "v_proj"]),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("prepared", [True, False])
def test_other_adapters(kind, prepared, tiny, trainer_for, tmp_path):
    """Under BF16 autocast where the base is not prepared: some of these return fp32 otherwise, which attention refuses."""
    base = load_int8(tiny)
    model = get_peft_model(prepare_model_for_kbit_training(base) if prepared else base, OTHERS[kind])
    trainer_for(model, GNMRCallback(**MOVING), bf16=not prepared).train()
    _, lines = trace_lines(tmp_path / "run")
    norms = np.array([line["norms"] for line in lines], dtype=float)
    assert np.isfinite(norms).all() and (norms > 0).all() and moves(lines)


def test_adalora_with_its_budget_allocated_in_training(tiny, trainer_for, tmp_path):
    """The Trainer does not call `update_and_allocate`; a callback of the user's does, and ranks are pruned meanwhile."""

    class Allocate(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            model.base_model.update_and_allocate(state.global_step + 1)

    model = get_peft_model(prepare_model_for_kbit_training(load_int8(tiny)), OTHERS["adalora"])
    callback = GNMRCallback(**MOVING)
    trainer_for(model, callback, Allocate(), max_steps=8).train()
    _, lines = trace_lines(tmp_path / "run")
    norms = np.array([line["norms"] for line in lines], dtype=float)
    assert np.isfinite(norms).all() and (norms > 0).all() and moves(lines) and len(lines) == 8
    values = [p for name, p in model.named_parameters() if "lora_E" in name]
    assert sum(int((p == 0).sum()) for p in values) == sum(p.numel() for p in values) - 2 * len(values), "pruned to target_r"


def test_adapters_are_chosen_before_training_and_each_run_has_its_own_units(tiny, trainer_for, tmp_path):
    model = with_lora(load_int8(tiny))
    model.add_adapter("second", LoraConfig(r=4, layers_to_transform=[1], target_modules=["q_proj"]))
    trainer_for(model, GNMRCallback(**MOVING)).train()
    assert [unit["layer"] for unit in trace_lines(tmp_path / "run")[0]["units"]] == [0, 1, 2]
    first = {name: p.detach().clone() for name, p in model.named_parameters() if ".default." in name}
    model.set_adapter("second")
    trainer_for(model, GNMRCallback(max_o=1)).train()
    header, lines = trace_lines(tmp_path / "run")
    assert [unit["layer"] for unit in header["units"]] == [1]
    assert header["census"]["modules_not_switched"] == {}, "the idle adapter is no part of the layer"
    assert all(line["norms"][0] > 0 for line in lines)
    assert all(torch.equal(p, first[name]) for name, p in model.named_parameters() if name in first)
    model.base_model.set_adapter(["default", "second"])
    trainer_for(model, GNMRCallback(**MOVING)).train()
    assert [unit["layer"] for unit in trace_lines(tmp_path / "run")[0]["units"]] == [0, 1, 2]


def test_another_adapter_in_the_middle_of_training_is_refused(tiny, trainer_for):
    class Switch(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                model.set_adapter("second")

    model = with_lora(load_int8(tiny))
    model.add_adapter("second", model.peft_config["default"])
    with pytest.raises(SetupError, match="another adapter was made active"):
        trainer_for(model, GNMRCallback(), Switch()).train()


def test_reference_logits_with_the_adapter_off_do_not_change_the_reading(tiny, trainer_for, tmp_path):
    """As preference losses do: a second forward of the same model, adapter off, within the step; in training mode, and once
    even with gradients on."""
    traces = {}
    for kind in ("plain", "no_grad", "with grad"):

        class Referenced(Trainer):
            def compute_loss(self, model, inputs, *args, kind=kind, **kwargs):
                if kind != "plain":
                    with torch.set_grad_enabled(kind == "with grad"), self.model.disable_adapter():
                        model(**inputs)
                return super().compute_loss(model, inputs, *args, **kwargs)

        trainer_for(with_lora(load_int8(tiny)), GNMRCallback(**MOVING), trainer_class=Referenced).train()
        traces[kind] = [(line["norms"], line["active"], line["loss"]) for line in trace_lines(tmp_path / "run")[1]]
    assert traces["plain"] == traces["no_grad"] == traces["with grad"]


def test_a_bare_decoder_without_a_head(tiny, trainer_for, tmp_path):
    """Its output has no loss; one is made from the hidden states."""

    class Embedding(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            inputs.pop("labels", None)
            return model(**inputs).last_hidden_state.float().square().mean()

    base = LlamaModel.from_pretrained(tiny, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    trainer_for(with_lora(base), GNMRCallback(**MOVING), trainer_class=Embedding).train()
    header, lines = trace_lines(tmp_path / "run")
    assert [unit["name"] for unit in header["units"]] == [f"layers.{i}" for i in range(3)]
    assert all(norm > 0 for line in lines for norm in line["norms"]) and moves(lines)


def test_adapters_outside_the_layers_are_refused_and_named(tiny, trainer_for):
    model = get_peft_model(load_int8(tiny), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(SetupError, match="trainable parameters only in prompt_encoder"):
        trainer_for(model, GNMRCallback()).train()


def test_an_initialisation_that_changes_the_base_is_refused(tiny, trainer_for):
    """OLoRA subtracts its adapters from the base weights: the checkpoint is then no longer the original."""
    model = with_lora(load_int8(tiny), init_lora_weights="olora")
    with pytest.raises(SetupError, match="does not quantise to the 8-bit codes in use"):
        trainer_for(model, GNMRCallback()).train()
    trainer_for(model, GNMRCallback(recovery="dequantize")).train()


def test_preparation_for_kbit_training_and_autocast_change_dtypes_not_results(tmp_path, trainer_for):
    """fp32 norms, embeddings, head and hidden states, on a model with biases (as Qwen2's), a layer toggled every step."""
    folder = save_llama(tmp_path / "llama", attention_bias=True)
    losses = {}
    for prepared, bf16 in itertools.product((False, True), (False, True)):
        base = load_int8(folder)
        before = {n: p.detach().float() for n, p in base.named_parameters() if n.endswith("proj.bias")}
        model = with_lora(prepare_model_for_kbit_training(base) if prepared else base)
        dtypes = {n: p.dtype for n, p in model.named_parameters()}
        assert any(dtype == torch.float32 for n, dtype in dtypes.items() if "norm" in n) == prepared
        trainer_for(model, GNMRCallback(**MOVING), bf16=bf16).train()
        lines = trace_lines(tmp_path / "run")[1]
        assert moves(lines)
        assert [n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n] == []
        assert {n: p.dtype for n, p in model.named_parameters()} == dtypes, "plain bitsandbytes rewrites biases' dtype"
        for name, p in base.named_parameters():
            if name.endswith("proj.base_layer.bias"):
                assert torch.equal(p.float(), before[canonical(name)]), name
        losses[prepared, bf16] = [line["loss"] for line in lines]
    for losses_of_run in losses.values():
        np.testing.assert_allclose(losses_of_run, losses[True, False], rtol=2e-3)
