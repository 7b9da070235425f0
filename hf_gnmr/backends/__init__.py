"""Backends by name. A new format is one file here and one line in the dict."""

from __future__ import annotations

from ..config import ConfigError
from .activation import ActivationBackend
from .base import Backend
from .bnb.int8 import Int8Backend
from .fewbit.fp8 import Fp8Backend
from .fewbit.lowbit import LowBitBackend
from .none import NoBackend

BACKENDS: dict[str, type[Backend]] = {
    "int8": Int8Backend,
    "activation": ActivationBackend,
    "fp8": Fp8Backend,
    "lowbit": LowBitBackend,
    "none": NoBackend,
}


def check_backend(name: str) -> None:
    """Raise ConfigError unless `name` is a known backend."""
    if name not in BACKENDS:
        raise ConfigError(f"backend={name!r}: one of {', '.join(map(repr, BACKENDS))} is allowed")


__all__ = [
    "BACKENDS",
    "ActivationBackend",
    "Backend",
    "Fp8Backend",
    "Int8Backend",
    "LowBitBackend",
    "NoBackend",
    "check_backend",
]
