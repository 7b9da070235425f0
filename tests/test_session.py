"""A loop of one's own: the example runs and resumes, a loop without accelerate agrees with autograd, misuse is told."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import load_int8, token_rows, trace_lines, with_lora

from hf_gnmr import ConfigError, GNMRSession, SetupError
from hf_gnmr.backends.switchable import SwitchableLinear8bitLt

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "accelerate_loop.py"
BATCHES = [
    {k: torch.tensor([row[k] for row in token_rows(4, seed=seed)]) for k in ("input_ids", "labels")} for seed in range(12)
]


def run_example(model, data, out, *more):
    command = [sys.executable, str(EXAMPLE), "--model", model, "--data", data, "--output-dir", str(out), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


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
        truth.append([
            float(torch.stack([p.grad.float().norm() for p in unit.parameters if p.grad is not None]).norm())
            for unit in session.units
        ])
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
        model, max_o=1, alpha=0.9, total_steps=4, alpha_init_fraction=0.0, gradient_accumulation_steps=accumulation,
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


def test_windows_of_another_length_and_skipped_updates_are_no_step(tiny):
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


def test_misuse_is_told(tiny):
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
