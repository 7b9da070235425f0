"""What is switched and how: options checked at construction, and models taken over with them or refused."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from ..backends import BACKENDS, Backend, BackendOptions, backend_options, option_names
from ..backends.bnb.switchable import restore_plain
from ..backends.units import FINDERS, Unit
from ..config import ConfigError, GNMRConfig, nearest, parse_bytes
from ..control.controller import Trigger, TriggerOptions
from ..control.triggers import TRIGGERS, check_trigger, make_trigger
from ..terminal import shown
from ..trace.lifted import resolve_trigger_options
from .engines import refuse_unreadable_engine

DEFAULT_BACKEND, DEFAULT_TRIGGER = "int8", "gnmr"


class Options:
    """What is switched and how, apart from the thresholds; checked at construction.

    Args:
        backend: one of `backends.BACKENDS`.
        trigger: one of `control.triggers.TRIGGERS`.
        trigger_options: the trigger's own options, e.g. {"promotion_ratio": 0.1} for "random".
        layers: pattern for the decoder layers of an unknown architecture, e.g. "transformer.blocks.*".
        max_recovery_memory: device memory that the lifted units may add, instead of max_o: bytes, or "6GB", "500MiB".
        of_backend: the backend's own options, as declared in its `Options`.

    Raises:
        ConfigError: a wrong value, by name; an unknown option, with the nearest known one.
    """

    def __init__(
        self,
        backend: str = DEFAULT_BACKEND,
        trigger: str = DEFAULT_TRIGGER,
        trigger_options: Mapping[str, Any] | TriggerOptions | None = None,
        layers: str | None = None,
        max_recovery_memory: int | str | None = None,
        **of_backend: Any,
    ) -> None:
        self.backend, self.trigger = backend, trigger
        self.of_backend: BackendOptions = backend_options(backend, of_backend)
        """The backend's own options."""
        self.layers, self.max_recovery_memory = layers, max_recovery_memory
        if trigger_options is not None and not isinstance(trigger_options, (Mapping, TriggerOptions)):
            raise ConfigError(f"trigger_options={trigger_options!r}: expected a dict of the trigger's own options")
        if isinstance(trigger_options, Mapping):
            # Paths as text, because options are stored in checkpoints as JSON.
            trigger_options = {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in trigger_options.items()}
        self.of_trigger: TriggerOptions = check_trigger(trigger, trigger_options)
        """The trigger's own options."""
        if layers is not None and not isinstance(layers, str):
            raise ConfigError(f"layers={layers!r}: expected a pattern such as 'transformer.blocks.*', or None")
        self._check_combination()

    def _check_combination(self) -> None:
        """Raise ConfigError for options that contradict each other."""
        backend = BACKENDS[self.backend]
        if self.unit_kind == "expert" and TRIGGERS[self.trigger].signal is not None:
            raise ConfigError(
                f"trigger={self.trigger!r} with unit='expert': experts in one tensor have no separate inputs and "
                "parameters to measure; use unit='experts'"
            )
        if not backend.switches and self.trigger != DEFAULT_TRIGGER:
            raise ConfigError(
                f"trigger={self.trigger!r} with backend={self.backend!r}: nothing is switched; leave the trigger at "
                f"{DEFAULT_TRIGGER!r}"
            )
        if self.max_recovery_memory is None:
            return
        parse_bytes("max_recovery_memory", self.max_recovery_memory)
        why_not = backend.why_no_budget(self.of_backend)
        if why_not is None and not TRIGGERS[self.trigger].takes_budget:
            why_not = f"trigger={self.trigger!r} takes no budget in bytes; give max_o"
        if why_not is not None:
            raise ConfigError(f"max_recovery_memory={self.max_recovery_memory!r} with backend={self.backend!r}: {why_not}")

    @property
    def unit_kind(self) -> str:
        """What is switched as one unit, with the default resolved."""
        return BACKENDS[self.backend].unit_kind(self.of_backend)

    @classmethod
    def names(cls) -> list[str]:
        """All option names: the general ones, and those of every backend."""
        return ["backend", "trigger", "trigger_options", "layers", "max_recovery_memory", *option_names()]

    def to_dict(self) -> dict[str, Any]:
        """Keywords that make equal options, as plain JSON values."""
        return {
            "backend": self.backend,
            "trigger": self.trigger,
            "trigger_options": self.of_trigger.changed(),
            "layers": self.layers,
            "max_recovery_memory": self.max_recovery_memory,
            **self.of_backend.to_dict(),
        }

    def stored(self) -> dict[str, Any]:
        """The same for a checkpoint: with the options of other backends at their defaults, as version 0.1.0 reads them."""
        foreign: dict[str, Any] = {}
        for backend in BACKENDS.values():
            foreign = {**backend.Options.defaults(), **foreign}
        return {**foreign, **self.to_dict()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Options) and self.to_dict() == other.to_dict()

    def __repr__(self) -> str:
        return f"Options({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    __hash__ = None  # type: ignore[assignment]


