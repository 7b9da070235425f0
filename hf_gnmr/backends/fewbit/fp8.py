"""Hybrid FP8 ↔ the plain product: E4M3 forward, E5M2 gradients, one scale a tensor.

Paper, section 5.2 and Appendix E.2, first configuration.  Where the processor multiplies FP8 (NVIDIA, compute capability 8.9
and above) the low-cost path is its own scaled product by way of torch.  Anywhere else it can be emulated: the same numbers,
without the gain; that has to be asked for, and is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...config import ConfigError, SetupError
from ..units import Unit, fused_experts_of, linears_of
from .paths import LowPrecision
from .products import HybridFp8

EMULATE = (False, True, "auto")
LEAST_CAPABILITY = (8, 9)


class Fp8Backend(LowPrecision):
    """Decoder layers (or experts) in hybrid FP8, recovered by the plain product in the model's own dtype.

    Args:
        model: see `LowPrecision`.
        units: see `LowPrecision`.
        emulate: false: the processor's FP8 product, or an error; true: emulation; "auto": emulation where there is none.
        eval_path: "low", "recovery" or "active".

    Raises:
        ConfigError: another value of `emulate`.
        SetupError: no FP8 on this device, or linears whose sides are no multiples of 16; see `LowPrecision` too.
    """

    name = "fp8"

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], *, emulate: bool | str = False, eval_path: str = "low"
    ) -> None:
        check_emulate(emulate)
        device = units[0].parameters[0].device if units and units[0].parameters else torch.device("cpu")
        self.engine = engine_on(device, emulate)
        if self.engine == "scaled_mm":
            refuse_shapes(units)
        self._take(model, units, HybridFp8(self.engine), None, eval_path)

    def census(self) -> dict[str, Any]:
        census = super().census()
        said = "EMULATED (numbers are rounded; no memory or time is saved): " if self.engine == "emulated" else ""
        return {**census, "path": said + census["path"], "engine": self.engine}


def check_emulate(emulate: object) -> None:
    """Raise ConfigError unless `emulate` is true, false or "auto"."""
    if not (isinstance(emulate, bool) or emulate == "auto"):
        raise ConfigError(f"emulate={emulate!r}: true, false or 'auto' is allowed")


def engine_on(device: torch.device, emulate: bool | str) -> str:
    """What multiplies on `device`, of `products.ENGINES`.

    Raises:
        SetupError: no FP8 there, and no emulation asked for.
    """
    lacks = why_not(device)
    if lacks and emulate is False:
        raise SetupError(
            f"backend='fp8': {lacks}. Ask for the emulation, which rounds the same and gains nothing (emulate=true; auto: "
            "only where there is none), or use a GPU that has FP8"
        )
    return "emulated" if lacks or emulate is True else "scaled_mm"


def why_not(device: torch.device) -> str | None:
    """Why `device` has no FP8 product; None: it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no FP8 product on {device.type if device.type != 'cuda' else 'this AMD GPU'}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        held = ".".join(map(str, capability))
        return f"{torch.cuda.get_device_name(device)} has no FP8 product (compute capability {held}, below 8.9)"
    return None


def refuse_shapes(units: Sequence[Unit]) -> None:
    """Raise SetupError for weights that the FP8 product cannot take."""
    for unit in units:
        sizes = {f"{unit.name}.{name}": m.weight.shape for name, m in linears_of(unit.module)}
        for name, m in fused_experts_of(unit.module):
            sizes |= {f"{unit.name}.{name}": p.shape[1:] for p in m.parameters(recurse=False) if p.ndim == 3}
        for name, shape in sizes.items():
            if any(side % 16 for side in shape):
                raise SetupError(
                    f"backend='fp8': {name} is {tuple(shape)}; the FP8 product takes sides that are multiples of 16. Use "
                    "emulate=true, or a model with such sides"
                )
