"""Whether training is distributed, and over how many processes."""

from __future__ import annotations

import torch


def is_distributed() -> bool:
    """Whether a process group is initialised."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size() -> int:
    """Number of processes; 1 without a process group."""
    return torch.distributed.get_world_size() if is_distributed() else 1
