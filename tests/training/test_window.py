"""Gradients that are changed between the passes of a step: which earlier state they were returned to, if any."""

from __future__ import annotations

import pytest
import torch

from hf_gnmr.training.accumulated import MOST, SAMPLED, GradientMarks, in_proportion
from hf_gnmr.training.window import Window


def parameters(count=4):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3)) for _ in range(count)]


def run_pass(window, params, factor=None):
    """One backward of a random loss, or of the same one times a factor."""
    window.put_back()
    if window.now.count and window.marks.thrown_away():
        window.throw_away(None)
    window.before_pass(None)
    for i, p in enumerate(params):
        (p * (torch.randn(3) if factor is None else factor * (i + 1))).sum().backward()
    window.after_pass()
    window.now.losses.append(torch.ones(()))


def copies(params):
    return [p.grad.clone() for p in params]


def put(params, gradients, in_place=False):
    for p, gradient in zip(params, gradients, strict=True):
        if in_place:
            p.grad.copy_(gradient)
        else:
            p.grad = gradient


def clip(params):
    torch._foreach_mul_([p.grad for p in params], 0.01)


def zero(params):
    for p in params:
        p.grad = None


@pytest.mark.parametrize("factor", [None, 1.0], ids=["other rows", "the same row"])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_clipping_after_any_number_of_passes_is_no_return(passes, clipped, factor):
    params = parameters()
    window = Window(params, 2)
    for _ in range(passes):
        run_pass(window, params, factor)
    if clipped:
        clip(params)
    assert window.put_back(at_end=True) is None and window.now.count == passes


@pytest.mark.parametrize("factor", [None, 1.0], ids=["other rows", "the same row"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("probes", [1, 3])
def test_a_probe_at_the_end_that_puts_the_gradients_back(probes, clipped, zeroed, in_place, factor):
    if clipped and in_place and factor is not None:
        pytest.skip("the probe's gradients, scaled, cannot be distinguished from the step's, clipped")
    params = parameters()
    window = Window(params, 2)
    for _ in range(2):
        run_pass(window, params, factor)
    if clipped:
        clip(params)
    kept = copies(params)
    if zeroed:
        zero(params)
    for _ in range(probes):
        run_pass(window, params, factor)
    put(params, kept, in_place)
    assert window.put_back(at_end=True) is not None
    assert window.now.count == 2 and len(window.now.losses) == 2


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("same_tensors", [False, True])
def test_a_probe_between_two_passes(same_tensors, in_place):
    params = parameters()
    window = Window(params, 3)
    run_pass(window, params)
    run_pass(window, params)
    kept = [p.grad for p in params] if same_tensors else copies(params)
    if same_tensors:
        zero(params)
    run_pass(window, params)
    put(params, kept, in_place and not same_tensors)
    run_pass(window, params)
    assert window.now.count == 3 and len(window.now.losses) == 3


def test_gradients_that_were_replaced_by_other_values_are_no_return():
    """A filter on the gradients, such as a running mean, replaces them in every step."""
    params = parameters()
    window = Window(params, 2)
    run_pass(window, params)
    run_pass(window, params)
    put(params, [g + torch.randn(3) for g in copies(params)])
    assert window.put_back(at_end=True) is None and window.now.count == 2


def test_gradients_that_were_replaced_by_scaled_ones_are_no_return():
    params = parameters()
    window = Window(params, 2)
    run_pass(window, params, 1.0)
    run_pass(window, params, 1.0)
    put(params, [0.3 * g for g in copies(params)])
    assert window.put_back(at_end=True) is None and window.now.count == 2


def test_the_earliest_of_several_equal_states_is_found():
    """Passes that were thrown away one after the other, each after one backward; then the first ones are put back."""
    params = parameters()
    window = Window(params, 2)
    run_pass(window, params)
    kept = copies(params)
    for _ in range(3):
        zero(params)
        run_pass(window, params)
    put(params, kept)
    assert window.put_back() is not None and window.now.count == 1 and len(window.now.losses) == 1


def test_clear_forgets_the_step():
    params = parameters()
    window = Window(params, 1)
    run_pass(window, params)
    kept = copies(params)
    run_pass(window, params)
    window.clear()
    put(params, kept)
    assert window.put_back() is None and window.now.count == 0 and window.now.losses == []


def test_the_sample_is_small_and_of_one_dtype():
    params = parameters(MOST + 50)
    params[1].data = params[1].data.half()
    marks = GradientMarks(params)
    assert marks.norms().shape == (SAMPLED,) and not marks.norms().any()
    for p in params:
        p.grad = torch.ones_like(p)
    torch.testing.assert_close(marks.norms(), torch.full((SAMPLED,), 3**0.5))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([1.0, 2.0], [10.0, 20.0], True),
        ([1.0, 2.0], [10.0, 20.001], True),
        ([1.0, 2.0], [10.0, 21.0], False),
        ([0.0, 2.0], [0.0, 1.0], True),
        ([0.0, 2.0], [1.0, 1.0], False),
        ([0.0, 0.0], [0.0, 0.0], False),
        ([float("nan"), 1.0], [float("nan"), 2.0], True),
        ([float("inf"), 1.0], [float("inf"), 1.0], False),
    ],
)
def test_in_proportion(one, other, expected):
    assert in_proportion(torch.tensor(one), torch.tensor(other)) is expected
