"""Backends whose paths are products in few bits: the linears and experts of a unit run one product each, or none (plain).

`LowPrecision` is what `fp8` and `lowbit` share; they differ in the two products.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import nn

from ...config import SetupError
from ...control.monitor import Bools
from ..base import BY_TOKENS, Backend, BackendOptions, Counts, check_eval_path, check_unit
from ..linears import Latest, Switched, lend, make_plain, plain_class, refuse_8bit, refuse_unswitchable
from ..units import PEFT_INFIX, Unit, fused_experts_of, linears_of
from .experts import refuse_unhandled, switched_class
from .products import Product
from .switched import ProductSwitch, SwitchedLinear

UNIT_KINDS = ("layer", "experts", "expert")


@dataclass(frozen=True)
class LowPrecisionOptions(BackendOptions):
    """The kind of unit, and which path evaluation runs."""

    eval_path: str = "low"
    """Path in evaluation during training: ``low``, ``recovery``, or ``active`` (whatever training runs at that moment)."""
    unit: str | None = None
    """What is switched together: ``layer`` (None), ``experts`` (a layer's experts together) or ``expert`` (each)."""

    backend: ClassVar[str]

    def __post_init__(self) -> None:
        check_eval_path(self.eval_path)
        check_unit(self.backend, self.unit, UNIT_KINDS)


class LowPrecision(Backend):
    """Units whose linears and fused experts run `low`, or `recovery` while they are active.

    Routers, adapters and everything that is not a linear (embeddings, norms, the attention itself) stay as they are, as does
    everything outside the units (the output head).

    Args:
        model: any model whose decoder layers hold `nn.Linear` or Hugging Face's fused experts.
        units: its layers, experts of a layer, or single experts.

    Raises:
        SetupError: units without such modules, an 8-bit base, or modules that cannot be switched.
    """

    options: LowPrecisionOptions
    unit_kinds = UNIT_KINDS

    @abstractmethod
    def products(self, units: Sequence[Unit]) -> tuple[Product, Product | None]:
        """The products of the two paths, low-cost first; None: plain.

        Raises:
            SetupError: units that these products do not support, or a device without them.
        """

    def take(self, model: nn.Module, units: Sequence[Unit]) -> None:
        refuse_8bit(self.name, model, "its weights are integer codes, which have no product in another format")
        self.low, self.recovery = self.products(units)
        linears, fused = self._switchable(units)
        self._refuse(model, units, linears, fused)
        self.paths = [ProductSwitch() for _ in units]
        self._latest = latest = Latest()
        for path, modules in zip(self.paths, linears, strict=True):
            for module in modules:
                lend(module, SwitchedLinear, paths=path, latest=latest)
        for experts, owners in fused.items():
            lend(experts, switched_class(plain_class(experts)), paths=[self.paths[unit] for unit in owners], latest=latest)
        self._modules: list[Any] = [*(m for modules in linears for m in modules), *fused]
        self._counts = sum(map(len, linears)), len(fused)
        self._names = [unit.name for unit in units]
        self.recoverable = np.ones(len(units), dtype=bool)
        # The trained weights are in memory whatever runs; a path derives its numbers from them in each product.
        self.bytes_low = self.bytes_recovery = _weight_bytes(linears, fused)
        self.bytes_added = np.zeros(len(units), dtype=np.int64)
        self._active, self._exact = np.zeros(len(units), dtype=bool), False
        for path in self.paths:
            path.in_train = self.low
            path.in_eval = self.recovery if self.options.eval_path == "recovery" else self.low

    def _switchable(self, units: Sequence[Unit]) -> tuple[list[list[Any]], dict[Any, list[int]]]:
        """Each unit's linears; and each module of fused experts with the units it forms: one, or one per expert."""
        linears: list[list[Any]] = [[] for _ in units]
        fused: dict[Any, list[int]] = {}
        for unit in units:
            if unit.part is not None:
                fused.setdefault(unit.module, []).append(unit.index)
                continue
            linears[unit.index] = [m for _, m in linears_of(unit.module)]
            inside = fused_experts_of(unit.module)
            fused |= {m: [unit.index] for _, m in inside}
            if not inside and not linears[unit.index]:
                raise SetupError(f"backend={self.name!r}: no nn.Linear and no fused experts in {unit.name}")
        return linears, fused

    def _refuse(
        self, model: nn.Module, units: Sequence[Unit], linears: list[list[Any]], fused: dict[Any, list[int]]
    ) -> None:
        """Raise SetupError for modules that cannot be switched."""
        names = {module: name for name, module in model.named_modules()}
        for experts in fused:
            refuse_unhandled(self.name, names[experts], experts, names[experts].endswith(PEFT_INFIX))
        first = [[m for m, owners in fused.items() if owners[0] == unit.index] for unit in units]
        refuse_unswitchable(self.name, units, [[*a, *b] for a, b in zip(linears, first, strict=True)])

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

    def _run(self, path: ProductSwitch, product: Product | None) -> None:
        path.in_train = product
        if self.options.eval_path == "active":
            path.in_eval = product

    def remove(self) -> None:
        for module in self._modules:
            if isinstance(module, Switched) and module.__dict__.get("latest") is self._latest:  # not another session's
                make_plain(module)
        self._latest.forget()

    @classmethod
    def why_no_budget(cls, options: BackendOptions) -> str | None:
        return BY_TOKENS

    @classmethod
    def plan_saved(
        cls, model: Any, units: Sequence[Unit], options: BackendOptions, forward: Callable[[Any], None], half: bool
    ) -> dict[str, int]:
        cls(model, units, options).remove()  # only for its checks: products need nothing that is not there anyway
        return {}

    def identity(self) -> dict[str, Any]:
        return {
            **super().identity(),
            "units": self._names,
            "formats": [self._in_words(self.low), self._in_words(self.recovery)],
        }

    @staticmethod
    def _in_words(product: Product | None) -> str:
        return "not quantised" if product is None else product.name

    def census(self) -> dict[str, Any]:
        low, recovery = self._in_words(self.low), self._in_words(self.recovery)
        linears, fused = self._counts
        what = " and ".join(
            f"{count} {name}" for count, name in ((linears, "linears"), (fused, "modules of fused experts")) if count
        )
        return {
            "path": f"{what}: low-cost path {low}; recovery path {recovery}; evaluation during training runs the "
            f"{self.options.eval_path} path; embeddings, norms, the attention itself, routers, adapters and output head as "
            "they are",
            "format_low": low,
            "format_recovery": recovery,
            "eval_path": self.options.eval_path,
        }


def _weight_bytes(linears: list[list[Any]], fused: dict[Any, list[int]]) -> Counts:
    """Bytes of each unit's switched weights; those of fused experts in equal parts."""
    sizes = [sum(m.weight.numel() * m.weight.element_size() for m in modules) for modules in linears]
    for experts, owners in fused.items():
        whole = sum(p.numel() * p.element_size() for p in experts.parameters(recurse=False))
        for unit in owners:
            sizes[unit] += whole // len(owners)
    return np.array(sizes, dtype=np.int64)
