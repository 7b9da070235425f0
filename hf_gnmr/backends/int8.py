"""INT8 ↔ BF16: bitsandbytes' LLM.int8 linears of the frozen base, each layer switchable to its original BF16 weights.

A module becomes switchable by a change of class: PEFT, state dicts and quantizers go on seeing bitsandbytes'
`Linear8bitLt` with the same parameters under the same names.

* Low-cost path: bitsandbytes' INT8×INT8 product in training and evaluation alike, also on the CPU, where plain
  bitsandbytes quietly trains on dequantised weights instead.
* Recovery path: a BF16 product with the original BF16 weight; computes in BF16 and returns the input's dtype.
* ``recovery="dequantize"``: the recovery path without originals, a BF16 product with the dequantised codes.

The path is a property of the unit, read in the forward pass: switching a unit touches one object, not its modules.
"""

from __future__ import annotations

import logging
import os
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import bitsandbytes as bnb
import numpy as np
import torch
from bitsandbytes.autograd._functions import MatMul8bitLt
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import ConfigError, SetupError
from ..controller import Bools
from ..units import Unit, base_model, canonical
from .base import Backend
from .originals import IN_MEMORY, Original, find_originals, is_transposed

RECOVERIES = ("host", "dequantize")
EVAL_PATHS = ("low", "recovery", "active")


class UnitPath:
    """Which path a unit's modules run, in train and in eval mode."""

    __slots__ = ("in_eval", "in_train")

    def __init__(self) -> None:
        self.in_train = False
        self.in_eval = False


