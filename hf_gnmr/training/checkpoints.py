"""Model weights of a checkpoint that a plain Trainer leaves unread.

transformers saves some models under other names than it trains them by (a mixture's fused experts are saved expert by
expert), and `from_pretrained` maps them back.  The Trainer's own loading does not: it passes over what it finds no name for,
and training goes on with those weights as they were initialised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..backends.units import unwrap


def load_renamed(model: Any, folder: Path) -> list[str]:
    """Load weights that `folder` holds under other names than the model's own.

    Args:
        model: a transformers model (PEFT's adapters are saved under their own names: nothing is done).
        folder: a checkpoint.

    Returns:
        the model's names of weights that are not in the files under them; empty: there was nothing to do.
    """
    model = unwrap(model)
    names = _names_in(folder)
    if not names or hasattr(model, "peft_config") or not hasattr(model, "save_pretrained"):
        return []
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = [name for name in model.state_dict() if name not in names and name not in tied]
    if missing:
        # In fp32, which holds what any of the files' dtypes does; copied into the model's own dtype.
        loaded = type(model).from_pretrained(folder, dtype=torch.float32, config=model.config)
        there = dict(loaded.state_dict())
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(there[name])
    return missing


def _names_in(folder: Path) -> set[str]:
    """Names of the tensors in a checkpoint's safetensors."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not single.is_file():
        return set()
    with safe_open(single, framework="pt") as file:
        return set(file.keys())
