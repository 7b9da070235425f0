"""Products in few bits: against explicit formulas in both directions, both ends bit for bit, what is refused."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from conftest import load_int8, logits_and_gradients, random_llama, token_rows, trace_lines, with_lora
from test_formats import by_oracle
from torch.nn import functional as F

from hf_gnmr import GNMRCallback
from hf_gnmr.backends import Fp8Backend, LowBitBackend
from hf_gnmr.backends.fewbit.products import HybridFp8, LowBit
from hf_gnmr.backends.formats import E2M1, E3M2, E4M3, E5M2, on_grid
from hf_gnmr.backends.linears import Latest
from hf_gnmr.backends.units import find_units
from hf_gnmr.config import ConfigError, SetupError
from hf_gnmr.training.options import Options

IDS = torch.tensor([row["input_ids"] for row in token_rows(6, 16)])


def q(form, x, by="row"):
    """Literal: each row (or the whole) scaled onto the format by ml_dtypes' own rounding, and back; fp32 arithmetic."""
    values = x.detach().float().numpy()
    rows = values.reshape(1, -1) if by == "tensor" else values
    scale = np.maximum(np.abs(rows).max(axis=1, keepdims=True) / np.float32(form.largest), np.finfo(np.float32).tiny)
    back = by_oracle(form, rows * (np.float32(1) / scale)) * scale
    return torch.from_numpy(back.reshape(values.shape)).to(x.dtype)


def operands(dtype, rows=37, inside=24, out=16):
    generator = torch.Generator().manual_seed(1)
    x, w, b, dy = (torch.randn(s, generator=generator) for s in ((rows, inside), (out, inside), (out,), (rows, out)))
    x[3] *= 1e4  # an outlier token
    x[5] = 0
    w[2] = 0
    return [t.to(dtype).requires_grad_(i < 3) for i, t in enumerate((x, w, b, dy))]


