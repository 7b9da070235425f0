"""What a recorded run lifted, for triggers that repeat it (`random` and `listed` with the option `trace`).

Triggers open no files: `resolve_trigger_options` reads the trace and replaces the option by the result.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np

from ..config import ConfigError
from ..control.controller import Bools, TriggerOptions
from ..files import printable
from .file import TraceError
from .series import read_series


class LiftedRecord:
    """A trace's active sets over the steps that count, a fidelity warm-up excluded.

    Args:
        path: the trace file, or the folder of a run.

    Raises:
        ConfigError: no trace, or a broken one; the message begins with ``trace=``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self.series = read_series(self.path)
        except TraceError as error:
            raise ConfigError(f"trace={self.path!r}: {error}") from error
        header = self.series.header
        share, total = header["config"].get("fidelity_warmup", 0.0), header["total_steps"]
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise ConfigError(f"trace={self.path!r}: its header has fidelity_warmup={share!r}, expected a share")
        warmup_steps = math.ceil(share * total - 1e-9) if share and total else 0
        self.rows: Bools = self.series.counted & (self.series.step > warmup_steps)
        """(S,): lines that enter the figures."""

    def promotion_ratio(self) -> float:
        """Mean share of the recoverable units on the recovery path.

        Raises:
            ConfigError: no step that counts after the warm-up, or no recoverable unit.
        """
        pairs = int(self.rows.sum()) * int(self.series.recoverable.sum())
        if not pairs:
            raise ConfigError(f"trace={self.path!r} has no step or no recoverable unit, hence no promotion ratio")
        return int(self.series.active[self.rows].sum()) / pairs

    def most_lifted(self, names: Sequence[str], recoverable: Bools) -> list[str]:
        """Names of the recoverable units, those lifted in the most steps first, ties in the order of the units.

        Args:
            names: (U,): names of this run's units; they are compared as a trace holds them (`files.printable`), and returned
                as given.
            recoverable: (U,): this run's units with both paths.

        Raises:
            ConfigError: the trace is of other units.
        """
        self._check_same_units([printable(name) for name in names], [bool(able) for able in recoverable])
        steps = self.series.active[self.rows].sum(axis=0)
        order = sorted(np.flatnonzero(recoverable).tolist(), key=lambda unit: -steps[unit])
        return [names[unit] for unit in order]

    def _check_same_units(self, names: list[str], recoverable: list[bool]) -> None:
        units = list(zip(names, recoverable, strict=True))
        recorded = list(zip(self.series.names, self.series.recoverable.tolist(), strict=True))
        if units == recorded:
            return
        unequal = next((pair for pair in zip(recorded, units, strict=False) if pair[0] != pair[1]), None)
        if unequal is None:
            difference = f"{len(recorded)} units, this run {len(units)}"
        else:
            (name, able), (name_here, _) = unequal
            if name != name_here:
                difference = f"a unit {name!r}, this run {name_here!r}"
            else:
                difference = f"a unit {name!r} {'with' if able else 'without'} a recovery path, unlike this run"
        raise ConfigError(f"trace={self.path!r} has {difference}: expected a trace over the same units")


def resolve_trigger_options(options: TriggerOptions, names: Sequence[str], recoverable: Bools) -> TriggerOptions:
    """Options with the option `trace`, where it is set, replaced by what that trace gives; others unchanged.

    Args:
        options: a trigger's options.
        names: (U,): names of the units.
        recoverable: (U,): units with both paths.

    Raises:
        ConfigError: see `LiftedRecord`.
    """
    path = getattr(options, "trace", None)
    return options if path is None else options.resolved(LiftedRecord(path), names, recoverable)
