"""What is switched and how: options checked on construction, and a model taken over under them or refused."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from ..backends import BACKENDS, Backend, check_backend
from ..backends.activation import check_bits
from ..backends.bnb.int8 import check_options
from ..backends.bnb.switchable import restore_plain
from ..backends.fewbit.fp8 import check_emulate
from ..backends.fewbit.lowbit import products_of
from ..backends.units import FINDERS, Unit
from ..config import ConfigError, GNMRConfig, parse_bytes
from ..control.controller import Controller
from ..control.triggers import check_trigger, make_trigger
from ..run.sections import OF_BACKEND, UNITS
from .checks import refuse_partitioned_gradients

NOT_ITS_OWN = ("unit",)
"""Of those, what the backend itself is not given."""


@dataclass(frozen=True)
class Options:
    """What is switched and how, beside the thresholds; checked on construction.

    Raises:
        ConfigError: an option's value that is not allowed, by name.
    """

    backend: str = "int8"
    """"int8" (bitsandbytes INT8 ↔ BF16), "activation" (saved activations in few bits), "fp8" (hybrid FP8), "lowbit" (4 and 6
    bits, simulated) or "none" (monitor only)."""
    trigger: str = "gnmr"
    """One of `triggers.TRIGGERS`."""
    trigger_options: Mapping[str, Any] = field(default_factory=dict)
    """The trigger's own options, e.g. {"promotion_ratio": 0.1} of "random"."""
    recovery: str = "host"
    """The store of recovery weights: "host", "device" (original BF16 weights both) or "dequantize" (the 8-bit ones)."""
    recovery_source: str | os.PathLike[str] | None = None
    """Folder or Hub id of the original weights; None: what the model was loaded from."""
    max_recovery_memory: int | str | None = None
    """Device memory that the lifted units may add, instead of max_o: bytes, or "6GB", "500MiB"."""
    pin_memory: bool = False
    """With "host" on an accelerator: hold the originals in pinned host memory."""
    layers: str | None = None
    """Pattern for the decoder layers of an unknown architecture, e.g. "transformer.blocks.*"."""
    eval_path: str = "low"
    """Path in eval mode: "low", "recovery" or "active"."""
    unit: str | None = None
    """What is switched as one. Backend "activation": "projection" (what None means) or "layer"; "fp8" and "lowbit": "layer"
    (None), "experts" (a layer's experts together) or "expert" (each)."""
    bits_low: int = 4
    """Bits on the low-cost path. Backend "activation", of saved activations: 2 to 8; "lowbit": 4 or 6."""
    bits_recovery: int = 8
    """Bits on the recovery path; 16: not quantised."""
    format: str = "float"
    """Backend "activation": "float" (E2M1, E3M2, E4M3) or "int" (symmetric)."""
    emulate: bool | str = False
    """Backend "fp8": true: emulated; "auto": emulated where the device has no FP8; false: refused there."""

    def __post_init__(self) -> None:
        check_backend(self.backend)
        if not isinstance(self.trigger_options, Mapping):
            raise ConfigError(f"trigger_options={self.trigger_options!r}: a dict of the trigger's own options is allowed")
        # Paths as text: options go into checkpoints as JSON.
        plain = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in self.trigger_options.items()}
        object.__setattr__(self, "trigger_options", plain)
        check_trigger(self.trigger, self.trigger_options)
        check_emulate(self.emulate)
        self._refuse_what_says_nothing()
        if self.backend == "lowbit":
            products_of(self.bits_low, self.bits_recovery)
        else:
            check_bits(self.bits_low, self.bits_recovery, self.format)
        kinds = UNITS.get(self.backend, ())
        if self.unit is not None and self.unit not in kinds:
            raise ConfigError(
                f"unit={self.unit!r}: one of {', '.join(map(repr, kinds))} is allowed with backend={self.backend!r}"
            )
        if self.unit == "expert" and self.trigger in ("gsnr", "jacobian"):
            raise ConfigError(
                f"trigger={self.trigger!r} with unit='expert': experts in one tensor have no input and no parameters of "
                "their own to measure; use unit='experts'"
            )
        check_options(
            recovery=self.recovery,
            recovery_source=self.recovery_source,
            eval_path=self.eval_path,
            pin_memory=self.pin_memory,
        )
        if self.layers is not None and not isinstance(self.layers, str):
            raise ConfigError(f"layers={self.layers!r}: a pattern such as 'transformer.blocks.*', or None, is allowed")
        if self.backend == "none" and self.trigger != "gnmr":
            raise ConfigError(
                f"trigger={self.trigger!r} with backend='none': nothing is switched, leave the trigger at 'gnmr'"
            )
        if self.max_recovery_memory is not None:
            parse_bytes("max_recovery_memory", self.max_recovery_memory)
            if self.backend in UNITS:
                raise ConfigError(
                    f"max_recovery_memory with backend={self.backend!r}: what a lifted unit adds depends on the tokens of "
                    "a batch; give max_o"
                )
            if self.backend == "none" or self.recovery == "dequantize" or self.trigger != "gnmr":
                raise ConfigError(
                    f"max_recovery_memory={self.max_recovery_memory!r} bounds what chosen units add; there is nothing to "
                    f"bound with backend={self.backend!r}, recovery={self.recovery!r}, trigger={self.trigger!r}"
                )

    def _refuse_what_says_nothing(self) -> None:
        """Options of another backend than the one that was chosen."""
        for name in dict.fromkeys(name for names in OF_BACKEND.values() for name in names):
            owners = [backend for backend, names in OF_BACKEND.items() if name in names]
            if self.backend not in owners and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} belongs to backend={' or '.join(map(repr, owners))}; this is "
                    f"backend={self.backend!r}"
                )

    @property
    def unit_kind(self) -> str:
        """What is switched as one, the default said."""
        return self.unit or UNITS.get(self.backend, ("layer",))[0]