@pytest.mark.parametrize("form", [E2M1, E3M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lowbit_product_is_the_formula(form, dtype):
    x, w, b, dy = operands(dtype)
    y = LowBit(form)(x, w, b, Latest())
    y.backward(dy)
    xq, wq, dyq = q(form, x), q(form, w), q(form, dy)
    assert torch.equal(y, q(form, F.linear(xq, wq, b)))
    assert torch.equal(x.grad, q(form, dyq @ wq))
    assert torch.equal(w.grad, q(form, dyq.t() @ xq))
    assert torch.equal(b.grad, dyq.sum(0))
    assert x.grad.dtype == w.grad.dtype == y.dtype == dtype
    assert len(torch.unique(y[0].float() / y[0].float().abs().max())) <= 2**form.bits - 1, "on a grid of so few numbers"
    assert torch.all(wq[2] == 0) and torch.isfinite(y).all(), "a row of zeros gives zeros"


@pytest.mark.parametrize("engine", ["emulated", "scaled_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [32, 37])
def test_hybrid_fp8_product_is_the_formula(engine, dtype, rows):
    x, w, b, dy = operands(dtype, rows, inside=32)
    y = HybridFp8(engine)(x, w, b, Latest())
    y.backward(dy)
    xq, wq, dyq = (q(form, t.detach().float(), "tensor") for form, t in ((E4M3, x), (E4M3, w), (E5M2, dy)))
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    size = [float(t.abs().max()) for t in (xq @ wq.t(), dyq @ wq, dyq.t() @ xq)]
    torch.testing.assert_close(y.float() / size[0], (xq @ wq.t() + b.float()) / size[0], **close)
    torch.testing.assert_close(x.grad.float() / size[1], (dyq @ wq) / size[1], **close)
    torch.testing.assert_close(w.grad.float() / size[2], (dyq.t() @ xq) / size[2], **close)
    assert torch.equal(b.grad, dy.sum(0)) and y.dtype == x.grad.dtype == w.grad.dtype == dtype


@pytest.mark.parametrize(("form", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)], ids=["e4m3", "e5m2"])
def test_the_cast_to_fp8_rounds_as_the_grid_does(form, dtype):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 300, generator=generator) * torch.logspace(-8, 8, 300)
    grid, scale = on_grid(x, form)
    assert torch.equal((x * scale.reciprocal()).to(dtype).float(), grid)


def test_fp8_under_fp16_does_not_overflow_where_the_product_does_not():
    x = torch.full((4, 64), 100.0, dtype=torch.float16, requires_grad=True)
    w = torch.full((8, 64), 1.0, dtype=torch.float16, requires_grad=True)
    y = HybridFp8()(x, w, None, Latest())
    assert torch.allclose(y.float(), torch.tensor(6400.0)) and y.dtype == torch.float16


@pytest.mark.parametrize("product", [LowBit(E2M1), HybridFp8()], ids=["lowbit", "fp8"])
def test_fp16_autocast_in_forward_and_backward(product):
    torch.manual_seed(0)
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        y = product(x, w, None, Latest())
        y.sum().backward()  # under autocast, as some loops do it
    exact = product(x.detach().half().float(), w.detach().half().float(), None, Latest())
    torch.testing.assert_close(y.float(), exact, rtol=0.01, atol=0.05)
    assert y.dtype == torch.float16 and torch.isfinite(w.grad).all() and torch.isfinite(x.grad).all()


def test_inference_mode(trainer_for):
    model = random_llama()
    backend = LowBitBackend(model, find_units(model))
    with torch.no_grad():
        expected = model.eval()(input_ids=IDS).logits
    with torch.inference_mode():
        assert torch.equal(model(input_ids=IDS).logits, expected)
    x = torch.randn(4, 64)
    q_proj = model.model.layers[0].self_attn.q_proj.train()
    with torch.inference_mode():
        q_proj(x)
    q_proj(x).sum().backward()  # nothing of inference mode is left over for a backward
    backend.remove()


@pytest.mark.parametrize("product", [LowBit(E2M1), HybridFp8()], ids=["lowbit", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(product, bad):
    x, w, _, dy = operands(torch.float32)
    x.data[7, 2] = bad
    y = product(x, w, None, Latest())
    assert not torch.isfinite(y[7]).any()
    y.backward(dy)
    assert not torch.isfinite(w.grad).all()
    dy[4, 1] = bad
    x.data[7, 2] = 0.0
    x.grad = w.grad = None
    product(x, w, None, Latest()).backward(dy)
    assert not torch.isfinite(x.grad[4]).any() and not torch.isfinite(w.grad).all()


@pytest.mark.parametrize("product", [LowBit(E3M2), HybridFp8()], ids=["lowbit", "fp8"])
def test_empty_batches_one_row_and_shared_inputs(product):
    w = torch.randn(5, 33, requires_grad=True)
    for x in (torch.zeros(0, 7, 33), torch.randn(33), torch.randn(3, 1, 33) * 1e20, torch.zeros(2, 33)):
        x.requires_grad_()
        w.grad = None
        y = product(x, w, None, Latest())
        y.sum().backward()
        assert y.shape == (*x.shape[:-1], 5) and x.grad.shape == x.shape and torch.isfinite(w.grad).all()
    latest, x = Latest(), torch.randn(4, 33)
    first, second = product(x, w, None, latest), product(x, w * 2, None, latest)
    x.mul_(-1.0)  # another input in the same memory
    torch.testing.assert_close(product(x, w, None, latest), -first)
    assert second.shape == first.shape


def step(model, autocast=False):
    return logits_and_gradients(model, IDS, autocast)


def same(a, b):
    return torch.equal(a[0], b[0]) and a[1].keys() == b[1].keys() and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_both_ends_bit_for_bit_and_every_mix_between(dtype, autocast):
    plain = step(random_llama(dtype), autocast)
    model = random_llama(dtype)
    fp8 = Fp8Backend(model, find_units(model), emulate=True)
    emulated = step(model, autocast)
    fp8.apply(fp8.recoverable)
    assert same(step(model, autocast), plain)
    fp8.remove()
    lowbit = LowBitBackend(model, find_units(model), bits_low=4)
    low = step(model, autocast)
    lowbit.apply(lowbit.recoverable)
    assert same(step(model, autocast), emulated), "recovery is the other backend's low path"
    lowbit.apply(np.array([True, False, True]))
    mixed = step(model, autocast)
    assert not same(mixed, low) and not same(mixed, emulated)
    lowbit.apply_exact()
    assert same(step(model, autocast), plain)
    lowbit.apply(np.zeros(3, dtype=bool))
    assert same(step(model, autocast), low)
    assert not torch.equal(low[0], plain[0]) and not torch.equal(emulated[0], plain[0])
    lowbit.remove()
    assert same(step(model, autocast), plain)
    assert all(type(m) is torch.nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))
    assert not any("paths" in vars(m) for m in model.modules())


def test_what_is_switched_and_what_is_left():
    model = with_lora(random_llama(attention_bias=True))
    backend = LowBitBackend(model, find_units(model))
    switched = [n for n, m in model.named_modules() if type(m).__name__ == "SwitchedLinear"]
    assert len(switched) == 21 and all(n.endswith("_proj.base_layer") for n in switched), "adapters and head are left"
    logits, grads = step(model)
    assert torch.isfinite(logits).all() and all(".lora_" in n for n in grads)
    census = backend.census()
    assert census["path"].startswith("SIMULATED") and "21 linears" in census["path"]
    assert census["format_low"] == "4-bit (E2M1) w, x, y, dy, dw, dx"
    assert backend.recovery_bytes_bound(3) == 0 and (backend.bytes_low == backend.bytes_recovery).all()


def test_gradient_checkpointing_changes_nothing():
    results = []
    for checkpointing in (False, True):
        model = random_llama()
        LowBitBackend(model, find_units(model))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        results.append(step(model))
    assert same(*results)


@pytest.mark.parametrize(("eval_path", "expected"), [("low", "low"), ("recovery", "plain"), ("active", "plain")])
def test_evaluation_runs_the_path_it_is_said_to(eval_path, expected):
    model = random_llama()
    with torch.no_grad():
        logits = {"plain": model.eval()(input_ids=IDS).logits}
        backend = Fp8Backend(model, find_units(model), emulate=True, eval_path=eval_path)
        if eval_path != "recovery":
            logits["low"] = model(input_ids=IDS).logits
        backend.apply(backend.recoverable)
        assert torch.equal(model(input_ids=IDS).logits, logits[expected])


def test_copies_and_pickles_are_plain():
    model = random_llama()
    backend = LowBitBackend(model, find_units(model))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.model.layers[0]))):
        linears = [m for m in twin.modules() if isinstance(m, torch.nn.Linear)]
        assert linears and all(type(m) is torch.nn.Linear and "paths" not in vars(m) for m in linears)
    keys = set(model.state_dict())
    backend.remove()
    backend.remove()
    assert set(model.state_dict()) == keys


