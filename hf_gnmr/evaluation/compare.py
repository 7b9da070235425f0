"""``hf-gnmr compare RUN ...``: evaluated runs side by side: methods as rows, metrics as columns, differences from BF16.

A difference is called noise where the 95% interval of a paired bootstrap over the items that both rows were scored on
(10,000 draws, seed 0) contains zero. For perplexities the items are pages or blocks, resampled with their weights. Items
count as the same where the hashes of prompt and target agree; with fewer than ten of them no verdict is given.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ConfigError, refusing
from ..files import FileError, free_number, numbered, read_json, replaceable, write_json, write_text
from ..terminal import TRACEBACK, TRACEBACK_HELP, clean, cleaned, refused
from .results import Result, load_results
from .scores import figure, standard_error
from .table import CSV_COLUMNS, as_csv, markdown

DRAWS = 10_000
DRAWS_AT_ONCE = 100
"""All at once would take gigabytes for MMLU."""
LEAST = 10
"""With fewer items no difference is judged."""
OURS = {
    "compare.md": (b"| method |", b"**SMOKE"),
    "compare.json": (b'{\n  "reference":',),
    "compare.csv": (",".join(CSV_COLUMNS[:4]).encode(),),
}
"""The table's files, and how they begin, in every version."""
Rows = dict[str, list[Result]]
"""The results of each row of the table, by its name."""


@cleaned
def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hf-gnmr compare", description="Evaluated runs side by side.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run that was evaluated, or a folder of results")
    parser.add_argument("--against", help="the row that the others are compared with; default: the first in BF16")
    parser.add_argument("--output", type=Path, help="folder for compare.md, compare.json and compare.csv; default: none")
    parser.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)
    options = parser.parse_args(argv)
    try:
        write([Path(run) for run in options.runs], options.against, options.output)
    except (ConfigError, FileError) as error:
        return refused(error)
    return 0


def write(folders: list[Path], against: str | None, output: Path | None, shown: set[tuple[str, str]] | None = None) -> None:
    """Print the table of these folders, and write it to `output`, where an earlier one of other rows is moved aside.

    Args:
        folders: see `load_results`.
        against: the reference row's name; None: the first in BF16.
        output: None: print only.
        shown: (precision, task) pairs to show; None: all.

    Raises:
        ConfigError: no results, or no row of the name `against`.
        FileError: a result that cannot be read.
    """
    if output is not None:
        check_output(output)
    table = compare(folders, against, shown)
    text = clean(markdown(table))
    print(text, flush=True)
    if output is None:
        return
    with refusing(f"--output {output}"):
        output.mkdir(parents=True, exist_ok=True)
    earlier = output / "compare.json"
    if earlier.is_file() and _row_names(earlier) != table["rows"].keys():
        files = [output / name for name in OURS]
        number = free_number(*files)
        for file in files:
            if file.is_file():
                os.replace(file, numbered(file, number))
    write_text(output / "compare.md", text + "\n")
    write_json(output / "compare.json", table)
    write_text(output / "compare.csv", as_csv(table))


def _row_names(file: Path) -> set[str]:
    """Names of the rows in an earlier table; empty where it has none, or is broken."""
    rows = read_json(file).get("rows")
    return set(rows) if isinstance(rows, dict) else set()


def check_output(output: Path) -> None:
    """Refuse a folder that cannot hold a table, or holds other files under its names.

    Raises:
        ConfigError: naming it.
    """
    with refusing(f"--output {output}"):
        if os.path.lexists(output) and not output.is_dir():
            raise ConfigError(f"--output {output}: not a folder")
    for name, beginnings in OURS.items():
        with refusing(f"--output {output}"):
            try:
                replaceable(output / name, functools.partial(_begins_with, beginnings), "a table of hf-gnmr compare")
            except FileError as error:
                raise ConfigError(f"--output {error}") from error


def _begins_with(beginnings: tuple[bytes, ...], text: bytes) -> bool:
    return text.startswith(beginnings)


def model_of(result: Result) -> str:
    """What the results of one row have in common: the model, and the dtype it was evaluated in."""
    key = result["key"]
    parts = ("adapter", "base", "base_files", "int8", "final", "recovery", "dtype")
    return json.dumps([key.get(part) for part in parts], sort_keys=True)


def compare(folders: list[Path], against: str | None = None, shown: set[tuple[str, str]] | None = None) -> dict[str, Any]:
    """Rows (model and precision), columns (task and metric), cells with differences from the reference row.

    Results in one folder that are of different models or dtypes are separate rows.

    Raises:
        ConfigError: no results, or no row of the name `against`.
        FileError: a result that cannot be read.
    """
    rows = _rows(folders, shown)
    in_bf16 = [name for name, results in rows.items() if results[0]["in_bf16"]]
    reference = against or (in_bf16[0] if in_bf16 else None)
    if reference is not None and reference not in rows:
        raise ConfigError(f"--against {reference!r}: expected one of {', '.join(map(repr, rows))}")
    reference_results = {result["task"]: result for result in reversed(rows.get(reference or "", []))}
    cells: dict[str, dict[str, Any]] = {name: {} for name in rows}
    for name, results in rows.items():
        for result in results:
            for metric in result["metrics"]:
                cell = _cell(result, metric)
                other = reference_results.get(result["task"])
                if other is not None and name != reference:
                    cell["difference"] = difference(result, other, metric)
                cells[name][f"{result['task']} {metric}"] = cell
    first = next(iter(rows.values()))[0]
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    smoke = [column for column in columns if any(row[column]["smoke"] for row in cells.values() if column in row)]
    return {
        "reference": reference,
        "columns": columns,
        "rows": cells,
        "smoke": smoke,
        "without_effect": [name for name, results in rows.items() if any(r["adapter_effect"] == 0.0 for r in results)],
        "versions": {"lm_eval": first["lm_eval"], **first["machine"]["packages"]},
        "test": f"paired bootstrap over items, {DRAWS} draws, seed 0, 95%",
    }


