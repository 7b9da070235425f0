"""hf_gnmr: runtime stability control for low-precision training (GNMR) under the Hugging Face Trainer."""

from .backends.convert import quantize_int8
from .backends.switchable import restore_plain
from .callback import GNMRCallback
from .config import ConfigError, GNMRConfig, SetupError
from .controller import Controller, Decision
from .folder import last_checkpoint
from .session import GNMRSession
from .trace import read_trace
from .trainer import GNMRTrainerMixin

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