def test_a_second_backend_takes_over_and_the_first_does_not_undo_it():
    model = random_llama()
    first = Fp8Backend(model, find_units(model), emulate=True)
    second = LowBitBackend(model, find_units(model))
    low = step(model)
    first.remove()
    assert same(step(model), low)
    second.remove()
    assert all(type(m) is not type(first) and type(m).__name__ != "SwitchedLinear" for m in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "lowbit", "bits_low": 5}, "bits_low=5: expected 4 or 6"),
        ({"backend": "lowbit", "bits_low": True}, "bits_low=True"),
        ({"backend": "lowbit", "bits_recovery": 6}, "bits_recovery=6: expected 8 or 16"),
        ({"backend": "lowbit", "format": "int"}, "format='int' belongs to backend='activation'"),
        ({"backend": "lowbit", "emulate": True}, "emulate=True belongs to backend='fp8'"),
        ({"backend": "fp8", "bits_low": 6}, "bits_low=6 belongs to backend='activation' or 'lowbit'"),
        ({"backend": "fp8", "emulate": "yes"}, "emulate='yes'"),
        ({"backend": "fp8", "emulate": 1}, "emulate=1"),
        ({"backend": "fp8", "unit": "projection"}, "unit='projection'"),
        ({"unit": "expert"}, "unit='expert' belongs to"),
        ({"backend": "fp8", "eval_path": "high"}, "eval_path='high'"),
        ({"backend": "fp8", "unit": "expert", "trigger": "gsnr"}, "trigger='gsnr' with unit='expert'"),
        ({"backend": "fp8", "max_recovery_memory": "1GB"}, "max_recovery_memory='1GB' with backend='fp8'"),
        ({"backend": "fp8", "recovery": "device"}, "recovery='device' belongs to backend='int8'"),
    ],
)
def test_options_that_are_not_allowed(options, message):
    with pytest.raises(ConfigError) as error:
        Options(**options)
    assert message in str(error.value)