class SwitchableLinear8bitLt(bnb.nn.Linear8bitLt):
    """A `Linear8bitLt` with a second, BF16 path. Made by change of class only, see `Int8Backend`."""

    _gnmr_path: UnitPath
    _gnmr_original: Original | None
    _gnmr_on_device: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features), floating point; returns (..., out_features) in x's dtype."""
        path = self._gnmr_path
        if path.in_train if self.training else path.in_eval:
            return self._recovery(x)
        return self._low(x)

    def _low(self, x: Tensor) -> Tensor:
        state = self.state
        if self.weight.CB is not None:
            self.init_8bit_state()
        state.is_training = self.training
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        # Two dimensions: bitsandbytes' bias gradient sums over the first dimension only. The bias is cast without
        # touching the parameter (plain bitsandbytes rewrites it in the input's dtype).
        bias = None if self.bias is None else self.bias.to(x.dtype)
        out = MatMul8bitLt.apply(x.reshape(-1, x.shape[-1]), self.weight, None, bias, state)
        return out.to(x.dtype).reshape(*x.shape[:-1], out.shape[-1])

    def _recovery(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) != torch.bfloat16:
            with torch.autocast(x.device.type, enabled=False):
                return self._bf16(x)
        return self._bf16(x)

    def _bf16(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        h = x.to(torch.bfloat16)
        original = self._gnmr_original
        if original is None:
            if self.weight.CB is not None:
                self.init_8bit_state()
            return _DequantizedLinear.apply(h, self.state.CB, self.state.SCB, bias).to(x.dtype)
        if self.weight is not self.__dict__["_gnmr_weight"]:
            raise SetupError(
                "the 8-bit weight of a switched module was replaced (adapters merged into it?) while its recovery path "
                "still holds the original: end training first"
            )
        weight = self._gnmr_on_device
        if weight is None:
            weight = original.weight.to(x.device)
        if original.transposed:
            # The product that transformers' Conv1D does, in its orientation, so that results agree bit for bit.
            flat = h.reshape(-1, h.shape[-1])
            out = torch.mm(flat, weight) if bias is None else torch.addmm(bias, flat, weight)
            return out.reshape(*x.shape[:-1], out.shape[-1]).to(x.dtype)
        return F.linear(h, weight, bias).to(x.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # After a forward the scales live in `state`, where bitsandbytes' own loading does not look for them.
        lent = self.weight.SCB is None and self.state.SCB is not None
        if lent:
            self.weight.SCB = self.state.SCB
        try:
            super()._load_from_state_dict(state_dict, prefix, *args)
        finally:
            if lent:
                self.weight.SCB = None


class _DequantizedLinear(torch.autograd.Function):
    """BF16 product with codes × scale / 127, the weight rebuilt in forward and backward and never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.codes, ctx.scale = codes, scale
        return F.linear(x, dequantize(codes, scale), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        grad_x = grad @ dequantize(ctx.codes, ctx.scale) if ctx.needs_input_grad[0] else None
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None
        return grad_x, None, None, grad_bias


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """codes: int8 (out, in); scale: fp32 (out,), the row's largest magnitude. Returns BF16 (out, in)."""
    return codes.to(torch.bfloat16).mul_(scale.unsqueeze(1) / 127.0)


class Int8Backend(Backend):
    """Decoder layers as units; their `Linear8bitLt` modules switch together.

    Args:
        model: a model loaded with `BitsAndBytesConfig(load_in_8bit=True)`, usually under PEFT.
        units: its monitored layers.
        recovery: "host" (original weights, kept off an accelerator until needed) or "dequantize".
        recovery_source: folder or Hub id of the original weights; None: the one the model was loaded from.
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
        eval_path: str = "low",
    ) -> None:
        check_options(recovery=recovery, recovery_source=recovery_source, eval_path=eval_path)
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
        originals: dict[str, Original] = {}
        self.source = "dequantised 8-bit weights; no originals"
        if recovery == "host":
            originals, self.source = find_originals(base, flat, recovery_source)

        self.device = next(iter(flat.values())).state.CB.device
        self._hosted_apart = recovery == "host" and self.device.type != "cpu"
        self._filter = _QuietCast()
        logging.getLogger("bitsandbytes.autograd._functions").addFilter(self._filter)
        self.paths = [UnitPath() for _ in units]
        for path, modules in zip(self.paths, self.modules, strict=True):
            path.in_eval = eval_path == "recovery"
            for module in modules:
                _make_switchable(module, path, originals.get(names[module]))
        self._account(units, originals)
        self._active = np.zeros(len(units), dtype=bool)

    def _account(self, units: Sequence[Unit], originals: dict[str, Original]) -> None:
        self.recoverable = np.array([bool(modules) for modules in self.modules])
        weights = np.array([sum(m.state.CB.numel() for m in modules) for modules in self.modules], dtype=np.int64)
        rows = np.array([sum(m.state.SCB.numel() for m in modules) for modules in self.modules], dtype=np.int64)
        self.bytes_low = weights + 4 * rows
        self.bytes_recovery = 2 * weights if self.recovery == "host" else np.zeros_like(weights)
        copied = sum(2 * o.weight.numel() for o in originals.values() if not o.mapped)
        self.resident_bytes = copied
        if self._hosted_apart or not originals:
            self.bytes_added = self.bytes_recovery.copy()
        else:
            # On the CPU the original is used where it lies: mapped pages come in with use, a copy is there anyway.
            mapped = [
                sum(2 * m._gnmr_original.weight.numel() for m in modules if m._gnmr_original.mapped)
                for modules in self.modules
            ]
            self.bytes_added = np.array(mapped, dtype=np.int64)
        self._copied_modules = sum(not o.mapped for o in originals.values())
        self._other = Counter(
            type(m).__name__
            for unit in units
            for name, m in unit.module.named_modules()
            if isinstance(m, nn.Linear)
            and not isinstance(m, SwitchableLinear8bitLt)
            and ".lora_" not in name
        )
        # Frozen matrices of the layers that no path switches (fused experts, skipped modules): said in the census.
        self._unswitched = sum(
            p.numel() * p.element_size()
            for unit in units
            for p in unit.module.parameters()
            if not p.requires_grad and p.ndim >= 2 and p.dtype != torch.int8
        )

    def apply(self, active: Bools) -> int:
        changed = np.flatnonzero(active != self._active)
        for unit in changed.tolist():
            on = bool(active[unit])
            path = self.paths[unit]
            path.in_train = on
            if self.eval_path == "active":
                path.in_eval = on
            if self._hosted_apart:
                for module in self.modules[unit]:
                    module._gnmr_on_device = (
                        module._gnmr_original.weight.to(self.device, non_blocking=True) if on else None
                    )
        self._active = np.array(active, dtype=bool)
        return changed.size

    def remove(self) -> None:
        for modules in self.modules:
            for module in modules:
                _make_plain(module)
        logging.getLogger("bitsandbytes.autograd._functions").removeFilter(self._filter)

    def census(self) -> dict[str, Any]:
        low = int(self.bytes_low.sum())
        lines: dict[str, Any] = {
            "modules_switched": sum(map(len, self.modules)),
            "modules_not_switched": dict(self._other),
            "low_path": low_path_in_words(self.modules[int(np.flatnonzero(self.recoverable)[0])][0]),
            "recovery_path": (
                "BF16 product with the original BF16 weights"
                if self.recovery == "host"
                else "BF16 product with DEQUANTISED 8-bit weights (not the originals)"
            ),
            "recovery": self.recovery,
            "recovery_source": self.source,
            "eval_path": self.eval_path,
            "bytes_low": low,
            "bytes_recovery": int(self.bytes_recovery.sum()),
            "share_switched": round(low / (low + self._unswitched), 4),
        }
        if self._copied_modules:
            lines["note"] = (
                f"{self._copied_modules} weights held as one BF16 copy in memory ({self.resident_bytes:,} bytes, "
                "resident whatever is active)"
            )
        return lines


class _QuietCast(logging.Filter):
    """Drops bitsandbytes' note, once per module and forward, that BF16 inputs are cast to FP16 for quantisation."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "will be cast from" not in str(record.msg)


def check_options(*, recovery: str, recovery_source: object, eval_path: str) -> None:
    """Raise ConfigError for an option's value that is not allowed."""
    if recovery not in RECOVERIES:
        raise ConfigError(f"recovery={recovery!r}: one of {', '.join(map(repr, RECOVERIES))} is allowed")
    if eval_path not in EVAL_PATHS:
        raise ConfigError(f"eval_path={eval_path!r}: one of {', '.join(map(repr, EVAL_PATHS))} is allowed")
    if recovery_source is not None and not isinstance(recovery_source, (str, os.PathLike)):
        raise ConfigError(f"recovery_source={recovery_source!r}: a folder, a Hub id or None is allowed")
    if recovery == "dequantize" and recovery_source is not None:
        raise ConfigError(f"recovery_source={recovery_source!r} is not read with recovery='dequantize': give one of them")


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


def _modules(unit: Unit) -> Iterator[Any]:
    return unit.module.modules()


def _make_switchable(module: bnb.nn.Linear8bitLt, path: UnitPath, original: Original | None) -> None:
    module.__class__ = SwitchableLinear8bitLt
    module._gnmr_path, module._gnmr_original = path, original
    # Past nn.Module.__setattr__, which would register a second parameter.
    module.__dict__["_gnmr_weight"] = module.weight
    on_cpu = module.state.CB.device.type == "cpu"
    module._gnmr_on_device = original.weight if original is not None and on_cpu else None
    _rebind(module)


def _make_plain(module: Any) -> None:
    if type(module) is SwitchableLinear8bitLt:
        module.__class__ = bnb.nn.Linear8bitLt
        for name in ("_gnmr_path", "_gnmr_original", "_gnmr_on_device", "_gnmr_weight"):
            module.__dict__.pop(name, None)
        _rebind(module)


def _rebind(module: Any) -> None:
    """Point accelerate's device hooks, which hold the bound forward of the old class, at the new one."""
    if "_old_forward" in module.__dict__:
        module._old_forward = types.MethodType(type(module).forward, module)


def restore_plain(model: nn.Module) -> None:
    """Undo what a run that was broken off may have left on the model."""
    for module in model.modules():
        _make_plain(module)


def quantize_int8(model: Any, *, threshold: float = 6.0) -> Any:
    """Convert a BF16 model in memory to 8-bit, in place, and keep its BF16 weights for the recovery path.

    Every `nn.Linear` but the output head becomes a frozen `Linear8bitLt`, as `BitsAndBytesConfig(load_in_8bit=True)`
    does on loading; PEFT, the Trainer and `save_pretrained` then take the model for such a one.

    Args:
        model: a transformers model whose linears are BF16.
        threshold: LLM.int8's outlier threshold.

    Raises:
        SetupError: a linear of another dtype, or nothing to convert.
    """
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    if not linears:
        raise SetupError(f"{type(model).__name__} has no nn.Linear to convert")
    for name, linear in linears:
        if linear.weight.dtype is not torch.bfloat16:
            raise SetupError(f"{name} is {linear.weight.dtype}: load the model with dtype=torch.bfloat16 to convert it")
        device = linear.weight.device
        with torch.device("meta"):
            new = bnb.nn.Linear8bitLt(
                linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False,
                threshold=threshold,
            )
        original = linear.weight.detach()
        new.weight = bnb.nn.Int8Params(original.to("cpu"), requires_grad=False, has_fp16_weights=False).to(device)
        new.bias = linear.bias
        new.source_cls = nn.Linear
        new.requires_grad_(False)
        new.train(linear.training)
        model.set_submodule(name, new)
        IN_MEMORY[new] = original.to("cpu")
    model.requires_grad_(False)
    quantization = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    model.hf_quantizer = quantizer
    model.is_quantized = model.is_loaded_in_8bit = True
    model.quantization_method = quantization.quant_method
    model.config.quantization_config = quantization
    return model


def _not_8bit(base: nn.Module, units: Sequence[Unit]) -> str:
    kinds = {type(m).__name__ for unit in units for m in unit.module.modules() if isinstance(m, nn.Linear)}
    held = any(
        isinstance(m, bnb.nn.Linear8bitLt) and m.state.has_fp16_weights
        for unit in units
        for m in _modules(unit)
    )
    why = "its 8-bit linears keep 16-bit weights (llm_int8_has_fp16_weight=True)" if held else (
        f"its linears are {', '.join(sorted(kinds)) or 'none'}"
    )
    return (
        f"{type(base).__name__} is not an 8-bit model: {why}. Load it with "
        "quantization_config=BitsAndBytesConfig(load_in_8bit=True), convert it with hf_gnmr.quantize_int8(model), or "
        'use backend="none" to monitor without switching'
    )


__all__ = ["Int8Backend", "SwitchableLinear8bitLt", "dequantize", "is_transposed", "quantize_int8"]
