"""What a store of recovery weights provides to the backend and to the plan.

For each 8-bit module, a store makes a function from BF16 input and bias to the BF16 product.  It receives the active set
after every decision, and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import bitsandbytes as bnb
import numpy as np

from ....control.monitor import Bools
from ...base import Counts, Way
from ..bf16_product import Product
from ..originals import Originals

Module: TypeAlias = bnb.nn.Linear8bitLt


class StoreOptions(Protocol):
    """The backend options that a store may read."""

    @property
    def recovery(self) -> str: ...

    @property
    def pin_memory(self) -> bool: ...


@dataclass(frozen=True)
class SwitchedBase:
    """A model whose 8-bit modules are to be switched, as a store sees it."""

    modules: Sequence[Sequence[Module]]
    """The 8-bit modules of each unit."""
    find: Callable[[bool], Originals]
    """Finds and checks the original weights; True: cast those that are not BF16."""
    options: StoreOptions
    """The backend's."""
    on_accelerator: bool
    """Whether the 8-bit weights are on one."""


@dataclass(frozen=True)
class PlannedWeights:
    """What is known about a base in few bits before any weight is loaded; sizes in bytes."""

    weights: int
    """The whole base on the device, low-cost path."""
    units: list[int]
    """BF16 size of each recoverable unit's switched weights, the largest first."""
    largest: int
    """Numbers in the largest switched weight."""
    lifted: int
    """Units on the recovery path at a time."""
    cast: bool
    """Whether the checkpoint is not BF16, so that originals have to be cast."""

    @property
    def slots(self) -> int:
        """The largest `lifted` units in BF16."""
        return sum(self.units[: self.lifted])


class Store(ABC):
    """Recovery weights of all units.

    Args:
        modules: the 8-bit modules of each unit.
    """

    bytes_added: Counts
    """Bytes that each unit adds on the device while it is active (ΔM), shape (num_units,)."""
    resident_bytes: int = 0
    """Bytes that the store holds in device memory (on a CPU: anonymous memory), whatever is active."""
    host_bytes: int = 0
    """Bytes that it holds in the host's anonymous memory, where the host is not the device."""
    holds_all: bool = True
    """Whether all units can be active at once, whatever maxO is."""
    source: str = "not known"
    """Where the originals came from, for the census."""

    def __init__(self, modules: Sequence[Sequence[Module]]) -> None:
        self.modules = [list(members) for members in modules]
        self.weights = np.array([sum(m.state.CB.numel() for m in members) for members in self.modules], dtype=np.int64)
        self.bytes_added = np.zeros(len(self.modules), dtype=np.int64)

    @abstractmethod
    def product(self, module: Module) -> Product:
        """The recovery path of `module`."""

    def bound(self, units: int) -> int:
        """The most bytes that `units` active units can add on the device."""
        return int(np.sort(self.bytes_added)[-units:].sum()) if units > 0 else 0

    def reserve(self, units: int) -> None:
        """Make room for this many active units at a time; before the first `apply`."""
        return None

    def apply(self, active: Bools) -> None:
        """Take the set of units that the next forward runs on the recovery path."""
        return None

    def close(self) -> None:
        """Release everything."""
        return None

    @abstractmethod
    def in_words(self) -> str:
        """What a lifted unit runs, for the census."""

    def census(self) -> dict[str, Any]:
        """Further entries of the census, plain JSON values."""
        return {}


class StoreKind(ABC):
    """One value of the option `recovery`: how its store is made, and what it needs, planned before there is a model."""

    summary: ClassVar[str]
    """What it keeps, for the table of options."""
    originals_used: ClassVar[bool] = True
    """Whether a lifted unit runs the original weights."""
    pins: ClassVar[bool] = False
    """Whether it can hold the originals in pinned host memory."""
    holds_all_anywhere: ClassVar[bool] = True
    """Whether all units can be lifted at once, on every device."""

    @classmethod
    @abstractmethod
    def open(cls, base: SwitchedBase) -> Store:
        """The store of a model's recovery weights.

        Raises:
            SetupError: no originals, or options that this device does not support.
        """

    @classmethod
    @abstractmethod
    def ways(cls, planned: PlannedWeights) -> list[Way]:
        """The ways to hold a base with this store, for `hf-gnmr plan`."""

    @classmethod
    @abstractmethod
    def way(cls, options: StoreOptions, on_cpu: bool) -> str:
        """The key of the way that these options select."""

    @classmethod
    def planned_bounds(cls, planned: PlannedWeights, on_cpu: bool) -> list[int]:
        """The most bytes that 0, 1, … all recoverable units add on the device."""
        return [0] * (len(planned.units) + 1)

    @classmethod
    def planned_holds_all(cls, on_cpu: bool) -> bool:
        """`holds_all`, before there is a store."""
        return True


class Worker:
    """One thread for copies and page work, started with its first job."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, job: Callable[[], Any]) -> Future[Any]:
        """Run `job` in parallel with training, after the jobs before it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hf_gnmr")
        return self._pool.submit(job)

    def close(self) -> None:
        """Wait for the jobs that were started."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
