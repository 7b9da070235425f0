"""Ways to choose the active set: same norms in, same `Decision` out.

`gnmr` is the paper's controller.  `none` and `all` are its two ends: every recoverable unit on the low-cost path, and
every one on the recovery path (exempt from maxO).  Both ends still score every unit, so that a fixed run's trace shows
what the controller would have seen.
"""

from __future__ import annotations

import numpy as np

from .config import ConfigError, GNMRConfig
from .controller import Bools, Controller


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


TRIGGERS: dict[str, type[Controller]] = {"gnmr": Controller, "none": NoneLifted, "all": AllLifted}


def make_trigger(
    name: str,
    num_units: int,
    config: GNMRConfig,
    *,
    total_steps: int | None = None,
    recoverable: Bools | None = None,
) -> Controller:
    """The trigger called `name`.

    Raises:
        ConfigError: an unknown name, or settings the trigger cannot use.
    """
    check_trigger(name)
    mask = None if recoverable is None else np.asarray(recoverable, dtype=bool)
    return TRIGGERS[name](num_units, config, total_steps=total_steps, recoverable=mask)


def check_trigger(name: str) -> None:
    """Raise ConfigError unless `name` is a known trigger."""
    if name not in TRIGGERS:
        raise ConfigError(f"trigger={name!r}: one of {', '.join(map(repr, TRIGGERS))} is allowed")
