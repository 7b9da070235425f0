"""Mixtures of experts: fused experts in few bits by the model's own code, single experts as units, unused ones unread."""

from __future__ import annotations

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
from conftest import logits_and_gradients, token_rows, trace_lines, with_lora
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hf_gnmr import GNMRCallback
from hf_gnmr.backends import Fp8Backend, LowBitBackend
from hf_gnmr.backends.formats import E2M1, quantise_rows
from hf_gnmr.backends.units import find_experts, find_units, linears_of
from hf_gnmr.config import ConfigError, SetupError
from hf_gnmr.training.gradients import GradientNorms
from hf_gnmr.training.mixin import GNMRTrainer

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
IDS = torch.tensor([row["input_ids"] for row in token_rows(6, 16)])


def mixtral(implementation="eager", **changes):
    torch.manual_seed(0)
    config = MixtralConfig(**{**SIZES, "num_local_experts": 4, **changes})
    config._experts_implementation = implementation
    return MixtralForCausalLM(config).train()


def step(model):
    return logits_and_gradients(model, IDS)


def same(a, b):
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("kind", ["layer", "experts", "expert"])
def test_both_ends_whatever_implementation_the_model_is_set_to(implementation, kind):
    plain, low_eager = step(mixtral(implementation)), None
    for model in (mixtral(implementation), mixtral("eager")):
        units = find_units(model) if kind == "layer" else find_experts(model, each=kind == "expert")
        assert len(units) == {"layer": 2, "experts": 2, "expert": 8}[kind]
        backend = Fp8Backend(model, units, emulate=True)
        low = step(model)
        assert not torch.equal(low[0], plain[0])
        assert low_eager is None or same(low, low_eager), "in few bits the model's own loop runs, whatever is configured"
        low_eager = low
        backend.apply(backend.recoverable)
        assert same(step(model), plain if model.config._experts_implementation == implementation else step(mixtral()))
        backend.apply(np.zeros(len(units), dtype=bool))
        assert same(step(model), low)
        backend.remove()
        assert type(model.model.layers[0].mlp.experts).__name__ == "MixtralExperts"


def literal_experts(module, states, chosen, weights, quantised):
    """A mixture of experts by its definition: for each token the weighted sum of its experts' outputs."""
    q = lambda x: quantise_rows(x, E2M1)
    out = torch.zeros_like(states)
    for token in range(len(states)):
        for place in range(chosen.shape[1]):
            e = int(chosen[token, place])
            up, down, x = module.gate_up_proj[e], module.down_proj[e], states[token : token + 1]
            if quantised[e]:
                a, b = q(q(x) @ q(up).t()).chunk(2, dim=-1)
                y = q(q(module.act_fn(a) * b) @ q(down).t())
            else:
                a, b = (x @ up.t()).chunk(2, dim=-1)
                y = (module.act_fn(a) * b) @ down.t()
            out[token] += weights[token, place] * y[0]
    return out


@pytest.mark.parametrize("lifted", [[], [0, 2], [0, 1, 2], [0, 1, 2, 3]], ids=str)
def test_each_expert_runs_its_own_path(lifted):
    model = mixtral()
    units = find_experts(model, each=True)
    assert [u.name for u in units] == [f"model.layers.{layer}.mlp.experts.{i}" for layer in range(2) for i in range(4)]
    assert units[5].part == 1 and units[5].layer == 1 and units[5].numel == 3 * 64 * 96
    experts = model.model.layers[0].mlp.experts
    torch.manual_seed(1)
    states, chosen = torch.randn(11, 64), torch.stack([torch.randperm(4)[:2] for _ in range(11)])
    weights = torch.rand(11, 2)
    backend = LowBitBackend(model, units, bits_recovery=16)
    active = np.zeros(8, dtype=bool)
    active[lifted] = True
    for mask in (active, np.zeros(8, dtype=bool), active):
        backend.apply(mask)
        with torch.no_grad():
            torch.testing.assert_close(
                experts(states, chosen, weights),
                literal_experts(experts, states, chosen, weights, quantised=~mask[:4]),
                rtol=1e-4,
                atol=1e-6,
            )


def test_gradients_of_experts_are_read_separately_and_unused_ones_are_not_read():
    model = mixtral()
    with torch.no_grad():  # expert 3 of layer 1 is never chosen
        model.model.layers[1].mlp.gate.weight[3] = 0
        model.model.layers[1].mlp.gate.weight[:3] = 0
    router = model.model.layers[1].mlp.gate
    router.register_forward_hook(lambda module, args, out: (out[0], out[1], torch.zeros_like(out[2]) + torch.tensor([0, 1])))
    units = find_experts(model, each=True)
    norms = GradientNorms(model, units)
    _, grads = step(model)
    reading = norms.read()
    assert reading.seen.tolist()[4:] == [True, True, False, False] and reading.norms[6] == reading.norms[7] == 0
    for unit in units:
        parts = [grads[f"model.layers.{unit.layer}.mlp.experts.{n}"][unit.part] for n in ("gate_up_proj", "down_proj")]
        norm = float(sum(p.double().square().sum() for p in parts)) ** 0.5
        assert reading.norms[unit.index] == pytest.approx(norm, rel=1e-6)
    total = sum(g.double().square().sum() for g in grads.values())
    assert reading.total_norm == pytest.approx(float(total) ** 0.5, rel=1e-6), "each number once"
    whole = GradientNorms(model, find_experts(model))
    step(model)
    assert whole.read().norms[0] == pytest.approx(float(np.sqrt(np.square(reading.norms[:4]).sum())), rel=1e-6)


