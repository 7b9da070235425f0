"""What a store of recovery weights owes the INT8 backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import bitsandbytes as bnb
import numpy as np

from ....control.controller import Bools
from ...base import Counts
from ..bf16_product import Product

Module: TypeAlias = bnb.nn.Linear8bitLt


class Store(ABC):
    """Recovery weights of all units.

    Args:
        modules: the 8-bit modules of each unit.
    """

    bytes_added: Counts
    """What each unit adds on the device while it is active (ΔM), shape (num_units,)."""
    resident_bytes: int = 0
    """What the store holds in the device's memory whatever is active (on a CPU: in anonymous memory)."""
    host_bytes: int = 0
    """What it holds in anonymous memory of the host, where that is not the device."""
    holds_all: bool = True
    """Whether all units can be active at once, whatever maxO is."""

    def __init__(self, modules: Sequence[Sequence[Module]]) -> None:
        self.modules = [list(members) for members in modules]
        self.weights = np.array([sum(m.state.CB.numel() for m in members) for members in self.modules], dtype=np.int64)
        self.bytes_added = np.zeros(len(self.modules), dtype=np.int64)

    @abstractmethod
    def product(self, module: Module) -> Product:
        """The recovery path of `module`."""

    def bound(self, units: int) -> int:
        """The most that `units` active units can add on the device."""
        return int(np.sort(self.bytes_added)[-units:].sum()) if units > 0 else 0

    def reserve(self, units: int) -> None:
        """Make room for as many active units at a time; before the first `apply`."""
        return None

    def apply(self, active: Bools) -> None:
        """The set that the next forward runs on the recovery path."""
        return None

    def close(self) -> None:
        """Let go of everything."""
        return None

    @abstractmethod
    def in_words(self) -> str:
        """What a lifted unit runs, for the census."""


class Worker:
    """One thread for copies and page work, started with its first job."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, job: Callable[[], Any]) -> Future[Any]:
        """Run `job` beside the training, after the jobs before it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hf_gnmr")
        return self._pool.submit(job)

    def close(self) -> None:
        """Wait for what was started."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
