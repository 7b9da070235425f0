"""Which recipes a recipe may extend, and how a recipe's file is read.

`extends` is part of a file that may come from anywhere.  It reads recipes below the folder of the recipe that the user
named, or the package's own, and no message shows what another file holds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..reading import MAX_EXTENDS, MAX_YAML_BYTES, SHIPPED, FileError, read_utf8
from ..terminal import shown
from .sections import RecipeError
from .yaml12 import YamlError, load_yaml


def read_values(path: Path, *, foreign: bool) -> Any:
    """What a recipe's file holds, as plain values.

    Args:
        path: the file.
        foreign: whether another recipe names it, and not the user.

    Raises:
        RecipeError: it cannot be read, is not valid YAML, or is beyond a limit.
    """
    try:
        text = read_utf8(path, MAX_YAML_BYTES)
    except FileError as error:
        raise RecipeError(str(error)) from error
    try:
        return load_yaml(text, foreign=foreign)
    except YamlError as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from error


def extended_by(path: Path, name: Any, chain: tuple[Path, ...]) -> Path:
    """The file that a recipe extends.

    Args:
        path: the recipe.
        name: its value of `extends`.
        chain: the resolved files before it, beginning with the one that the user named, up to and including `path`.

    Raises:
        RecipeError: no name, a file outside the permitted folders, a circle, or a chain that is too long.
    """
    # What another file says is not shown, and the chain says which files the user did not name.
    what = f"extends={shown(name)}" if len(chain) == 1 else f"extends in {path}"
    if not isinstance(name, str):
        raise RecipeError(f"{what}: expected the file name of a recipe in the same folder")
    if len(chain) > MAX_EXTENDS:
        raise RecipeError(f"{what}: expected at most {MAX_EXTENDS} recipes that extend each other")
    home = chain[0].parent
    target = path.parent / name
    try:
        resolved = target.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null character, or links in a circle
        raise RecipeError(f"{what} cannot be read: not a usable path") from error
    if not any(resolved.is_relative_to(folder) for folder in (home, *(folder.resolve() for folder in SHIPPED))):
        raise RecipeError(f"{what}: expected a recipe below {home}, or one that comes with the package")
    if len(chain) > 1 and not os.path.exists(resolved):  # reading it would name it
        raise RecipeError(f"{what} cannot be read: no such file")
    if resolved in chain:
        raise RecipeError(f"{path} extends itself, through {shown([p.name for p in chain])}")
    return target
