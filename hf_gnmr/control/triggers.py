"""Ways to choose the active set, by name: same norms in, same `Decision` out.

| name | rule | source |
|---|---|---|
| `gnmr` | the paper's controller | sections 3.1 to 3.3, `gnmr.Controller` |
| `gsnr` | the maxO units of lowest gradient signal-to-noise ratio, every step | Appendix E.5 |
| `jacobian` | the maxO units of highest gain in the backward, every step | Appendix E.5 |
| `static` | a warm-up in 16 bits; then the units of highest mean GNMR in it, always; exempt from maxO | Appendix E.4 |
| `random` | units drawn again each step, a promotion ratio on average, never above maxO | ours: the control to beat |
| `listed` | the units of a list, or those that a trace lifted most, always; exempt from maxO | ours: the other control |
| `none`, `all` | all on the low-cost path, or all recoverable units on the recovery path (exempt from maxO) | the two ends |

All of them score every unit as `gnmr` does, so that any run's trace shows what the controller would have seen.  What a
trigger measures besides the norms is a `training.signals.Signal`.  A new trigger is one file and one line in `TRIGGERS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..config import ConfigError, GNMRConfig, one_of
from .baselines import AllLifted, Listed, NoneLifted, Random
from .controller import Bools, Trigger, TriggerOptions
from .gnmr import Controller
from .ranked import HighestGain, LowestGsnr
from .static import Static

TRIGGERS: dict[str, type[Trigger]] = {
    cls.name: cls for cls in (Controller, NoneLifted, AllLifted, LowestGsnr, HighestGain, Static, Random, Listed)
}


def make_trigger(
    name: str,
    num_units: int,
    config: GNMRConfig,
    *,
    total_steps: int | None = None,
    recoverable: Bools | None = None,
    options: TriggerOptions | Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
) -> Trigger:
    """The trigger called `name`; `names` are the names of the units, which `listed` chooses by.

    Raises:
        ConfigError: an unknown name, or settings the trigger cannot use.
    """
    checked = check_trigger(name, options)
    mask = None if recoverable is None else np.asarray(recoverable, dtype=bool)
    return TRIGGERS[name](num_units, config, total_steps=total_steps, recoverable=mask, options=checked, names=names)


def check_trigger(name: str, options: TriggerOptions | Mapping[str, Any] | None = None) -> TriggerOptions:
    """The options of the trigger called `name`, checked as far as possible without units.

    Raises:
        ConfigError: an unknown name, an option of another trigger, or a wrong value.
    """
    one_of("trigger", name, TRIGGERS)
    for option in {} if isinstance(options, TriggerOptions) else options or {}:
        owners = [trigger for trigger, cls in TRIGGERS.items() if option in cls.Options.defaults()]
        if owners and name not in owners:
            raise ConfigError(f"trigger={name!r} has no option {option!r}: it belongs to {', '.join(owners)}")
    return TRIGGERS[name].make_options(options)
