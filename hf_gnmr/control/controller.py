"""The controller: gradient norms in, the set of units for the next step out.

    controller = Controller(num_units, GNMRConfig(), total_steps=1000)
    decision = controller.step(norms)      # norms: float, shape (num_units,), one optimizer step
    backend.apply(decision.active)         # the units that run the recovery path in the next step

Three parts: `RiskMonitor` (the paper's Algorithm 1) scores each unit against its own history, `RecoveryPolicy`
(Algorithm 2) turns scores into at most maxO seats, `Controller` holds both together with the schedules.  numpy in
float64 throughout, vectorised over units; memory is O(units · δ), a step costs O(units · δ).  Nothing here knows
models, formats or torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..config import ConfigError, GNMRConfig

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

STATE_VERSION = 1


@dataclass(frozen=True)
class Decision:
    """What one step's norms led to. Arrays have shape (num_units,)."""

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
    """Recoverable units with R ≥ 1."""
    active: Bools
    """Units on the recovery path in step t + 1."""
    seen: Bools
    """Units that had a gradient; of the others GNMR and ΔGNMR are nan."""


class RiskMonitor:
    """GNMR and Δ-GNMR of every unit (paper, sections 3.1 and 3.2, Algorithm 1).

    Args:
        num_units: number of monitored units.
        delta: window δ of Δ-GNMR, in finite GNMR values.
    """

    def __init__(self, num_units: int, delta: int) -> None:
        self.num_units = num_units
        self.delta = delta
        self.norm_sum = np.zeros(num_units)
        self.norm_count = np.zeros(num_units, dtype=np.int64)
        # A ring buffer per unit: row `gnmr_count % delta` is the next to be overwritten. Units advance separately,
        # because a norm that is not finite enters no history. Unfilled rows hold 0 and so add nothing to a sum.
        self.window = np.zeros((delta, num_units))
        self.gnmr_count = np.zeros(num_units, dtype=np.int64)
        self._units = np.arange(num_units)

    def observe(self, norms: Floats, seen: Bools | None = None) -> tuple[Floats, Floats]:
        """Score one step and enter it into the history.

        Args:
            norms: gradient norms n[b, t], float64, shape (num_units,); inf and nan allowed.
            seen: units that had a gradient; None: all. The others' history stays as it is.

        Returns:
            GNMR and Δ-GNMR, float64, shape (num_units,) each; +inf where the norm is not finite, nan where not seen.
        """
        finite = np.isfinite(norms) if seen is None else np.isfinite(norms) & seen
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            mean = self.norm_sum / self.norm_count
            gnmr = np.where((self.norm_count > 0) & (mean != 0), norms / mean, 1.0)
            filled = np.minimum(self.gnmr_count, self.delta)
            recent = self.window.sum(axis=0) / filled
            delta_gnmr = np.where((filled > 0) & (recent != 0), gnmr / recent, 1.0)
        gnmr[~finite] = np.inf
        delta_gnmr[~finite] = np.inf

        self.norm_sum[finite] += norms[finite]
        self.norm_count += finite
        # A finite norm can still overflow the ratio; such a GNMR is no usable member of the window.
        usable = np.isfinite(gnmr)
        if seen is not None:
            gnmr[~seen] = delta_gnmr[~seen] = np.nan
        columns = self._units[usable]
        self.window[self.gnmr_count[usable] % self.delta, columns] = gnmr[usable]
        self.gnmr_count += usable
        return gnmr, delta_gnmr


class RecoveryPolicy:
    """Top-maxO selection with locks (paper, section 3.3, Algorithm 2).

    Args:
        recoverable: which units have both paths, bool, shape (num_units,).
        max_o: seats, a number of units.
        t_lock: for how many further decisions a triggered unit that got a seat stays in the pool.
    """

    def __init__(self, recoverable: Bools, max_o: int, t_lock: int) -> None:
        self.recoverable = recoverable
        self.max_o = max_o
        self.t_lock = t_lock
        self.lock = np.zeros(recoverable.shape[0], dtype=np.int64)

    def select(self, risk: Floats) -> tuple[Bools, Bools]:
        """One decision.

        Args:
            risk: R[b, t], float64, shape (num_units,).

        Returns:
            triggered and seated units, bool, shape (num_units,) each.
        """
        triggered = self.recoverable & (risk >= 1.0)
        pool = np.flatnonzero(triggered | (self.lock > 0))
        seated = np.zeros_like(triggered)
        seated[top_units(risk, pool, self.max_o)] = True
        np.maximum(self.lock - 1, 0, out=self.lock)
        # Only a fresh trigger sets the lock: a seat kept by the lock alone would otherwise renew itself for ever.
        self.lock[triggered & seated] = self.t_lock
        return triggered, seated


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


