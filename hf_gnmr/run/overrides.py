"""Settings on the command line: ``section.key=value``, the value in YAML."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from typing import Any

from ..terminal import shown
from .sections import RecipeError
from .values import check_known
from .yaml12 import YamlError, load_yaml


def read_overrides(
    overrides: Iterable[str], sections: Iterable[str], off: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """The values by section and key; of a key that is given several values the last one, with a warning.

    Args:
        overrides: as on the command line.
        sections: a recipe's sections.
        off: those that the recipe switches off (``lora: false``).

    Raises:
        RecipeError: naming the override.
    """
    changes: dict[str, dict[str, Any]] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.partition(".")
        if not equals or not dot or not name:
            raise RecipeError(f"override {shown(override)}: expected section.key=value, e.g. training.max_steps=20")
        check_known(section, list(sections), "section")
        if not text.strip():
            raise RecipeError(f"override {shown(override)}: expected a value after =, or null for none")
        if section in off:
            raise RecipeError(f"override {shown(override)}: the recipe says {section}: false")
        try:
            value = load_yaml(text)
        except YamlError as error:
            raise RecipeError(f"override {shown(override)}: the value is not valid YAML ({error})") from error
        values = changes.setdefault(section, {})
        if name in values and values[name] != value:
            before = shown(values[name])
            warnings.warn(f"{shown(key)} is given twice: {shown(value)} counts, {before} does not", stacklevel=3)
        values[name] = value
    return changes
