"""hf_gnmr: runtime stability control for low-precision training (GNMR) under the Hugging Face Trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .config import ConfigError, GNMRConfig, SetupError
from .control.controller import Decision
from .control.gnmr import Controller
from .trace.file import read_trace

if TYPE_CHECKING:
    from .backends.bnb.convert import quantize_int8
    from .backends.bnb.switchable import restore_plain
    from .run.folder import last_checkpoint
    from .training.callback import GNMRCallback
    from .training.mixin import GNMRTrainerMixin
    from .training.session import GNMRSession

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "Controller",
    "Decision",
    "GNMRCallback",
    "GNMRConfig",
    "GNMRSession",
    "GNMRTrainerMixin",
    "SetupError",
    "__version__",
    "last_checkpoint",
    "quantize_int8",
    "read_trace",
    "restore_plain",
]

_WITH_TORCH = {
    "GNMRCallback": "training.callback",
    "GNMRSession": "training.session",
    "GNMRTrainerMixin": "training.mixin",
    "last_checkpoint": "run.folder",
    "quantize_int8": "backends.bnb.convert",
    "restore_plain": "backends.bnb.switchable",
}
"""Imported on first access, so that traces can be read, replayed and shown without loading torch."""


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_WITH_TORCH[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
