"""INT8 ↔ BF16: the frozen base's bitsandbytes linears, each decoder layer switchable to its original BF16 weights.

What the two paths are stands in `switchable`, where the originals come from in `originals`, where they are kept in `stores`;
here they become units with bytes and a census.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import bitsandbytes as bnb
import numpy as np
import torch
from torch import nn

from ...config import ConfigError, SetupError
from ...control.controller import Bools
from ..base import Backend
from ..units import Unit, base_model, canonical
from .originals import find_originals
from .stores.base import Store
from .stores.host import Decoded, Dequantised, InPlace
from .stores.slots import Slots
from .switchable import SwitchableLinear8bitLt, UnitPath, make_plain, make_switchable, restore_plain

CAST_NOTES = logging.getLogger("bitsandbytes.autograd._functions")
RECOVERIES = ("host", "device", "dequantize")
EVAL_PATHS = ("low", "recovery", "active")


class Int8Backend(Backend):
    """Decoder layers as units; their `Linear8bitLt` modules switch together.

    Args:
        model: a model loaded with `BitsAndBytesConfig(load_in_8bit=True)`, usually under PEFT.
        units: its monitored layers.
        recovery: the store (`stores`): "host" (originals off the device; on a CPU used where they lie), "device" (both paths
            resident) or "dequantize" (no originals).
        recovery_source: folder or Hub id of the original weights; None: the one the model was loaded from.
        pin_memory: with "host" on an accelerator, hold the originals in pinned host memory.
        eval_path: path in eval mode: "low", "recovery", or "active" (whatever training runs at that moment).

    Raises:
        ConfigError: an unknown option.
        SetupError: no 8-bit linear in the units, or no original weights.
    """

    name = "int8"

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        *,
        recovery: str = "host",
        recovery_source: str | os.PathLike[str] | None = None,
        pin_memory: bool = False,
        eval_path: str = "low",
    ) -> None:
        check_options(recovery=recovery, recovery_source=recovery_source, eval_path=eval_path, pin_memory=pin_memory)
        self.recovery, self.eval_path = recovery, eval_path
        restore_plain(model)
        base = base_model(model)
        names = {module: canonical(name) for name, module in base.named_modules()}
        self.modules: list[list[bnb.nn.Linear8bitLt]] = [
            [m for m in _modules(unit) if type(m) is bnb.nn.Linear8bitLt and not m.state.has_fp16_weights] for unit in units
        ]
        flat = {names[m]: m for modules in self.modules for m in modules}
        if not flat:
            raise SetupError(_not_8bit(base, units))
        for module in flat.values():
            if module.weight.CB is not None:
                module.init_8bit_state()
            if module.state.SCB is None:
                raise SetupError(
                    "the scales of the 8-bit weights are lost: PEFT's DoRA drops them in a plain forward on a CPU (an "
                    "evaluation before or between trainings). Load the model anew and train before evaluating"
                )
        on_accelerator = any(is_accelerator(m.state.CB.device) for m in flat.values())
        if pin_memory and not on_accelerator:
            raise SetupError("pin_memory=True is for copies to an accelerator; this model's 8-bit weights are on the CPU")
        self.source = "dequantised 8-bit weights; no originals"
        if recovery == "dequantize":
            self.store: Store = Dequantised(self.modules)
        else:
            in_place = recovery == "host" and not on_accelerator
            found, self.source, watch = find_originals(base, flat, recovery_source, cast=in_place)
            originals = {module: found[name] for name, module in flat.items()}
            if in_place:
                self.store = InPlace(self.modules, originals, watch)
            elif recovery == "host":
                self.store = Slots(self.modules, originals, watch, pin=pin_memory)
            else:
                self.store = Decoded(self.modules, originals)
        CAST_NOTES.addFilter(quiet)
        self.paths = [UnitPath() for _ in units]
        for path, modules in zip(self.paths, self.modules, strict=True):
            path.in_eval = eval_path == "recovery"
            for module in modules:
                make_switchable(module, path, self.store.product(module), originals=recovery != "dequantize")
        self._account(units)
        self._outside = sum(type(m) is bnb.nn.Linear8bitLt for m in base.modules())
        self._active = np.zeros(len(units), dtype=bool)

    def _account(self, units: Sequence[Unit]) -> None:
        self.recoverable = np.array([bool(modules) for modules in self.modules])
        rows = np.array([sum(m.state.SCB.numel() for m in modules) for modules in self.modules], dtype=np.int64)
        weights = self.store.weights
        self.bytes_low = weights + 4 * rows
        self.bytes_recovery = 2 * weights if self.recovery != "dequantize" else np.zeros_like(weights)
        self.bytes_added, self.resident_bytes = self.store.bytes_added, self.store.resident_bytes
        self.host_bytes, self.holds_all = self.store.host_bytes, self.store.holds_all
        # Frozen matrices of the layers that bitsandbytes left as they were (fused experts, routers, skipped modules).
        self._left: Counter[str] = Counter()
        self._left_bytes: Counter[str] = Counter()
        for unit in units:
            for name, module in unit.module.named_modules():
                if "lora_" in name or isinstance(module, SwitchableLinear8bitLt):
                    continue
                matrices = [p for p in module.parameters(recurse=False) if p.ndim >= 2 and not p.requires_grad]
                if matrices:
                    self._left[type(module).__name__] += 1
                    self._left_bytes[type(module).__name__] += sum(p.numel() * p.element_size() for p in matrices)

    def reserve(self, units: int) -> None:
        # Evaluation on the recovery path needs one slot to pass the units through.
        self.store.reserve(max(units, 1) if self.eval_path == "recovery" else units)

    def recovery_bytes_bound(self, units: int) -> int:
        return self.store.bound(units)

    def apply(self, active: Bools) -> int:
        unit = int(np.flatnonzero(self.recoverable)[0])
        if getattr(self.modules[unit][0], "_gnmr_path", None) is not self.paths[unit]:
            raise SetupError(
                "the model's paths are no longer under this backend: a second GNMRCallback took them over, or they were "
                "taken away in mid-training (restore_plain). Use one callback, until training ends"
            )
        changed = np.flatnonzero(active != self._active)
        if changed.size:
            self.store.apply(active)
        for unit in changed.tolist():
            path = self.paths[unit]
            path.in_train = bool(active[unit])
            if self.eval_path == "active":
                path.in_eval = path.in_train
        self._active = np.array(active, dtype=bool)
        return changed.size

    def remove(self) -> None:
        for path, modules in zip(self.paths, self.modules, strict=True):
            for module in modules:
                if module.__dict__.get("_gnmr_path") is path:  # not if another run has taken the model over
                    make_plain(module)
        self.store.close()
        CAST_NOTES.removeFilter(quiet)

    def census(self) -> dict[str, Any]:
        low, left = int(self.bytes_low.sum()), self._left_bytes.total()
        lines: dict[str, Any] = {
            "modules_switched": sum(map(len, self.modules)),
            "modules_not_switched": {kind: self._left[kind] for kind, _ in self._left_bytes.most_common()},
            "bytes_not_switched": left,
            "modules_8bit_elsewhere": self._outside,
            "low_path": low_path_in_words(self.modules[int(np.flatnonzero(self.recoverable)[0])][0]),
            "recovery_path": self.store.in_words(),
            "recovery": self.recovery,
            "recovery_source": self.source,
            "eval_path": self.eval_path,
            "bytes_low": low,
            "bytes_recovery": int(self.bytes_recovery.sum()),
            "share_switched": round(low / (low + left), 4),
        }
        if isinstance(self.store, Slots):
            lines["slot_bytes"] = self.store.slot_bytes
        if isinstance(self.store, InPlace) and self.store.copies:
            lines["note"] = (
                f"{self.store.copies} weights held as one BF16 copy in memory ({self.resident_bytes:,} bytes, "
                "resident whatever is active)"
            )
        return lines


def is_accelerator(device: torch.device) -> bool:
    """Whether weights have to be copied to get there."""
    return device.type != "cpu"


def quiet(record: logging.LogRecord) -> bool:
    """Drops bitsandbytes' note, once per module and forward, that BF16 inputs are cast to FP16 for quantisation."""
    return "will be cast from" not in str(record.msg)


