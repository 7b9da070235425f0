"""hf_gnmr: runtime stability control for low-precision training (GNMR) under the Hugging Face Trainer."""

from .backends.convert import quantize_int8
from .backends.switchable import restore_plain
from .callback import GNMRCallback
from .config import ConfigError, GNMRConfig, SetupError
from .controller import Controller, Decision
from .trace import read_trace

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "Controller",
    "Decision",
    "GNMRCallback",
    "GNMRConfig",
    "SetupError",
    "__version__",
    "quantize_int8",
    "read_trace",
    "restore_plain",
]
