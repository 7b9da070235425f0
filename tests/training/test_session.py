"""Custom loops: the example runs and resumes, a loop without accelerate agrees with autograd, misuse is reported."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers as hf
from conftest import load_int8, token_rows, trace_lines, with_lora
from safetensors.torch import save_file
from transformers import TrainerCallback

from hf_gnmr import ConfigError, GNMRCallback, GNMRSession, SetupError, last_checkpoint
from hf_gnmr.backends.bnb.switchable import SwitchableLinear8bitLt
from hf_gnmr.training.first_steps import looks_scaled
from hf_gnmr.training.options import Options

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
BATCHES = [
    {k: torch.tensor([row[k] for row in token_rows(4, seed=seed)]) for k in ("input_ids", "labels")} for seed in range(12)
]


def run_example(model, data, out, *arguments):
    command = [sys.executable, str(EXAMPLE), "--model", model, "--data", data, "--output-dir", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.slow
def test_the_example_resumes_bit_for_bit(tiny_lm, rows_file, tmp_path):
    out = run_example(tiny_lm, rows_file, tmp_path / "straight")
    assert out.count("GNMR: 3 units") == 1 and "step 12: loss" in out
    run_example(tiny_lm, rows_file, tmp_path / "cut", "--stop-after", "6")
    run_example(tiny_lm, rows_file, tmp_path / "cut")
    straight, cut = (
        [{k: v for k, v in line.items() if not k.endswith("_ms")} for line in trace_lines(tmp_path / name)[1]]
        for name in ("straight", "cut")
    )
    assert straight == cut and [line["step"] for line in cut] == list(range(1, 13))
    assert {tuple(line["active"]) for line in cut} != {()}
    assert all(line["micro_batches"] == 2 and line["loss"] > 0 for line in cut)
    assert all(line["step_ms"] > line["controller_ms"] > 0 for line in trace_lines(tmp_path / "cut")[1])
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["steps"] == 12
    assert (tmp_path / "cut" / "adapter" / "adapter_model.safetensors").exists()


def loop(model, session, optimizer, steps, accumulation, clip=1.0):
    """Without accelerate: `.grad` simply accumulates. Returns the true norms of each step."""
    batches = iter(BATCHES)
    truth = []
    for _ in range(steps):
        total = 0.0
        for _ in range(accumulation):
            loss = model(**next(batches)).loss / accumulation
            loss.backward()
            total += loss.item()
        truth.append(
            [
                float(torch.stack([p.grad.float().norm() for p in unit.parameters if p.grad is not None]).norm())
                for unit in session.units
            ]
        )
        reading = session.observe()
        assert reading.loss == pytest.approx(total, rel=1e-5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        session.decide()
        optimizer.zero_grad()
    return np.array(truth)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_plain_torch_loop(tiny, tmp_path, accumulation):
    model = with_lora(load_int8(tiny)).train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    session = GNMRSession(
        model,
        max_o=1,
        alpha=0.9,
        total_steps=4,
        alpha_init_fraction=0.0,
        gradient_accumulation_steps=accumulation,
        output_dir=tmp_path / "run",
    )
    truth = loop(model, session, optimizer, 4, accumulation)
    summary = session.close()
    header, lines = trace_lines(tmp_path / "run")
    np.testing.assert_allclose([line["norms"] for line in lines], truth, rtol=1e-5)
    assert [line["micro_batches"] for line in lines] == [accumulation] * 4
    assert any(line["active"] for line in lines) and summary["steps"] == 4
    assert not any(isinstance(m, SwitchableLinear8bitLt) for m in model.modules())
    assert not model._forward_hooks
    assert session.close() == summary, "may be called twice"


def test_the_first_choice_is_in_force_in_the_first_forward(tiny):
    model = with_lora(load_int8(tiny)).train()
    with torch.no_grad():
        plain = model.eval()(**BATCHES[0]).logits
    model.train()
    session = GNMRSession(model, max_o=1, total_steps=10, fidelity_warmup=0.2)
    with torch.no_grad():
        assert not torch.equal(model(**BATCHES[0]).logits, plain), "a fidelity warm-up lifts all units from the start"
    session.detach()
    resumed = GNMRSession(model, max_o=1, alpha_init_fraction=0.0)
    state = resumed.state_dict()
    state["controller"]["active"] = [False, True, False]
    resumed.load_state_dict(json.loads(json.dumps(state)))
    with torch.no_grad():
        assert not torch.equal(model(**BATCHES[0]).logits, plain), "and a resumed choice is put in force on loading"
    resumed.detach()


def test_windows_of_another_length_and_skipped_updates_do_not_count_as_steps(tiny):
    model = with_lora(load_int8(tiny)).train()
    session = GNMRSession(model, max_o=1, alpha_init_fraction=0.0, gradient_accumulation_steps=2)
    model(**BATCHES[0]).loss.backward()
    session.observe()
    assert session.decide() is None and session.controller.steps_done == 0 and session.steps_done == 1
    for skipped in (True, False):
        model.zero_grad()
        model(**BATCHES[0]).loss.backward()
        model(**BATCHES[1]).loss.backward()
        session.observe()
        assert (session.decide(skipped=skipped) is None) == skipped
    assert session.controller.steps_done == 1
    session.detach()


def test_misuse_is_reported(tiny):
    model = with_lora(load_int8(tiny)).train()
    with pytest.raises(ConfigError, match="GNMRSession has no argument 'maxo'"):
        GNMRSession(model, maxo=1)
    with pytest.raises(ConfigError, match="alpha_init_fraction"):
        GNMRSession(model, max_o=1)  # a share of the steps, and no total
    assert not any(isinstance(m, SwitchableLinear8bitLt) for m in model.modules()), "a refusal leaves the model plain"
    session = GNMRSession(model, max_o=1, alpha_init_fraction=0.0)
    with pytest.raises(SetupError, match="without observe"):
        session.decide()
    model.eval()(**BATCHES[0]).loss.backward()
    with pytest.raises(SetupError, match="not in training mode"):
        session.observe()
    session.detach()


def test_without_a_scaler_a_gradient_that_is_not_finite_updates_nothing(tiny, capsys):
    model = with_lora(load_int8(tiny)).train()
    session = GNMRSession(model, max_o=1, alpha_init_fraction=0.0)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    handle = session.units[1].parameters[0].register_hook(lambda g: g * float("nan"))
    model(**BATCHES[0]).loss.backward()
    handle.remove()
    session.observe()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    decision = session.decide()
    assert decision.active.tolist() == [False, True, False]
    assert all(torch.equal(p, q) for p, q in zip((p for p in model.parameters() if p.requires_grad), before, strict=True))
    assert "step 1: gradient not finite in layer 1; the optimizer's update was withheld" in capsys.readouterr().out
    session.detach()


# -- what would go unnoticed -------------------------------------------------------------------------------------------


def new_session(model, **options):
    return GNMRSession(model, **{"max_o": 1, "alpha_init_fraction": 0.0, **options})


def test_a_wrong_accumulation_is_reported(tiny, capsys):
    model = with_lora(load_int8(tiny)).train()
    session = new_session(model)
    for step in range(3):
        for i in range(2):
            (model(**BATCHES[2 * step + i]).loss / 2).backward()
        session.observe()
        assert session.decide() is None
        model.zero_grad()
    assert "NO DECISION so far: the first windows had 2, 2, 2 micro-batches" in capsys.readouterr().out
    session.detach()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("gradient_accumulation_steps", value) for value in (0, -1, "4", 2.0, True)),
        *(("total_steps", value) for value in (0, -3, "9", 1.5, True)),
    ],
)
def test_a_wrong_number_of_steps_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value!r}: expected a whole number above 0"):
        new_session(torch.nn.Module(), **{name: value})


def test_options_are_given_in_one_way_only():
    with pytest.raises(ConfigError, match="give options= or its fields"):
        GNMRSession(torch.nn.Module(), options=Options(), backend="none")


def test_powers_of_two_look_scaled_and_sums_over_processes_do_not(monkeypatch):
    assert looks_scaled(65536.0) and looks_scaled(1024.0)
    assert not looks_scaled(300.0) and not looks_scaled(128.0)
    assert not looks_scaled(float("inf")) and not looks_scaled(float("nan")) and not looks_scaled(0.0)
    monkeypatch.setattr("hf_gnmr.training.first_steps.world_size", lambda: 512)
    assert not looks_scaled(512.0), "a mean over all tokens on 512 processes"


def test_an_order_in_which_nothing_can_be_protected_is_refused(tiny):
    model = with_lora(load_int8(tiny)).train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    session = new_session(model)
    model(**BATCHES[0]).loss.backward()
    optimizer.step()
    with pytest.raises(SetupError, match="must be read before the optimizer's step"):
        session.observe()
    session.detach()


def test_missing_calls_are_detected(tiny):
    model = with_lora(load_int8(tiny)).train()
    session = new_session(model)
    model(**BATCHES[0]).loss.backward()
    with pytest.warns(UserWarning, match=r"1 backward passes but no observe\(\)"):
        session.close()
    for call in (session.observe, session.decide):
        with pytest.raises(SetupError, match="is closed"):
            call()
    session = new_session(model)
    for _ in range(2):
        model(**BATCHES[0]).loss.backward()
        if session.steps_done == 0 and session.reading is None:
            session.observe()
    with pytest.raises(SetupError, match=r"a second time without decide"):
        session.observe()
    session.detach()


def step(model, session, i):
    model.zero_grad()
    model(**BATCHES[i]).loss.backward()
    session.observe()
    return session.decide()


def test_going_back_to_an_earlier_state_in_mid_run_keeps_the_trace_in_order(tiny, tmp_path):
    model = with_lora(load_int8(tiny)).train()
    session = new_session(model, output_dir=tmp_path / "run")
    for i in range(2):
        step(model, session, i)
    state = json.loads(json.dumps(session.state_dict()))
    for i in range(2, 4):
        step(model, session, i)
    session.load_state_dict(state)
    session.begin()
    session.begin()
    for i in range(2, 5):
        step(model, session, i)
    summary = session.close()
    assert [line["step"] for line in trace_lines(tmp_path / "run")[1]] == [1, 2, 3, 4, 5]
    assert summary["steps"] == 5 and summary["missing_steps"] == 0
    assert len((tmp_path / "run" / "trace.after-step-2.jsonl").read_text().splitlines()) == 2, "and loses no line"


def test_a_state_of_other_layers_is_refused_by_name(tiny):
    targets = {"target_modules": ["q_proj"]}
    first = new_session(with_lora(load_int8(tiny), layers_to_transform=[0, 1], **targets))
    second = new_session(with_lora(load_int8(tiny), layers_to_transform=[1, 2], **targets))
    with pytest.raises(ConfigError, match=r"layers=\[0, 1\], this run has \[1, 2\]"):
        second.load_state_dict(first.state_dict())


def test_a_batch_that_is_dropped_leaves_nothing_behind(tiny):
    model = with_lora(load_int8(tiny)).train()
    session = new_session(model)
    step(model, session, 0)
    with torch.no_grad():
        expected = model(**BATCHES[1]).loss.item()
    model(**BATCHES[2]).loss.backward()  # a batch that the loop drops
    model.zero_grad()
    session.discard()
    model(**BATCHES[1]).loss.backward()
    reading = session.observe()
    assert reading.backwards == 1 and reading.loss == pytest.approx(expected, rel=1e-5) and session.decide() is not None

    def stop(grad):
        raise RuntimeError("out of memory, say")

    with torch.no_grad():
        expected = model(**BATCHES[1]).loss.item()
    loss = model(**BATCHES[2]).loss
    handle = session.units[0].parameters[0].register_hook(stop)
    with pytest.raises(RuntimeError, match="say"):
        loss.backward()
    handle.remove()
    model.zero_grad()
    model(**BATCHES[1]).loss.backward()
    reading = session.observe()
    assert reading.backwards == 1 and reading.loss == pytest.approx(expected, rel=1e-5)
    session.detach()


def test_layers_that_a_step_skips_are_not_observed_and_cause_no_spike(tmp_path, trainer_for):
    """OPT's layerdrop: a skipped layer has no gradient at all, which is not a gradient of zero."""
    config = hf.OPTConfig(
        vocab_size=128,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        max_position_embeddings=32,
        layerdrop=0.4,
        dropout=0.0,
    )
    torch.manual_seed(0)
    hf.OPTForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "opt")
    model = with_lora(load_int8(tmp_path / "opt"))
    callback = GNMRCallback(max_o=2, alpha=1.9, alpha_init_fraction=0.0, beta=None)
    trainer_for(model, callback, max_steps=24, learning_rate=1e-9, rows=[token_rows(1)[0]] * 96).train()
    lines = trace_lines(tmp_path / "run")[1]
    skipped = [(line["step"], unit) for line in lines for unit in range(6) if line["norms"][unit] is None]
    assert 20 < len(skipped) < 100
    for line in lines:
        for unit in range(6):
            unseen = line["norms"][unit] is None
            assert (line["gnmr"][unit] is None) == (line["delta_gnmr"][unit] is None) == unseen
            assert (line["risk"][unit] == 0) == unseen
    assert callback.summary["gnmr_exceedance"] is not None and callback.summary["non_finite_steps"] == 0
    ratios = [g for line in lines for g in line["gnmr"] if g is not None]
    assert min(ratios) > 0.2, "no zero was taken for a norm"


