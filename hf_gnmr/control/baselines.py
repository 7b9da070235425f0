"""Triggers that no score enters: units drawn at random, and units of a list. What the others are held against."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..config import ConfigError
from ..files import printable
from ..trace.file import TraceError
from ..trace.series import Series, read_series
from .controller import Bools, Controller


class Random(Controller):
    """Units drawn uniformly, from a generator of seed and step alone.

    Options:
        promotion_ratio: mean share of recoverable units that is lifted.
        trace: a trace whose promotion ratio is taken instead.
        seed: of the draws; default 0.
        hold: steps that a draw stays in force; default 1, anew each step. For a control that changes as seldom as a trigger
            with a long T_lock.
    """

    trigger = "random"
    options = {"promotion_ratio": None, "trace": None, "seed": 0, "hold": 1}

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> None:
        seed = given["seed"]
        if (given["promotion_ratio"] is None) == (given["trace"] is None):
            raise ConfigError("trigger='random' takes promotion_ratio or trace, one of them")
        _check_ratio(given["promotion_ratio"])
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"seed={seed!r}: a whole number of 0 or more is allowed")
        hold = given["hold"]
        if isinstance(hold, bool) or not isinstance(hold, int) or hold < 1:
            raise ConfigError(f"hold={hold!r}: a whole number of steps, 1 or more, is allowed")

    def _prepare(self) -> None:
        ratio = self.given["promotion_ratio"]
        if ratio is None:
            ratio = promotion_ratio(str(self.given["trace"]))
        self.mean = float(ratio) * int(self.recoverable.sum())
        if self.mean > self.max_o + 1e-9:
            raise ConfigError(
                f"promotion_ratio={ratio!r} is {self.mean:g} units in the mean, and max_o allows {self.max_o}: raise one or "
                "lower the other"
            )
        # What the ratio came to is what a resumed run is held to, whatever became of the trace.
        self.given = {**self.given, "promotion_ratio": float(ratio), "trace": None}

    def _paths(self, seated: Bools) -> Bools:
        if self.steps_done + 1 <= self.fidelity_warmup_steps:
            return self.recoverable.copy()
        generator = np.random.default_rng([self.given["seed"], self.steps_done // self.given["hold"]])
        whole = math.floor(self.mean + 1e-9)
        number = whole + int(generator.random() < self.mean - whole)
        drawn = np.zeros(self.num_units, dtype=bool)
        drawn[generator.choice(np.flatnonzero(self.recoverable), size=number, replace=False)] = True
        return drawn


class Listed(Controller):
    """The same units for good.

    With `trace` the second control beside `random`: as many units as that run lifted in the mean, and those that it lifted
    most often, so that what differs from that run is the timing alone.

    Options:
        units: names of units or patterns of them (``*.down_proj``), in order.
        promotion_ratio: mean share of the recoverable units that is lifted: the first of the list in every step, the next
            one in as many steps as the fraction asks for; default: all of the list.
        trace: a trace to take both from, of a run over units of the same names.
    """

    trigger = "listed"
    options = {"units": None, "promotion_ratio": None, "trace": None}

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> None:
        units, ratio, trace = given["units"], given["promotion_ratio"], given["trace"]
        if (units is None) == (trace is None) or (trace is not None and ratio is not None):
            raise ConfigError("trigger='listed' takes units (and promotion_ratio, if not all of them always), or trace")
        listed = isinstance(units, (list, tuple)) and units and all(isinstance(unit, str) for unit in units)
        if trace is None and not listed:
            raise ConfigError(f"units={units!r}: a list of names or patterns of units is allowed")
        _check_ratio(ratio)

    def _prepare(self) -> None:
        units, ratio, trace = self.given["units"], self.given["promotion_ratio"], self.given["trace"]
        if not self.names:
            raise ConfigError("trigger='listed' needs the names of the units (make_trigger's `names`)")
        if trace is not None:
            self._order, ratio = _most_lifted(str(trace), self.names, self.recoverable)
        else:
            self._order = self._matching(units)
        count = int(self.recoverable.sum())
        ratio = len(self._order) / count if ratio is None else ratio
        self.mean = float(ratio) * count
        if self.mean > len(self._order) + 1e-9:
            raise ConfigError(
                f"promotion_ratio={ratio!r} is {self.mean:g} units in the mean, and the list has {len(self._order)}"
            )
        # As with `random`: a resumed run is held to what a trace came to.
        self.given = {
            "units": [self.names[unit] for unit in self._order],
            "promotion_ratio": float(ratio),
            "trace": None,
        }

    def _matching(self, patterns: Sequence[str]) -> list[int]:
        """Indices of the recoverable units that the patterns name, in the patterns' order, each once."""
        found: dict[int, None] = {}
        for pattern in patterns:
            named = [i for i, name in enumerate(self.names) if name == pattern or fnmatchcase(name, pattern)]
            able = [i for i in named if self.recoverable[i]]
            if not able:
                what = "matches no unit" if not named else "matches only units without a recovery path"
                raise ConfigError(
                    f"units={pattern!r} {what}: a name from {self.names[0]} to {self.names[-1]}, or a pattern such as "
                    f"'*.{self.names[-1].rpartition('.')[2]}', is allowed"
                )
            found.update(dict.fromkeys(able))
        return list(found)

    def most_active(self) -> int:
        if self.fidelity_warmup_steps:
            return int(self.recoverable.sum())
        return math.ceil(self.mean - 1e-9)

    def _paths(self, seated: Bools) -> Bools:
        if self.steps_done + 1 <= self.fidelity_warmup_steps:
            return self.recoverable.copy()
        # The number of seats so far is rounded down in every step: a fraction is spread evenly, without any state.
        before, after = (math.floor(self.mean * steps + 1e-9) for steps in (self.steps_done, self.steps_done + 1))
        lifted = np.zeros(self.num_units, dtype=bool)
        lifted[self._order[: after - before]] = True
        return lifted


