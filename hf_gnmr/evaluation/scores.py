"""A task's figure and its standard error, from scores by item."""

from __future__ import annotations

import numpy as np

RESAMPLES = 1000
Array = np.ndarray


def is_perplexity(metric: str) -> bool:
    """Whether a metric's items are log-likelihoods that carry a weight: their words, bytes or tokens."""
    return "perplexity" in metric or metric == "bits_per_byte"


def figure(metric: str, values: Array, weights: Array) -> Array:
    """A metric over items, along the last axis.

    Args:
        metric: its name.
        values: (..., items); log-likelihoods in nats for perplexities, else scores.
        weights: as `values`; the length of what a log-likelihood covers, in words, bytes or tokens. Plain scores ignore it.

    Returns:
        (...): the mean of scores, or exp of the mean negative log-likelihood per unit of weight (for bits_per_byte that mean
        in bits).
    """
    if not is_perplexity(metric):
        return values.mean(axis=-1)
    mean = -values.sum(axis=-1) / weights.sum(axis=-1)
    return mean / np.log(2) if metric == "bits_per_byte" else np.exp(mean)


def standard_error(metric: str, items: dict[str, float], weights: dict[str, float]) -> float | None:
    """Standard error of a figure.

    For scores it is that of the mean, with variances pooled over the subtasks that items (``subtask/number``) belong to, as
    in lm-eval's own groups. For perplexities it is the spread of 1,000 bootstrap draws of the pages or blocks (seed 0).

    Args:
        metric: its name.
        items: score by item.
        weights: weight by ``metric|item``, see `figure`.

    Returns:
        None with too few items, or perplexities of scores that are not finite.
    """
    values = np.array([float(v) for v in items.values()])
    if is_perplexity(metric):
        if len(items) < 2 or not np.isfinite(values).all():
            return None
        weight = np.array([weights[f"{metric}|{item}"] for item in items])
        drawn = np.random.default_rng(0).integers(0, len(items), (RESAMPLES, len(items)))
        return float(figure(metric, values[drawn], weight[drawn]).std(ddof=1))
    groups: dict[str, list[float]] = {}
    for item, value in items.items():
        groups.setdefault(item.rpartition("/")[0], []).append(float(value))
    free = len(items) - len(groups)
    if free < 1:
        return None
    squares = sum(float(np.square(np.array(g) - np.mean(g)).sum()) for g in groups.values())
    return float(np.sqrt(squares / free / len(items)))
