"""Backends whose paths are products in few bits: what a unit's linears and experts run is a product each, or none (plain).

`LowPrecision` is what `fp8` and `lowbit` share; they differ in the two products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...config import SetupError
from ...control.controller import Bools
from ..base import Backend
from ..linears import Latest, Switched, lend, make_plain, plain_class, refuse_8bit, refuse_unswitchable
from ..units import PEFT_INFIX, Unit, fused_experts_of, linears_of
from .products import Product


class UnitPaths:
    """What a unit's modules run, in train and in eval mode; None: the plain product."""

    __slots__ = ("in_eval", "in_train")

    def __init__(self) -> None:
        self.in_train: Product | None = None
        self.in_eval: Product | None = None


class SwitchedLinear(Switched, nn.Linear):
    """A linear that runs its unit's product."""

    ours = ("paths", "latest")
    paths: UnitPaths
    latest: Latest

    # As it is under torch.compile, so that a choice of units costs no recompilation.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        product = self.paths.in_train if self.training else self.paths.in_eval
        if product is None:
            return super().forward(x)
        return product(x, self.weight, self.bias, self.latest)


class LowPrecision(Backend):
    """Units whose linears and fused experts run `low`, or `recovery` while they are active.

    Routers, adapters and everything that is no linear (embeddings, norms, the attention itself) stay as they are, as does
    what lies in no unit (the output head).

    Args:
        model: any model whose decoder layers hold `nn.Linear` or Hugging Face's fused experts.
        units: its layers, experts of a layer, or single experts.
        low, recovery: the products of the two paths; None: plain.
        eval_path: path in eval mode: "low", "recovery", or "active" (whatever training runs at that moment).

    Raises:
        SetupError: units without such modules, an 8-bit base, or modules that cannot be switched.
    """

    def _take(self, model: nn.Module, units: Sequence[Unit], low: Product, recovery: Product | None, eval_path: str) -> None:
        # Past this file's own import: experts know paths.
        from .experts import refuse_unhandled, switched_class

        refuse_8bit(self.name, model, "its weights are integer codes, which have no product in another format")
        self.low, self.recovery, self.eval_path = low, recovery, eval_path
        linears: list[list[Any]] = [[] for _ in units]
        fused: dict[Any, list[int]] = {}  # the units of each module of fused experts: one, or one an expert
        for unit in units:
            if unit.part is not None:
                fused.setdefault(unit.module, []).append(unit.index)
                continue
            linears[unit.index] = [m for _, m in linears_of(unit.module)]
            inside = fused_experts_of(unit.module)
            fused |= {m: [unit.index] for _, m in inside}
            if not inside and not linears[unit.index]:
                raise SetupError(f"backend={self.name!r}: no nn.Linear and no fused experts in {unit.name}")
        first = [[m for m, of in fused.items() if of[0] == unit.index] for unit in units]
        names = {module: name for name, module in model.named_modules()}
        for experts in fused:
            refuse_unhandled(self.name, names[experts], experts, names[experts].endswith(PEFT_INFIX))
        refuse_unswitchable(self.name, units, [[*a, *b] for a, b in zip(linears, first, strict=True)])

        self.paths = [UnitPaths() for _ in units]
        self._latest = latest = Latest()
        for path, modules in zip(self.paths, linears, strict=True):
            for module in modules:
                lend(module, SwitchedLinear, paths=path, latest=latest)
        for experts, of in fused.items():
            lend(experts, switched_class(plain_class(experts)), paths=[self.paths[unit] for unit in of], latest=latest)
        self._modules: list[Any] = [*(m for modules in linears for m in modules), *fused]
        self._counts = sum(map(len, linears)), len(fused)

        self.recoverable = np.ones(len(units), dtype=bool)
        weights = [sum(m.weight.numel() * m.weight.element_size() for m in modules) for modules in linears]
        for experts, of in fused.items():
            size = sum(p.numel() * p.element_size() for p in experts.parameters(recurse=False))
            for index in of:
                weights[index] += size // len(of)
        # The weights that are trained are there whatever runs; a path makes its numbers from them in each product.
        self.bytes_low = self.bytes_recovery = np.array(weights, dtype=np.int64)
        self.bytes_added = np.zeros(len(units), dtype=np.int64)
        self._active, self._exact = np.zeros(len(units), dtype=bool), False
        for path in self.paths:
            path.in_train = low
            path.in_eval = recovery if eval_path == "recovery" else low

    def apply(self, active: Bools) -> int:
        changed = np.flatnonzero(active != self._active)
        for unit in range(len(self.paths)) if self._exact else changed:
            self._run(self.paths[unit], self.recovery if active[unit] else self.low)
        self._active, self._exact = active.copy(), False
        return len(changed)

    def apply_exact(self) -> int:
        changed = 0 if self._exact else len(self.paths)
        for path in self.paths:
            self._run(path, None)
        self._active, self._exact = self.recoverable.copy(), True
        return changed

    def _run(self, path: UnitPaths, product: Product | None) -> None:
        path.in_train = product
        if self.eval_path == "active":
            path.in_eval = product

    def remove(self) -> None:
        for module in self._modules:
            if isinstance(module, Switched) and module.__dict__.get("latest") is self._latest:  # and not another session's
                make_plain(module)
        self._latest.forget()

    def census(self) -> dict[str, Any]:
        low, recovery = ("not quantised" if p is None else p.name for p in (self.low, self.recovery))
        linears, fused = self._counts
        what = " and ".join(
            f"{count} {name}" for count, name in ((linears, "linears"), (fused, "modules of fused experts")) if count
        )
        return {
            "path": f"{what}: low-cost path {low}; recovery path {recovery}; evaluation during training runs the "
            f"{self.eval_path} path; embeddings, norms, the attention itself, routers, adapters and output head as they are",
            "format_low": low,
            "format_recovery": recovery,
            "eval_path": self.eval_path,
        }
