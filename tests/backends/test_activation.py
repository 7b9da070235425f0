"""Saved activations in few bits: forward bit for bit, gradients by explicit formulas, memory as counted and as measured."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from conftest import (
    byte_tokenizer,
    load_int8,
    logits_and_gradients,
    random_llama,
    token_rows,
    trace_lines,
    with_lora,
)
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from hf_gnmr import GNMRCallback
from hf_gnmr.backends import ActivationBackend
from hf_gnmr.backends.formats import E2M1, E4M3, IntFormat, format_of, packed_bytes, quantise_rows
from hf_gnmr.backends.units import find_projections, find_units
from hf_gnmr.config import ConfigError, SetupError
from hf_gnmr.training.options import Options

NONE, ALL = np.zeros(21, dtype=bool), np.ones(21, dtype=bool)


IDS = torch.tensor([row["input_ids"] for row in token_rows(6, 16)])


def step(model, autocast=False):
    return logits_and_gradients(model, IDS, autocast)


class Watched:
    """Inputs and output gradients of linears, from hooks on the plain model."""

    def __init__(self, model):
        self.inputs, self.outputs = {}, {}
        for name, module in model.named_modules():
            if type(module) is torch.nn.Linear:
                module.register_forward_hook(self._hook(name))

    def _hook(self, name):
        def hook(module, args, output):
            self.inputs[name] = args[0].detach()
            output.register_hook(lambda grad: self.outputs.__setitem__(name, grad.detach()))

        return hook


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize(("kind", "low", "recovery"), [("float", 4, 8), ("int", 2, 8), ("int", 5, 7), ("float", 6, 16)])
def test_forward_and_gradients(dtype, autocast, kind, low, recovery):
    bias = {"attention_bias": True, "mlp_bias": True}
    plain = random_llama(dtype, **bias)
    watched = Watched(plain)
    logits, plain_grads = step(plain, autocast)
    model = random_llama(dtype, **bias)
    units = find_projections(model)
    assert len(units) == 21
    backend = ActivationBackend(model, units, bits_low=low, bits_recovery=recovery, format=kind)
    lifted = NONE.copy()
    lifted[[0, 5, 13]] = True
    backend.apply(lifted)
    quantised, grads = step(model, autocast)
    assert torch.equal(quantised, logits), "the forward is the plain one's, bit for bit"
    compute = torch.bfloat16 if autocast else dtype
    for unit in units:
        form = format_of("bits", kind, recovery if lifted[unit.index] else low)
        x = watched.inputs[unit.name].to(compute).reshape(-1, unit.module.in_features)
        dy = watched.outputs[unit.name].to(compute).reshape(-1, unit.module.out_features)
        kept = x if form is None else quantise_rows(x, form)
        expected = (dy.t() @ kept).to(dtype)
        torch.testing.assert_close(
            grads[f"{unit.name}.weight"],
            expected,
            rtol=1e-5 if compute == torch.float32 else 0.02,
            atol=1e-6 if compute == torch.float32 else 1e-3,
        )
        assert torch.equal(grads[f"{unit.name}.bias"], plain_grads[f"{unit.name}.bias"])
    for name in plain_grads:  # gradients of inputs are exact, and so is everything that they alone reach
        if "norm" in name or "embed" in name or "lm_head" in name:
            assert torch.equal(grads[name], plain_grads[name]), name
    backend.remove()
    assert torch.equal(step(model, autocast)[0], logits)
    assert all(type(m) is torch.nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))
    assert not any(hasattr(m, "saved") for m in model.modules())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("exact", [False, True], ids=["recovery in 16 bits", "apply_exact"])
def test_16_bits_are_the_plain_linear_bit_for_bit(autocast, bias, exact):
    biases = {"attention_bias": bias, "mlp_bias": bias}
    logits, plain = step(random_llama(**biases), autocast)
    model = random_llama(**biases)
    backend = ActivationBackend(model, find_projections(model), bits_low=4, bits_recovery=16)
    for _ in range(2):
        backend.apply_exact() if exact else backend.apply(ALL)
        lifted, grads = step(model, autocast)
        assert torch.equal(lifted, logits) and all(torch.equal(grads[n], plain[n]) for n in plain)
        backend.apply(NONE)
        name = "model.layers.0.mlp.up_proj.weight"
        assert not torch.equal(step(model, autocast)[1][name], plain[name])


def kept_bytes(model, autocast=False, projections_only=False):
    """Bytes of distinct storages that a forward keeps for the backward, parameters apart, as autograd itself holds them;
    `projections_only`: those kept inside the projections' own forward."""
    seen, parameters = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack_hook(tensor):
        storage = tensor.untyped_storage()
        counted = inside or not projections_only
        if storage.data_ptr() not in parameters and counted and tuple(tensor.shape[-2:]) not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    inside: list[bool] = []
    projections = [m for n, m in model.named_modules() if n.endswith("_proj")]
    # Casts of weights are no activations.
    weights = {s for m in projections for s in (m.weight.shape, m.weight.t().shape)} if projections_only else set()
    handles = [m.register_forward_pre_hook(lambda *_: inside.append(True)) for m in projections]
    handles += [m.register_forward_hook(lambda *_: inside.clear()) for m in projections]
    with (
        torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        out = model(input_ids=IDS, labels=IDS)
    for handle in handles:
        handle.remove()
    total = sum(seen.values())
    out.loss.backward()
    return total


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("lifted", [NONE, ALL])
def test_what_is_counted_is_what_is_kept(autocast, lifted):
    model = random_llama()
    plain = kept_bytes(model, autocast, projections_only=True)
    backend = ActivationBackend(model, find_projections(model), bits_recovery=16)
    backend.apply(lifted)
    kept = kept_bytes(model, autocast, projections_only=True)
    assert backend.step_figures()["saved_bytes"] == kept
    # Plain linears under autocast keep a cast copy each; here those that read the same input share one.
    numbers = 3 * IDS.numel() * (64 + 64 + 64 + 128)
    if lifted.all():
        assert kept == numbers * (2 if autocast else 4) and plain == (
            3 * IDS.numel() * (4 * 64 + 2 * 64 + 128) * 2 if autocast else kept
        )


def test_bytes_count_while_a_backward_needs_them():
    model = random_llama()
    backend = ActivationBackend(model, find_projections(model), bits_recovery=16)
    micro_batch = 3 * sum(packed_bytes(IDS.numel(), n, E2M1) for n in (64, 64, 64, 128))

    def forward():
        return model(input_ids=IDS, labels=IDS).loss

    for _ in range(3):
        forward().backward()
    assert backend.step_figures()["saved_bytes"] == micro_batch, "micro-batches follow each other"
    (forward() + forward()).backward()
    assert backend.step_figures()["saved_bytes"] == 2 * micro_batch, "a loss of two forwards holds both"
    loss = forward()
    loss.backward(retain_graph=True)
    loss.backward()
    forward()
    assert backend.step_figures()["saved_bytes"] == micro_batch, "one that is dropped without a backward is released too"
    for p in model.model.layers[0].parameters():
        p.requires_grad_(False)
    for switch, size in (
        (lambda: backend.apply(NONE), micro_batch // 3 * 2),
        (backend.apply_exact, 2 * IDS.numel() * 320 * 4),
    ):
        switch()
        for _ in range(4):
            forward().backward()
        assert backend.step_figures()["saved_bytes"] == size, "the first layer may be frozen"
    with torch.autograd.graph.save_on_cpu():
        loss = forward()
    loss.backward()
    assert backend.step_figures()["saved_bytes_low"] == micro_batch // 3 * 2


def test_doras_read_of_its_weight_is_no_activation():
    plain = with_lora(random_llama().requires_grad_(False), trained=True, use_dora=True)
    logits, expected = step(plain)
    model = with_lora(random_llama().requires_grad_(False), trained=True, use_dora=True)
    backend = ActivationBackend(model, find_projections(model), bits_recovery=16)
    quantised, grads = step(model)
    assert torch.equal(quantised, logits)
    assert {n for n in grads if not torch.equal(grads[n], expected[n])} == {n for n in grads if "lora_A" in n}
    figures = backend.step_figures()
    assert figures["saved_tokens"] == IDS.numel()
    # DoRA passes q, k and v separate dropout outputs only with dropout: without it they share.
    assert figures["saved_bytes"] == 3 * sum(packed_bytes(IDS.numel(), n, E2M1) for n in (64, 64, 64, 128))
    backend.apply(ALL)
    assert all(torch.equal(g, expected[n]) for n, g in step(model)[1].items())


def test_units_that_lifting_cannot_reach_are_named(trainer_for, tmp_path, capsys):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["up_proj.weight"])
    model = get_peft_model(random_llama(), config)
    trainer_for(model, GNMRCallback(backend="activation", trigger="jacobian", max_o=6)).train()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("GNMR: ")]
    assert sum("LIFTING CHANGES NOTHING for 3 of 6 units (model.layers.0.mlp.up_proj," in line for line in printed) == 1
    # Layer 0's queries read the embedding, which LoRA has frozen.
    assert (
        sum(
            "NO SIGNAL of trigger 'jacobian' from 1 of 6 units (model.layers.0.self_attn.q_proj)" in line for line in printed
        )
        == 1
    )


