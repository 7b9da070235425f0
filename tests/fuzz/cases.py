"""All cases, by wing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fuzz import api, commands, data, models, recipes, runs, traces
from fuzz.harness import Case

WINGS = (recipes, data, models, traces, runs, commands, api)


def all_cases() -> Iterator[Case]:
    """Every case; the same ones in each process. Two of three are left to the slow part."""
    for wing in WINGS:
        for number, case in enumerate(wing.cases()):
            yield replace(case, slow=case.slow or wing is models or bool(number % 3))
