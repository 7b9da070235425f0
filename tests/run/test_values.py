"""A recipe's values: converted to the type of their field, or refused with key, value and what was expected."""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any, Literal

import pytest
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_gnmr.run.recipe import check_training
from hf_gnmr.run.sections import RecipeError
from hf_gnmr.run.values import LEAST, MOST, check_known, check_value


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, int, 3),
        ("3", int, 3),
        (2, float, 2.0),
        ("2e-5", float, 2e-5),
        (True, bool, True),
        ("false", bool, False),
        (None, int | None, None),
        (False, Literal["auto", False] | str, False),
        ("checkpoint-3", Literal["auto", False] | str, "checkpoint-3"),
        ([1, 2], list[int] | None, [1, 2]),
        ("epoch", IntervalStrategy, IntervalStrategy.EPOCH),
        ({"a": 1}, Any, {"a": 1}),
    ],
)
def test_a_value_gets_the_type_of_its_field(value, hint, expected):
    result = check_value("section.key", value, hint)
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        ("three", int, "section.key='three': expected int"),
        (2.5, int, "section.key=2.5: expected int"),
        (True, int, "section.key=True: expected int"),
        (None, str, "section.key=None: expected str"),
        ([1, "x"], list[int] | None, "section.key=[1, 'x']: expected list[int] | None"),
        ("epochs", IntervalStrategy, "section.key='epochs': did you mean 'epoch'? expected 'no', 'steps', 'epoch'"),
        (math.nan, float, "section.key=nan: expected a finite number"),
        (math.inf, float | None, "section.key=inf: expected a finite number"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(value, hint, message):
    with pytest.raises(RecipeError) as error:
        check_value("section.key", value, hint)
    assert str(error.value) == message


def test_a_flag_that_a_literal_does_not_name_is_refused():
    with pytest.raises(RecipeError, match=r"section.key=True: expected .*Literal\['auto', False\]"):
        check_value("section.key", True, Literal["auto", False] | str)


@pytest.mark.parametrize(
    ("key", "value", "bounds"),
    [
        ("lora.r", 0, "expected a finite number, at least 1 and at most 65,536"),
        ("lora.lora_dropout", 1.5, "expected a finite number, at least 0 and at most 1"),
        ("training.max_steps", 0, "expected a finite number, at least 1 and at most 1,000,000,000"),
        ("training.max_steps", -2, "expected a finite number, at least 1 and at most 1,000,000,000"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_bounds(key, value, bounds):
    with pytest.raises(RecipeError) as error:
        check_value(key, value, type(value))
    assert str(error.value) == f"{key}={value!r}: {bounds}"


@pytest.mark.parametrize(
    ("key", "value"), [("training.max_steps", -1), ("lora.lora_dropout", 1.0), ("gnmr.alpha", -1.0), ("gnmr.beta", math.inf)]
)
def test_the_ends_of_a_range_are_in_it_and_gnmr_has_its_own(key, value):
    assert check_value(key, value, type(value)) == value


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_step", "unknown key training.max_step: did you mean training.max_steps?"),
        ("zzz", "unknown key training.zzz: known: max_steps, seed"),
        (3, "unknown key training.3: known: max_steps, seed"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, message):
    with pytest.raises(RecipeError) as error:
        check_known(name, ["max_steps", "seed"], "key", "training.")
    assert str(error.value) == message


def test_a_known_name_is_accepted():
    check_known("seed", ["max_steps", "seed"], "key")


def numeric_fields():
    """Fields of TrainingArguments that take numbers, and may be set."""
    hints = typing.get_type_hints(TrainingArguments)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(TrainingArguments) if f.init}
    return {name: hint for name, hint in fields.items() if {int, float} & {hint, *typing.get_args(hint)}}


@pytest.mark.parametrize("name", sorted(numeric_fields()))
def test_every_number_of_a_training_has_bounds(name):
    """So that no value takes memory or time without end, or ends in another library's error after the model was loaded."""
    key, hint = f"training.{name}", numeric_fields()[name]
    default = next(f.default for f in dataclasses.fields(TrainingArguments) if f.name == name)
    assert check_value(key, default, hint) == default
    assert check_value(key, LEAST[key], hint) == LEAST[key] and check_value(key, MOST[key], hint) == MOST[key]
    for value in (MOST[key] * 2, 10**60, LEAST[key] - 3, math.nan, math.inf, -math.inf):
        with pytest.raises(RecipeError, match=f"^{key}=.*: expected"):
            check_value(key, value, hint)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"lr_scheduler_kwargs": {"num_cycles": math.inf}}, "lr_scheduler_kwargs.num_cycles=inf"),
        ({"lr_scheduler_kwargs": {"a": [1, {"b": math.nan}]}}, "lr_scheduler_kwargs.a.b=nan"),
    ],
)
def test_numbers_inside_settings_are_finite(values, name):
    with pytest.raises(RecipeError, match=f"training.{name}: expected a finite number"):
        check_training(values)
