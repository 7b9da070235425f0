"""Model weights in a checkpoint that a plain Trainer does not load.

transformers saves the weights of some models under names that differ from those in training (the fused experts of a mixture
are saved one by one), and `from_pretrained` maps them back.  The Trainer's own loading does not: it skips names that the
model does not have, and training continues with those weights as they were initialised.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..backends.units import unwrap
from ..files import read_json


def load_renamed(model: Any, folder: Path) -> list[str]:
    """Load weights that `folder` stores under names other than the model's own.

    Args:
        model: a transformers model (PEFT saves adapters under the model's names, so nothing is done for them).
        folder: a checkpoint.

    Returns:
        names of the model's weights that the files store under other names; empty if there was nothing to do.
    """
    model = unwrap(model)
    names = _names_in(folder)
    if not names or hasattr(model, "peft_config") or not hasattr(model, "save_pretrained"):
        return []
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = [name for name in model.state_dict() if name not in names and name not in tied]
    if missing:
        # Loaded in fp32, which represents every dtype in the files exactly, then copied into the model's own dtype.
        loaded = type(model).from_pretrained(folder, dtype=torch.float32, config=model.config)
        weights = dict(loaded.state_dict())
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(weights[name])
    return missing


def _names_in(folder: Path) -> set[str]:
    """Names of the tensors in a checkpoint's safetensors files."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return set(read_json(index)["weight_map"])
    if not single.is_file():
        return set()
    with safe_open(single, framework="pt") as file:
        return set(file.keys())