def make_config(config: GNMRConfig | dict[str, Any] | None, settings: dict[str, Any], owner: str) -> GNMRConfig:
    """A configuration from an object, a dict or keywords, of which only one may be given."""
    known = [field.name for field in fields(GNMRConfig)]
    for name in [*settings, *(config if isinstance(config, dict) else {})]:
        if name not in known:
            raise ConfigError(f"{owner} has no argument {name!r}: GNMRConfig's fields are {', '.join(known)}")
    if config is not None and settings:
        raise ConfigError(f"give config= or its fields as keywords, not both (got {', '.join(settings)})")
    if isinstance(config, dict):
        config = GNMRConfig(**config)
    if config is not None and not isinstance(config, GNMRConfig):
        raise ConfigError(f"config={config!r}: a GNMRConfig is allowed")
    return config or GNMRConfig(**settings)


def take_over(model: nn.Module, config: GNMRConfig, options: Options) -> tuple[list[Unit], Backend, GNMRConfig]:
    """Find the units of `model` and make them switchable, or refuse (`Backend.remove` undoes it).

    Returns:
        Units, backend, and the configuration with the max_o that `max_recovery_memory` comes to.
    """
    refuse_partitioned_gradients(model)
    restore_plain(model)  # of a training that was broken off: also where this backend switches nothing
    units = FINDERS[options.unit_kind](model, options.layers)
    more = {name: getattr(options, name) for name in OF_BACKEND.get(options.backend, ()) if name not in NOT_ITS_OWN}
    backend = BACKENDS[options.backend](model, units, **more)
    count = int(backend.recoverable.sum())
    try:
        bounds = [backend.recovery_bytes_bound(lifted) for lifted in range(count + 1)]
        config = within_budget(config, options, bounds, holds_all=backend.holds_all)
    except BaseException:
        backend.remove()
        raise
    return units, backend, config


def trigger_over(
    units: Sequence[Unit], backend: Backend, config: GNMRConfig, options: Options, total_steps: int | None
) -> Controller:
    """The trigger over units that `take_over` found.

    Raises:
        ConfigError: options that do not fit these units.
    """
    return make_trigger(
        options.trigger,
        len(units),
        config,
        total_steps=total_steps,
        recoverable=backend.recoverable,
        options=options.trigger_options,
        names=[unit.name for unit in units],
    )


def within_budget(config: GNMRConfig, options: Options, bounds: Sequence[int], *, holds_all: bool) -> GNMRConfig:
    """`config` with a max_o that the model and `max_recovery_memory` allow: any choice of so many units fits.

    Args:
        bounds: the most that 0, 1, … all recoverable units can add, in bytes.
        holds_all: whether the store holds all units whatever max_o is (a fidelity warm-up lifts all of them).

    Raises:
        ConfigError: more units than there are, no unit fits, the fidelity warm-up does not, max_o is given as well as a
            budget, or units add nothing.
    """
    count = len(bounds) - 1
    if count and isinstance(config.max_o, int) and config.max_o > count:
        raise ConfigError(f"max_o={config.max_o}: the model has {count} recoverable units, at most that is allowed")
    warm_up = f"fidelity_warmup={config.fidelity_warmup} lifts all {count} units, which add {bounds[-1]:,} bytes"
    if options.max_recovery_memory is not None:
        given = f"max_recovery_memory={options.max_recovery_memory!r}"
        budget = parse_bytes("max_recovery_memory", options.max_recovery_memory)
        if config.max_o != GNMRConfig().max_o:
            raise ConfigError(f"{given} and max_o={config.max_o!r}: give one of them")
        if bounds[-1] == 0:
            raise ConfigError(
                f"{given}: lifted units add no memory here (recovery={options.recovery!r}); give max_o instead"
            )
        fitting = max(units for units, size in enumerate(bounds) if size <= budget)
        if fitting == 0:
            raise ConfigError(f"{given} is below one unit: the largest adds {bounds[1]:,} bytes")
        if config.fidelity_warmup and fitting < count:
            raise ConfigError(f"{given}: {warm_up}")
        config = dataclasses.replace(config, max_o=fitting)
    if config.fidelity_warmup and not holds_all and config.resolve_max_o(count) < count:
        raise ConfigError(
            f"{warm_up}, and recovery={options.recovery!r} holds {config.resolve_max_o(count)} of them on this device: use "
            "recovery='device', which holds all, or no warm-up"
        )
    return config