def test_models_that_are_refused(tiny):
    model = random_llama()
    with pytest.raises(SetupError, match="no FP8 product on cpu.*emulate=true"):
        Fp8Backend(model, find_units(model))
    assert Fp8Backend(model, find_units(model), emulate="auto").census()["path"].startswith("EMULATED")
    eight = with_lora(load_int8(tiny))
    for backend in (Fp8Backend, LowBitBackend):
        with pytest.raises(SetupError, match="over an 8-bit base"):
            backend(eight, find_units(eight), **({"emulate": True} if backend is Fp8Backend else {}))
    hooked = random_llama()
    hooked.model.layers[1].mlp.up_proj.forward = lambda x: x
    with pytest.raises(SetupError, match="has a forward of its own"):
        LowBitBackend(hooked, find_units(hooked))
    shared = random_llama()
    shared.model.layers[1].mlp = shared.model.layers[0].mlp
    with pytest.raises(SetupError, match="are one module"):
        LowBitBackend(shared, find_units(shared))
    assert type(shared.model.layers[0].mlp.up_proj) is torch.nn.Linear, "nothing is half taken"


def test_shapes_that_the_processor_cannot_take(monkeypatch):
    from hf_gnmr.backends.fewbit import fp8

    monkeypatch.setattr(fp8, "why_not", lambda device: None)
    model = random_llama(intermediate_size=100)
    with pytest.raises(SetupError, match=r"layers\.0\.mlp\.gate_proj is \(100, 64\).*multiples of 16"):
        Fp8Backend(model, find_units(model))
    model = random_llama()
    backend = Fp8Backend(model, find_units(model))
    assert backend.engine == "scaled_mm" and "EMULATED" not in backend.census()["path"]
    ours = step(model)
    backend.remove()
    emulated = Fp8Backend(model, find_units(model), emulate=True)
    other = step(model)
    emulated.remove()
    torch.testing.assert_close(ours[0], other[0], rtol=1e-3, atol=1e-4)
    for name in ours[1]:
        torch.testing.assert_close(ours[1][name], other[1][name], rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("backend", ["fp8", "lowbit"])
def test_a_trainer_resumes_bit_for_bit(backend, trainer_for, tmp_path):
    options = {"emulate": True} if backend == "fp8" else {"bits_low": 6}
    settings = {"max_o": 1, "alpha": 0.9, "alpha_init_fraction": 0.0, "backend": backend, **options}
    model = random_llama()
    trainer_for(model, GNMRCallback(**settings), save_strategy="steps", save_steps=3, max_steps=6).train()
    header, straight = trace_lines(tmp_path / "run")
    assert any(line["active"] for line in straight) and header["backend"] == backend
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    resumed = random_llama()
    trainer_for(resumed, GNMRCallback(**settings), save_strategy="steps", save_steps=3, max_steps=6).train(
        resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3")
    )
    _, lines = trace_lines(tmp_path / "run")
    assert [{k: v for k, v in line.items() if not k.endswith("_ms")} for line in lines] == [
        {k: v for k, v in line.items() if not k.endswith("_ms")} for line in straight
    ]
    assert all(torch.equal(p, weights[n]) for n, p in resumed.named_parameters())
    other = {"emulate": True, "backend": "fp8"} if backend == "lowbit" else {"bits_low": 4, "backend": "lowbit"}
    changed = {k: v for k, v in settings.items() if k not in options} | other
    with pytest.raises(ConfigError, match="formats"):
        trainer_for(random_llama(), GNMRCallback(**changed), max_steps=6).train(
            resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3")
        )
