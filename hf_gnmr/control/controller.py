"""What every trigger shares: gradient norms in, the set of units for the next step out.

    trigger = make_trigger("gnmr", num_units, GNMRConfig(), total_steps=1000)
    decision = trigger.step(norms)         # norms: float, shape (num_units,), one optimizer step
    backend.apply(decision.active)         # the units that run the recovery path in the NEXT step

`monitor.RiskMonitor` (the paper's Algorithm 1) scores each unit against its own history.  `Trigger` holds the monitor, the
threshold schedules and the state; a subclass chooses.  `gnmr.Controller` is the paper's choice (Algorithm 2); `ranked`,
`static` and `baselines` hold the others.  numpy in float64 throughout, vectorised over units; memory is O(units · δ), a step
costs O(units · δ).  Nothing in this package knows about models, formats, files or torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..config import ConfigError, DeclaredOptions, GNMRConfig, field_defaults, integer
from ..terminal import shown
from .arguments import State, array
from .monitor import Bools, Floats, RiskMonitor, check_norms, encode_floats

STATE_VERSION = 1


@dataclass(frozen=True)
class Decision:
    """What one step's norms led to. Arrays have shape (num_units,).

    `active` is the set for the NEXT step. A trace's `active` is the set that ran DURING its step: line t + 1 of a trace
    holds what the decision of step t chose.
    """

    step: int
    """The step t whose norms were read, counted from 1."""
    alpha: float
    """α_t."""
    beta: float | None
    """β_t; None where Δ-GNMR is off."""
    gnmr: Floats
    delta_gnmr: Floats
    risk: Floats
    """R = max(GNMR/α_t, ΔGNMR/β_t); 0 where a unit was not seen."""
    triggered: Bools
    """Units that triggered at step t: for `gnmr`, recoverable units with R ≥ 1."""
    active: Bools
    """Units on the recovery path in step t + 1."""
    seen: Bools
    """Units that had a gradient; GNMR and ΔGNMR of the others are nan."""


@dataclass(frozen=True)
class Scores:
    """One step's scores, from which a trigger chooses. Arrays have shape (num_units,)."""

    gnmr: Floats
    delta_gnmr: Floats
    risk: Floats
    """By which units are ranked: R, or where it is infinite for several units and it is known where that began, infinite for
    that unit and the largest finite number for the others."""
    seen: Bools
    signal: Floats | None
    """What `Trigger.signal` asked for; nan where a unit gave none, None where nothing was measured."""


def top_units(risk: Floats, pool: NDArray[np.intp], seats: int) -> NDArray[np.intp]:
    """The `seats` units of `pool` (ascending indices) with the highest risk, ties to the lower index; O(len(pool))."""
    if pool.size <= seats:
        return pool
    if seats <= 0:
        return pool[:0]
    values = risk[pool]
    cut = np.partition(values, pool.size - seats)[pool.size - seats]
    above = pool[values > cut]
    at_cut = pool[values == cut]
    return np.concatenate([above, at_cut[: seats - above.size]])


class Record(Protocol):
    """What a recorded run lifted, for triggers that repeat it (`hf_gnmr.trace.lifted` reads it from a trace)."""

    def promotion_ratio(self) -> float:
        """Mean share of recoverable units on the recovery path."""

    def most_lifted(self, names: Sequence[str], recoverable: Bools) -> list[str]:
        """Names of the recoverable units, those lifted in the most steps first."""


@dataclass(frozen=True)
class TriggerOptions(DeclaredOptions):
    """A trigger's own options."""

    def resolved(self, record: Record, names: Sequence[str], recoverable: Bools) -> TriggerOptions:
        """The options with `trace` replaced by what the record resolves to; only for options that have a `trace`."""
        raise NotImplementedError


