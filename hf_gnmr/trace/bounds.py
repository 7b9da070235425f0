"""Intervals of rates, and the terms of the paper's Theorem 2; for `theorems`."""

from __future__ import annotations

import math

import numpy as np

from ..control.controller import Floats


def block_interval(hits: np.ndarray, numbers: np.ndarray) -> tuple[float, float]:
    """95% interval of Σ hits / Σ numbers by a bootstrap over blocks of steps, for events that come in runs.

    Args:
        hits, numbers: per step, (S,).

    Returns:
        low and high; Wilson's interval where fewer than ten blocks have an event, and never narrower than it.
    """
    low, high = wilson(int(hits.sum()), int(numbers.sum()))
    blocks = np.array_split(np.arange(len(hits)), max(1, min(100, len(hits) // 20)))
    table = np.array([[hits[b].sum(), numbers[b].sum()] for b in blocks], dtype=np.float64)
    table = table[table[:, 1] > 0]
    if len(table) < 10:
        return low, high
    drawn = table[np.random.default_rng(0).integers(0, len(table), (1000, len(table)))].sum(axis=1)
    lower, upper = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return min(low, float(lower)), max(high, float(upper))


def wilson(hits: int, number: int, z: float = 1.959964) -> tuple[float, float]:
    """95% interval of a rate (Wilson's score interval); (0, 1) without a trial."""
    if number == 0:
        return 0.0, 1.0
    p, n = hits / number, number
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
    return 0.0 if hits == 0 else low, 1.0 if hits == number else high


def psi1(norms: Floats) -> float:
    """ψ₁ norm of n / mean(n) − 1: the smallest K with mean exp(|x| / K) ≤ 2; 0 for constant norms, nan without a norm."""
    if len(norms) == 0 or norms.mean() == 0:
        return math.nan
    x = np.abs(norms / norms.mean() - 1)
    if not x.any():
        return 0.0
    low, high = float(x.max()) / 700, float(x.max()) / math.log(2)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if np.exp(x / middle).mean() > 2 else (low, middle)
    return high


def bound_terms(c: float, alpha: float, kappas: Floats, counts: Floats) -> tuple[float, float]:
    """The two terms of Theorem 2's bound, mean over units and steps with a history.

    Args:
        c: the theorem's constant.
        alpha: the threshold.
        kappas: κ_b, (U,).
        counts: observations of each unit, (U,); t − 1 runs from 1 to `counts` − 1.
    """
    epsilon, lengths = alpha - 1, counts - 1

    def exponent(size: float) -> Floats:
        with np.errstate(divide="ignore"):
            ratio = size / kappas
        return c * np.minimum(ratio**2, ratio)

    first = np.exp(-exponent(epsilon)) * lengths
    decay = np.exp(-exponent(epsilon / alpha))  # of the second term from one step to the next: a geometric series
    with np.errstate(divide="ignore", invalid="ignore"):
        series = np.where(decay < 1, decay * (1 - decay**lengths) / (1 - decay), lengths)
    total = float(lengths.sum())
    return float(first.sum()) / total, float(2 * series.sum()) / total


def largest_c(measured: float, alpha: float, kappas: Floats, counts: Floats) -> float:
    """The largest c for which the bound is not below the measured exceedance; inf where that is 0."""
    if measured == 0:
        return math.inf
    low, high = 0.0, 1.0
    while sum(bound_terms(high, alpha, kappas, counts)) > measured and high < 1e6:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(bound_terms(middle, alpha, kappas, counts)) >= measured else (low, middle)
    return low
