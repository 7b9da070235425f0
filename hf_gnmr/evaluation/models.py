"""Building what is evaluated: a base model, its adapter, and for an 8-bit base the path that its layers run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..backends import Int8Backend, NoBackend
from ..backends.bnb.int8 import cast_notes_silenced
from ..backends.units import all_layers
from ..config import ConfigError
from ..files import FileError, read_json
from ..run.adapter_config import check_adapter
from ..run.architecture import cause, check_folder
from ..run.models import load_adapter, load_base, load_tokenizer, model_source, module_names
from ..run.patterns import check_patterns
from .subjects import ADAPTER, Subject, last_layers


def build(subject: Subject, precision: str, dtype: str) -> tuple[Any, Any, str]:
    """Model in eval mode, tokenizer, and what runs, in words.

    Args:
        subject: what to load.
        precision: one of `subjects.PRECISIONS`; matters for an 8-bit base only.
        dtype: name of the dtype of everything that is not 8-bit.

    Raises:
        ConfigError, SetupError: a model that cannot be loaded, or an adapter that does not fit it.
    """
    source = model_source(subject.section)
    tokenizer = load_tokenizer(source, subject.section)
    backend = Int8Backend.name if subject.int8 else NoBackend.name
    model = load_base(source, subject.section, backend, getattr(torch, dtype))
    if subject.adapter is not None:
        model = _adapted(model, subject, subject.adapter)
    model.eval()
    if torch.cuda.is_available():
        model.to("cuda")
    kind = f"{'adapter over ' if subject.adapter is not None else ''}{subject.section.name}"
    return model, tokenizer, f"{kind}, {_switched(model, subject, precision) if subject.int8 else dtype}"


def _adapted(model: Any, subject: Subject, adapter: Path) -> Any:
    """The base under PEFT with the weights of the adapter's file."""
    from peft import PeftConfig, get_peft_model

    try:
        check_folder(adapter, subject.label)
        stored = read_json(adapter / "adapter_config.json")
        check_adapter(stored, f"{subject.label}: adapter_config.json", adapter / ADAPTER)
        check_patterns(stored, module_names(model), f"{subject.label}: adapter_config.json: ")
        config = PeftConfig.from_pretrained(adapter)
        config.inference_mode = False  # else its parameters are frozen, and layers are recognised by what is trainable
        model = get_peft_model(model, config)
    except (ConfigError, FileError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what a configuration makes PEFT raise is open-ended
        raise ConfigError(f"{subject.label}: its adapter does not fit {subject.section.name}: {cause(error)}") from error
    load_adapter(model, str(adapter), subject.label)
    return model


def _switched(model: Any, subject: Subject, precision: str) -> str:
    """Put an 8-bit model's layers on the paths of `precision`; returns what runs, in words."""
    # Every layer, adapted or not; the low-cost path too runs through the switched modules (DoRA's plain one fails on a CPU).
    units = all_layers(model, subject.section.layers)
    options = subject.int8_options
    # No original weights where no layer leaves the low-cost path.
    recovery, source = ("dequantize", None) if precision == "low" else (options.recovery, options.recovery_source)
    if source is not None:
        check_folder(source, f"{subject.label}: recovery_source")
    backend = Int8Backend(model, units, eval_path="active", recovery=recovery, recovery_source=source)
    active = np.zeros(len(units), dtype=bool)
    if precision == "recovery":
        active = backend.recoverable
    elif precision == "final":
        active[last_layers(subject)] = True
    backend.reserve(int(active.sum()))
    backend.apply(active)
    if precision == "low":
        return "bitsandbytes INT8 everywhere"
    weights = "" if recovery != "dequantize" else " (dequantised weights)"
    if precision == "final":
        return f"INT8 with layers {np.flatnonzero(active).tolist()} in BF16{weights}"
    return f"every layer of the 8-bit model on its BF16 path{weights}"


def adapter_effect(model: Any, autocast: torch.dtype | None = None) -> float:
    """Largest change of a logit that the adapter makes on a fixed input; 0.0: none."""
    ids = torch.arange(5, 21, device=model.device)[None]
    with (
        torch.no_grad(),
        cast_notes_silenced(),
        torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None),
    ):
        on = model(input_ids=ids).logits
        with model.disable_adapter():
            off = model(input_ids=ids).logits
    return float((on - off).abs().max())
