"""Backends by name. A new one is one file here and one line in the dict; its options are declared in its `Options`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ConfigError, nearest, one_of
from .activation import ActivationBackend
from .base import Backend, BackendOptions
from .bnb.int8 import Int8Backend
from .fewbit.fp8 import Fp8Backend
from .fewbit.lowbit import LowBitBackend
from .none import NoBackend

BACKENDS: dict[str, type[Backend]] = {
    cls.name: cls for cls in (Int8Backend, ActivationBackend, Fp8Backend, LowBitBackend, NoBackend)
}


def option_names() -> list[str]:
    """The options of all backends, each once."""
    return list(dict.fromkeys(name for cls in BACKENDS.values() for name in cls.Options.defaults()))


def backend_options(backend: str, values: Mapping[str, Any]) -> BackendOptions:
    """The options of the backend called `backend`, from values by name.

    An option of another backend is accepted at its default value, where it has no effect (recipes and checkpoints of
    version 0.1.0 list the options of all backends).

    Raises:
        ConfigError: an unknown backend or option, a wrong value, or a value for another backend's option.
    """
    one_of("backend", backend, BACKENDS)
    own = BACKENDS[backend].Options.defaults()
    for name, value in values.items():
        if name in own:
            continue
        owners = {owner: cls.Options.defaults()[name] for owner, cls in BACKENDS.items() if name in cls.Options.defaults()}
        if not owners:
            raise ConfigError(f"unknown option {name}={value!r}: {nearest(name, option_names())}")
        if not any(value == default and type(value) is type(default) for default in owners.values()):
            raise ConfigError(
                f"{name}={value!r} belongs to backend={' or '.join(map(repr, owners))}; this is backend={backend!r}"
            )
    return BACKENDS[backend].Options.of({n: value for n, value in values.items() if n in own}, f"backend={backend!r}")


__all__ = [
    "BACKENDS",
    "ActivationBackend",
    "Backend",
    "BackendOptions",
    "Fp8Backend",
    "Int8Backend",
    "LowBitBackend",
    "NoBackend",
    "backend_options",
    "option_names",
]
