"""Figures and standard errors from scores by item."""

from __future__ import annotations

import numpy as np
import pytest

from hf_gnmr.evaluation.scores import figure, is_perplexity, standard_error


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("acc", False), ("exact_match,strict-match", False), ("word_perplexity", True), ("bits_per_byte", True)],
)
def test_which_metrics_are_perplexities(metric, expected):
    assert is_perplexity(metric) is expected


@pytest.mark.parametrize(
    ("metric", "expected"), [("acc", -6.0), ("token_perplexity", np.exp(0.3)), ("bits_per_byte", 0.3 / np.log(2))]
)
def test_a_figure_is_a_mean_or_a_perplexity_by_unit_of_weight(metric, expected):
    values, weights = np.array([-3.0, -9.0]), np.array([10.0, 30.0])
    assert figure(metric, values, weights) == pytest.approx(expected)
    assert figure(metric, np.stack([values] * 3), np.stack([weights] * 3)).shape == (3,)


def test_scores_pool_their_variance_over_subtasks():
    items = {"a/0": 0.0, "a/1": 1.0, "b/0": 1.0, "b/1": 1.0}
    assert standard_error("acc", items, {}) == pytest.approx((0.5 / 2 / 4) ** 0.5)


@pytest.mark.parametrize("metric", ["word_perplexity", "token_perplexity", "bits_per_byte"])
def test_the_error_of_a_perplexity_is_that_of_the_delta_method(metric):
    generator = np.random.default_rng(1)
    rates = 2.0 + 0.1 * generator.standard_normal(200)
    items = {f"block/{i}": -100.0 * rate for i, rate in enumerate(rates)}
    weights = {f"{metric}|{item}": 100.0 for item in items}
    slope = 1 / np.log(2) if metric == "bits_per_byte" else np.exp(rates.mean())
    expected = rates.std(ddof=1) / len(rates) ** 0.5 * slope
    assert standard_error(metric, items, weights) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("metric", "items"),
    [
        ("acc", {"a/0": 1.0}),
        ("acc", {"a/0": 1.0, "b/0": 0.0}),
        ("token_perplexity", {"block/0": -3.0}),
        ("token_perplexity", {"block/0": -3.0, "block/1": float("nan")}),
    ],
)
def test_too_few_items_or_nan_have_no_error(metric, items):
    assert standard_error(metric, items, {f"{metric}|{item}": 1.0 for item in items}) is None
