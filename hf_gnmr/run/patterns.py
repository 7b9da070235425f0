"""Regular expressions from recipes and adapters, tried under a time limit before PEFT matches them.

An expression such as ``(a+)+b`` takes exponential time on some names, and whether one does cannot be read off its text
without refusing honest ones.  So it is tried: a helper process matches it against the names that PEFT will match it against,
in the way that PEFT does, and is ended after a few seconds; Python cannot interrupt a match in its own process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ..terminal import shown
from .sections import RecipeError

MATCH_SECONDS = 10
"""For all names of a model; an honest expression takes milliseconds, and starting the helper less than a second."""
MAX_PATTERN = 10_000
"""Characters of an expression."""
FULL = ("target_modules", "exclude_modules", "target_parameters", "modules_to_save")
"""Options of PEFT that are matched as a whole, where they are a text."""
HELPER = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for number, (pattern, whole) in enumerate(patterns):
    print(number, flush=True)
    try:
        expression = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        sys.exit(f"not a regular expression ({error})")
    for name in names:
        expression.fullmatch(name) if whole else expression.match(name)
"""
"""Compiles too: an expression may take as long to compile as to match. Its last line of output is the one that it is at."""


def check_patterns(options: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Refuse expressions among PEFT's options that do not compile, or take too long on these names.

    Args:
        options: of the adapter, by PEFT's names.
        names: of all modules and parameters.
        where: begins the message.

    Raises:
        RecipeError: naming option and expression.
    """
    expressions = _expressions(options)
    for option, pattern, _ in expressions:
        if len(pattern) > MAX_PATTERN:
            raise RecipeError(f"{where}{option}={shown(pattern)}: expected at most {MAX_PATTERN:,} characters")
    if not expressions:
        return
    at, problem = _try([(pattern, whole) for _, pattern, whole in expressions], list(names))
    if problem is not None:
        option, pattern, _ = expressions[at]
        raise RecipeError(f"{where}{option}={shown(pattern)}: {problem}")


def _expressions(options: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """Option, expression as PEFT builds it, and whether the whole name must match."""
    entries = [(key, options[key], True) for key in FULL if isinstance(options.get(key), str)]
    layers = options.get("layers_pattern")
    for pattern in [layers] if isinstance(layers, str) else layers or []:
        entries.append(("layers_pattern", rf".*\.{pattern}\.(\d+)\.", False))
    for key in ("rank_pattern", "alpha_pattern"):
        if isinstance(options.get(key), Mapping):
            entries += [(key, rf"(.*\.)?({pattern})$", False) for pattern in options[key]]
    # A plain name ("all-linear", "q_proj", "mlp.down_proj") cannot backtrack.
    return [entry for entry in entries if not re.fullmatch(r"[\w.\-]*", entry[1])]


def _try(patterns: list[tuple[str, bool]], names: list[str]) -> tuple[int, str | None]:
    """The position of the last expression that was tried, and what is wrong with it; None: all were matched in time."""
    command = [sys.executable, "-I", "-S", "-c", HELPER]
    content = json.dumps([patterns, names])
    try:
        done = subprocess.run(  # noqa: S603 (this interpreter, a constant program)
            command, input=content, text=True, timeout=MATCH_SECONDS, check=False, capture_output=True
        )
    except subprocess.TimeoutExpired as error:
        problem: str | None = (
            f"expected expressions that are matched against the names of the model's modules within {MATCH_SECONDS} seconds"
        )
        output = error.stdout or b""
        text = output.decode() if isinstance(output, bytes) else output
    else:
        text = done.stdout
        problem = None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["cannot be matched"])[-1]
    return int((text.split() or ["0"])[-1]), problem
