"""Hooks on a user's modules: recognised as ours, and never part of a copy.

A model may be copied, pickled or saved whole while it is monitored.  The copy is not monitored: its hooks do nothing, hold
nothing, and do not keep it from being pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Hook:
    """A module hook that calls a function; a copy of it calls none.

    Args:
        function: called with what the hook is called with; None: the hook does nothing.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._function is None else self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""Where torch keeps a module's hooks, and what it notes about some of them under the same keys."""


def remove_hooks(model: nn.Module) -> None:
    """Remove every `Hook` from the model's modules: of trainings that were interrupted, and inert ones in a copy."""
    for module in model.modules():
        for kind in KINDS:
            hooks = module.__dict__.get(kind) or {}
            for key in [key for key, hook in hooks.items() if isinstance(hook, Hook)]:
                del hooks[key]
                for flags in FLAGS:
                    (module.__dict__.get(flags) or {}).pop(key, None)
