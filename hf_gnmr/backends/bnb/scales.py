"""Row scales of 8-bit weights that make the low-cost path wrong from the start: infinite, NaN, or lost to zero.

bitsandbytes quantises through FP16: a weight above 65504 gives its row an infinite scale, and weights below 6e-8 become
zeros.  Every product with such a row is NaN or 0, in every step, and no history of norms can show it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import bitsandbytes as bnb
import torch
from torch import Tensor

from ...config import SetupError

NAMED = 4
"""Modules that an error names; the others are counted."""


def refuse_broken_scales(modules: Mapping[str, bnb.nn.Linear8bitLt]) -> None:
    """Raise SetupError if a scale is not finite.

    Args:
        modules: 8-bit linears by name, loaded.
    """
    broken: dict[str, int] = {}
    for name, module in modules.items():
        scales = scales_of(module)
        rows = 0 if scales is None else int((~torch.isfinite(scales)).sum())
        if rows:
            broken[name] = rows
    if broken:
        raise SetupError(
            f"the 8-bit scales of {_listed(broken, modules)} are not finite: the original weights are inf or NaN, or above "
            f"65504, which bitsandbytes' FP16 cannot hold. Their INT8 product is NaN in every step. {_mend(broken)}"
        )


def refuse_lost_rows(modules: Mapping[str, bnb.nn.Linear8bitLt], rows_of: Callable[[str, Tensor], Tensor]) -> None:
    """Raise SetupError if a scale is 0 where the original row is not: the row was rounded away. (A row of zeros is right.)

    Args:
        modules: 8-bit linears by name, loaded.
        rows_of: rows of a module's original weight, (rows, in), from its name and their indices.
    """
    lost: dict[str, int] = {}
    for name, module in modules.items():
        scales = scales_of(module)
        zero = torch.zeros(0) if scales is None else torch.nonzero(scales.flatten() == 0).flatten().cpu()
        if len(zero):
            rows = int(rows_of(name, zero).ne(0).any(dim=1).sum())
            if rows:
                lost[name] = rows
    if lost:
        raise SetupError(
            f"the 8-bit scales of {_listed(lost, modules)} are 0, although the original weights are not: they are below "
            f"6e-8, which bitsandbytes' FP16 rounds to 0. Their INT8 product is 0 in every step. {_mend(lost)}"
        )


def warn_of_zeros(modules: Mapping[str, bnb.nn.Linear8bitLt]) -> None:
    """Warn of rows whose scale is 0, where there are no originals to tell a lost row from a row of zeros."""
    zeros: dict[str, int] = {}
    for name, module in modules.items():
        scales = scales_of(module)
        rows = 0 if scales is None else int((scales == 0).sum())
        if rows:
            zeros[name] = rows
    if zeros:
        warnings.warn(
            f"rows that are 0 in 8 bits: {_listed(zeros, modules)}; their product is 0. If the original weights are not 0 "
            "(below 6e-8 they are rounded away), keep these modules in 16 bits (llm_int8_skip_modules)",
            stacklevel=2,
        )


def scales_of(module: bnb.nn.Linear8bitLt) -> Tensor | None:
    """A module's row scales, wherever bitsandbytes keeps them at the moment; None: lost."""
    scales = module.state.SCB if module.state.SCB is not None else getattr(module.weight, "SCB", None)
    return scales if isinstance(scales, Tensor) and scales.device.type != "meta" else None


def _listed(rows: Mapping[str, int], modules: Mapping[str, bnb.nn.Linear8bitLt]) -> str:
    named = [f"{name} ({count} of {modules[name].out_features} rows)" for name, count in list(rows.items())[:NAMED]]
    rest = f" and {len(rows) - NAMED} more modules" if len(rows) > NAMED else ""
    return f"{', '.join(named)}{rest}"


def _mend(rows: Mapping[str, int]) -> str:
    names = [name.rpartition(".")[2] if len(rows) > NAMED else name for name in rows]
    skipped = ", ".join(repr(name) for name in dict.fromkeys([*names, "lm_head"]))
    return (
        "Keep these modules in 16 bits: BitsAndBytesConfig(load_in_8bit=True, "
        f"llm_int8_skip_modules=[{skipped}]), or repair the checkpoint"
    )
