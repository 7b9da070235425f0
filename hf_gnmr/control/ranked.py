"""Triggers that rank units by a signal measured in the backward: the maxO first ones, every step (paper, Appendix E.5)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .controller import Bools, Scores, Trigger, top_units


class Ranked(Trigger):
    """The maxO units that a signal ranks first, every step; thresholds and locks play no part."""

    sign: ClassVar[float]

    def choose(self, scores: Scores) -> tuple[Bools, Bools]:
        signal = scores.signal
        if signal is None:  # nothing was measured: the step had another number of backward passes than micro-batches
            signal = np.full(self.num_units, np.nan)
        rank = np.where(np.isfinite(scores.gnmr), self.sign * signal, np.inf)  # a gradient that is not finite comes first
        pool = np.flatnonzero(self.recoverable & scores.seen & ~np.isnan(rank))
        chosen = np.zeros_like(scores.seen)
        chosen[top_units(rank, pool, self.max_o)] = True
        return chosen.copy(), chosen


class LowestGsnr(Ranked):
    """Gradient signal-to-noise ratio, the lowest first."""

    name = "gsnr"
    signal = "gsnr"
    sign = -1.0


class HighestGain(Ranked):
    """Gain in the backward, the highest first."""

    name = "jacobian"
    signal = "jacobian"
    sign = 1.0
