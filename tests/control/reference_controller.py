"""A slow, literal twin of the controller: plain Python, whole histories kept, one unit at a time.

It shares no code with `hf_gnmr.control.controller`; the property tests compare the vectorised version with it.
"""

from __future__ import annotations

import math
from fractions import Fraction


class ReferenceController:
    def __init__(
        self,
        num_units,
        *,
        alpha,
        alpha_init,
        alpha_init_steps,
        beta,
        delta,
        max_o,
        t_lock,
        fidelity_warmup_steps=0,
        recoverable=None,
    ):
        self.units = range(num_units)
        self.alpha, self.alpha_init, self.alpha_init_steps = alpha, alpha_init, alpha_init_steps
        self.beta, self.delta, self.max_o, self.t_lock = beta, delta, max_o, t_lock
        self.warmup = fidelity_warmup_steps
        self.recoverable = list(recoverable) if recoverable is not None else [True] * num_units
        self.norms = [[] for _ in self.units]
        self.gnmrs = [[] for _ in self.units]
        self.lock = [0] * num_units
        self.t = 0

    def initial_active(self):
        return [b for b in self.units if self.recoverable[b] and self.warmup >= 1]

    def step(self, norms):
        self.t += 1
        alpha = self.alpha_init if self.t <= self.alpha_init_steps else self.alpha
        gnmr, delta_gnmr, risk = [], [], []
        for b in self.units:
            n = norms[b]
            if not math.isfinite(n):
                g = d = math.inf
            else:
                g = ratio(n, mean(self.norms[b])) if self.norms[b] else 1.0
                recent = self.gnmrs[b][-self.delta :]
                d = ratio(g, mean(recent)) if recent else 1.0
                self.norms[b].append(n)
                self.gnmrs[b].append(g)
            gnmr.append(g)
            delta_gnmr.append(d)
            risk.append(max(g / alpha, d / self.beta) if self.beta is not None else g / alpha)
        triggered = [b for b in self.units if self.recoverable[b] and risk[b] >= 1.0]
        pool = [b for b in self.units if b in triggered or self.lock[b] > 0]
        seats = sorted(pool, key=lambda b: (-risk[b], b))[: self.max_o]
        for b in self.units:
            self.lock[b] = self.t_lock if b in triggered and b in seats else max(0, self.lock[b] - 1)
        if self.t + 1 <= self.warmup:
            active = [b for b in self.units if self.recoverable[b]]
        else:
            active = sorted(seats)
        return {
            "alpha": alpha,
            "gnmr": gnmr,
            "delta_gnmr": delta_gnmr,
            "risk": risk,
            "triggered": triggered,
            "active": active,
        }


def mean(values):
    # Exact sum, so that the vectorised version is compared with the true mean and not with another rounding.
    return float(sum(Fraction(v) for v in values) / len(values))


def ratio(numerator, denominator):
    return 1.0 if denominator == 0 else numerator / denominator
