"""Hybrid FP8 ↔ the plain product: E4M3 forward, E5M2 gradients, one scale per tensor.

Paper, section 5.2 and Appendix E.2, first configuration.  Where the processor multiplies FP8 (NVIDIA, compute capability 8.9
and above) the low-cost path is its scaled product, called through torch.  Elsewhere it can be emulated: the same numbers,
without the gain.  Emulation has to be requested, and is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ...config import SetupError, one_of
from ..base import BackendOptions
from ..units import Unit, fused_experts_of, linears_of
from .paths import LowPrecision, LowPrecisionOptions
from .products import HybridFp8, Product

EMULATE = (False, True, "auto")
LEAST_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Fp8Options(LowPrecisionOptions):
    """Whether the processor's FP8 product runs, or its emulation."""

    emulate: bool | Literal["auto"] = False
    """false: the device's own FP8 product, or an error; true: emulated (the same numbers, nothing gained); ``auto``:
    emulated where the device has no FP8."""

    backend = "fp8"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("emulate", self.emulate, EMULATE)


class Fp8Backend(LowPrecision):
    """Decoder layers (or experts) in hybrid FP8, recovered by the plain product in the model's own dtype.

    Raises:
        ConfigError: a wrong option.
        SetupError: no FP8 on this device, or linears whose sides are not multiples of 16; see also `LowPrecision`.
    """

    name = "fp8"
    Options = Fp8Options
    options: Fp8Options

    @classmethod
    def check_device(cls, options: BackendOptions, device: torch.device) -> None:
        assert isinstance(options, Fp8Options)
        engine_on(device, options.emulate)

    @classmethod
    def plan_saved(
        cls, model: Any, units: Sequence[Unit], options: BackendOptions, forward: Callable[[Any], None], half: bool
    ) -> dict[str, int]:
        assert isinstance(options, Fp8Options)
        if options.emulate is False:
            refuse_shapes(units)
        # The meta device has no FP8 product; the modules and the errors are the same.
        return super().plan_saved(model, units, replace(options, emulate=True), forward, half)

    def products(self, units: Sequence[Unit]) -> tuple[Product, Product | None]:
        device = units[0].parameters[0].device if units and units[0].parameters else torch.device("cpu")
        self.engine = engine_on(device, self.options.emulate)
        if self.engine == "scaled_mm":
            refuse_shapes(units)
        return HybridFp8(self.engine), None

    def census(self) -> dict[str, Any]:
        census = super().census()
        prefix = "EMULATED (numbers are rounded; no memory or time is saved): " if self.engine == "emulated" else ""
        return {**census, "path": prefix + census["path"], "engine": self.engine}


def engine_on(device: torch.device, emulate: bool | str) -> str:
    """What multiplies on `device`, of `products.ENGINES`.

    Raises:
        SetupError: the device has no FP8, and emulation was not requested.
    """
    reason = why_not(device)
    if reason and emulate is False:
        raise SetupError(
            f"backend='fp8': {reason}. Request the emulation, which rounds the same way and gains nothing (emulate=true; "
            "auto: only where the device has no FP8), or use a GPU that has FP8"
        )
    return "emulated" if reason or emulate is True else "scaled_mm"


def why_not(device: torch.device) -> str | None:
    """Why `device` has no FP8 product; None: it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no FP8 product on {device.type if device.type != 'cuda' else 'this AMD GPU'}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        version = ".".join(map(str, capability))
        return f"{torch.cuda.get_device_name(device)} has no FP8 product (compute capability {version}, below 8.9)"
    return None


def refuse_shapes(units: Sequence[Unit]) -> None:
    """Raise SetupError for weights that the FP8 product does not support."""
    for unit in units:
        sizes = {f"{unit.name}.{name}": m.weight.shape for name, m in linears_of(unit.module)}
        for name, m in fused_experts_of(unit.module):
            sizes |= {f"{unit.name}.{name}": p.shape[1:] for p in m.parameters(recurse=False) if p.ndim == 3}
        for name, shape in sizes.items():
            if any(side % 16 for side in shape):
                raise SetupError(
                    f"backend='fp8': {name} is {tuple(shape)}; the FP8 product needs sides that are multiples of 16. Use "
                    "emulate=true, or a model with such sides"
                )