def test_a_baseline_after_an_interrupted_training_runs_the_plain_model(tiny, trainer_for, tmp_path):
    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise KeyboardInterrupt

    def losses(model):
        trainer_for(model, GNMRCallback(backend="none"), learning_rate=0.0).train()
        return [line["loss"] for line in trace_lines(tmp_path / "run")[1]]

    model = with_lora(load_int8(tiny))
    with pytest.raises(KeyboardInterrupt):
        trainer_for(model, GNMRCallback(trigger="all"), Stop(), learning_rate=0.0).train()
    assert losses(model) == losses(with_lora(load_int8(tiny)))
    assert not any(isinstance(m, SwitchableLinear8bitLt) for m in model.modules())


def test_scales_that_doras_plain_forward_lost_are_reported(tiny, trainer_for):
    model = with_lora(load_int8(tiny), use_dora=True).eval()
    with torch.no_grad():
        model(**BATCHES[0])
    with pytest.raises(SetupError, match="the scales of the 8-bit weights are lost: PEFT's DoRA"):
        trainer_for(model, GNMRCallback()).train()


def test_the_last_complete_checkpoint_is_found_by_name_and_content(tmp_path):
    def make(name, *files):
        (tmp_path / name).mkdir()
        for file in files:
            if file.endswith(".pt"):
                torch.save({}, tmp_path / name / file)
            elif file.endswith(".safetensors"):
                save_file({"weight": torch.zeros(1)}, tmp_path / name / file)
            else:
                (tmp_path / name / file).write_text("{}")

    whole = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "adapter_model.safetensors")
    assert last_checkpoint(tmp_path) is None
    make("checkpoint-7", "adapter_model.safetensors")
    with pytest.warns(UserWarning, match="1 checkpoints, none of them complete"):
        assert last_checkpoint(tmp_path) is None
    make("checkpoint-3", *whole)
    make("checkpoint-old-6", *whole)
    make("checkpoint-5", *whole[:3])
    assert last_checkpoint(tmp_path).name == "checkpoint-3"
