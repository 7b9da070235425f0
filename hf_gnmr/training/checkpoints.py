"""Model weights in a checkpoint that a plain Trainer does not load.

transformers saves the weights of some models under names that differ from those in training (the fused experts of a mixture
are saved one by one), and `from_pretrained` maps them back.  The Trainer's own loading does not: it skips names that the
model does not have, and training continues with those weights as they were initialised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..backends.units import unwrap
from ..config import SetupError
from ..files import FileError, read_json
from .fit import refuse, stored_shapes
from .whole import STATE


def load_renamed(model: Any, folder: Path) -> list[str]:
    """Load weights that `folder` stores under names other than the model's own.

    Args:
        model: a transformers model (PEFT saves adapters under the model's names, so nothing is done for them).
        folder: a checkpoint.

    Returns:
        names of the model's weights that the files store under other names; empty if there was nothing to do.

    Raises:
        SetupError: weights that the files lack, or that the model does not have, under any name.
    """
    model = unwrap(model)
    names = stored_shapes(folder)
    if not names or hasattr(model, "peft_config") or not hasattr(model, "save_pretrained"):
        return []
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    own = model.state_dict()
    missing = [name for name in own if name not in names and name not in tied]
    if missing or names.keys() - own.keys():
        # Loaded in fp32, which represents every dtype in the files exactly, then copied into the model's own dtype.
        try:
            loaded, info = type(model).from_pretrained(
                folder, dtype=torch.float32, config=model.config, output_loading_info=True
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise SetupError(f"the weights in {folder} do not fit the model: {error}") from error
        refuse(folder, info["missing_keys"], info["unexpected_keys"], [str(key) for key in info.get("mismatched_keys", ())])
        weights = dict(loaded.state_dict())
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(weights[name])
    return missing


def is_checkpoint_of(folder: Path, state: Any) -> bool:
    """Whether `folder` is the checkpoint that a Trainer's state was read from, or a copy: same step, same history.

    A folder of the same name may belong to another run, as the Trainer may resume from anywhere.
    """
    try:
        stored = read_json(folder / STATE)
    except FileError:
        return False
    same_step = stored.get("global_step") == state.global_step
    return same_step and json.dumps(stored.get("log_history")) == json.dumps(state.log_history)
