"""The trigger `static`: sensitivity measured once, in the style of ADAPT (paper, Appendix E.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import ConfigError, number
from .arguments import State
from .controller import Bools, Scores, Trigger, TriggerOptions, top_units


@dataclass(frozen=True)
class StaticOptions(TriggerOptions):
    """How long sensitivity is measured, and how many units are lifted after it."""

    warmup: int | float = 500
    """Steps of the warm-up in 16 bits (a whole number), or a share of all steps (between 0 and 1)."""
    share: float = 0.25
    """Share of the recoverable units that stays lifted after the warm-up, above 0 and at most 1; at least one unit."""

    def __post_init__(self) -> None:
        expected = "a number of steps above 0, or a share of the steps between 0 and 1"
        warmup = number("warmup", self.warmup, expected)
        if not math.isfinite(warmup) or warmup <= 0:
            raise ConfigError(f"warmup={self.warmup!r}: expected {expected}")
        if isinstance(self.warmup, float) and warmup >= 1:
            raise ConfigError(f"warmup={self.warmup!r}: expected a share below 1, or a whole number of steps")
        self._convert("warmup", int(warmup) if not isinstance(self.warmup, float) else warmup)
        if not 0 < number("share", self.share, "a number above 0, at most 1") <= 1:
            raise ConfigError(f"share={self.share!r}: expected a number above 0, at most 1")


class Static(Trigger):
    """A warm-up in 16 bits; then the units with the highest mean GNMR in it stay lifted. Exempt from maxO."""

    name = "static"
    Options = StaticOptions
    options: StaticOptions
    warms_up = False

    def prepare(self) -> None:
        warmup = self.options.warmup
        if self.config.fidelity_warmup:
            raise ConfigError(
                f"fidelity_warmup={self.config.fidelity_warmup} with trigger='static', which has its own warm-up: set "
                "it to 0, and give trigger.warmup"
            )
        if isinstance(warmup, float):
            if self.total_steps is None:
                raise ConfigError(f"warmup={warmup!r}: a share needs the total number of steps")
            warmup = math.ceil(warmup * self.total_steps - 1e-9)
        if self.total_steps is not None and warmup >= self.total_steps:
            raise ConfigError(
                f"warmup={warmup} of {self.total_steps} steps: expected fewer steps, since nothing would follow the warm-up"
            )
        self.warmup_steps = int(warmup)
        self.lifted_units = max(1, math.floor(self.options.share * int(self.recoverable.sum()) + 1e-9))
        self._sum, self._count = np.zeros(self.num_units), np.zeros(self.num_units)
        self._fixed: Bools | None = None

    def most_active(self) -> int:
        return int(self.recoverable.sum())

    @property
    def exact(self) -> bool:
        return self._fixed is None

    def choose(self, scores: Scores) -> tuple[Bools, Bools]:
        if self._fixed is None:
            usable = scores.seen & np.isfinite(scores.gnmr)
            self._sum[usable] += scores.gnmr[usable]
            self._count += usable
            if self.steps_done >= self.warmup_steps:
                with np.errstate(invalid="ignore", divide="ignore"):
                    mean = np.where(self._count > 0, self._sum / self._count, -np.inf)
                self._fixed = np.zeros_like(scores.seen)
                self._fixed[top_units(mean, np.flatnonzero(self.recoverable), self.lifted_units)] = True
        return self.above_threshold(scores), self.before_scores()

    def before_scores(self) -> Bools:
        return self.recoverable.copy() if self._fixed is None else self._fixed.copy()

    def more_state(self) -> dict[str, Any]:
        return {
            "warmup_steps": self.warmup_steps,
            "gnmr_sum": self._sum.tolist(),
            "gnmr_n": self._count.tolist(),
            "fixed": None if self._fixed is None else self._fixed.tolist(),
        }

    def load_more(self, state: dict[str, Any]) -> None:
        stored, units = State(state, "controller"), (self.num_units,)
        warmup_steps = stored.count("warmup_steps")
        sums, counts = stored.floats("gnmr_sum", units), stored.floats("gnmr_n", units)
        self._fixed = None if state.get("fixed") is None else stored.bools("fixed", units)
        self.warmup_steps, self._sum, self._count = warmup_steps, sums, counts