def test_nothing_is_reported_where_lifting_reaches_all_units(trainer_for, tmp_path, capsys):
    trainer_for(random_llama(), GNMRCallback(backend="activation", trigger="jacobian", max_o=6)).train()
    printed = capsys.readouterr().out
    assert "LIFTING CHANGES NOTHING" not in printed and "NO SIGNAL" not in printed


@pytest.mark.parametrize("kind", ["float", "int"])
def test_memory_is_measured_and_shared_by_projections_that_read_the_same_input(kind):
    rows = IDS.numel()
    model = random_llama()
    plain = kept_bytes(model)
    backend = ActivationBackend(model, find_projections(model), format=kind)
    low, high = (E2M1, E4M3) if kind == "float" else (IntFormat(4), IntFormat(8))
    of_a_layer = [64, 64, 64, 128]  # q, k, v together; o; gate and up together; down
    all_low = 3 * sum(packed_bytes(rows, n, low) for n in of_a_layer)
    quantised = kept_bytes(model)
    backend.apply(NONE)
    assert backend.step_figures() == {"saved_bytes": all_low, "saved_bytes_low": all_low, "saved_tokens": rows}
    assert backend.recovery_bytes(NONE) == 0
    # The inputs themselves are no longer kept: 4 bytes per number each, except o's (attention keeps its output as well),
    # and the product of gate and up, which the multiplication does not need.
    assert plain - quantised >= 3 * 4 * rows * (64 + 128) - all_low
    lifted = NONE.copy()
    lifted[1] = True  # k of layer 0: alone with its input in 8 bits, q and v keep the low copy
    backend.apply(lifted)
    step(model)
    backend.step_figures()
    assert backend.recovery_bytes(lifted) == packed_bytes(rows, 64, high)
    lifted[:3] = True  # q, k, v: the low copy is not needed
    backend.apply(lifted)
    step(model)
    backend.step_figures()
    assert backend.recovery_bytes(lifted) == packed_bytes(rows, 64, high) - packed_bytes(rows, 64, low)
    assert backend.recovery_bytes_bound(3) * rows >= backend.recovery_bytes(lifted)


