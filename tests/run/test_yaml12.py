"""Plain scalars as YAML 1.2 reads them, loaded safely."""

from __future__ import annotations

import math

import pytest
import yaml

from hf_gnmr.run.yaml12 import Yaml12


def read(text):
    return yaml.load(text, Loader=Yaml12)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("2.0E-05", 2e-5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5", -1.5),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("010", 10),
        ("-3", -3),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("on", "on"),
        ("no", "no"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("2026-01-02", "2026-01-02"),
        ("'2e-5'", "2e-5"),
        ('"010"', "010"),
    ],
)
def test_a_plain_scalar(text, value):
    result = read(text)
    assert result == value and type(result) is type(value)


def test_not_a_number():
    assert math.isnan(read(".nan"))


@pytest.mark.parametrize("text", ["{a: 1, a: 2}", "a: 1\nb: {c: 1, c: 1}", "{1: x, 01: y}"])
def test_a_duplicate_key_is_refused(text):
    with pytest.raises(yaml.YAMLError, match="duplicate key"):
        read(text)


def test_objects_are_refused():
    with pytest.raises(yaml.YAMLError):
        read("!!python/object/apply:os.system [echo]")
