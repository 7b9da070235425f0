"""What a backend provides: its options, units with two paths each, and a way to apply an active set.

A backend never sees a score or a threshold, and nothing outside this package knows about formats, kernels or weights.  All
that a recipe section, the callback, the session, the plan and the README state about a backend's options is derived from
its `Options`; a new backend is one file and one line in `BACKENDS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..config import ConfigError, DeclaredOptions, one_of
from ..control.monitor import Bools
from .units import Unit

Counts = NDArray[np.int64]
EVAL_PATHS = ("low", "recovery", "active")


@dataclass(frozen=True)
class BackendOptions(DeclaredOptions):
    """A backend's own options."""

    @classmethod
    def choices(cls, name: str) -> dict[str, str]:
        """What each value of the option `name` means, where its values are the keys of a registry; else empty."""
        return {}

    def store_for_all(self) -> str:
        """The value of that option with which all units can be lifted at once; empty where there is none."""
        return ""

    def store(self) -> str:
        """The option that says where recovery weights are kept, as messages name it; empty where nothing is kept."""
        return ""


def check_unit(backend: str, unit: str | None, kinds: Sequence[str]) -> None:
    """Raise ConfigError unless `unit` is None or one of the backend's kinds of unit."""
    if unit is not None and unit not in kinds:
        raise ConfigError(f"unit={unit!r}: expected one of {', '.join(map(repr, kinds))} with backend={backend!r}")


def check_eval_path(eval_path: str) -> None:
    """Raise ConfigError for an unknown path in eval mode."""
    one_of("eval_path", eval_path, EVAL_PATHS)


@dataclass(frozen=True)
class Way:
    """One way to hold a recipe's base model, as the plan lists it; sizes in bytes."""

    key: str
    name: str
    """For people."""
    weights: int
    """Weights on the device, recovery apart."""
    recovery: int = 0
    """What recovery takes on the device at most."""
    host_bytes: int = 0
    """Anonymous memory of the host."""
    moved: int = 0
    """From host to device in a step, at worst."""
    note: str = ""
    """What else there is to say about it."""


Seats: TypeAlias = Callable[[Sequence[int], bool, list[bool]], tuple[int, int]]
"""(bytes that 0, 1, … lifted units add; whether all can be lifted at once; recoverable units) -> (maxO, units lifted)."""
BY_TOKENS = "what a lifted unit adds depends on the tokens of a batch; give max_o"
"""Why a budget of bytes cannot bound what is counted per token."""


@dataclass(frozen=True)
class BasePlan:
    """What a plan needs to know about a base stored in few bits."""

    ways: list[Way]
    way: str
    """Key of the way that the recipe asks for."""
    unit_bytes: list[int]
    """BF16 size of each recoverable unit's switched weights, the largest first."""
    max_o: int
    lifted: int
    """Units on the recovery path at a time; 0: the trigger lifts none."""


