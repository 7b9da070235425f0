"""The key that makes a recipe a Python script as well (`hf_gnmr.script`): accepted exactly as it is written there."""

from __future__ import annotations

from typing import Any

from ..files import printable
from ..script import KEY, OPENING
from .sections import RecipeError


def drop_script_key(raw: dict[str, Any], *, foreign: bool = False) -> None:
    """Remove the key from a recipe's plain values, if it is there.

    Args:
        raw: the values.
        foreign: another recipe names the file, whose contents no message shows.

    Raises:
        RecipeError: it has another value.
    """
    value = raw.pop(KEY, OPENING)
    if value != OPENING:
        got = type(value).__name__
        if isinstance(value, str):
            got = "another text" if foreign else repr(printable(value))
        raise RecipeError(f"{KEY}: expected the line `{KEY}: {OPENING}`, or no such key; got {got}")


def refuse_script_key(values: dict[str, Any]) -> None:
    """Refuse the key inside a section, at any depth.

    Raises:
        RecipeError: naming the place.
    """
    pending: list[tuple[str, Any]] = list(values.items())
    seen: set[int] = set()
    while pending:
        name, value = pending.pop()
        if not isinstance(value, (dict, list)) or id(value) in seen:
            continue
        seen.add(id(value))  # an alias is looked at once, however often it is used
        if isinstance(value, dict):
            if KEY in value:
                raise RecipeError(f"{name}.{KEY}: expected `{KEY}: {OPENING}` at the top level only")
            pending += [(f"{name}.{key}", inner) for key, inner in value.items()]
        else:
            pending += [(name, inner) for inner in value]