class Controller:
    """Monitor, schedules and policy together: the trigger `gnmr`.

    Args:
        num_units: number of monitored units, at least 1.
        config: thresholds and budget.
        total_steps: optimizer steps of the whole run; needed where the configuration gives shares of it.
        recoverable: bools, shape (num_units,); None means all.
        options: a trigger's own.
        names: of the units, for a trigger that chooses by them.

    Raises:
        ConfigError: no units, a mask of the wrong length, or a share of steps without `total_steps`.
    """

    trigger: ClassVar[str] = "gnmr"
    signal: ClassVar[str | None] = None
    """What it needs measured beside the norms (`signals.SIGNALS`); None: nothing."""
    options: ClassVar[Mapping[str, Any]] = {}
    """A trigger's own options and their defaults."""

    def __init__(
        self,
        num_units: int,
        config: GNMRConfig | None = None,
        *,
        total_steps: int | None = None,
        recoverable: ArrayLike | None = None,
        options: Mapping[str, Any] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        if num_units < 1:
            raise ConfigError(f"num_units={num_units!r}: at least 1 unit is needed")
        self.config = config or GNMRConfig()
        self.num_units = num_units
        self.total_steps = total_steps
        mask = np.ones(num_units, dtype=bool) if recoverable is None else np.array(recoverable, dtype=bool)
        if mask.shape != (num_units,):
            raise ConfigError(f"recoverable has shape {mask.shape}: ({num_units},), one value a unit, is allowed")
        self.alpha_init_steps = self.config.resolve_steps("alpha_init_fraction", total_steps)
        self.fidelity_warmup_steps = self.config.resolve_steps("fidelity_warmup", total_steps)
        self.max_o = self.config.resolve_max_o(int(mask.sum()))
        self.recoverable = mask
        self.monitor = RiskMonitor(num_units, self.config.delta)
        self.policy = RecoveryPolicy(mask, self.max_o, self.config.t_lock)
        self.steps_done = 0
        self.names = list(names)
        self.given: dict[str, Any] = {**self.options, **(options or {})}
        self.check(self.given)
        self._prepare()
        self.active: Bools = self._paths(np.zeros(num_units, dtype=bool))
        """Units on the recovery path in the step that comes next, bool, shape (num_units,)."""

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> None:
        """Raise ConfigError where a trigger's own options (all of them, defaults included) can be told to be wrong."""
        return None

    def _prepare(self) -> None:
        """Resolve a trigger's own options, once the units are known."""
        return None

    @property
    def exact(self) -> bool:
        """Whether the coming step is to run in 16 bits throughout, whatever the recovery path is."""
        return False

    def step(self, norms: ArrayLike, seen: ArrayLike | None = None, signal: ArrayLike | None = None) -> Decision:
        """Read the norms of one optimizer step and decide about the next one.

        Args:
            norms: L2 norm of each unit's unclipped gradient, shape (num_units,); inf and nan are allowed and count as
                the highest risk.
            seen: bools, shape (num_units,): units that had a gradient at all; None: all. One that had none (a layer that was
                skipped, or is frozen for a while) is not observed: a zero would pull its mean down, and its next ordinary
                gradient would look like a spike.
            signal: what `self.signal` asks for, shape (num_units,); nan where a unit gave none.

        Raises:
            ValueError: wrong shape, or a negative norm.
        """
        there = np.ones(self.num_units, dtype=bool) if seen is None else np.array(seen, dtype=bool)
        values = np.where(there, check_norms(norms, self.num_units), 0.0)
        self.steps_done += 1
        alpha = self.config.alpha_init if self.steps_done <= self.alpha_init_steps else self.config.alpha
        beta = self.config.beta
        gnmr, delta_gnmr = self.monitor.observe(values, there)
        risk = gnmr / alpha if beta is None else np.maximum(gnmr / alpha, delta_gnmr / beta)
        risk[~there] = 0.0
        measured = None if signal is None else np.asarray(signal, dtype=np.float64)
        triggered, seated = self._choose(gnmr, risk, there, measured)
        self.active = self._paths(seated)
        return Decision(self.steps_done, alpha, beta, gnmr, delta_gnmr, risk, triggered, self.active.copy(), there)

    def _choose(self, gnmr: Floats, risk: Floats, seen: Bools, signal: Floats | None) -> tuple[Bools, Bools]:
        """Triggered and seated units."""
        return self.policy.select(risk)

    def most_active(self) -> int:
        """The most units that can be on the recovery path at a time: maxO, or all in a fidelity warm-up, which is exempt."""
        return int(self.recoverable.sum()) if self.fidelity_warmup_steps else self.max_o

    def _paths(self, seated: Bools) -> Bools:
        """The seats, unless the coming step lies in the fidelity warm-up, which overrides only the path."""
        if self.steps_done + 1 <= self.fidelity_warmup_steps:
            return self.recoverable.copy()
        return seated

    def state_dict(self) -> dict[str, Any]:
        """Everything the next decision depends on, as plain JSON values (inf and nan as strings); O(units · δ)."""
        return {
            "version": STATE_VERSION,
            "trigger": self.trigger,
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
            "lock": self.policy.lock.tolist(),
            "active": self.active.tolist(),
            "options": dict(self.given),
            **self._more_state(),
        }

    def _more_state(self) -> dict[str, Any]:
        """What a trigger keeps beside the monitor and the policy, as plain JSON values."""
        return {}

    def _load_more(self, state: dict[str, Any]) -> None:
        """The inverse of `_more_state`."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of a controller with the same units and settings.

        The total number of steps may differ (a run that is prolonged): phases that were given as shares of it keep the
        length they had, so that none begins a second time.

        Raises:
            ConfigError: another version, another number of units, mask or configuration; the message names it.
        """
        if state.get("version") != STATE_VERSION:
            raise ConfigError(f"controller state has version {state.get('version')!r}: {STATE_VERSION} is allowed")
        for name, ours in (
            ("trigger", self.trigger),
            ("num_units", self.num_units),
            ("recoverable", self.recoverable.tolist()),
            ("config", self.config.to_dict()),
            ("options", dict(self.given)),
        ):
            theirs = state.get(name)
            if name == "options":  # those that a state lacks are newer than it
                theirs = {**self.options, **(theirs or {})}
            if theirs != ours:
                raise ConfigError(
                    f"controller state was written with {name}={theirs!r}, this run has {ours!r}: "
                    "resume with the model and settings of the checkpoint, or start anew"
                )
        self.steps_done = int(state["steps_done"])
        self.alpha_init_steps = int(state["alpha_init_steps"])
        self.fidelity_warmup_steps = int(state["fidelity_warmup_steps"])
        self.monitor.norm_sum = decode_floats(state["norm_sum"])
        self.monitor.norm_count = np.array(state["norm_count"], dtype=np.int64)
        self.monitor.window = np.stack([decode_floats(row) for row in state["window"]])
        self.monitor.gnmr_count = np.array(state["gnmr_count"], dtype=np.int64)
        self.policy.lock = np.array(state["lock"], dtype=np.int64)
        self.active = np.array(state["active"], dtype=bool)
        self._load_more(state)


def check_norms(norms: ArrayLike, num_units: int) -> Floats:
    """`norms` as float64 of shape (num_units,), or a ValueError that says what is wrong with it."""
    values = np.asarray(norms, dtype=np.float64)
    if values.shape != (num_units,):
        raise ValueError(f"norms have shape {values.shape}: ({num_units},), one value a unit, is allowed")
    if (values < 0).any():
        unit = int(np.flatnonzero(values < 0)[0])
        raise ValueError(f"norm of unit {unit} is {float(values[unit])!r}: a norm is 0 or more (or inf or nan)")
    return values


def encode_floats(values: ArrayLike) -> list[float | str]:
    """Floats as JSON values: finite ones exactly, the others as "inf", "-inf", "nan"."""
    return [v if math.isfinite(v) else str(v) for v in np.asarray(values, dtype=np.float64).tolist()]


def decode_floats(values: Sequence[float | str]) -> Floats:
    """The inverse of `encode_floats`."""
    return np.array([float(v) for v in values], dtype=np.float64)