def signature_with_settings(function: Callable[..., Any]) -> inspect.Signature:
    """A constructor's signature with `**settings` replaced by every single setting, for `help` and editors."""
    own = list(inspect.signature(function).parameters.values())[:-1]  # without **settings
    listed = {parameter.name for parameter in own}
    settings = {field.name: field.default for field in fields(GNMRConfig)}
    for cls in BACKENDS.values():
        settings = {**cls.Options.defaults(), **settings}
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in settings.items()
        if name not in listed
    ]
    return inspect.Signature([*own, *extra])


def split_settings(settings: Mapping[str, Any], owner: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keywords into those of `Options` and those of `GNMRConfig`.

    Raises:
        ConfigError: a keyword of neither, with the nearest known one.
    """
    thresholds = [field.name for field in fields(GNMRConfig)]
    for name in settings:
        if name not in thresholds and name not in Options.names():
            raise ConfigError(f"{owner} has no argument {name!r}: {nearest(name, [*thresholds, *Options.names()])}")
    own = {name: value for name, value in settings.items() if name not in thresholds}
    return own, {name: value for name, value in settings.items() if name in thresholds}


def make_config(config: GNMRConfig | dict[str, Any] | None, settings: dict[str, Any], owner: str) -> GNMRConfig:
    """A configuration from an object, a dict or keywords; only one of them may be given."""
    known = [field.name for field in fields(GNMRConfig)]
    for name in [*settings, *(config if isinstance(config, dict) else {})]:
        if name not in known:
            kind = "config: " if name not in settings else ""
            raise ConfigError(f"{kind}{owner} has no argument {shown(name)}: GNMRConfig's fields are {', '.join(known)}")
    if config is not None and settings:
        raise ConfigError(f"give config= or its fields as keywords, not both (got {', '.join(settings)})")
    if isinstance(config, dict):
        try:
            config = GNMRConfig(**config)
        except ConfigError as error:
            raise ConfigError(f"config: {error}") from error
    if config is not None and not isinstance(config, GNMRConfig):
        raise ConfigError(f"config={config!r}: expected a GNMRConfig")
    return config or GNMRConfig(**settings)


def take_over(model: nn.Module, config: GNMRConfig, options: Options) -> tuple[list[Unit], Backend, GNMRConfig]:
    """Find the units of `model` and make them switchable, or refuse the model (`Backend.remove` undoes it).

    Returns:
        Units, backend, and the configuration with the max_o that follows from `max_recovery_memory`.
    """
    refuse_unreadable_engine(model)
    restore_plain(model)  # after an interrupted training, even if this backend switches nothing
    units = FINDERS[options.unit_kind](model, options.layers)
    backend = BACKENDS[options.backend](model, units, options.of_backend)
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
) -> Trigger:
    """The trigger for the units that `take_over` found.

    Raises:
        ConfigError: options that do not fit these units.
    """
    names = [unit.name for unit in units]
    return make_trigger(
        options.trigger,
        len(units),
        config,
        total_steps=total_steps,
        recoverable=backend.recoverable,
        options=resolve_trigger_options(options.of_trigger, names, backend.recoverable),
        names=names,
    )


def within_budget(config: GNMRConfig, options: Options, bounds: Sequence[int], *, holds_all: bool) -> GNMRConfig:
    """`config` with the max_o that the model and `max_recovery_memory` allow: any set of that many units fits.

    Args:
        config: thresholds and budget.
        options: what is switched and how.
        bounds: the most that 0, 1, … or all recoverable units can add, in bytes.
        holds_all: whether all units can be active at once, whatever max_o is (a fidelity warm-up lifts all of them).

    Raises:
        ConfigError: max_o is above the number of recoverable units, no unit fits, the fidelity warm-up does not fit, both
            max_o and a budget are given, or lifted units add no memory.
    """
    count = len(bounds) - 1
    if count and isinstance(config.max_o, int) and config.max_o > count:
        raise ConfigError(f"max_o={config.max_o}: expected at most {count}, the model's recoverable units")
    warm_up = f"fidelity_warmup={config.fidelity_warmup} lifts all {count} units, which add {bounds[-1]:,} bytes"
    if options.max_recovery_memory is not None:
        setting = f"max_recovery_memory={options.max_recovery_memory!r}"
        budget = parse_bytes("max_recovery_memory", options.max_recovery_memory)
        if config.max_o != GNMRConfig().max_o:
            raise ConfigError(f"{setting} and max_o={config.max_o!r}: give only one of them")
        if bounds[-1] == 0:
            raise ConfigError(
                f"{setting}: lifted units add no memory here ({options.of_backend.store()}); give max_o instead"
            )
        fitting = max(units for units, size in enumerate(bounds) if size <= budget)
        if fitting == 0:
            raise ConfigError(f"{setting} is below one unit: the largest adds {bounds[1]:,} bytes")
        if config.fidelity_warmup and fitting < count:
            raise ConfigError(f"{setting}: {warm_up}")
        config = dataclasses.replace(config, max_o=fitting)
    if config.fidelity_warmup and not holds_all and config.resolve_max_o(count) < count:
        raise ConfigError(
            f"{warm_up}, but {options.of_backend.store()} holds only {config.resolve_max_o(count)} of them on this device: "
            f"use {options.of_backend.store_for_all()}, which holds all of them, or no warm-up"
        )
    return config