@pytest.mark.parametrize("parts", ["all", "every other one", "in reverse order"])
def test_slices_are_measured_by_one_norm_a_tensor(parts, monkeypatch):
    """As many calls as tensors, whatever the number of experts; the same numbers as slice by slice."""
    model = mixtral()
    units = find_experts(model, each=True)
    if parts == "every other one":
        units = [dataclasses.replace(unit, index=i) for i, unit in enumerate(units[::2])]
    elif parts == "in reverse order":
        units = [dataclasses.replace(unit, index=i) for i, unit in enumerate(units[::-1])]
    calls, norm = [], torch.linalg.vector_norm

    def counted(gradient, *args, **kwargs):
        calls.append(gradient.shape)
        return norm(gradient, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "vector_norm", counted)
    norms = GradientNorms(model, units)
    _, grads = step(model)
    reading = norms.read()
    assert len(calls) == 2 * 2, "gate_up_proj and down_proj of two layers"
    for unit in units:
        slices = [grads[f"model.layers.{unit.layer}.mlp.experts.{n}"][unit.part] for n in ("gate_up_proj", "down_proj")]
        expected = torch.stack(torch._foreach_norm(slices, 2, torch.float32)).double().norm()
        assert reading.norms[unit.index] == pytest.approx(float(expected), rel=1e-6)


def test_a_training_shows_which_experts_were_lifted_and_leaves_unused_ones_alone(trainer_for, tmp_path):
    model = mixtral()
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.zero_()
    model.model.layers[1].mlp.gate.register_forward_hook(
        lambda module, args, out: (out[0], out[1], torch.zeros_like(out[2]) + torch.tensor([0, 1]))
    )
    options = {"backend": "fp8", "emulate": True, "unit": "expert"}
    callback = GNMRCallback(**options, max_o=2, alpha=0.9, alpha_init_fraction=0.0, beta=None)
    trainer_for(model, callback, max_steps=8).train()
    header, lines = trace_lines(tmp_path / "run")
    names = [unit["name"] for unit in header["units"]]
    lifted = {names[i] for line in lines for i in line["active"]}
    assert lifted and lifted <= set(names[:6]), "experts 2 and 3 of layer 1 have no reading, so they are never chosen"
    assert all(line["gnmr"][6] is line["gnmr"][7] is None for line in lines), lines[0]["gnmr"]
    assert header["backend"] == "fp8" and header["census"]["path"].startswith("EMULATED")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["units"] == 8 and summary["promotion_ratio"] > 0


@pytest.mark.parametrize(
    ("config", "cls", "count"),
    [
        (
            Qwen2MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=48),
            Qwen2MoeForCausalLM,
            8,
        ),
        (Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32, head_dim=16), Qwen3MoeForCausalLM, 8),
        (
            DeepseekV3Config(
                **SIZES | {"num_key_value_heads": 4},
                n_routed_experts=4,
                moe_intermediate_size=32,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=1,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=16,
            ),
            DeepseekV3ForCausalLM,
            4,
        ),
    ],
    ids=["qwen2_moe", "qwen3_moe", "deepseek_v3"],
)
@pytest.mark.parametrize("kind", ["layer", "experts", "expert"])
def test_other_mixtures(config, cls, count, kind):
    torch.manual_seed(0)
    model = cls(config).train()
    plain = step(model)
    units = find_units(model) if kind == "layer" else find_experts(model, each=kind == "expert")
    assert kind != "expert" or len(units) == count
    backend = LowBitBackend(model, units)
    low = step(model)
    assert not torch.equal(low[0], plain[0]) and torch.isfinite(low[0]).all()
    switched = {n.rpartition(".")[2] for n, m in model.named_modules() if type(m).__name__.startswith("Switched")}
    assert "experts" in switched and not switched & {"gate", "shared_expert_gate", "lm_head", "embed_tokens"}
    backend.apply_exact()
    assert same(step(model), plain)
    backend.remove()
    assert same(step(model), plain)


