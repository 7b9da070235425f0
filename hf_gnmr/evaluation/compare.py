"""``hf-gnmr compare RUN ...``: evaluated runs side by side: methods as rows, metrics as columns, differences from BF16.

A difference is called noise where the 95% interval of a paired bootstrap over the items that both were scored on (10,000
draws, seed 0) holds zero; for perplexities items are pages or blocks, resampled with their weights. Items count as the same
where their prompt and target are (hashes); below ten of them nothing is said.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..config import ConfigError
from ..files import free_name, read_json, write_json, write_text
from ..trace.file import TraceError
from .scores import figure, standard_error
from .subjects import EVAL_FOLDER, PRECISIONS, folder_for, resolve

DRAWS = 10_000
LEAST = 10
"""Items below which no difference is called anything."""
Result = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hf-gnmr compare", description="Evaluated runs side by side.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run that was evaluated, or a folder of results")
    parser.add_argument("--against", help="the row that the others are compared with; default: the first in BF16")
    parser.add_argument("--output", type=Path, help="folder for compare.md, compare.json and compare.csv; default: none")
    options = parser.parse_args(argv)
    try:
        write([Path(run) for run in options.runs], options.against, options.output)
    except (ConfigError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def write(folders: list[Path], against: str | None, output: Path | None, shown: set[tuple[str, str]] | None = None) -> None:
    """Print the table of these folders, and write it to `output`, where an earlier one of other rows is moved aside.

    Args:
        shown: (precision, task) pairs to show; None: all that are there.

    Raises:
        ConfigError: no results, or no row of the name `against`.
    """
    table = compare(folders, against, shown)
    text = markdown(table)
    print(text, flush=True)
    if output is None:
        return
    output.mkdir(parents=True, exist_ok=True)
    earlier = output / "compare.json"
    if earlier.is_file() and read_json(earlier).get("rows", {}).keys() != table["rows"].keys():
        for name in ("compare.md", "compare.json", "compare.csv"):
            if (output / name).is_file():
                os.replace(output / name, free_name(output / name))
    write_text(output / "compare.md", text + "\n")
    write_json(output / "compare.json", table)
    write_text(output / "compare.csv", as_csv(table))


def load_results(folder: Path) -> dict[str, list[Result]]:
    """All results under a run's or an evaluation's folder, by the place of what was evaluated.

    Raises:
        ConfigError: none there.
    """
    if folder.name == EVAL_FOLDER and (folder.parent / "adapter_config.json").is_file():
        roots = {str(folder.parent.resolve()): folder}
    elif (folder / EVAL_FOLDER).is_dir():
        roots = {str(folder.resolve()): folder / EVAL_FOLDER}
    elif (folder / "config.json").is_file() or not folder.exists():  # a base model
        roots = {str(folder): folder_for(resolve(str(folder), None, None))}
    else:
        roots = {str(folder.resolve()): folder}
        # What several runs were evaluated into has a folder for each.
        roots |= {str(f.resolve()): f for f in sorted(folder.glob("*")) if f.is_dir() and f.name not in PRECISIONS}
    found = {place: _results_in(root) for place, root in roots.items()}
    found = {place: results for place, results in found.items() if results}
    if not found:
        raise ConfigError(f"{folder}: no evaluation in it; run hf-gnmr eval first")
    return found


def _results_in(root: Path) -> list[Result]:
    # Not those that were moved aside (gsm8k.1.json).
    files = [
        file
        for precision in PRECISIONS
        for file in sorted((root / precision).glob("*.json"))
        if not re.search(r"\.[0-9]+\.json$", file.name)
    ]
    results = [read_json(file) for file in files]
    return [result for result in results if {"per_item", "precision", "task", "key"} <= result.keys()]


def model_of(result: Result) -> str:
    """What a row must have in common: the model and the dtype it was evaluated in."""
    key = result["key"]
    parts = ("adapter", "base", "base_files", "int8", "final", "recovery", "dtype")
    return json.dumps([key.get(k) for k in parts], sort_keys=True)


def compare(folders: list[Path], against: str | None = None, shown: set[tuple[str, str]] | None = None) -> dict[str, Any]:
    """Rows (model and precision), columns (task and metric), cells with differences from the reference row.

    Results of one folder that are not of the same model, or not in the same dtype, are rows of their own.
    """
    placed: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for folder in folders:
        for place, results in load_results(folder).items():
            for result in results:
                if shown is None or (result["precision"], result["task"]) in shown:
                    models = placed.setdefault((place, result["precision"]), {})
                    models.setdefault(model_of(result), []).append(result)
    if not placed:
        raise ConfigError(f"{', '.join(map(str, folders))}: no evaluation of what was asked for")
    named = _names(list(placed))
    rows = {
        named[place] + (f", model {i} of {len(models)}" if len(models) > 1 else ""): results
        for place, models in placed.items()
        for i, results in enumerate(models.values(), 1)
    }
    in_bf16 = [name for name, results in rows.items() if results[0]["in_bf16"]]
    reference = against or (in_bf16[0] if in_bf16 else None)
    if reference is not None and reference not in rows:
        raise ConfigError(f"--against {reference!r}: one of {', '.join(map(repr, rows))} is allowed")
    cells: dict[str, dict[str, Any]] = {name: {} for name in rows}
    for name, results in rows.items():
        for result in results:
            for metric, value in result["metrics"].items():
                column = f"{result['task']} {metric}"
                cell = {
                    "value": float(value),
                    "n": result["n"],
                    "stderr": standard_error(metric, result["per_item"][metric], result["per_item_weight"]),
                    "shots": result["shots"],
                    "limit": result["key"]["limit"],
                    "smoke": result["smoke"],
                    "model": result["model"],
                    "truncated": result.get("truncated", 0),
                    "lm_eval": result["lm_eval"],
                    "files": result["key"]["files"],
                    "dtype": result["key"]["dtype"],
                    "settings": {
                        k: v
                        for k, v in (*result["key"].items(), ("block", result.get("block")))
                        if k in ("block", "stride", "chat_template", "max_gen_tokens") and v
                    },
                }
                other = next((r for r in rows.get(reference or "", []) if r["task"] == result["task"]), None)
                if other is not None and name != reference:
                    cell["difference"] = difference(result, other, metric)
                cells[name][column] = cell
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


def _names(places: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """A row's name: the end of its place that tells it from the others, and the precision."""
    named = {}
    for place, precision in places:
        parts = place.strip("/").split("/")
        ends = ["/".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        others = {other for other, _ in places if other != place}
        end = next((e for e in ends if not any(f"/{o}".endswith(f"/{e}") for o in others)), place)
        named[place, precision] = f"{end} ({precision})"
    return named


def difference(ours: Result, theirs: Result, metric: str) -> dict[str, Any] | None:
    """Difference of a metric over the items that both were scored on, with its interval.

    None where there is no such item or a score is not finite; `within_noise` is None below LEAST items.
    """
    hashes, weight = theirs["item_hash"], theirs["per_item_weight"]
    items = [
        item
        for item in ours["per_item"].get(metric, {})
        if item in theirs["per_item"].get(metric, {})
        and ours["item_hash"].get(item) == hashes.get(item)
        and ours["per_item_weight"].get(f"{metric}|{item}") == weight.get(f"{metric}|{item}")
    ]
    a = np.array([float(ours["per_item"][metric][item]) for item in items])
    b = np.array([float(theirs["per_item"][metric][item]) for item in items])
    if not items or not np.isfinite([a, b]).all():
        return None
    weights = np.array([ours["per_item_weight"].get(f"{metric}|{item}", 1.0) for item in items])
    generator = np.random.default_rng(0)

    def apart(index: np.ndarray) -> np.ndarray:
        return figure(metric, a[index], weights[index]) - figure(metric, b[index], weights[index])

    drawn = []
    for _ in range(DRAWS // 100):  # a hundred at a time: all at once would take gigabytes for MMLU
        index = generator.integers(0, len(items), (100, len(items)))
        drawn.append(apart(index))
    low, high = np.quantile(np.concatenate(drawn), [0.025, 0.975])
    return {
        "value": float(apart(np.arange(len(items)))),
        "low": float(low),
        "high": float(high),
        "items": len(items),
        "within_noise": bool(low <= 0.0 <= high) if len(items) >= LEAST else None,
    }


def markdown(table: dict[str, Any]) -> str:
    """The table as Markdown, with what belongs to its numbers."""
    lines = []
    if table["smoke"]:
        which = "" if len(table["smoke"]) == len(table["columns"]) else f" in {', '.join(table['smoke'])}"
        lines += [f"**SMOKE{which}: built-in rows; they say that everything runs, and nothing about a model.**", ""]
    lines += ["| method | " + " | ".join(table["columns"]) + " |", "|---|" + "---|" * len(table["columns"])]
    for name, cells in table["rows"].items():
        row = []
        for column in table["columns"]:
            cell = cells.get(column)
            if cell is None:
                row.append("")
                continue
            text = f"{cell['value']:.4f}" + (f" ± {cell['stderr']:.4f}" if cell["stderr"] is not None else "")
            d = cell.get("difference")
            if d is not None:
                word = {True: ", noise", False: "", None: ", too few items to tell"}[d["within_noise"]]
                paired = "" if d["items"] == cell["n"] or ":" in word else f", {d['items']} items in common"
                text += f" ({d['value']:+.4f}{word}{paired})"
            elif table["reference"] and name != table["reference"] and column in table["rows"][table["reference"]]:
                text += " (no item in common)" if np.isfinite(cell["value"]) else ""
            row.append(text)
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    lines.append("")
    if table["reference"]:
        lines.append(f"In brackets: difference from {table['reference']}; noise: its interval holds 0 ({table['test']}).")
    for column in table["columns"]:
        asked = dict.fromkeys(
            f"n {c['n']}, shots {', '.join(map(str, c['shots']))}{', limit ' + str(c['limit']) if c['limit'] else ''}, "
            f"{''.join(f'{k} {v}, ' for k, v in c['settings'].items())}"
            f"{str(c['truncated']) + ' prompts cut on the left, ' if c['truncated'] else ''}{_source(c['files'])}"
            for cells in table["rows"].values()
            if (c := cells.get(column))
        )
        lines.append(f"{column}: {'; '.join(asked)}." + (" NOT THE SAME ITEMS in all rows." if len(asked) > 1 else ""))
    for name, cells in table["rows"].items():
        of_it = next(iter(cells.values()))
        dtype = "" if of_it["dtype"] in of_it["model"] else f", {of_it['dtype']} beside it"
        lines.append(f"{name}: {of_it['model']}{dtype}.")
    for name in table["without_effect"]:
        lines.append(f"{name}: ADAPTER WITHOUT EFFECT.")
    lines.append("Versions: " + ", ".join(f"{k} {v}" for k, v in table["versions"].items()) + ".")
    return "\n".join(lines)


def _source(files: dict[str, str]) -> str:
    """Where the items are from; of local files the beginning of their hash, which tells other contents of the same name."""
    if "data" in files:
        return "the Hub's rows" if files["data"] == "Hub" else "built-in rows"
    return ", ".join(f"{name} ({digest[:6]})" for name, digest in files.items())


def as_csv(table: dict[str, Any]) -> str:
    """One line a cell."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(
        [
            "method",
            "metric",
            "value",
            "stderr",
            "n",
            "shots",
            "limit",
            "settings",
            "dtype",
            "difference",
            "low",
            "high",
            "items",
            "within_noise",
            "lm_eval",
        ]
    )
    for name, cells in table["rows"].items():
        for column, cell in cells.items():
            d = cell.get("difference") or {}
            writer.writerow(
                [
                    name,
                    column,
                    cell["value"],
                    cell["stderr"],
                    cell["n"],
                    "/".join(map(str, cell["shots"])),
                    cell["limit"],
                    " ".join(f"{k}={v}" for k, v in cell["settings"].items()),
                    cell["dtype"],
                    d.get("value"),
                    d.get("low"),
                    d.get("high"),
                    d.get("items"),
                    d.get("within_noise"),
                    cell["lm_eval"],
                ]
            )
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
