"""One module with two paths: bitsandbytes' 8-bit linear, switchable to a BF16 product.

A module becomes switchable by a change of class: PEFT, state dicts and quantizers still see bitsandbytes'
`Linear8bitLt` with the same parameters under the same names, and changing the class back leaves nothing behind.

* Low-cost path: bitsandbytes' INT8×INT8 product in training and evaluation alike, also on the CPU, where plain
  bitsandbytes silently trains on dequantised weights instead.
* Recovery path: a BF16 product with the original BF16 weight, or, where there is none, with the dequantised codes.
  It computes in BF16 and returns the input's dtype.

The path is a property of the unit, read in the forward pass: switching a unit touches one object, not its modules.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.autograd._functions import MatMul8bitLt
from torch import Tensor, nn

from ...config import ConfigError, SetupError
from ...terminal import shown
from .. import linears
from ..hooks import remove_hooks
from .bf16_product import Product


class PathSwitch:
    """Which path a unit's modules run, in train and in eval mode."""

    __slots__ = ("in_eval", "in_train")

    def __init__(self) -> None:
        self.in_train = False
        self.in_eval = False


ATTRIBUTES = ("_gnmr_path", "_gnmr_product", "_gnmr_checked", "_gnmr_weight")
"""Of a switchable linear, beside those of a plain one."""


class SwitchableLinear8bitLt(bnb.nn.Linear8bitLt):
    """A `Linear8bitLt` with a second, BF16 path. Made by `make_switchable` only."""

    _gnmr_path: PathSwitch
    _gnmr_product: Product
    _gnmr_checked: bool

    # Under torch.compile a path that is read while tracing would be a guard: each new choice of layers would recompile.
    # Run eagerly, between graphs that do not depend on the path, it does not. (bitsandbytes' own forward breaks the graph
    # at every linear too.)
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features), floating point; returns (..., out_features) in x's dtype."""
        path = self._gnmr_path
        flat = x.reshape(-1, x.shape[-1])  # bitsandbytes' bias gradient sums over the first dimension only
        out = self._recovery(flat) if (path.in_train if self.training else path.in_eval) else self._low(flat)
        # Both paths return a view: otherwise graphs compiled around the module would guard on which path ran.
        return out.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def _low(self, x: Tensor) -> Tensor:
        state = self.state
        if self.weight.CB is not None:
            self.init_8bit_state()
        state.is_training = self.training
        if x.numel() == 0:
            return x.new_zeros(x.shape[0], self.out_features)
        # The bias is cast without touching the parameter (plain bitsandbytes rewrites it in the input's dtype).
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return MatMul8bitLt.apply(x, self.weight, None, bias, state)

    def _recovery(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) != torch.bfloat16:
            with torch.autocast(x.device.type, enabled=False):
                return self._bf16(x)
        return self._bf16(x)

    def _bf16(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        known = self.__dict__["_gnmr_weight"]
        # A new parameter around the same codes (as DoRA makes) is still the same weight.
        if self._gnmr_checked and self.weight is not known and self.weight.data_ptr() != known.data_ptr():
            raise SetupError(
                "the 8-bit weight of a switched module was replaced (adapters merged into it?) while its recovery path "
                "still holds the original: end training first or, if training was interrupted, call "
                "hf_gnmr.restore_plain(model)"
            )
        return self._gnmr_product(x.to(torch.bfloat16), bias)

    def init_8bit_state(self) -> None:
        """Move codes and scales from the parameter to `state`, as bitsandbytes does before a product."""
        # PEFT's DoRA rewraps the codes in every forward on a CPU, and loses the scales that are already in `state`.
        scales = self.state.SCB
        super().init_8bit_state()
        if self.state.SCB is None:
            self.state.SCB = scales

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        twin = type(self).__new__(type(self))  # runs the path on which it was copied, until it is restored
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickled, it is plain: nothing controls it where it is read."""
        state = {name: value for name, value in self.__dict__.items() if name not in ATTRIBUTES}
        return bnb.nn.Linear8bitLt.__new__, (bnb.nn.Linear8bitLt,), state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # After a forward the scales live in `state`, where bitsandbytes' own loading does not look for them.
        borrowed = self.weight.SCB is None and self.state.SCB is not None
        if borrowed:
            self.weight.SCB = self.state.SCB
        try:
            super()._load_from_state_dict(state_dict, prefix, *args)
        finally:
            if borrowed:
                self.weight.SCB = None


def make_switchable(module: bnb.nn.Linear8bitLt, path: PathSwitch, product: Product, *, originals: bool) -> None:
    """Give `module` its second path.

    Args:
        module: an 8-bit linear whose state is initialised.
        path: the switch, shared by the modules of a unit.
        product: the recovery path's BF16 product (`Store.product`).
        originals: whether the product holds originals; then codes that were replaced since are an error.
    """
    module.__class__ = SwitchableLinear8bitLt
    module._gnmr_path, module._gnmr_checked = path, originals
    module.__dict__["_gnmr_product"] = product
    # Bypasses nn.Module.__setattr__, which would register a second parameter.
    module.__dict__["_gnmr_weight"] = module.weight
    _rebind(module)


def make_plain_8bit(module: Any) -> None:
    """Remove the second path; modules that are not switchable are left alone."""
    if type(module) is SwitchableLinear8bitLt:
        if module.weight.CB is not None:
            module.init_8bit_state()
        module.__class__ = bnb.nn.Linear8bitLt
        for name in ATTRIBUTES:
            module.__dict__.pop(name, None)
        _rebind(module)


def _rebind(module: Any) -> None:
    """Point accelerate's device hooks, which hold the bound forward of the old class, at the new one."""
    if "_old_forward" in module.__dict__:
        module._old_forward = types.MethodType(type(module).forward, module)


def restore_plain(model: nn.Module) -> None:
    """Make every module of `model` plain again (a `Linear8bitLt`, an `nn.Linear`, no hooks of ours), as training's end does.

    Only needed if training was interrupted (by an exception or a signal) and the model is used without another run.

    Raises:
        ConfigError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={shown(model)}: expected a torch.nn.Module")
    remove_hooks(model)
    for module in model.modules():
        make_plain_8bit(module)
        linears.make_plain(module)
