"""Which unit's forward first turned finite inputs into values that are not finite.

One bad layer makes the loss NaN, and a NaN loss makes every layer's gradient NaN: the norms no longer tell which one it was.
The forward does.  A hook on each unit's module sums the unit's output on the device (a sum is finite only if all its terms
are), once per forward and without a host sync; the sums are fetched with the norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..backends.hooks import Hook
from ..backends.units import Unit
from ..control.controller import Floats


class ForwardProbe:
    """Watches the outputs of the units' modules in training mode.

    Args:
        units: the monitored units, in the order of the forward. Units that are parts of one module are watched together.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        first_of: dict[nn.Module, int] = {}
        for unit in units:
            first_of.setdefault(unit.module, unit.index)
        self._home = units[0].parameters[0].device
        self.indices = list(first_of.values())
        """The unit of each sum; the first sum is that of the first unit's input."""
        self._sums = [torch.zeros((), device=units[0].parameters[0].device)]
        self._handles = [units[0].module.register_forward_hook(Hook(self._look_at_input(self._sums[0])), with_kwargs=True)]
        for module, index in first_of.items():
            self._sums.append(torch.zeros((), device=units[index].parameters[0].device))
            self._handles.append(module.register_forward_hook(Hook(self._look_at_output(self._sums[-1]))))

    def _look_at_output(self, total: Tensor) -> Any:
        def add(module: nn.Module, args: Any, output: Any) -> None:
            if module.training and not torch.compiler.is_compiling():
                _add(total, output)

        return add

    def _look_at_input(self, total: Tensor) -> Any:
        def add(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if module.training and not torch.compiler.is_compiling():
                _add(total, args or kwargs.get("hidden_states"))

        return add

    def values(self) -> Tensor:
        """1 for every sum that is not finite, otherwise 0: fp32, shape (watched modules + 1,), on the device."""
        sums = torch.stack([total.to(self._home, non_blocking=True) for total in self._sums])
        return (~torch.isfinite(sums)).float()

    def combine(self, values: Floats) -> int | None:
        """The first unit whose output is not finite, from `values` on the host; None if there is none, or if the input of
        the first unit was not finite already."""
        bad = np.flatnonzero(values)
        return None if not bad.size or bad[0] == 0 else self.indices[int(bad[0]) - 1]

    def discard(self) -> None:
        """Start over."""
        torch._foreach_zero_(self._sums)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _add(total: Tensor, values: Any) -> None:
    """Add the sum of the first floating-point tensor in `values`; inf and nan stay."""
    tensor = next((t for t in tensors_in(values) if t.is_floating_point()), None)
    if tensor is not None:
        total.add_(tensor.detach().sum(dtype=torch.float32).to(total.device, non_blocking=True))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in a module's inputs or output: of a model its loss, logits, and hidden states if they were requested."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)


def queue_callback(function: Any) -> None:
    """Have the autograd engine call `function` at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]