def _check_ratio(ratio: Any) -> None:
    if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1):
        raise ConfigError(f"promotion_ratio={ratio!r}: a number from 0 to 1 is allowed")


def promotion_ratio(path: str) -> float:
    """Of a trace (or the folder of a run), a fidelity warm-up apart.

    Raises:
        ConfigError: no trace, a broken one, or none with a step of recoverable units.
    """
    return _ratio_of(path, *_after_warm_up(path))


def _ratio_of(path: str, series: Series, rows: Bools) -> float:
    pairs = int(rows.sum()) * int(series.recoverable.sum())
    if not pairs:
        raise ConfigError(f"trace={path!r} has no step or no recoverable unit: no promotion ratio")
    return int(series.active[rows].sum()) / pairs


def _most_lifted(path: str, names: Sequence[str], recoverable: Bools) -> tuple[list[int], float]:
    """Indices of the recoverable units, those first that a trace over the same units lifted in the most steps, and its
    promotion ratio."""
    series, rows = _after_warm_up(path)
    ours, theirs = (
        [(name, bool(able)) for name, able in zip(*both, strict=True)]
        for both in (
            ([printable(name) for name in names], recoverable),
            (series.names, series.recoverable),
        )
    )
    if ours != theirs:
        unit = next((pair for pair in zip(theirs, ours, strict=False) if pair[0] != pair[1]), None)
        if unit is None:
            told = f"{len(theirs)} units, this run {len(ours)}"
        elif unit[0][0] != unit[1][0]:
            told = f"a unit {unit[0][0]!r}, this run {unit[1][0]!r}"
        else:
            told = f"a unit {unit[0][0]!r} {'with' if unit[0][1] else 'without'} a recovery path, unlike this run"
        raise ConfigError(f"trace={path!r} has {told}: a trace over the same units is allowed")
    counts = series.active[rows].sum(axis=0)
    order = sorted(np.flatnonzero(recoverable).tolist(), key=lambda unit: -counts[unit])
    return order, _ratio_of(path, series, rows)


def _after_warm_up(path: str) -> tuple[Series, Bools]:
    """A trace, and which of its lines count: steps of the controller, a fidelity warm-up apart, bool, (S,)."""
    try:
        series = read_series(path)
    except TraceError as error:
        raise ConfigError(f"trace={path!r}: {error}") from error
    share, total = series.header["config"].get("fidelity_warmup", 0.0), series.header["total_steps"]
    if isinstance(share, bool) or not isinstance(share, (int, float)):
        raise ConfigError(f"trace={path!r}: its header has fidelity_warmup={share!r}, no share")
    warm_up = math.ceil(share * total - 1e-9) if share and total else 0
    return series, series.counted & (series.step > warm_up)
