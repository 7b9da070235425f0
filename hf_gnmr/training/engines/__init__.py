"""How gradients are read under the engine that holds them: one file per engine, one entry in `ENGINES`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...backends.units import Unit
from ...config import SetupError
from .base import UnitNorms, partitioning
from .local import LocalNorms

ENGINES: tuple[type[UnitNorms], ...] = (LocalNorms,)
"""Asked in this order; the first that handles a model reads its gradients."""


IN_BACKWARD = ("lomo", "layerwise")
"""Parts of the names of optimizers that use up each gradient inside the backward, so that no norm is left to read."""
PARTITIONED_BY = ("deepspeed", "fsdp")
"""Fields of TrainingArguments that request an engine which partitions gradients."""


def refuse_unreadable_settings(training: Mapping[str, Any]) -> None:
    """Raise SetupError for fields of TrainingArguments that request an engine without a reader here."""
    for key in PARTITIONED_BY:
        if training.get(key) and not any(key in engine.asked_for_by for engine in ENGINES):
            raise SetupError(
                f"training.{key}={training[key]!r}: {key} partitions the gradients, so a layer's unclipped norm cannot be "
                "read. Use one process, DDP, or device_map"
            )


def refuse_unreadable_optimizer(name: str, model: nn.Module | None = None) -> None:
    """Raise SetupError for an optimizer that steps inside the backward, unless each gradient is read before.

    Args:
        name: the optimizer, as in `TrainingArguments.optim`.
        model: the model, whose own reader must do so; None (before a model is loaded): any reader here may.
    """
    readers = ENGINES if model is None else [_reader_for(model)]
    if any(part in name.lower() for part in IN_BACKWARD) and not any(reader.reads_in_backward for reader in readers):
        raise SetupError(
            f"optim={name!r} uses up each gradient inside the backward, so no norm is left to read. "
            "Use an optimizer that steps after the backward, such as adamw_torch"
        )


def refuse_unreadable_engine(model: nn.Module) -> None:
    """Raise SetupError if no reader here can read the gradients of the engine that holds this model."""
    _reader_for(model)


def _reader_for(model: nn.Module) -> type[UnitNorms]:
    """The first reader that handles the model.

    Raises:
        SetupError: none does.
    """
    for engine in ENGINES:
        if engine.handles(model):
            return engine
    raise SetupError(
        f"{partitioning(model)}: the engine partitions the gradients or keeps them to itself, so a layer's unclipped norm "
        "cannot be read. Use one process, DDP, or device_map"
    )


def unit_norms(model: nn.Module, units: Sequence[Unit]) -> UnitNorms:
    """The reader for the engine that holds the model's gradients.

    Raises:
        SetupError: no reader can read them.
    """
    return _reader_for(model)(model, units)


__all__ = [
    "ENGINES",
    "LocalNorms",
    "UnitNorms",
    "refuse_unreadable_engine",
    "refuse_unreadable_optimizer",
    "refuse_unreadable_settings",
    "unit_norms",
]
