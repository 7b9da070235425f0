"""BF16 products by float32 kernels are BF16 products; the choice is measured, reported, and can be forced."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from conftest import bf16_in_hardware
from torch.nn import functional as F

from hf_gnmr.backends import bf16_cpu
from hf_gnmr.backends.bf16_cpu import EMULATED, choose, float32_kernels

BF16 = torch.bfloat16


def normal(*shape, dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded_once(*factors):
    """A product of BF16 matrices as it should be: exact, then rounded to BF16."""
    a, b = (f.double() for f in factors)
    return (a @ b).to(BF16)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("mm", [(5, 7), (7, 3)]),
        ("bmm", [(2, 5, 7), (2, 7, 3)]),
        ("matmul", [(2, 4, 5, 7), (7, 3)]),
        ("mm", [(0, 7), (7, 3)]),
    ],
)
def test_a_product_is_rounded_once(name, shapes):
    a, b = (normal(*shape, seed=i) for i, shape in enumerate(shapes))
    with float32_kernels():
        result = getattr(torch, name)(a, b)
    assert result.dtype is BF16 and torch.equal(result, rounded_once(a, b))


def test_a_linear_and_its_gradients():
    x, w, bias = (
        normal(6, 9, 32).requires_grad_(),
        normal(16, 32, seed=1).requires_grad_(),
        normal(16, seed=2).requires_grad_(),
    )
    with float32_kernels():
        y = F.linear(x, w, bias)
        dy = normal(6, 9, 16, seed=3)
        gradients = torch.autograd.grad(y, (x, w, bias), dy)
    flat_x, flat_dy = x.flatten(0, 1), dy.flatten(0, 1)
    assert torch.equal(y, (flat_x.double() @ w.double().t() + bias.double()).to(BF16).view_as(y))
    assert torch.equal(gradients[0], rounded_once(flat_dy, w).view_as(x))
    assert torch.equal(gradients[1], rounded_once(flat_dy.t(), flat_x))
    assert all(g.dtype is BF16 for g in gradients)


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 2.0), (0, 1)])
@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_a_sum_and_a_product(name, beta, alpha):
    batch = () if name == "addmm" else (3,)
    c, a, b = normal(*batch, 4, 5), normal(*batch, 4, 6, seed=1), normal(*batch, 6, 5, seed=2)
    with float32_kernels():
        result = getattr(torch, name)(c, a, b, beta=beta, alpha=alpha)
    assert torch.equal(result, (beta * c.double() + alpha * (a.double() @ b.double())).to(BF16))


def test_other_dtypes_are_untouched():
    a, b = normal(17, 33, dtype=torch.float32), normal(33, 9, dtype=torch.float32, seed=1)
    whole = torch.arange(12).view(3, 4)
    before = a @ b, a.double() @ b.double(), whole @ whole.t(), F.linear(a, b.t(), a[0, :9])
    with float32_kernels():
        after = a @ b, a.double() @ b.double(), whole @ whole.t(), F.linear(a, b.t(), a[0, :9])
    assert all(torch.equal(x, y) and x.dtype is y.dtype for x, y in zip(before, after, strict=True))


def test_autocast_multiplies_in_bf16():
    x, w = normal(8, 32, dtype=torch.float32), normal(16, 32, dtype=torch.float32, seed=1)
    with float32_kernels(), torch.autocast("cpu", BF16):
        assert torch.equal(F.linear(x, w), rounded_once(x.to(BF16), w.to(BF16).t()))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradients(masked):
    mask = torch.ones(12, 12).tril().log() if masked else None

    def attention(dtype):
        qkv = [normal(2, 3, 12, 8, seed=i).to(dtype).requires_grad_() for i in range(3)]
        out = F.scaled_dot_product_attention(*qkv, attn_mask=None if mask is None else mask.to(dtype), is_causal=not masked)
        return out, torch.autograd.grad(out, qkv, normal(2, 3, 12, 8, seed=9).to(dtype))

    with float32_kernels():
        out, gradients = attention(BF16)
    exact, exact_gradients = attention(torch.float32)
    torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=2e-2)
    for gradient, right in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype is BF16
        torch.testing.assert_close(gradient.float(), right, rtol=4e-2, atol=4e-2)


def test_the_cpus_own_kernels_return():
    with float32_kernels(False):
        outside = bf16_cpu.active()  # the tests' own session may have them on
    with float32_kernels():
        assert bf16_cpu.active()
        with float32_kernels():
            pass
        assert bf16_cpu.active()
        with pytest.raises(ZeroDivisionError), float32_kernels():
            raise ZeroDivisionError
        assert bf16_cpu.active()
    assert bf16_cpu.active() == outside


# -- the choice -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "emulated", "words"),
    [
        (0.4, False, "this CPU's own kernels (AVX9), 0.4 times the time of float32"),
        (EMULATED - 0.01, False, "own kernels"),
        (EMULATED, True, "since this CPU (AVX9) emulates BF16: the CPU's own take 3 times"),
        (47.6, True, "the CPU's own take 48 times the time of float32 (run.bf16_products=native forces them)"),
        (math.inf, True, "torch has none here"),
    ],
)
def test_the_choice_is_measured_and_says_so(monkeypatch, ratio, emulated, words):
    monkeypatch.setattr(bf16_cpu, "has_instructions", lambda: False)
    monkeypatch.setattr(bf16_cpu, "_depth", 0)
    monkeypatch.setattr(bf16_cpu, "slowdown", lambda: ratio)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9")
    result, line = choose("auto", "cpu")
    assert result is emulated and words in line and "\n" not in line


@pytest.mark.parametrize(("kernels", "emulated"), [("native", False), ("float32", True)])
def test_the_choice_can_be_forced(monkeypatch, kernels, emulated):
    monkeypatch.setattr(bf16_cpu, "slowdown", lambda: pytest.fail("nothing to measure"))
    result, line = choose(kernels, "cpu")
    assert result is emulated and f"run.bf16_products={kernels}" in line


@pytest.mark.parametrize("kernels", ["auto", "native", "float32"])
def test_accelerators_use_their_own(monkeypatch, kernels):
    monkeypatch.setattr(bf16_cpu, "slowdown", lambda: pytest.fail("nothing to measure"))
    assert choose(kernels, torch.device("cuda:0")) == (False, "BF16 products: cuda's own")


def test_a_cpu_with_bf16_instructions_is_not_timed_unless_its_kernels_are_limited(monkeypatch):
    for variable in bf16_cpu.LIMITS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(bf16_cpu, "slowdown", lambda: 30.0)
    monkeypatch.setattr(bf16_cpu, "_depth", 0)
    assert not choose("auto", "cpu")[0]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert choose("auto", "cpu")[0], "what counts is what the CPU does now"


def test_one_slow_measurement_does_not_make_a_cpu_slow(monkeypatch):
    measured = iter([40.0, 0.5])
    monkeypatch.setattr(bf16_cpu, "_measure", lambda: next(measured))
    threads = torch.get_num_threads()
    assert bf16_cpu.slowdown.__wrapped__() == 0.5 and torch.get_num_threads() == threads


def test_a_cpu_without_any_bf16_product_is_slow(monkeypatch):
    def none():
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(bf16_cpu, "_measure", none)
    threads = torch.get_num_threads()
    assert bf16_cpu.slowdown.__wrapped__() == math.inf and torch.get_num_threads() == threads


def test_the_measurement_agrees_with_the_instruction_set():
    if not bf16_in_hardware():
        pytest.skip("only where torch knows the instructions")
    assert bf16_cpu.slowdown() < EMULATED


class Library:
    """In the place of the kernels: counts how often it was registered and removed."""

    def __init__(self, log):
        self.log = log
        time.sleep(0.01)  # as long as registering takes: another thread may come in between
        log.append("registered")

    def _destroy(self):
        self.log.append("removed")


@pytest.fixture
def log(monkeypatch):
    entries: list[str] = []
    monkeypatch.setattr(bf16_cpu, "_depth", 0)
    monkeypatch.setattr(bf16_cpu, "_library", None)
    monkeypatch.setattr(bf16_cpu, "_override", lambda: Library(entries))
    return entries


def test_the_kernels_stay_until_the_last_one_closes_them(log):
    """Threads do not close in the order in which they opened."""
    first, second = float32_kernels(), float32_kernels()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert bf16_cpu.active() and log == ["registered"]
    second.__exit__(None, None, None)
    assert not bf16_cpu.active() and log == ["registered", "removed"]


def test_many_threads_register_and_remove_the_kernels_in_turns(log):
    start = threading.Barrier(8)

    def work():
        start.wait()
        for _ in range(5):
            with float32_kernels():
                time.sleep(0.001)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bf16_cpu.active() and bf16_cpu._library is None
    assert log == ["registered", "removed"] * (len(log) // 2) and log


@pytest.mark.parametrize("kernels", ["native", "float32"])
def test_a_choice_that_another_process_made_is_not_called_the_recipes(monkeypatch, kernels):
    monkeypatch.setenv(bf16_cpu.REASON, "as eval/three_ways.py chose for all ways")
    emulated, line = choose(kernels, "cpu")
    assert emulated is (kernels == "float32")
    assert line.endswith(", as eval/three_ways.py chose for all ways") and "run.bf16_products" not in line
