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


def refuse_unreadable_optimizer(name: str) -> None:
    """Raise SetupError for an optimizer that steps inside the backward, unless a reader here reads each gradient before."""
    if any(part in name.lower() for part in IN_BACKWARD) and not any(engine.reads_in_backward for engine in ENGINES):
        raise SetupError(
            f"optim={name!r} uses up each gradient inside the backward, so no norm is left to read. "
            "Use an optimizer that steps after the backward, such as adamw_torch"
        )


def refuse_unreadable_engine(model: nn.Module) -> None:
    """Raise SetupError if no reader here can read the gradients of the engine that holds this model."""
    if not any(engine.handles(model) for engine in ENGINES):
        raise SetupError(
            f"{partitioning(model)}: the engine partitions the gradients or keeps them to itself, so a layer's "
            "unclipped norm cannot be read. Use one process, DDP, or device_map"
        )


def unit_norms(model: nn.Module, units: Sequence[Unit]) -> UnitNorms:
    """The reader for the engine that holds the model's gradients.

    Raises:
        SetupError: no reader can read them.
    """
    refuse_unreadable_engine(model)
    return next(engine for engine in ENGINES if engine.handles(model))(model, units)


__all__ = [
    "ENGINES",
    "LocalNorms",
    "UnitNorms",
    "refuse_unreadable_engine",
    "refuse_unreadable_optimizer",
    "refuse_unreadable_settings",
    "unit_norms",
]
