"""A recipe that is YAML and Python at once, so that `accelerate launch RECIPE` (which runs the file as Python) trains it.

The third line, ``_: r'''``, is a key to YAML; to Python it is an annotation that opens a string, which holds the recipe.
The last line, ``# '''; …``, is a comment to YAML; to Python it closes the string and, in a script that is run, calls
`hf_gnmr.train.main` with this file and the command line's arguments.  The two lines above are comments to both; the first
lets a shell run the file.
"""

from __future__ import annotations

import os
from pathlib import Path

from .files import write_text

KEY, OPENING = "_", "r'''"
"""The third line's key and its value, as YAML reads them."""
HEAD = (
    "#!/usr/bin/env -S hf-gnmr train",
    "# YAML and Python at once: the third line and the last let python, accelerate launch and torchrun run this file.",
    f"{KEY}: {OPENING}",
)
TAIL = (
    "# '''; import sys; "
    '__name__ == "__main__" and sys.exit(__import__("hf_gnmr.train").train.main([__file__, *sys.argv[1:]]))'
)
"""Nothing is imported where the file is not the program that was started (a data loader's process imports it once more)."""


def as_script(text: str) -> str:
    r"""The text of a recipe between the lines that make it a Python script as well.

    Args:
        text: YAML in which three single quotes in a row stand only in double-quoted scalars and comments: there they are
            written as ``\x27\x27\x27``, since they would end the Python string.
    """
    body = text if text.endswith("\n") else text + "\n"
    return "\n".join((*HEAD, body.replace("'''", r"\x27\x27\x27") + TAIL)) + "\n"


def write_script(path: str | os.PathLike[str], text: str) -> None:
    """Write the recipe `text` as such a script (see `as_script`), executable by whoever may read it."""
    write_text(path, as_script(text))
    mode = Path(path).stat().st_mode
    Path(path).chmod(mode | (mode & 0o444) >> 2)