def test_nothing_is_kept_without_gradients():
    model = random_llama()
    backend = ActivationBackend(model, find_projections(model))
    with torch.no_grad():
        model(input_ids=IDS)
    backend.apply(NONE)
    assert backend.step_figures()["saved_bytes"] == 0


@pytest.mark.parametrize("changes", [[False, True], [True, False]], ids=["changed last", "changed first"])
def test_a_changed_input_is_packed_again(changes):
    model = random_llama()
    ActivationBackend(model, find_projections(model))
    q, k = model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj
    x = torch.randn(4, 64)
    for changed in changes:
        x.copy_(torch.randn(4, 64))
        q.zero_grad()
        k.zero_grad()
        a = q(x)
        if changed:
            x.mul_(3.0)
        (a.sum() + k(x).sum()).backward()
        now = quantise_rows(x, E2M1).sum(0)
        torch.testing.assert_close(k.weight.grad[0], now)
        torch.testing.assert_close(q.weight.grad[0], now / 3 if changed else now)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(0, 7, 33), torch.randn(1, 33), torch.randn(3, 1, 33) * 1e20, torch.zeros(2, 33), torch.randn(33)],
    ids=["empty", "one row", "outliers", "zeros", "vector"],
)
def test_odd_shapes_outliers_and_empty_batches(x):
    layer = torch.nn.Linear(33, 5)
    holder = random_llama()
    holder.model.layers[0].mlp.up_proj = layer
    units = [u for u in find_projections(holder) if u.module is layer]
    backend = ActivationBackend(holder, units)
    x = x.clone().requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad.shape == (5, 33) and x.grad.shape == x.shape and torch.isfinite(layer.weight.grad).all()
    backend.remove()


