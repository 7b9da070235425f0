"""docs/SECURITY.md and the code have the same limits."""

from __future__ import annotations

import importlib
import pathlib
import re

import pytest

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "SECURITY.md").read_text(encoding="utf-8")
TABLE = TEXT.split("<!-- limits -->")[1].split("<!-- end limits -->")[0]
LIMITS = re.findall(r"^\| `([\w.]+)\.(\w+)` \| ([\d,]+) \|", TABLE, re.MULTILINE)
MODULES = {module for module, _, _ in LIMITS}


@pytest.mark.parametrize(("module", "name", "value"), LIMITS, ids=[name for _, name, _ in LIMITS])
def test_a_limit_has_the_value_that_the_table_gives(module, name, value):
    assert getattr(importlib.import_module(f"hf_gnmr.{module}"), name) == int(value.replace(",", ""))


def test_every_row_of_the_table_is_a_limit():
    assert len(LIMITS) == len(TABLE.strip().split("\n")) - 2 > 20


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_limit_of_these_modules_is_in_the_table(module):
    source = pathlib.Path(importlib.import_module(f"hf_gnmr.{module}").__file__).read_text(encoding="utf-8")
    defined = set(re.findall(r"^(MAX_\w+|MATCH_SECONDS) = ", source, re.MULTILINE))
    assert defined <= {name for of, name, _ in LIMITS if of == module}
