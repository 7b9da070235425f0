"""``hf-gnmr compare RUN ...``: evaluated runs side by side: methods as rows, metrics as columns, differences from BF16.

A difference is called noise where the 95% interval of a paired bootstrap over the items that both were scored on (10,000
draws, seed 0) holds zero; for perplexities items are pages or blocks, resampled with their weights. Items count as the same
where their prompt and target are (hashes); below ten of them nothing is said.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .config import ConfigError
from .scores import figure, standard_error
from .subjects import EVAL_FOLDER, folder_for, resolve
from .trace import TraceError, read_json, write_json, write_text

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
        table = compare([Path(run) for run in options.runs], options.against)
    except (ConfigError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = markdown(table)
    print(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        write_text(options.output / "compare.md", text + "\n")
        write_json(options.output / "compare.json", table)
        write_text(options.output / "compare.csv", as_csv(table))
    return 0


def load_results(folder: Path) -> list[Result]:
    """All results under a run's or an evaluation's folder.

    Raises:
        ConfigError: none there.
    """
    root = folder / EVAL_FOLDER if (folder / EVAL_FOLDER).is_dir() else folder
    if (folder / "config.json").is_file() and root == folder:
        root = folder_for(resolve(str(folder), None, None))
    # Not those that were moved aside (gsm8k.1.json).
    files = [file for file in sorted(root.glob("*/*.json")) if not re.search(r"\.[0-9]+\.json$", file.name)]
    found = [read_json(file) for file in files]
    found = [result for result in found if {"per_item", "precision", "task", "key"} <= result.keys()]
    if not found:
        raise ConfigError(f"{folder}: no evaluation in it; run hf-gnmr eval first")
    return found


def compare(folders: list[Path], against: str | None = None) -> dict[str, Any]:
    """Rows (run and precision), columns (task and metric), cells with differences from the reference row."""
    placed: dict[tuple[str, str], list[Result]] = {}
    for folder in folders:
        for result in load_results(folder):
            placed.setdefault((result["key"]["place"], result["precision"]), []).append(result)
    named = _names(list(placed))
    rows = {named[place]: results for place, results in placed.items()}
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
                    "value": float(value), "n": result["n"],
                    "stderr": standard_error(metric, result["per_item"][metric], result["per_item_weight"]),
                    "shots": result["shots"], "limit": result["key"]["limit"], "smoke": result["smoke"],
                    "model": result["model"], "truncated": result.get("truncated", 0), "lm_eval": result["lm_eval"],
                    "files": result["key"]["files"],
                }
                other = next((r for r in rows.get(reference or "", []) if r["task"] == result["task"]), None)
                if other is not None and name != reference:
                    cell["difference"] = difference(result, other, metric)
                cells[name][column] = cell
    first = next(iter(rows.values()))[0]
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    return {
        "reference": reference, "columns": columns, "rows": cells,
        "smoke": any(result["smoke"] for results in rows.values() for result in results),
        "without_effect": [name for name, results in rows.items() if results[0]["adapter_effect"] == 0.0],
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
        item for item in ours["per_item"].get(metric, {})
        if item in theirs["per_item"].get(metric, {}) and ours["item_hash"].get(item) == hashes.get(item)
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
        "value": float(apart(np.arange(len(items)))), "low": float(low), "high": float(high), "items": len(items),
        "within_noise": bool(low <= 0.0 <= high) if len(items) >= LEAST else None,
    }


def markdown(table: dict[str, Any]) -> str:
    """The table as Markdown, with what belongs to its numbers."""
    lines = []
    if table["smoke"]:
        lines += ["**SMOKE: built-in rows; these numbers say that everything runs, and nothing about a model.**", ""]
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
                text += f" ({d['value']:+.4f}{word})"
            row.append(text)
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    lines.append("")
    if table["reference"]:
        lines.append(f"In brackets: difference from {table['reference']}; noise: its interval holds 0 ({table['test']}).")
    for column in table["columns"]:
        asked = dict.fromkeys(
            f"n {c['n']}, shots {', '.join(map(str, c['shots']))}{', limit ' + str(c['limit']) if c['limit'] else ''}, "
            f"{str(c['truncated']) + ' prompts cut on the left, ' if c['truncated'] else ''}{', '.join(c['files'])}"
            for cells in table["rows"].values() if (c := cells.get(column))
        )
        lines.append(f"{column}: {'; '.join(asked)}." + (" NOT THE SAME ITEMS in all rows." if len(asked) > 1 else ""))
    for name, cells in table["rows"].items():
        lines.append(f"{name}: {next(iter(cells.values()))['model']}.")
    for name in table["without_effect"]:
        lines.append(f"{name}: ADAPTER WITHOUT EFFECT.")
    lines.append("Versions: " + ", ".join(f"{k} {v}" for k, v in table["versions"].items()) + ".")
    return "\n".join(lines)


def as_csv(table: dict[str, Any]) -> str:
    """One line a cell."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([
        "method", "metric", "value", "stderr", "n", "shots", "limit", "difference", "low", "high", "within_noise", "lm_eval",
    ])
    for name, cells in table["rows"].items():
        for column, cell in cells.items():
            d = cell.get("difference") or {}
            writer.writerow([
                name, column, cell["value"], cell["stderr"], cell["n"], "/".join(map(str, cell["shots"])), cell["limit"],
                d.get("value"), d.get("low"), d.get("high"), d.get("within_noise"), cell["lm_eval"],
            ])
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