class Trigger(ABC):
    """A way to choose the units for the next step, over the scores that all of them share.

    Args:
        num_units: number of monitored units, at least 1.
        config: thresholds and budget.
        total_steps: optimizer steps of the whole run; needed where the configuration gives shares of it.
        recoverable: bools, shape (num_units,); None means all.
        options: the trigger's own (`Options`, or a mapping of its fields).
        names: names of the units, for triggers that choose by them.

    Raises:
        ConfigError: no units, a mask of the wrong length, a window δ too long for so many units, a share of steps without
            `total_steps`, or wrong options.
    """

    name: ClassVar[str]
    signal: ClassVar[str | None] = None
    """What it needs measured besides the norms (`training.signals.SIGNALS`); None: nothing."""
    Options: ClassVar[type[TriggerOptions]] = TriggerOptions
    takes_budget: ClassVar[bool] = False
    """Whether `max_recovery_memory` may stand for its maxO."""
    warms_up: ClassVar[bool] = True
    """Whether a fidelity warm-up (every recoverable unit on the recovery path) overrides its choice."""

    def __init__(
        self,
        num_units: int,
        config: GNMRConfig | None = None,
        *,
        total_steps: int | None = None,
        recoverable: ArrayLike | None = None,
        options: TriggerOptions | Mapping[str, Any] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        integer("num_units", num_units, 1, "a number of units")
        if config is not None and not isinstance(config, GNMRConfig):
            raise ConfigError(f"config={shown(config)}: expected a GNMRConfig")
        if total_steps is not None:
            integer("total_steps", total_steps, 1)
        self.config = config or GNMRConfig()
        self.num_units = num_units
        self.total_steps = total_steps
        mask = np.ones(num_units, dtype=bool)
        if recoverable is not None:
            mask = array("recoverable", recoverable, (num_units,), bool)
        self.config.check_history(num_units)
        self.alpha_init_steps = self.config.resolve_steps("alpha_init_fraction", total_steps)
        self.fidelity_warmup_steps = self.config.resolve_steps("fidelity_warmup", total_steps)
        self.max_o = self.config.resolve_max_o(int(mask.sum()))
        self.recoverable = mask
        self.monitor = RiskMonitor(num_units, self.config.delta)
        self.steps_done = 0
        if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"names={shown(names)}: expected a list of texts")
        self.names = list(names)
        self.options = self.make_options(options)
        self._scored = False
        self.prepare()
        self.active: Bools = self._in_force(self.before_scores())
        """Units on the recovery path in the coming step, bool, shape (num_units,)."""

    @classmethod
    def make_options(cls, options: TriggerOptions | Mapping[str, Any] | None) -> TriggerOptions:
        """The trigger's options, checked.

        Raises:
            ConfigError: an unknown option, or a wrong value.
        """
        if isinstance(options, cls.Options):
            return options
        if options is not None and not isinstance(options, (TriggerOptions, Mapping)):
            raise ConfigError(f"options={shown(options)}: expected a dict of the trigger's own options, or None")
        values = options.changed() if isinstance(options, TriggerOptions) else options or {}
        return cls.Options.of(values, f"trigger={cls.name!r}")

    def prepare(self) -> None:
        """Resolve the trigger's own options once the units are known.

        Raises:
            ConfigError: options that do not fit the units or the configuration.
        """
        return None

    @abstractmethod
    def choose(self, scores: Scores) -> tuple[Bools, Bools]:
        """One decision: triggered units, and the units for the next step (warm-up apart), bool, shape (num_units,) each."""

    def before_scores(self) -> Bools:
        """The units for the coming step where no step was scored yet, bool, shape (num_units,)."""
        return np.zeros(self.num_units, dtype=bool)

    @property
    def exact(self) -> bool:
        """Whether the coming step is to run in 16 bits throughout, whatever the recovery path is."""
        return False

    def most_active(self) -> int:
        """The most units on the recovery path at a time: maxO, or all of them in a fidelity warm-up, which is exempt."""
        return int(self.recoverable.sum()) if self.fidelity_warmup_steps else self.max_o

    def above_threshold(self, scores: Scores) -> Bools:
        """Recoverable units with R ≥ 1, bool, shape (num_units,)."""
        return self.recoverable & (scores.risk >= 1.0)

    def step(
        self,
        norms: ArrayLike,
        seen: ArrayLike | None = None,
        signal: ArrayLike | None = None,
        scores: tuple[Floats, Floats] | None = None,
        first_not_finite: int | None = None,
    ) -> Decision:
        """Read the norms of one optimizer step and decide about the next one.

        Args:
            norms: L2 norm of each unit's unclipped gradient, shape (num_units,); inf and nan are valid and count as
                the highest risk.
            seen: bools, shape (num_units,): units that had a gradient at all; None: all. A unit that had none (a layer that
                was skipped, or is frozen for a while) is not observed: a zero would pull its mean down, and its next
                ordinary gradient would look like a spike.
            signal: what `self.signal` asks for, shape (num_units,); nan where a unit gave none.
            scores: GNMR and ΔGNMR of this step if they were recorded; None: the monitor computes them.
            first_not_finite: the unit whose own forward first gave values that are not finite. If no norm of the step is
                finite, it is ranked before the others, which the norms cannot tell apart. None: unknown.

        Raises:
            ValueError: wrong shape or type, or a negative norm; the message names the argument.
        """
        shape = (self.num_units,)
        observed = np.ones(shape, dtype=bool) if seen is None else array("seen", seen, shape, bool)
        if signal is not None:
            signal = array("signal", signal, shape, float)
        if scores is not None:
            if not isinstance(scores, Sequence) or len(scores) != 2:
                raise ConfigError(f"scores={shown(scores)}: expected GNMR and ΔGNMR, an array of shape {shape} each")
            scores = (array("scores[0]", scores[0], shape, float), array("scores[1]", scores[1], shape, float))
        if first_not_finite is not None:
            integer("first_not_finite", first_not_finite, 0, "a unit's index", most=self.num_units - 1)
        values = np.where(observed, check_norms(norms, self.num_units), 0.0)
        self.steps_done += 1
        alpha = self.config.alpha_init if self.steps_done <= self.alpha_init_steps else self.config.alpha
        beta = self.config.beta
        gnmr, delta_gnmr = self.monitor.observe(values, observed) if scores is None else scores
        risk = gnmr / alpha if beta is None else np.maximum(gnmr / alpha, delta_gnmr / beta)
        risk[~observed] = 0.0
        measured = None if signal is None else np.asarray(signal, dtype=np.float64)
        ranked = risk
        if first_not_finite is not None and not np.isfinite(values[observed]).any():
            ranked = np.where(np.isinf(risk), np.finfo(np.float64).max, risk)
            ranked[first_not_finite] = risk[first_not_finite]
        triggered, chosen = self.choose(Scores(gnmr, delta_gnmr, ranked, observed, measured))
        self._scored = True
        self.active = self._in_force(chosen)
        return Decision(self.steps_done, alpha, beta, gnmr, delta_gnmr, risk, triggered, self.active.copy(), observed)

    def pass_over(self, steps: int) -> None:
        """Account for `steps` steps whose norms are unknown: the schedules advance, the history does not."""
        self.steps_done += steps
        if not self._scored:
            self.active = self._in_force(self.before_scores())

    def _in_force(self, chosen: Bools) -> Bools:
        """The choice, unless the coming step is in the fidelity warm-up, which overrides only the path."""
        if self.warms_up and self.steps_done + 1 <= self.fidelity_warmup_steps:
            return self.recoverable.copy()
        return chosen

    def options_dict(self) -> dict[str, Any]:
        """The trigger's options as resolved, plain JSON values."""
        return self.options.to_dict()

    def state_dict(self) -> dict[str, Any]:
        """Everything the next decision depends on, as plain JSON values (inf and nan as strings); O(units · δ)."""
        return {
            "version": STATE_VERSION,
            "trigger": self.name,
            "num_units": self.num_units,
            "config": self.config.to_dict(),
            "alpha_init_steps": self.alpha_init_steps,
            "fidelity_warmup_steps": self.fidelity_warmup_steps,
            "recoverable": self.recoverable.tolist(),
            "steps_done": self.steps_done,
            "norm_sum": encode_floats(self.monitor.norm_sum),
            "norm_count": self.monitor.norm_count.tolist(),
            "window": [encode_floats(row) for row in self.monitor.window],
            "gnmr_count": self.monitor.gnmr_count.tolist(),
            "lock": [0] * self.num_units,  # of `gnmr` only; version 0.1.0 reads it from the state of every trigger
            "active": self.active.tolist(),
            "options": self.options_dict(),
            **self.more_state(),
        }

    def more_state(self) -> dict[str, Any]:
        """What a trigger keeps besides the monitor, as plain JSON values."""
        return {}

    def load_more(self, state: dict[str, Any]) -> None:
        """The inverse of `more_state`."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of a trigger with the same units and settings.

        The total number of steps may differ (an extended run): phases given as shares of it keep their length, so that
        none starts a second time.

        Raises:
            ConfigError: the version, number of units, mask or configuration differs; the message names it.
        """
        stored_state = State(state, "controller")
        if state.get("version") != STATE_VERSION:
            raise ConfigError(f"controller state has version {state.get('version')!r}: expected {STATE_VERSION}")
        current = {
            "trigger": self.name,
            "num_units": self.num_units,
            "recoverable": self.recoverable.tolist(),
            "config": self.config.to_dict(),
            "options": self.options_dict(),
        }
        for name, value in current.items():
            stored = state.get(name)
            # Options and settings missing from the state were added after it was written.
            if name == "options" and isinstance(stored, (dict, type(None))):
                stored = {**self.Options.defaults(), **(stored or {})}
            elif name == "config" and isinstance(stored, dict):
                stored = {**field_defaults(GNMRConfig), **stored}
            if stored != value:
                raise ConfigError(
                    f"controller state was written with {name}={shown(stored)}, this run has {shown(value)}: "
                    "resume with the model and settings of the checkpoint, or start from scratch"
                )
        units, window = (self.num_units,), (self.config.delta, self.num_units)
        rows = state.get("window")
        if not isinstance(rows, (list, tuple)) or len(rows) != window[0]:
            raise ConfigError(f"controller state: window={shown(rows)}: expected {window[0]} rows of {window[1]} numbers")
        # All fields are checked before any is changed: a state that is refused leaves the trigger as it was.
        counters = {name: stored_state.count(name) for name in ("steps_done", "alpha_init_steps", "fidelity_warmup_steps")}
        norm_sum, norm_count = stored_state.floats("norm_sum", units), stored_state.counts("norm_count", units)
        scores, gnmr_count = stored_state.floats("window", window), stored_state.counts("gnmr_count", units)
        active = stored_state.bools("active", units)
        self.load_more(state)
        for name, value in counters.items():
            setattr(self, name, value)
        self.monitor.norm_sum, self.monitor.norm_count = norm_sum, norm_count
        self.monitor.window, self.monitor.gnmr_count = scores, gnmr_count
        self.active = active
        self._scored = self.steps_done > 0
