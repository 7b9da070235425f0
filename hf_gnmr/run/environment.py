"""The environment of a run: for `environment.json`, for the first lines it prints, and its peak memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from .. import __version__
from ..backends import bf16_cpu

PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "datasets", "safetensors", "numpy")


def environment(arguments: TrainingArguments, data: dict[str, int]) -> dict[str, Any]:
    """Command, versions, machine, precision, seed, and the counts of the data, in plain JSON values."""
    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **machine(),
        "device": str(arguments.device),
        "world_size": arguments.world_size,
        "precision": precision(arguments),
        "seed": arguments.seed,
        "data": data,
    }


def machine() -> dict[str, Any]:
    """Versions and hardware, independent of the run."""
    return {
        "hf_gnmr": __version__,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": processor(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability().lower(),
        "bf16_products": "float32 kernels" if bf16_cpu.active() else "native",
    }


def environment_in_words(arguments: TrainingArguments) -> str:
    """The same as one line for the user."""
    return (
        f"runs on: {arguments.device} ({processor()}, {torch.get_num_threads()} threads), "
        f"world size {arguments.world_size}, autocast {precision(arguments)}, torch {torch.__version__}"
    )


def precision(arguments: TrainingArguments) -> str:
    """The autocast in effect: the launcher's setting applies where the recipe has none."""
    if arguments.bf16 or arguments.fp16:
        return "bf16" if arguments.bf16 else "fp16"
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    return "off" if launched == "no" else launched


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


def peak_memory() -> dict[str, int]:
    """Peak memory so far, in bytes: the allocator's on a GPU, elsewhere the resident set (where it is reported)."""
    if torch.cuda.is_available():
        return {"peak_device_bytes": torch.cuda.max_memory_allocated()}
    try:
        import resource
    except ImportError:  # not on Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
