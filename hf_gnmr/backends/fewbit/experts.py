"""Fused experts in few bits, without rewriting them: the model's own code runs, its products are replaced as it goes.

Hugging Face keeps a layer's experts in tensors of (experts, rows, columns), and each class says in its own forward how the
tokens go through them, one expert after the other, by `F.linear` with a slice of such a tensor.  On a low path that very
forward is run (whatever faster implementation the model is set to otherwise), under a mode that sees each `F.linear` and,
where its weight is a slice of the module's own tensors, computes the expert's product instead.  Where every expert runs
plain, the module's forward is called as if nothing were there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...config import SetupError
from ..linears import Latest, Switched
from ..units import PEFT_INFIX
from .switched import ProductSwitch


class SwitchedExperts(Switched):
    """Mixin: fused experts with a path for all of them, or one for each."""

    ours = ("paths", "latest")
    paths: Sequence[ProductSwitch]
    latest: Latest

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own."""
        assert isinstance(self, nn.Module)
        products = [p.in_train if self.training else p.in_eval for p in self.paths]
        if all(p is None for p in products):
            return self.plain.forward(self, *args, **kwargs)
        mode = _Products(self, products)
        with mode:
            result = inspect.unwrap(self.plain.forward)(self, *args, **kwargs)
        if not mode.seen and result.numel():
            raise SetupError(
                f"{self.plain.__name__} multiplied by none of its weights through F.linear, so its experts cannot be put in "
                "few bits. Use a model of another class, or backend='none'"
            )
        return result


@functools.cache
def switched_class(plain: type[nn.Module]) -> type:
    """The class that a module of class `plain` is lent."""
    return type(f"Switched{plain.__name__}", (SwitchedExperts, plain), {"plain": plain})


def refuse_unhandled(backend: str, name: str, module: Any, adapted: bool) -> None:
    """Raise SetupError for fused experts that do not multiply by `F.linear`, or that have adapters."""
    name = name.removeprefix("base_model.model.").replace(PEFT_INFIX, "")
    kind = type(module).__name__
    if adapted or hasattr(module, "parametrizations"):
        raise SetupError(
            f"backend={backend!r}: {name} has adapters on fused experts, which are not handled. Name the linears that LoRA "
            "is for instead of 'all-linear', e.g. target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']"
        )
    if getattr(module, "is_transposed", False) or not _calls_linear(getattr(type(module), "plain", type(module))):
        raise SetupError(
            f"backend={backend!r}: {name} ({kind}) multiplies without F.linear (weights transposed, or all experts at "
            "once), which is not handled. Use a model of another class, or backend='none'"
        )


def _calls_linear(cls: type[nn.Module]) -> bool:
    """Whether a class's own forward, or a method that it calls, names `linear`: products that can be seen."""
    forward = inspect.unwrap(cls.forward)
    names = set(forward.__code__.co_names)
    for name in forward.__code__.co_names:
        code = getattr(inspect.unwrap(getattr(cls, name, None) or forward), "__code__", None)
        names |= set(code.co_names) if code is not None else set()
    return "linear" in names


class _Products(TorchFunctionMode):
    """Computes the products with slices of a module's weights by the expert's product."""

    def __init__(self, module: Any, products: list[Any]) -> None:
        super().__init__()
        self.products, self.latest = products, module.latest
        self.seen = False
        """Whether any product with these weights came by."""
        self.weights = [p for p in module.parameters(recurse=False) if p.ndim == 3]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            x, weight, bias = _linear_arguments(*args, **(kwargs or {}))
            expert = self._expert(weight)
            if expert is not None:
                self.seen = True
                product = self.products[expert if len(self.products) > 1 else 0]
                if product is not None:
                    return product(x, weight, bias, self.latest)
        return func(*args, **(kwargs or {}))

    def _expert(self, weight: Tensor) -> int | None:
        """Which expert's slice of which tensor a weight is; None: of none of ours."""
        if weight.ndim != 2:
            return None
        for tensor in self.weights:
            if weight.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                expert, rest = divmod(weight.storage_offset() - tensor.storage_offset(), tensor.stride(0))
                if rest == 0 and weight.shape == tensor.shape[1:]:
                    return expert
        return None


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias
