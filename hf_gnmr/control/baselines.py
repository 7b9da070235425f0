"""Triggers that ignore the scores: no unit, all units, units drawn at random, units from a list.

They are the two ends of the range, and the controls that every other trigger is compared with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import numpy as np

from ..config import ConfigError, integer, share
from .controller import Bools, Record, Scores, Trigger, TriggerOptions


class Fixed(Trigger):
    """The same active set in every step; scores and triggered units are still computed, but only reported."""

    lifted: ClassVar[bool]
    warms_up = False

    def most_active(self) -> int:
        return int(self.recoverable.sum()) if self.lifted else 0

    def choose(self, scores: Scores) -> tuple[Bools, Bools]:
        return self.above_threshold(scores), self.before_scores()

    def before_scores(self) -> Bools:
        return self.recoverable & self.lifted


class NoneLifted(Fixed):
    """Every unit on the low-cost path: fixed INT8."""

    name = "none"
    lifted = False


class AllLifted(Fixed):
    """Every recoverable unit on the recovery path of the same switched model."""

    name = "all"
    lifted = True


@dataclass(frozen=True)
class RandomOptions(TriggerOptions):
    """How many units are drawn, and how often. Expects `promotion_ratio` or `trace`, exactly one of them."""

    promotion_ratio: float | None = None
    """Mean share of the recoverable units that is lifted, 0 to 1."""
    trace: str | None = None
    """A trace whose promotion ratio is used instead."""
    seed: int = 0
    """Seed of the draws, at least 0."""
    hold: int = 1
    """Steps that a draw stays in force, at least 1: a control that changes as rarely as a trigger with a long T_lock."""

    def __post_init__(self) -> None:
        if (self.promotion_ratio is None) == (self.trace is None):
            raise ConfigError(
                f"promotion_ratio={self.promotion_ratio!r}, trace={self.trace!r} with trigger='random': expected "
                "promotion_ratio or trace, exactly one of them"
            )
        if self.promotion_ratio is not None:
            self._convert("promotion_ratio", share("promotion_ratio", self.promotion_ratio))
        for name, least, what in (("seed", 0, "a whole number"), ("hold", 1, "a whole number of steps")):
            self._convert(name, integer(name, getattr(self, name), least, what))

    def paths(self) -> dict[str, str]:
        return {} if self.trace is None else {"trace": self.trace}

    def resolved(self, record: Record, names: Sequence[str], recoverable: Bools) -> RandomOptions:
        return dataclasses.replace(self, promotion_ratio=float(record.promotion_ratio()), trace=None)


class Random(Trigger):
    """Units drawn uniformly, by a generator that depends on seed and step only."""

    name = "random"
    Options = RandomOptions
    options: RandomOptions

    def prepare(self) -> None:
        ratio = self.options.promotion_ratio
        if ratio is None:
            raise unresolved(self.name, self.options.trace)
        self.mean = float(ratio) * int(self.recoverable.sum())
        if self.mean > self.max_o + 1e-9:
            raise ConfigError(
                f"promotion_ratio={ratio!r} is {self.mean:g} units on average, but max_o allows {self.max_o}: raise max_o "
                "or lower promotion_ratio"
            )
        self.options = dataclasses.replace(self.options, promotion_ratio=float(ratio))

    def choose(self, scores: Scores) -> tuple[Bools, Bools]:
        return self.above_threshold(scores), self.before_scores()

    def before_scores(self) -> Bools:
        generator = np.random.default_rng([self.options.seed, self.steps_done // self.options.hold])
        rounded_down = math.floor(self.mean + 1e-9)
        count = rounded_down + int(generator.random() < self.mean - rounded_down)
        drawn = np.zeros(self.num_units, dtype=bool)
        drawn[generator.choice(np.flatnonzero(self.recoverable), size=count, replace=False)] = True
        return drawn


@dataclass(frozen=True)
class ListedOptions(TriggerOptions):
    """Which units are lifted. Expects `units` (with `promotion_ratio`, unless all are always lifted), or `trace`."""

    units: list[str] | None = None
    """Names of units or patterns of them (``*.down_proj``), in order."""
    promotion_ratio: float | None = None
    """Mean share of the recoverable units that is lifted, 0 to 1: the first of the list in every step, the next one in as
    many steps as the fraction requires. None: the whole list."""
    trace: str | None = None
    """A trace to take both from; its run must have had units of the same names."""

    def __post_init__(self) -> None:
        if (self.units is None) == (self.trace is None) or (self.trace is not None and self.promotion_ratio is not None):
            raise ConfigError(
                f"units={self.units!r}, trace={self.trace!r} with trigger='listed': expected units (with promotion_ratio, "
                "unless all are always lifted), or trace"
            )
        is_list = isinstance(self.units, (list, tuple)) and self.units and all(isinstance(u, str) for u in self.units)
        if self.trace is None and not is_list:
            raise ConfigError(f"units={self.units!r}: expected a list of names or patterns of units")
        if self.promotion_ratio is not None:
            self._convert("promotion_ratio", share("promotion_ratio", self.promotion_ratio))

    def paths(self) -> dict[str, str]:
        return {} if self.trace is None else {"trace": self.trace}

    def resolved(self, record: Record, names: Sequence[str], recoverable: Bools) -> ListedOptions:
        units = record.most_lifted(names, recoverable)
        return ListedOptions(units=units, promotion_ratio=float(record.promotion_ratio()))


class Listed(Trigger):
    """The same units in every step.

    With a trace it is the second control besides `random`: as many units as that run lifted on average, and those that it
    lifted most often, so that only the timing differs from that run.
    """

    name = "listed"
    Options = ListedOptions
    options: ListedOptions

    def prepare(self) -> None:
        if self.options.units is None:
            raise unresolved(self.name, self.options.trace)
        if not self.names:
            raise ConfigError("trigger='listed' needs the names of the units (make_trigger's `names`)")
        self._order = self._matching(self.options.units)
        count = int(self.recoverable.sum())
        ratio = self.options.promotion_ratio
        ratio = len(self._order) / count if ratio is None else ratio
        self.mean = float(ratio) * count
        if self.mean > len(self._order) + 1e-9:
            raise ConfigError(
                f"promotion_ratio={ratio!r} is {self.mean:g} units on average, but the list has {len(self._order)}"
            )
        self.options = ListedOptions([self.names[unit] for unit in self._order], float(ratio))

    def _matching(self, patterns: Sequence[str]) -> list[int]:
        """Indices of the recoverable units that match the patterns, in the patterns' order, each once."""
        order: dict[int, None] = {}
        for pattern in patterns:
            matches = [i for i, name in enumerate(self.names) if name == pattern or fnmatchcase(name, pattern)]
            usable = [i for i in matches if self.recoverable[i]]
            if not usable:
                what = "matches no unit" if not matches else "matches only units without a recovery path"
                raise ConfigError(
                    f"units={pattern!r} {what}: expected a name from {self.names[0]} to {self.names[-1]}, or a pattern such "
                    f"as '*.{self.names[-1].rpartition('.')[2]}'"
                )
            order.update(dict.fromkeys(usable))
        return list(order)

    def most_active(self) -> int:
        if self.fidelity_warmup_steps:
            return int(self.recoverable.sum())
        return math.ceil(self.mean - 1e-9)

    def choose(self, scores: Scores) -> tuple[Bools, Bools]:
        return self.above_threshold(scores), self.before_scores()

    def before_scores(self) -> Bools:
        # The number of seats so far is rounded down in every step: a fraction is spread evenly, without any state.
        before, after = (math.floor(self.mean * steps + 1e-9) for steps in (self.steps_done, self.steps_done + 1))
        lifted = np.zeros(self.num_units, dtype=bool)
        lifted[self._order[: after - before]] = True
        return lifted


def unresolved(name: str, trace: Any) -> ConfigError:
    """The error for a trigger whose trace has not been resolved."""
    return ConfigError(
        f"trigger={name!r} with trace={str(trace)!r}: a trigger opens no files; resolve the trace first "
        "(hf_gnmr.trace.lifted.resolve_trigger_options)"
    )
