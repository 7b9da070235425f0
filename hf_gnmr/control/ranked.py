"""Triggers that rank units by a signal measured in the backward: the first maxO, every step (paper, Appendix E.5)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .controller import Bools, Scores, Trigger, top_units


class Ranked(Trigger):
    """The maxO units that a signal ranks first, every step; thresholds and locks play no part."""

    sign: ClassVar[float]

    def choose(self, scores: Scores) -> tuple[Bools, Bools]:
        signal = scores.signal
        if signal is None:  # nothing was measured: the number of backward passes and of micro-batches differed
            signal = np.full(self.num_units, np.nan)
        # A gradient that is not finite comes first, whatever the signal is.
        rank = np.where(np.isfinite(scores.gnmr), self.sign * signal, scores.risk)
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