def test_under_lora_the_input_of_a_is_kept():
    torch.manual_seed(0)
    model = with_lora(random_llama().requires_grad_(False), trained=True)
    logits, plain = step(model)
    units = find_projections(model)
    assert len(units) == 21 and units[0].name == "model.layers.0.self_attn.q_proj"
    assert all(len(unit.parameters) == 2 for unit in units)
    backend = ActivationBackend(model, units)
    quantised, grads = step(model)
    backend.apply(NONE)
    figures = backend.step_figures()
    assert torch.equal(quantised, logits)
    changed = {n for n in grads if not torch.equal(grads[n], plain[n])}
    assert changed == {n for n in grads if "lora_A" in n}
    assert figures["saved_bytes"] == 3 * sum(packed_bytes(IDS.numel(), n, E2M1) for n in (64, 64, 64, 128))
    backend.remove()
    assert torch.equal(step(model)[0], logits)


@pytest.mark.parametrize("unit", ["projection", "layer"])
def test_a_training_under_control(trainer_for, tmp_path, unit):
    rows = token_rows(64)
    callback = GNMRCallback(backend="activation", unit=unit, max_o=2, alpha=0.9, alpha_init_fraction=0.0)
    trainer = trainer_for(random_llama(), callback, rows=rows, max_grad_norm=0.5)
    trainer.train()
    header, lines = trace_lines(tmp_path / "run")
    assert len(header["units"]) == (21 if unit == "projection" else 3) and header["census"]["bytes_per_token"]
    assert any(line["active"] for line in lines) and max(len(line["active"]) for line in lines) <= 2
    for line in lines:
        assert (line["recovery_bytes"] > 0) == bool(line["active"]) and line["saved_tokens"] == 64
        assert line["recovery_bytes"] == line["saved_bytes"] - line["saved_bytes_low"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0 < summary["peak_recovery_bytes"] <= summary["recovery_bytes_bound"]
    assert summary["gss_max"] >= 1 and summary["peak_saved_bytes"] > 0
    assert not any(hasattr(m, "saved") for m in trainer.model.modules())


def test_accumulated_micro_batches_count_once(trainer_for, tmp_path):
    callback = GNMRCallback(backend="activation", trigger="none")
    trainer_for(random_llama(), callback, gradient_accumulation_steps=3, per_device_train_batch_size=2).train()
    _, lines = trace_lines(tmp_path / "run")
    assert {line["saved_tokens"] for line in lines} == {32}
    assert {line["saved_bytes"] for line in lines} == {3 * sum(packed_bytes(32, n, E2M1) for n in (64, 64, 64, 128))}


def test_under_compile_the_projections_stay_as_they_are():
    model = random_llama()
    backend = ActivationBackend(model, find_projections(model))
    _, grads = step(model)
    model.zero_grad()
    compiled = torch.compile(model, backend="eager")
    compiled(input_ids=IDS, labels=IDS).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-5, atol=1e-7)
    backend.apply(NONE)
    assert backend.step_figures()["saved_tokens"] == IDS.numel()


@pytest.mark.parametrize("how", ["copied", "saved"])
def test_a_copy_or_a_saved_model_has_plain_linears(how, tmp_path):
    model = random_llama()
    backend = ActivationBackend(model, find_projections(model))
    logits, _ = step(model)
    if how == "copied":
        twin = copy.deepcopy(model)
    else:
        torch.save(model, tmp_path / "model.pt")
        twin = torch.load(tmp_path / "model.pt", weights_only=False)
    assert all(type(m) is torch.nn.Linear for n, m in twin.named_modules() if n.endswith("_proj"))
    assert torch.equal(step(twin)[0], logits)
    backend.apply(NONE)
    assert backend.step_figures()["saved_tokens"] == IDS.numel()