def _rows(folders: list[Path], shown: set[tuple[str, str]] | None) -> Rows:
    """Results by place and precision, and by model where one folder has several."""
    placed: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for folder in folders:
        for place, results in load_results(folder).items():
            for result in results:
                if shown is None or (result["precision"], result["task"]) in shown:
                    models = placed.setdefault((place, result["precision"]), {})
                    models.setdefault(model_of(result), []).append(result)
    if not placed:
        raise ConfigError(f"{', '.join(map(str, folders))}: no evaluation of the requested tasks")
    names = _names(list(placed))
    return {
        names[place] + (f", model {i} of {len(models)}" if len(models) > 1 else ""): results
        for place, models in placed.items()
        for i, results in enumerate(models.values(), 1)
    }


def _names(places: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """A row's name: the shortest end of its place that distinguishes it from the others, and the precision."""
    names = {}
    for place, precision in places:
        parts = place.strip("/").split("/")
        ends = ["/".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        others = {other for other, _ in places if other != place}
        end = next((e for e in ends if not any(f"/{o}".endswith(f"/{e}") for o in others)), place)
        names[place, precision] = f"{end} ({precision})"
    return names


def _cell(result: Result, metric: str) -> dict[str, Any]:
    """A metric's value, with everything that it depends on."""
    key = result["key"]
    settings = (*key.items(), ("block", result.get("block")))  # the key's block may be none, the model's own length
    return {
        "value": float(result["metrics"][metric]),
        "n": result["n"],
        "stderr": standard_error(metric, result["per_item"][metric], result["per_item_weight"]),
        "shots": result["shots"],
        "limit": key["limit"],
        "smoke": result["smoke"],
        "model": result["model"],
        "truncated": result.get("truncated", 0),
        "lm_eval": result["lm_eval"],
        "files": key["files"],
        "dtype": key["dtype"],
        "scoring": scoring_of(result),
        "settings": {
            name: value
            for name, value in settings
            if name in ("block", "stride", "chat_template", "max_gen_tokens") and value
        },
    }


def scoring_of(result: Result) -> dict[str, Any]:
    """How a result's items were scored: rows per batch, and the dtype of the log-softmax, where they are known.

    Results without them in their key took the log-softmax in the model's dtype (not those by token, which always took it
    in float32), and recorded the batch beside the key.
    """
    key = result["key"]
    if "block" in key:
        return {"softmax": "float32"}
    batch = key.get("batch_size", result.get("batch_size"))
    scoring = {} if batch is None else {"batch": batch}
    if "max_gen_tokens" not in key:  # answers are generated, not scored
        scoring["softmax"] = key.get("softmax_dtype", key["dtype"])
    return scoring


def difference(result: Result, reference: Result, metric: str) -> dict[str, Any] | None:
    """Difference of a metric from the reference's over the items that both were scored on, with its interval.

    None where there is no such item or a score is not finite; `within_noise` is None with fewer than LEAST items.
    """
    hashes, weight = reference["item_hash"], reference["per_item_weight"]
    items = [
        item
        for item in result["per_item"].get(metric, {})
        if item in reference["per_item"].get(metric, {})
        and result["item_hash"].get(item) == hashes.get(item)
        and result["per_item_weight"].get(f"{metric}|{item}") == weight.get(f"{metric}|{item}")
    ]
    a = np.array([float(result["per_item"][metric][item]) for item in items])
    b = np.array([float(reference["per_item"][metric][item]) for item in items])
    if not items or not np.isfinite([a, b]).all():
        return None
    weights = np.array([result["per_item_weight"].get(f"{metric}|{item}", 1.0) for item in items])
    generator = np.random.default_rng(0)

    def difference_over(index: np.ndarray) -> np.ndarray:
        return figure(metric, a[index], weights[index]) - figure(metric, b[index], weights[index])

    draws = []
    for _ in range(DRAWS // DRAWS_AT_ONCE):
        index = generator.integers(0, len(items), (DRAWS_AT_ONCE, len(items)))
        draws.append(difference_over(index))
    low, high = np.quantile(np.concatenate(draws), [0.025, 0.975])
    return {
        "value": float(difference_over(np.arange(len(items)))),
        "low": float(low),
        "high": float(high),
        "items": len(items),
        "within_noise": bool(low <= 0.0 <= high) if len(items) >= LEAST else None,
    }


if __name__ == "__main__":
    sys.exit(main())
