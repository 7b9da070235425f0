"""Ways to choose the active set: same norms in, same `Decision` out.

| name | rule | source |
|---|---|---|
| `gnmr` | the paper's controller | sections 3.1 to 3.3, `controller.Controller` |
| `gsnr` | the maxO units of lowest gradient signal-to-noise ratio, every step | Appendix E.5 |
| `jacobian` | the maxO units of highest gain in the backward, every step | Appendix E.5 |
| `static` | a warm-up in 16 bits; then those with the highest mean GNMR in it, for good; exempt from maxO | Appendix E.4 |
| `random` | units drawn anew each step, a promotion ratio in the mean, never above maxO | ours: the control to beat |
| `listed` | the units of a list, or those that a trace lifted most, for good; exempt from maxO | ours: the other control |
| `none`, `all` | all on the low-cost path, or all recoverable units on the recovery path (exempt from maxO) | the two ends |

All of them score every unit as `gnmr` does, so that any run's trace shows what the controller would have seen.  What a
trigger measures beside the norms is a `signals.Signal`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..config import ConfigError, GNMRConfig
from .baselines import Listed, Random
from .controller import Bools, Controller, Floats, top_units


class Fixed(Controller):
    """The same active set in every step; scores and triggers are worked out as by `Controller`, and only reported."""

    lifted: bool

    def most_active(self) -> int:
        return int(self.recoverable.sum()) if self.lifted else 0

    def _paths(self, seated: Bools) -> Bools:
        return self.recoverable & self.lifted


class NoneLifted(Fixed):
    """Every unit on the low-cost path: fixed INT8."""

    trigger = "none"
    lifted = False


class AllLifted(Fixed):
    """Every recoverable unit on the recovery path of the same switched model."""

    trigger = "all"
    lifted = True


class Ranked(Controller):
    """The maxO units that a signal ranks first, every step; thresholds and locks take no part."""

    sign: ClassVar[float]

    def _choose(self, gnmr: Floats, risk: Floats, seen: Bools, signal: Floats | None) -> tuple[Bools, Bools]:
        if signal is None:  # nothing was measured: a step of another number of backward passes than of micro-batches
            signal = np.full(self.num_units, np.nan)
        score = np.where(np.isfinite(gnmr), self.sign * signal, np.inf)  # a gradient that is not finite comes first
        pool = np.flatnonzero(self.recoverable & seen & ~np.isnan(score))
        seated = np.zeros_like(seen)
        seated[top_units(score, pool, self.max_o)] = True
        return seated.copy(), seated


class LowestGsnr(Ranked):
    """Gradient signal-to-noise ratio, the lowest first."""

    trigger = "gsnr"
    signal = "gsnr"
    sign = -1.0


class HighestGain(Ranked):
    """Gain in the backward, the highest first."""

    trigger = "jacobian"
    signal = "jacobian"
    sign = 1.0


class Static(Controller):
    """Sensitivity measured once: ADAPT-style.

    Options:
        warmup: steps of the warm-up, or a share of all steps; default 500 steps.
        share: share of the recoverable units that is lifted for good; default 0.25, at least one unit.
    """

    trigger = "static"
    options = {"warmup": 500, "share": 0.25}

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> None:
        warmup, share = given["warmup"], given["share"]
        if isinstance(warmup, bool) or not isinstance(warmup, (int, float)) or not math.isfinite(warmup) or warmup <= 0:
            raise ConfigError(f"warmup={warmup!r}: steps above 0, or a share of the steps between 0 and 1, is allowed")
        if isinstance(warmup, float) and warmup >= 1:
            raise ConfigError(f"warmup={warmup!r}: a share is below 1; steps are a whole number")
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"share={share!r}: above 0 and at most 1 is allowed")

    def _prepare(self) -> None:
        warmup, share = self.given["warmup"], self.given["share"]
        if self.config.fidelity_warmup:
            raise ConfigError(
                f"fidelity_warmup={self.config.fidelity_warmup} with trigger='static', which has a warm-up of its own: set "
                "it to 0, and give trigger.warmup"
            )
        if isinstance(warmup, float):
            if self.total_steps is None:
                raise ConfigError(f"warmup={warmup!r}: a share needs the total number of steps")
            warmup = math.ceil(warmup * self.total_steps - 1e-9)
        if self.total_steps is not None and warmup >= self.total_steps:
            raise ConfigError(f"warmup={warmup} of {self.total_steps} steps: nothing would be left after the warm-up")
        self.warmup_steps = int(warmup)
        self.lifted_units = max(1, math.floor(share * int(self.recoverable.sum()) + 1e-9))
        self._sum, self._count = np.zeros(self.num_units), np.zeros(self.num_units)
        self._fixed: Bools | None = None

    def most_active(self) -> int:
        return int(self.recoverable.sum())

    @property
    def exact(self) -> bool:
        return self._fixed is None

    def _choose(self, gnmr: Floats, risk: Floats, seen: Bools, signal: Floats | None) -> tuple[Bools, Bools]:
        if self._fixed is None:
            usable = seen & np.isfinite(gnmr)
            self._sum[usable] += gnmr[usable]
            self._count += usable
            if self.steps_done >= self.warmup_steps:
                with np.errstate(invalid="ignore", divide="ignore"):
                    mean = np.where(self._count > 0, self._sum / self._count, -np.inf)
                self._fixed = np.zeros_like(seen)
                self._fixed[top_units(mean, np.flatnonzero(self.recoverable), self.lifted_units)] = True
        return self.recoverable & (risk >= 1.0), seen

    def _paths(self, seated: Bools) -> Bools:
        return self.recoverable.copy() if self._fixed is None else self._fixed.copy()

    def _more_state(self) -> dict[str, Any]:
        return {
            "warmup_steps": self.warmup_steps,
            "gnmr_sum": self._sum.tolist(),
            "gnmr_n": self._count.tolist(),
            "fixed": None if self._fixed is None else self._fixed.tolist(),
        }

    def _load_more(self, state: dict[str, Any]) -> None:
        self.warmup_steps = int(state["warmup_steps"])
        self._sum, self._count = np.array(state["gnmr_sum"]), np.array(state["gnmr_n"])
        self._fixed = None if state["fixed"] is None else np.array(state["fixed"], dtype=bool)


TRIGGERS: dict[str, type[Controller]] = {
    "gnmr": Controller,
    "none": NoneLifted,
    "all": AllLifted,
    "gsnr": LowestGsnr,
    "jacobian": HighestGain,
    "static": Static,
    "random": Random,
    "listed": Listed,
}


def make_trigger(
    name: str,
    num_units: int,
    config: GNMRConfig,
    *,
    total_steps: int | None = None,
    recoverable: Bools | None = None,
    options: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
) -> Controller:
    """The trigger called `name`; `names` are the units', which `listed` chooses by.

    Raises:
        ConfigError: an unknown name, or settings the trigger cannot use.
    """
    check_trigger(name, options)
    mask = None if recoverable is None else np.asarray(recoverable, dtype=bool)
    return TRIGGERS[name](num_units, config, total_steps=total_steps, recoverable=mask, options=options, names=names)


def check_trigger(name: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError unless `name` is a known trigger and `options` are its own, as far as can be told without units."""
    if name not in TRIGGERS:
        raise ConfigError(f"trigger={name!r}: one of {', '.join(map(repr, TRIGGERS))} is allowed")
    known = TRIGGERS[name].options
    for option in options or {}:
        if option not in known:
            theirs = [trigger for trigger, cls in TRIGGERS.items() if option in cls.options]
            where = f"it belongs to {', '.join(theirs)}" if theirs else f"{name} has {', '.join(known) or 'none'}"
            raise ConfigError(f"trigger={name!r} has no option {option!r}: {where}")
    TRIGGERS[name].check({**known, **(options or {})})
