"""Result files of ``hf-gnmr eval``: found, read and checked, so that a table is made only of what can be shown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..files import FileError, read_json
from ..terminal import shown
from .scores import is_perplexity
from .subjects import EVAL_FOLDER, PRECISIONS, folder_for, resolve

MAX_NAME = 500
"""Characters of a name in a result: a task, a metric, a model's description."""
MAX_SCORE = 1e100
"""Of a finite number in a result, either way: sums and squares of scores stay finite."""
Result = dict[str, Any]
"""One result file."""
MARKS = {"per_item", "precision", "task", "key"}
"""A JSON file with fewer than two of these is not a result: a folder `final` may hold a model."""


def load_results(folder: Path) -> dict[str, list[Result]]:
    """All results under a run's or an evaluation's folder, by the place of the evaluated model.

    Raises:
        ConfigError: there are none.
        FileError: one cannot be read, or a field of it cannot be used.
    """
    if folder.name == EVAL_FOLDER and (folder.parent / "adapter_config.json").is_file():
        roots = {str(folder.parent.resolve()): folder}
    elif (folder / EVAL_FOLDER).is_dir():
        roots = {str(folder.resolve()): folder / EVAL_FOLDER}
    elif (folder / "config.json").is_file() or not folder.exists():  # a base model
        roots = {str(folder): folder_for(resolve(str(folder), None, None))}
    else:
        roots = {str(folder.resolve()): folder}
        # The --output of several runs has a folder for each.
        roots |= {str(f.resolve()): f for f in sorted(folder.glob("*")) if f.is_dir() and f.name not in PRECISIONS}
    placed = {place: results for place, root in roots.items() if (results := _results_in(root))}
    if not placed:
        raise ConfigError(f"{folder}: no evaluation in it; run hf-gnmr eval first")
    return placed


def _results_in(root: Path) -> list[Result]:
    """Without those that were moved aside (gsm8k.1.json)."""
    results = []
    for precision in PRECISIONS:
        for file in sorted((root / precision).glob("*.json")):
            if re.search(r"\.[0-9]+\.json$", file.name):
                continue
            result = read_json(file)
            if len(MARKS & result.keys()) >= 2:
                check_result(result, file)
                results.append(result)
    return results


# -- checks --------------------------------------------------------------------------------------------------------------

Check = Callable[[Any], bool]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME


def _is_number(value: Any) -> bool:
    """A number; one that is not finite is stored as text."""
    if value in ("inf", "-inf", "nan") and isinstance(value, str):
        return True
    return not isinstance(value, bool) and isinstance(value, (int, float)) and abs(value) <= MAX_SCORE


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_weight(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value <= MAX_SCORE


def _mapping(of: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(of, value.values()))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_list_of_counts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_NAME and all(map(_is_count, value))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


NAME = (_is_name, f"a text of 1 to {MAX_NAME} characters")
COUNT = (_is_count, "a whole number, at least 0")
COUNT_OR_NONE = (_or_none(_is_count), "a whole number, at least 0, or null")
FLAG = (_is_flag, "true or false")
OBJECT = (_is_object, "a JSON object")
REQUIRED: dict[str, tuple[Check, str]] = {
    "precision": (lambda value: value in PRECISIONS and isinstance(value, str), f"one of {', '.join(PRECISIONS)}"),
    "task": NAME,
    "key": OBJECT,
    "key.files": (_mapping(_is_text), "a JSON object of texts"),
    "key.limit": COUNT_OR_NONE,
    "key.dtype": NAME,
    "in_bf16": FLAG,
    "smoke": FLAG,
    "model": NAME,
    "adapter_effect": (_or_none(_is_number), "a number or null"),
    "machine": OBJECT,
    "machine.packages": (_mapping(_is_name), "a JSON object of texts"),
    "lm_eval": NAME,
    "metrics": (lambda value: bool(value) and _mapping(_is_number)(value), "a JSON object of numbers, one a metric"),
    "n": COUNT,
    "shots": (_is_list_of_counts, "a list of whole numbers"),
    "per_item": (_mapping(_mapping(_is_number)), "a JSON object of numbers by item, one a metric"),
    "per_item_weight": (_mapping(_is_weight), "a JSON object of numbers above 0"),
    "item_hash": (_mapping(_is_text), "a JSON object of texts"),
}
"""Fields by name (``key.files`` is in ``key``), their checks, and what is expected, in words."""
OPTIONAL: dict[str, tuple[Check, str]] = {
    "batch_size": COUNT,
    "truncated": COUNT,
    "block": COUNT_OR_NONE,
    "key.base_files": OBJECT,
    "key.adapter": OBJECT,
    "key.block": COUNT_OR_NONE,
    "key.stride": COUNT_OR_NONE,
    "key.batch_size": COUNT_OR_NONE,
    "key.max_gen_tokens": COUNT_OR_NONE,
    "key.chat_template": FLAG,
    "key.softmax_dtype": NAME,
}


def check_result(result: Result, file: Path) -> None:
    """Refuse a result with a field that is missing or cannot be used.

    Raises:
        FileError: naming file, field and value.
    """
    for field, (is_valid, expected) in {**REQUIRED, **OPTIONAL}.items():
        section, _, name = field.rpartition(".")
        values = result[section] if section else result
        if name not in values:
            if field in REQUIRED:
                raise FileError(f"{file}: {field} is missing; expected {expected}")
        elif not is_valid(values[name]):
            raise FileError(f"{file}: {field}={shown(values[name])}: expected {expected}")
    for metric in result["metrics"]:
        if not _is_name(metric):
            raise FileError(f"{file}: metrics: a name of {len(metric):,} characters: expected 1 to {MAX_NAME}")
        items = result["per_item"].get(metric)
        if not items:
            raise FileError(f"{file}: per_item has no scores of {shown(metric)}, which is in metrics")
        if is_perplexity(metric):
            _check_weights(result, metric, items, file)


def _check_weights(result: Result, metric: str, items: dict[str, Any], file: Path) -> None:
    for item, score in items.items():
        name = f"{metric}|{item}"
        weight = result["per_item_weight"].get(name)
        if weight is None:
            raise FileError(f"{file}: per_item_weight.{shown(name)} is missing; expected a number above 0")
        if math.isfinite(float(score)) and abs(float(score)) / weight > MAX_SCORE:
            raise FileError(f"{file}: per_item.{metric}.{shown(item)}={shown(score)}: out of range for weight {weight!r}")