@contextlib.contextmanager
def cast_notes_silenced() -> Iterator[None]:
    """Leave those notes out of the log of what an 8-bit model does without a backend."""
    CAST_NOTES.addFilter(quiet)
    try:
        yield
    finally:
        CAST_NOTES.removeFilter(quiet)


def check_options(*, recovery: str, recovery_source: object, eval_path: str, pin_memory: object = False) -> None:
    """Raise ConfigError for an option's value that is not allowed."""
    if recovery not in RECOVERIES:
        raise ConfigError(f"recovery={recovery!r}: one of {', '.join(map(repr, RECOVERIES))} is allowed")
    if eval_path not in EVAL_PATHS:
        raise ConfigError(f"eval_path={eval_path!r}: one of {', '.join(map(repr, EVAL_PATHS))} is allowed")
    if recovery_source is not None and not isinstance(recovery_source, (str, os.PathLike)):
        raise ConfigError(f"recovery_source={recovery_source!r}: a folder, a Hub id or None is allowed")
    if not isinstance(pin_memory, bool) or (pin_memory and recovery != "host"):
        raise ConfigError(f"pin_memory={pin_memory!r}: true or false is allowed, and true with recovery='host' only")
    if recovery == "dequantize" and recovery_source is not None:
        raise ConfigError(f"recovery_source={recovery_source!r} is not read with recovery='dequantize': give one of them")


def _modules(unit: Unit) -> Iterator[Any]:
    return unit.module.modules()


def low_path_in_words(module: bnb.nn.Linear8bitLt) -> str:
    """What the low-cost path really runs on this module's device."""
    device = module.state.CB.device
    threshold = f"outlier threshold {module.state.threshold:g}"
    if device.type != "cpu":
        return f"INT8×INT8 by bitsandbytes on {device}, {threshold}"
    from bitsandbytes.backends.cpu import ops

    if getattr(ops, "_has_avx512", False):
        return f"INT8×INT8 by torch._int_mm on the CPU (AVX-512), {threshold}"
    return f"INT8×INT8 emulated by an FP32 product of the codes (no AVX-512 on this CPU: slow), {threshold}"


def _not_8bit(base: nn.Module, units: Sequence[Unit]) -> str:
    kinds = {type(m).__name__ for unit in units for m in unit.module.modules() if isinstance(m, nn.Linear)}
    held = any(isinstance(m, bnb.nn.Linear8bitLt) and m.state.has_fp16_weights for unit in units for m in _modules(unit))
    why = (
        "its 8-bit linears keep 16-bit weights (llm_int8_has_fp16_weight=True)"
        if held
        else (f"its linears are {', '.join(sorted(kinds)) or 'none'}")
    )
    return (
        f"{type(base).__name__} is not an 8-bit model: {why}. Load it with "
        "quantization_config=BitsAndBytesConfig(load_in_8bit=True), convert it with hf_gnmr.quantize_int8(model), or "
        'use backend="none" to monitor without switching'
    )
