"""Saved activations in few bits: the backward of attention and MLP projections reads a quantised, packed copy.

The forward of a projection is that of the plain linear, bit for bit.  The gradient of its weight needs the input again, so
the input is kept: quantised token by token in a low format (low-cost path) or a finer one (recovery path), and packed.  The
gradient of the input is exact; that of the weight is ``dyᵀ · dequantised(x)``.  Projections that read the same tensor (q, k,
v; gate, up) share a copy as long as their formats agree.  Paper, section 5.1, Appendices E.1 and E.4.

With 16 bits a path is the plain linear: its input is kept unquantised, in the dtype of the product (under autocast, all
projections that read the same input share one cast copy, where plain linears keep one each).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..config import ConfigError, SetupError
from ..control.monitor import Bools
from .base import BY_TOKENS, Backend, BackendOptions, check_unit
from .formats import FLOATS, Format, Packed, format_of, pack, packed_bytes, unpack
from .linears import Latest, Switched, as_autocast, lend, make_plain, refuse_8bit, refuse_unswitchable
from .units import Unit, lora_part, projections_of, unwrap


class Saved(Latest):
    """Shared by a model's projections: copies of the latest input, and the count of bytes held for the backward.

    Args:
        low: the low-cost path's format.
        units: number of units.
    """

    def __init__(self, low: Format, units: int) -> None:
        super().__init__()
        self.low = low
        self.ran = np.zeros(units, dtype=bool)
        """Units whose projections have kept an input since this was last cleared."""
        self._now = self._now_low = 0
        self._peak = self._peak_low = self._tokens = 0

    def figures(self) -> tuple[int, int, int]:
        """Peak bytes held since the last call, the same bytes on the low-cost path, and tokens."""
        figures = self._peak, self._peak_low, self._tokens
        self._peak, self._peak_low, self._tokens = self._now, self._now_low, 0
        return figures

    def copy_of(self, given: Tensor, x: Tensor, form: Format | None) -> Copy:
        """The copy of `x`, which is `given` in the product's dtype, made once; x itself, detached, for 16 bits."""
        low = 0
        if self.is_new(given, x.dtype):
            self._tokens = max(self._tokens, x.numel() // x.shape[-1] if x.shape[-1] else 0)
            low = _bytes(x, self.low)
        copy: Copy = self.get("16 bits" if form is None else form.name, lambda: Copy(self, x.detach(), form, low))
        return copy

    def hold(self, nbytes: int, low: int) -> None:
        """Count `nbytes` more bytes as held (fewer if negative), and `low` more on the low-cost path."""
        self._now += nbytes
        self._now_low += low
        if self._now > self._peak:
            self._peak, self._peak_low = self._now, self._now_low


class Held:
    """Counts bytes as held for as long as it lives: until the last product's backward has run, or can no longer run. (A
    retained graph holds them longer than is counted.)"""

    __slots__ = ("low", "nbytes", "saved")

    def __init__(self, saved: Saved, nbytes: int, low: int) -> None:
        self.saved, self.nbytes, self.low = saved, nbytes, low
        saved.hold(nbytes, low)

    def __del__(self) -> None:
        self.saved.hold(-self.nbytes, -self.low)


class Copy:
    """The copy kept of one input; `low`: bytes that it adds to the low-cost path's count."""

    __slots__ = ("form", "held", "tensors")

    def __init__(self, saved: Saved, x: Tensor, form: Format | None, low: int) -> None:
        packed = None if form is None else pack(x.reshape(-1, x.shape[-1]), form)
        self.form = form
        self.tensors = [x] if packed is None else [packed.scale, *packed.planes]
        self.held = Held(saved, _bytes(x, form), low)


def _bytes(x: Tensor, form: Format | None) -> int:
    if form is None:
        return x.numel() * x.element_size()
    return packed_bytes(x.numel() // x.shape[-1], x.shape[-1], form) if x.numel() else 0


class _Product(torch.autograd.Function):
    """`F.linear` that keeps a shared copy of its input instead of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, copy: Copy) -> Tensor:
        # Keep the count, not the copy: autograd owns its tensors and may keep them elsewhere (saved-tensor hooks).
        ctx.held, ctx.form, ctx.saved, ctx.shape = copy.held, copy.form, copy.held.saved, x.shape
        ctx.save_for_backward(weight, *copy.tensors)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        ctx.saved.forget()
        ctx.held = None
        flat = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = (flat @ weight).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            rows = torch.Size((flat.shape[0], ctx.shape[-1]))
            if ctx.form is None:
                x = kept[0].reshape(rows)
            else:
                x = unpack(Packed(kept[1:], kept[0], rows, ctx.form, dy.dtype))
            dw = flat.t() @ x
        if ctx.needs_input_grad[2]:
            db = flat.sum(dim=0)
        return dx, dw, db, None


class QuantisedInput(Switched, nn.Linear):
    """A linear whose saved input is quantised."""

    attributes = ("saved", "form", "unit", "adapter")
    saved: Saved
    form: Format | None
    unit: int
    adapter: bool
    """Whether it is LoRA's A."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(x)  # a frozen weight needs no copy of x
        if self.adapter and not x.requires_grad and x.shape == (self.in_features, self.in_features):
            return super().forward(x)  # DoRA reads the weight itself this way, with an identity, and drops the graph
        self.saved.ran[self.unit] = True
        uncast = x
        x, weight, bias = as_autocast(x, self.weight, self.bias)
        return _Product.apply(x, weight, bias, self.saved.copy_of(uncast, x, self.form))


UNIT_KINDS = ("projection", "layer")


@dataclass(frozen=True)
class ActivationOptions(BackendOptions):
    """Formats of the saved activations on the two paths, and the kind of unit."""

    bits_low: int = 4
    """Bits on the low-cost path: 2 to 8 with integers; with floats the widths of `formats.FLOATS`."""
    bits_recovery: int = 8
    """Bits on the recovery path, more than `bits_low`: the same choices, or 16 (not quantised)."""
    format: str = "float"
    """``float`` or ``int`` (symmetric)."""
    unit: str | None = None
    """What is switched together: ``projection`` (None) or ``layer``."""

    @classmethod
    def choices(cls, name: str) -> dict[str, str]:
        return {str(bits): form.name.upper() for bits, form in FLOATS.items()} if name == "bits_low" else {}

    def __post_init__(self) -> None:
        check_bits(self.bits_low, self.bits_recovery, self.format)
        check_unit("activation", self.unit, UNIT_KINDS)


class ActivationBackend(Backend):
    """Units are projections (or decoder layers) whose saved inputs are in `bits_low` or `bits_recovery`.

    Takes any model whose decoder layers' projections are `nn.Linear`, fully trained or under LoRA (then the input of LoRA's
    A is kept).

    Raises:
        ConfigError: a wrong option.
        SetupError: a model without such projections, over 8-bit weights, or under gradient checkpointing.
    """

    name = "activation"
    changes_forward = False
    Options = ActivationOptions
    options: ActivationOptions
    unit_kinds = UNIT_KINDS

    @classmethod
    def why_no_budget(cls, options: BackendOptions) -> str | None:
        return BY_TOKENS

    @classmethod
    def plan_saved(
        cls, model: Any, units: Sequence[Unit], options: BackendOptions, forward: Callable[[Any], None], half: bool
    ) -> dict[str, int]:
        if half:  # autocast's products, and so the inputs they keep, are in 16 bits
            model = model.to(torch.bfloat16)
        backend, saved = cls(model, units, options), {}
        for path, active in (("low", np.zeros(len(units), dtype=bool)), ("recovery", np.ones(len(units), dtype=bool))):
            backend.apply(active)
            forward(model)
            backend.apply(active)
            saved[path] = backend.step_figures()["saved_bytes"]
        backend.apply_exact()
        forward(model)
        backend.apply_exact()
        saved["16 bits"] = backend.step_figures()["saved_bytes"]
        backend.remove()
        return saved

    def take(self, model: nn.Module, units: Sequence[Unit]) -> None:
        options = self.options
        self.low, self.recovery = check_bits(options.bits_low, options.bits_recovery, options.format)
        refuse_8bit(self.name, model, "bitsandbytes itself keeps the input of each product, whatever else is quantised")
        if any(getattr(m, "gradient_checkpointing", False) for m in unwrap(model).modules()):
            raise SetupError(
                "backend='activation' with gradient checkpointing: checkpointing keeps no activation between forward and "
                "backward, so there is nothing to quantise. Switch one of them off"
            )
        named = [projections_of(unit.module) for unit in units]
        self._modules: list[list[Any]] = [[m for _, m in modules] for modules in named]
        missing = [unit.name for unit, modules in zip(units, self._modules, strict=True) if not modules]
        if missing:
            raise SetupError(f"backend='activation': no trainable nn.Linear in {', '.join(missing[:3])}")
        refuse_unswitchable(self.name, units, self._modules)
        self._names = [unit.name for unit in units]
        self._saved = Saved(self.low, len(units))
        self._plain = False
        self._active = np.zeros(len(units), dtype=bool)
        self.recoverable = np.ones(len(units), dtype=bool)
        # Bytes of the inputs per token: the number of tokens is known only in the forward.
        self.bytes_low = self._per_token(self.low)
        self.bytes_recovery = self._per_token(self.recovery)
        # A lifted projection may share its input with projections that are not lifted: the low copy is then kept as well.
        self.bytes_added = self.bytes_recovery.copy()
        self._figures = (0, 0, 0)
        self._idle = np.zeros(len(units), dtype=bool)
        for unit, modules in enumerate(named):
            for name, module in modules:
                adapter = lora_part(name) == "A"
                lend(module, QuantisedInput, saved=self._saved, form=self.low, unit=unit, adapter=adapter)

    def _per_token(self, form: Format | None) -> np.ndarray:
        sizes = []
        for modules in self._modules:
            width = sum(m.in_features for m in modules)
            element = 2 if modules[0].weight.dtype != torch.float32 else 4
            sizes.append(width * element if form is None else width * form.bits // 8 + 4 * len(modules))
        return np.array(sizes, dtype=np.int64)

    def apply(self, active: Bools) -> int:
        changed = int((active != self._active).sum())
        for unit in range(len(self._modules)) if self._plain else np.flatnonzero(active != self._active):
            for module in self._modules[unit]:
                module.form = self.recovery if active[unit] else self.low
        self._active, self._plain = active.copy(), False
        return changed

    def apply_exact(self) -> int:
        changed = 0 if self._plain else len(self._modules)
        for modules in self._modules:
            for module in modules:
                module.form = None
        self._active, self._plain = self.recoverable.copy(), True
        return changed

    def remove(self) -> None:
        for modules in self._modules:
            for module in modules:
                if type(module) is QuantisedInput and module.saved is self._saved:  # not another session's
                    make_plain(module)
        self._saved.forget()

    def recovery_bytes(self, active: Bools) -> int:
        """Bytes held at the step's peak beyond those of the low-cost path, as counted by `step_figures`."""
        kept, low, _ = self._figures
        return kept - low

    def step_figures(self) -> dict[str, Any]:
        """For the trace: peak bytes held for the backward since the last call, and the tokens of a micro-batch."""
        kept, low, tokens = self._figures = self._saved.figures()
        self._idle, self._saved.ran[:] = ~self._saved.ran, False
        return {"saved_bytes": kept, "saved_bytes_low": low, "saved_tokens": tokens}

    def idle(self) -> Bools:
        return self._idle

    def identity(self) -> dict[str, Any]:
        options = self.options
        formats = [options.format, options.bits_low, options.bits_recovery]
        return {**super().identity(), "units": self._names, "formats": formats}

    def census(self) -> dict[str, Any]:
        low, recovery = ("not quantised" if f is None else f"{f.bits}-bit ({f.name})" for f in (self.low, self.recovery))
        return {
            "path": f"saved inputs of {sum(map(len, self._modules))} projections, token by token: low-cost path {low}, "
            f"recovery path {recovery}; forward and gradients of inputs exact; copies shared where the same input is read",
            "bytes_per_token": True,
            "format_low": low,
            "format_recovery": recovery,
        }


def check_bits(bits_low: int, bits_recovery: int, kind: str) -> tuple[Format, Format | None]:
    """The formats of both paths.

    Raises:
        ConfigError: bits that the kind does not offer, or a recovery path that is not finer.
    """
    low, recovery = format_of("bits_low", kind, bits_low), format_of("bits_recovery", kind, bits_recovery)
    if low is None or (recovery is not None and recovery.bits <= low.bits):
        raise ConfigError(f"bits_recovery={bits_recovery!r}: expected more than bits_low={bits_low!r}, up to 16")
    return low, recovery