class Backend(ABC):
    """A set of units that can run a low-cost or a recovery path.

    Constructing one makes the model switchable (every unit on the low-cost path); `remove` undoes that.
    Arrays have shape (num_units,).
    """

    changes_forward: ClassVar[bool] = True
    """Whether the two paths give different outputs (not only different gradients)."""
    name: ClassVar[str]
    Options: ClassVar[type[BackendOptions]] = BackendOptions
    unit_kinds: ClassVar[tuple[str, ...]] = ("layer",)
    """Kinds of unit (`units.FINDERS`) that the backend can switch, its default first."""
    switches: ClassVar[bool] = True
    """Whether there is a second path."""
    quantised_base: ClassVar[bool] = False
    """Whether the base model itself is stored in few bits: loaded that way, frozen, trained through adapters."""
    base_in_words: ClassVar[str] = "BF16"
    """What a model of this backend runs once training has ended."""

    recoverable: Bools
    """Units with both paths."""
    bytes_low: Counts
    """Bytes of the switched weights on the low-cost path, per unit."""
    bytes_recovery: Counts
    """Bytes of the same weights on the recovery path, per unit."""
    bytes_added: Counts
    """Bytes that a unit adds on the device while it is active (ΔM), beyond what is resident anyway."""
    resident_bytes: int = 0
    """Bytes that the store of recovery weights holds in device memory (on a CPU: anonymous memory), whatever is active."""
    host_bytes: int = 0
    """Bytes that it holds in the host's anonymous memory, where the host is not the device."""
    holds_all: bool = True
    """Whether all units can be active at once, whatever maxO is."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], options: BackendOptions | None = None, **settings: Any
    ) -> None:
        """Make the model's units switchable; every unit starts on the low-cost path.

        Args:
            model: the model.
            units: its monitored units.
            options: the backend's options; None: taken from the keywords, with defaults for the others.

        Raises:
            ConfigError: unknown options, or wrong values.
            SetupError: a model that cannot be switched.
        """
        if options is not None and (settings or not isinstance(options, self.Options)):
            raise ConfigError(
                f"backend={self.name!r}: expected a {self.Options.__name__} or its fields as keywords, got "
                f"{type(options).__name__}{' and ' if settings else ''}{', '.join(settings)}"
            )
        self.options = self.Options.of(settings, f"backend={self.name!r}") if options is None else options
        self.take(model, units)

    @abstractmethod
    def take(self, model: nn.Module, units: Sequence[Unit]) -> None:
        """Make the units switchable under `self.options`, or raise SetupError."""

    # -- before there is a model ---------------------------------------------------------------------------------------

    @classmethod
    def unit_kind(cls, options: BackendOptions) -> str:
        """The kind of unit that is switched, the default resolved."""
        return getattr(options, "unit", None) or cls.unit_kinds[0]

    @classmethod
    def why_no_budget(cls, options: BackendOptions) -> str | None:
        """Why `max_recovery_memory` cannot bound what lifted units add; None: it can."""
        return None

    @classmethod
    def check_device(cls, options: BackendOptions, device: torch.device) -> None:
        """Raise SetupError if `device` cannot run what the options ask for, before the model is loaded."""
        return None

    @classmethod
    def quantization_config(cls, llm_int8_threshold: float) -> Any:
        """transformers' quantization configuration for loading a base; None: the base is loaded unquantised."""
        return None

    # -- the plan, on the meta device ------------------------------------------------------------------------------------

    @classmethod
    def quantise_on_meta(cls, model: Any) -> None:
        """Give a model on the meta device the modules that loading would give it."""
        return None

    @classmethod
    def plan_base(
        cls, model: Any, units: Sequence[Unit], options: BackendOptions, *, cast: bool, on_cpu: bool, seats: Seats
    ) -> BasePlan:
        """The ways to hold a base that is stored in few bits; only where `quantised_base`.

        Args:
            model: the base on the meta device, as `quantise_on_meta` and adapters left it.
            units: its monitored units.
            options: the recipe's, or the defaults if the recipe has another backend.
            cast: whether originals have to be cast, since the checkpoint is not BF16.
            on_cpu: whether the run asks for the CPU.
            seats: (bounds, holds_all, recoverable) -> (maxO, units lifted at a time), as the run itself would have them.
        """
        raise NotImplementedError

    @classmethod
    def plan_saved(
        cls, model: Any, units: Sequence[Unit], options: BackendOptions, forward: Callable[[Any], None], half: bool
    ) -> dict[str, int]:
        """Bytes kept for a micro-batch's backward, by path; raises what the run itself would raise.

        Args:
            model: the model on the meta device, with its adapters.
            units: its monitored units.
            options: the recipe's.
            forward: model -> None: one micro-batch in train mode.
            half: whether products run in 16 bits (autocast).
        """
        return {}

    # -- switching -------------------------------------------------------------------------------------------------------

    def reserve(self, units: int) -> None:
        """Make room for this many active units at a time; before the first `apply`."""
        return None

    @abstractmethod
    def apply(self, active: Bools) -> int:
        """Put `active` units on the recovery path and all others on the low-cost one; returns how many changed.

        Called only between an optimizer step and the next forward.
        """

    def apply_exact(self) -> int:
        """Run all units in 16 bits, whatever the recovery path is (a trigger's warm-up); until the next `apply`."""
        return self.apply(self.recoverable)

    @abstractmethod
    def remove(self) -> None:
        """Restore the model; may be called twice."""

    # -- reporting -------------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What a history is tied to, besides layers and settings: a resumed run must match it; plain JSON values."""
        return {"recovery": "none"}

    @abstractmethod
    def census(self) -> dict[str, Any]:
        """What runs on each path, as plain JSON values for the trace."""

    def census_lines(self, census: Mapping[str, Any]) -> list[str]:
        """The run's census (this backend's entries in it) as lines for the user."""
        return [str(census["path"])]

    def step_figures(self) -> dict[str, Any]:
        """What the backend reports about the step that has just finished, for the trace: plain JSON values."""
        return {}

    def idle(self) -> Bools:
        """Units none of whose switched modules ran in the last step that `step_figures` reported; none, if unknown."""
        return np.zeros(len(self.recoverable), dtype=bool)

    def recovery_bytes(self, active: Bools) -> int:
        """ΔM of an active set."""
        return int(self.bytes_added[active].sum())

    def recovery_bytes_bound(self, units: int) -> int:
        """The most that `units` active units can add."""
        if units <= 0:
            return 0
        return int(np.sort(self.bytes_added[self.recoverable])[-units:].sum())