@pytest.mark.parametrize("kind", ["plain", "ours", "elsewhere"])
def test_a_mixture_resumes_bit_for_bit(kind, trainer_for, tmp_path):
    """transformers saves fused experts one by one, and its Trainer skips them when it resumes."""
    options = {"backend": "fp8", "emulate": True, "unit": "expert", "alpha": 0.9, "alpha_init_fraction": 0.0, "beta": None}
    model = mixtral()
    trainer_for(model, GNMRCallback(**options), save_strategy="steps", save_steps=3, max_steps=6).train()
    _, straight = trace_lines(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-3"
    if kind == "elsewhere":
        checkpoint = (tmp_path / "moved").resolve()
        (tmp_path / "run" / "checkpoint-3").rename(checkpoint)
    resumed = mixtral()
    with torch.no_grad():  # all of it must be overwritten
        for p in resumed.parameters():
            p.add_(1.0)
    trainer = trainer_for(resumed, GNMRCallback(**options), save_strategy="no", max_steps=6)
    if kind != "plain":
        trainer.__class__ = GNMRTrainer
    trainer.train(resume_from_checkpoint=str(checkpoint))
    _, lines = trace_lines(tmp_path / "run")
    assert [line["norms"] for line in lines[3:]] == [line["norms"] for line in straight[3:]]
    weights = dict(model.named_parameters())
    assert all(torch.equal(p, weights[n]) for n, p in resumed.named_parameters())


def test_the_best_checkpoint_of_a_mixture_is_loaded_completely(trainer_for, tmp_path):
    model = mixtral()
    callback = GNMRCallback(backend="fp8", emulate=True, unit="expert")
    trainer = trainer_for(
        model,
        callback,
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        eval_dataset=token_rows(4),
        metric_for_best_model="loss",
        greater_is_better=True,
    )
    trainer.__class__ = GNMRTrainer
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1"), "the higher loss counts as better"
    best = MixtralForCausalLM.from_pretrained(trainer.state.best_model_checkpoint, dtype=torch.float32)
    assert all(torch.equal(p, best.get_parameter(n)) for n, p in model.named_parameters())


def test_routers_are_recognised_by_any_part_of_their_name():
    layer = nn.Module()
    layer.gate = nn.Module()
    layer.gate.wg = nn.Linear(8, 4)  # HunYuan's
    layer.router = nn.Sequential(nn.Linear(8, 4))
    layer.shared_expert_gate, layer.gate_proj, layer.up_proj = nn.Linear(8, 1), nn.Linear(8, 8), nn.Linear(8, 8)
    assert [name for name, _ in linears_of(layer)] == ["gate_proj", "up_proj"]


class OwnExperts(nn.Module):
    """Experts as a list of modules, as in models of older transformers."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)) for _ in range(3))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts), None


def test_experts_as_a_list_of_modules():
    from conftest import tiny_config
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config())
    for layer in model.model.layers:
        layer.mlp = OwnExperts()
        layer.mlp.forward = None  # only found, not run
        del layer.mlp.forward
    units = find_experts(model, each=True)
    assert len(units) == 9 and units[4].name == "model.layers.1.mlp.experts.1" and units[4].part is None
    assert len(find_experts(model)) == 3
    backend = LowBitBackend(model, units)
    active = np.zeros(9, dtype=bool)
    active[4] = True
    backend.apply(active)
    x = torch.randn(5, 64)
    expert = model.model.layers[1].mlp.experts[1]
    low = expert(x)
    backend.apply_exact()
    assert not torch.equal(low, expert(x))
    backend.remove()


def test_models_that_are_refused():
    from conftest import tiny_config
    from transformers import LlamaForCausalLM

    with pytest.raises(SetupError, match="no trainable experts.*unit='layer'"):
        find_experts(LlamaForCausalLM(tiny_config()))
    model = GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, head_dim=16))
    with pytest.raises(SetupError, match=r"layers\.0\.mlp\.experts \(GptOssExperts\) multiplies without F\.linear"):
        LowBitBackend(model, find_units(model))
    adapted = with_lora(mixtral(), target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with pytest.raises(SetupError, match=r"mlp\.experts has adapters on fused experts.*'q_proj'"):
        LowBitBackend(adapted, find_units(adapted))
    llama4 = Llama4ForCausalLM(
        Llama4TextConfig(
            **SIZES | {"num_hidden_layers": 1, "num_experts_per_tok": 1},
            num_local_experts=2,
            intermediate_size_mlp=64,
            head_dim=16,
            interleave_moe_layer_step=1,
            pad_token_id=0,
        )
    )
    with pytest.raises(SetupError, match="Llama4TextExperts.*all experts at once"):
        LowBitBackend(llama4, find_units(llama4))
    attention_only = with_lora(mixtral(), target_modules=["q_proj"])
    with pytest.raises(SetupError, match="no trainable experts"):
        find_experts(attention_only)
    LowBitBackend(attention_only, find_units(attention_only)).remove()
    with pytest.raises(ConfigError, match="trigger='jacobian' with unit='expert'"):
        GNMRCallback(backend="lowbit", unit="expert", trigger="jacobian")


def test_copies_are_plain_and_experts_that_multiply_differently_are_refused():
    model = mixtral()
    backend = LowBitBackend(model, find_experts(model))
    twin = copy.deepcopy(model)
    assert type(twin.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
    assert not any("paths" in vars(m) for m in twin.modules())
    experts = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):  # weights that are no longer slices of its own tensors
        tensor = getattr(experts, name)
        experts._parameters.pop(name)
        experts.__dict__[name] = tensor.detach().clone()
    with pytest.raises(SetupError, match="called F.linear with none of its own weights"):
        model(input_ids=IDS)
    backend.remove()
