"""What backends over plain linears share: modules that are switched by a change of class, and inputs that modules share.

A module becomes switchable by a change of its class and plain again by changing it back: parameters, names, hooks and
state dicts stay what they were.  Copies, including pickled ones, are plain: no backend controls them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..config import SetupError
from .units import Unit, base_model


class Switched:
    """Mixin for the classes that replace a module's own."""

    plain: ClassVar[type[nn.Module]] = nn.Linear
    """The module's own class."""
    attributes: ClassVar[tuple[str, ...]] = ()
    """Attributes that `lend` sets on the module."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        twin = self.plain.__new__(self.plain)
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self._plain_state(), memo)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return self.plain.__new__, (self.plain,), self._plain_state()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def _plain_state(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in self.attributes}


def plain_class(module: Any) -> Any:
    """A module's own class, whether or not it is switched."""
    return module.plain if isinstance(module, Switched) else type(module)


def lend(module: Any, cls: type, **attributes: Any) -> None:
    """Change a module's class to `cls` (a `Switched`) and set its attributes; an earlier change is undone first."""
    make_plain(module)
    module.__class__ = cls
    module.__dict__.update(attributes)  # bypasses nn.Module.__setattr__: none of them is a parameter or a submodule


def make_plain(module: Any) -> None:
    """Restore a module's own class and remove the attributes; modules that are not switched are left alone."""
    if isinstance(module, Switched):
        plain, attributes = module.plain, module.attributes
        module.__class__ = plain  # type: ignore[assignment]
        for name in attributes:
            module.__dict__.pop(name, None)


def refuse_unswitchable(backend: str, units: Sequence[Unit], modules: Sequence[Iterable[Any]]) -> None:
    """Raise SetupError for modules that a change of class does not affect, or that two units share."""
    owner: dict[int, str] = {}
    for unit, members in zip(units, modules, strict=True):
        for module in members:
            if "forward" in module.__dict__:
                raise SetupError(
                    f"backend={backend!r}: a projection in {unit.name} has a custom forward (accelerate's hooks for "
                    "device_map or offloading, or a patch), which would bypass the quantisation. Load the model without it"
                )
            if id(module) in owner:
                raise SetupError(
                    f"backend={backend!r}: {unit.name} and {owner[id(module)]} are the same module, which cannot run "
                    "two paths. Use separate layers"
                )
            owner[id(module)] = unit.name


def refuse_8bit(backend: str, model: nn.Module, why: str) -> None:
    """Raise SetupError for a base in bitsandbytes' 8 bits."""
    if getattr(base_model(model), "is_loaded_in_8bit", False):
        raise SetupError(f"backend={backend!r} over an 8-bit base: {why}. Load the base in BF16, or use backend='int8'")


def as_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in the dtype that autocast would multiply them in; unchanged where it is off (fp64 always)."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor) -> Tensor:
        return t if t.dtype == torch.float64 else t.to(dtype)

    return cast(x), cast(weight), None if bias is None else cast(bias)


def without_autocast(x: Tensor) -> Any:
    """A context in which products run in the dtype of their operands, in a forward and in a backward, whatever calls it."""
    kind = x.device.type
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


class Latest:
    """What was computed from the latest input, shared by projections that read the same one (q, k, v; gate, up)."""

    def __init__(self) -> None:
        self._input: StorageWeakRef | None = None
        self._key: tuple[Any, ...] = ()
        self._made: dict[str, Any] = {}

    def is_new(self, given: Tensor, dtype: torch.dtype) -> bool:
        """Register `given`, to be multiplied in `dtype`; returns whether it differs from the last input."""
        if torch.is_inference_mode_enabled() or given.is_inference():  # no version to compare, and nothing may outlive it
            self.forget()
            return True
        # Inputs are compared by storage and version, since hooks pass each module a different view of one input.
        storage = StorageWeakRef(given.untyped_storage())
        key = (given.storage_offset(), given.shape, given.stride(), given.dtype, given._version, dtype)
        if self._input is None or self._input.expired() or self._input != storage or self._key != key:
            self._input, self._key, self._made = storage, key, {}
            return True
        return False

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """The result of `make`, computed once per name for the latest input."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def forget(self) -> None:
        """Drop everything (a backward's own references keep what it needs)."""
        self._input, self._made = None, {}
