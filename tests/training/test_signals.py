"""Signals of triggers: measured in the backward, against explicit formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from conftest import random_llama, token_rows

from hf_gnmr.backends.units import find_projections, find_units
from hf_gnmr.training.signals import Gsnr, Jacobian

IDS = torch.tensor([row["input_ids"] for row in token_rows(8, 16)])
ONE = torch.ones(1)


def backward(model, ids, scale=1.0):
    (model(input_ids=ids, labels=ids).loss * scale).backward()


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gsnr_is_the_formula(scale):
    model = random_llama()
    units = find_projections(model)
    signal = Gsnr(units)
    m = [np.zeros(u.parameters[0].shape) for u in units]
    v = [np.zeros(u.parameters[0].shape) for u in units]
    for t in range(1, 7):
        model.zero_grad()
        backward(model, IDS[t % 4 : t % 4 + 2], scale)
        gsnr = signal.combine(signal.values(torch.tensor([scale])).double().numpy())
        for i, unit in enumerate(units):
            g = unit.parameters[0].grad.double().numpy() / scale
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.9 * v[i] + 0.1 * g * g
            mean, square = m[i] / (1 - 0.9**t), v[i] / (1 - 0.9**t)
            expected = (mean**2 / (np.maximum(square - mean**2, 0) + 1e-12)).mean()
            if t > 1:  # in the first step v - m² is 0, up to rounding even in float64
                assert gsnr[i] == pytest.approx(expected, rel=1e-3), (t, unit.name)
            else:
                assert gsnr[i] == pytest.approx((g**2).mean() / 1e-12, rel=1e-3)
    assert signal.state_bytes == 8 * sum(u.parameters[0].numel() for u in units)


def test_gsnr_in_chunks_is_the_same(monkeypatch):
    results = []
    for chunk in (2**24, 5000):
        monkeypatch.setattr("hf_gnmr.training.signals.CHUNK", chunk)
        model = random_llama()
        signal = Gsnr(find_projections(model))
        for t in range(3):
            model.zero_grad()
            backward(model, IDS[t : t + 2])
            values = signal.combine(signal.values(ONE).double().numpy())
        results.append(values)
    np.testing.assert_array_equal(*results)


def test_gsnr_ignores_gradients_that_are_not_finite_and_is_nan_without_one():
    model = random_llama()
    units = find_projections(model)
    signal = Gsnr(units)
    for t in range(2):
        model.zero_grad()
        backward(model, IDS[t : t + 2])
        signal.combine(signal.values(ONE).double().numpy())
    before = {name: t.clone() for name, t in signal.tensors().items()}
    units[0].parameters[0].grad.fill_(float("nan"))
    units[1].parameters[0].grad[0, 0] = float("inf")
    units[2].parameters[0].grad = None
    gsnr = signal.combine(signal.values(ONE).double().numpy())
    after = signal.tensors()
    for i in range(3):
        assert all(torch.equal(before[f"{name}.{i}"], after[f"{name}.{i}"]) for name in ("mean", "spread"))
    assert not torch.equal(before["spread.3"], after["spread.3"])
    assert np.isnan(gsnr[:3]).all() and np.isfinite(gsnr[3:]).all()
    assert after["weight"][:4].tolist() == pytest.approx([1.9, 1.9, 1.9, 2.71])
    before = {name: t.clone() for name, t in after.items()}
    signal.combine(signal.values(ONE, skips=True).double().numpy())
    assert all(torch.equal(before[n], t) for n, t in signal.tensors().items()), "a loss scaler skips the whole update"


def test_gsnr_masks_on_the_device_what_the_host_learns_later():
    """The path of an accelerator, where whether a gradient is finite is known only after the step's single transfer."""
    on_host, on_device = (Gsnr(find_projections(random_llama())) for _ in range(2))
    for t in range(4):
        generator = torch.Generator().manual_seed(t)
        for signal in (on_host, on_device):
            generator.manual_seed(t)
            for i, p in enumerate(signal._parameters):
                p.grad = torch.randn(p.shape, generator=generator)
                if t == 2 and i == 1:
                    p.grad[0, 0] = float("nan")
        expected = on_host.combine(on_host.values(ONE).double().numpy())
        # As if its parameters were on an accelerator: entered first, under a mask, and corrected in `combine`.
        finite = [bool(torch.isfinite(p.grad).all()) for p in on_device._parameters]
        on_device._entered = list(range(len(finite)))
        on_device._weight = 0.9 * on_device._weight + 1
        sums = torch.full((2, len(finite)), torch.nan)
        sums[1] = torch.tensor(finite).float()
        on_device._enter(on_device._entered, ONE, {i: torch.tensor(f) for i, f in enumerate(finite)}, sums)
        gsnr = on_device.combine(sums.flatten().double().numpy())
        np.testing.assert_allclose(expected, gsnr, rtol=1e-5)
    for name, tensor in on_host.tensors().items():
        torch.testing.assert_close(tensor, on_device.tensors()[name], rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("by_layer", [False, True])
def test_the_jacobian_proxy_is_the_ratio_of_gradient_norms_over_all_micro_batches(by_layer):
    model = random_llama()
    units = (find_units if by_layer else find_projections)(model)
    signal = Jacobian(units)
    seen = {i: [0.0, 0.0] for i in range(len(units))}

    def watch(i):
        def hook(module, args, output):
            x = args[0].detach().requires_grad_()
            out = output[0] if isinstance(output, tuple) else output

            def grad(dy):
                seen[i][1] += float(dy.double().norm() ** 2)
                if not by_layer:
                    seen[i][0] += float((dy @ module.weight).double().norm() ** 2)

            out.register_hook(grad)
            if by_layer and args[0].requires_grad:
                args[0].register_hook(lambda dx: seen[i].__setitem__(0, seen[i][0] + float(dx.double().norm() ** 2)))
            return None if x is None else output

        return hook

    for i, unit in enumerate(units):
        unit.module.register_forward_hook(watch(i))
    for part in (IDS[:4], IDS[4:]):
        backward(model, part)
    gain = signal.combine(signal.values(ONE).double().numpy())
    for i in range(len(units)):
        assert gain[i] == pytest.approx(math.sqrt(seen[i][0] / seen[i][1]), rel=1e-4)
    backward(model, IDS)
    signal.discard()
    assert np.isnan(signal.combine(signal.values(ONE).double().numpy())).all(), "forgotten"
    signal.remove()
    assert not any(m._backward_hooks for m in model.modules())