def test_two_sessions_on_one_model_do_not_undo_each_other():
    model = random_llama()
    first = ActivationBackend(model, find_projections(model))
    second = ActivationBackend(model, find_projections(model))
    first.remove()
    step(model)
    assert second.step_figures()["saved_bytes"] > 0
    second.remove()
    assert all(type(m) is torch.nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))


def test_modules_with_a_custom_forward_or_shared_ones_are_refused():
    model = random_llama()
    up = model.model.layers[1].mlp.up_proj
    up.forward = up.forward  # as accelerate's hooks leave it
    with pytest.raises(SetupError, match="has a custom forward"):
        ActivationBackend(model, find_projections(model))
    del up.forward
    model.model.layers[2] = model.model.layers[0]
    with pytest.raises(SetupError, match="are the same module"):
        ActivationBackend(model, find_projections(model))


def test_doubles_under_autocast_stay_doubles():
    model = random_llama().double()
    logits, plain = step(model, autocast=True)
    backend = ActivationBackend(model, find_projections(model), bits_low=4, bits_recovery=16)
    quantised, _ = step(model, autocast=True)
    assert torch.equal(quantised, logits)
    backend.apply(ALL)
    assert all(torch.equal(g, plain[n]) for n, g in step(model, autocast=True)[1].items())


def test_routers_of_experts_are_left_alone():
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    names = [unit.name for unit in find_projections(MixtralForCausalLM(config))]
    assert names and all("self_attn" in name for name in names), "fused experts are no linears, and the router is left out"


def test_models_that_are_refused(tiny, trainer_for):
    with pytest.raises(SetupError, match=r"no projection .* Conv1D"):
        find_projections(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64)))
    model = random_llama()
    model.gradient_checkpointing_enable()
    with pytest.raises(SetupError, match="checkpointing keeps no activation"):
        trainer_for(model, GNMRCallback(backend="activation"), gradient_checkpointing=True).train()
    with pytest.raises(SetupError, match="8-bit"):
        trainer_for(with_lora(load_int8(tiny)), GNMRCallback(backend="activation")).train()
    frozen = random_llama().requires_grad_(False)
    with pytest.raises(SetupError, match="no trainable parameter|has a trainable parameter"):
        find_projections(frozen)
    only_norms = random_llama()
    for name, p in only_norms.named_parameters():
        p.requires_grad_("norm" in name)
    with pytest.raises(SetupError, match="no projection with trainable parameters"):
        find_projections(only_norms)
    with pytest.raises(SetupError, match=r"no trainable nn.Linear in model.layers.0"):
        ActivationBackend(only_norms, find_units(only_norms))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits_low": 1, "format": "int"}, "bits_low=1: expected 2, 3"),
        ({"bits_low": 5}, "bits_low=5: expected 4, 6"),
        ({"bits_recovery": 32}, "bits_recovery=32"),
        ({"bits_low": 8}, "bits_recovery=8: expected more than bits_low=8"),
        ({"bits_low": 16}, "expected more than bits_low=16"),
        ({"bits_low": 4.0}, "bits_low=4.0"),
        ({"format": "fp"}, "format='fp'"),
        ({"unit": "expert"}, "unit='expert'"),
        ({"recovery": "device"}, "recovery='device' belongs to backend='int8'"),
        ({"max_recovery_memory": "1GB"}, "depends on the tokens"),
        ({"eval_path": "recovery"}, "eval_path"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Options(backend="activation", **options)
    if "bits_low" in options:
        with pytest.raises(ConfigError, match="belongs to backend='activation'|bits"):
            Options(backend="int8", **options)


def test_the_byte_tokenizer_gives_back_what_it_was_given():
    text = "Straße 東京\n\ttabs  and   spaces\r\n"
    tokens = byte_tokenizer()(text)["input_ids"]
    assert len(tokens) == len(text.encode()) and byte_tokenizer().decode(tokens) == text
    assert len(byte_tokenizer()) == 259
