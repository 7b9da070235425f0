"""``hf-gnmr compare RUN ...``: evaluated runs side by side: methods as rows, metrics as columns, differences from BF16.

A difference is called noise where the 95% interval of a paired bootstrap over the items that both were scored on (10,000
draws, seed 0) holds zero; for perplexities items are pages or blocks, resampled with their weights.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path
from typing import Any

import numpy as np

from .config import ConfigError
from .evaluate import EVAL_FOLDER
from .trace import TraceError, read_json, write_json, write_text

DRAWS = 10_000
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
    found = [read_json(file) for file in sorted(root.glob("*/*.json"))]
    found = [result for result in found if {"per_item", "precision", "task"} <= result.keys()]
    if not found:
        raise ConfigError(f"{folder}: no evaluation in it; run hf-gnmr eval first")
    return found


def compare(folders: list[Path], against: str | None = None) -> dict[str, Any]:
    """Rows (run and precision), columns (task and metric), cells with differences from the reference row."""
    rows: dict[str, list[Result]] = {}
    for folder in folders:
        for result in load_results(folder):
            rows.setdefault(f"{result['run']} ({result['precision']})", []).append(result)
    in_bf16 = [name for name, results in rows.items() if "INT8" not in results[0]["model"]]
    reference = against or (in_bf16[0] if in_bf16 else None)
    if reference is not None and reference not in rows:
        raise ConfigError(f"--against {reference!r}: one of {', '.join(map(repr, rows))} is allowed")
    cells: dict[str, dict[str, Any]] = {name: {} for name in rows}
    for name, results in rows.items():
        for result in results:
            for metric, value in result["metrics"].items():
                column = f"{result['task']} {metric}"
                cell = {
                    "value": value, "stderr": result["stderr"].get(metric), "n": result["n"], "shots": result["shots"],
                    "limit": result["settings"]["limit"], "smoke": result["smoke"], "model": result["model"],
                }
                other = _same(rows.get(reference or "", []), result)
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


def _same(results: list[Result], wanted: Result) -> Result | None:
    """The result of the same task under the same settings, if there is one."""
    return next((r for r in results if r["task"] == wanted["task"] and r["settings"] == wanted["settings"]), None)


def difference(ours: Result, theirs: Result, metric: str) -> dict[str, Any]:
    """Difference of a metric over the items that both have, with its interval."""
    items = [item for item in ours["per_item"][metric] if item in theirs["per_item"].get(metric, {})]
    a = np.array([ours["per_item"][metric][item] for item in items])
    b = np.array([theirs["per_item"][metric][item] for item in items])
    weights = np.array([ours["per_item_weight"].get(f"{metric}|{item}", 1.0) for item in items])
    draws = np.random.default_rng(0).integers(0, len(items), (DRAWS, len(items)))

    def figure(values: np.ndarray, index: np.ndarray) -> np.ndarray:
        if "perplexity" not in metric and metric != "bits_per_byte":
            return values[index].mean(axis=-1)
        mean = -values[index].sum(axis=-1) / weights[index].sum(axis=-1)
        return mean / np.log(2) if metric == "bits_per_byte" else np.exp(mean)

    every = np.arange(len(items))
    low, high = np.quantile(figure(a, draws) - figure(b, draws), [0.025, 0.975])
    return {
        "value": float(figure(a, every) - figure(b, every)), "low": float(low), "high": float(high), "items": len(items),
        "within_noise": bool(low <= 0.0 <= high),
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
            if "difference" in cell:
                d = cell["difference"]
                text += f" ({d['value']:+.4f}{', noise' if d['within_noise'] else ''})"
            row.append(text)
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    lines.append("")
    if table["reference"]:
        lines.append(f"In brackets: difference from {table['reference']}; noise: its interval holds 0 ({table['test']}).")
    for column in table["columns"]:
        cell = next(cells[column] for cells in table["rows"].values() if column in cells)
        limit = f", limit {cell['limit']}" if cell["limit"] else ""
        lines.append(f"{column}: n {cell['n']}, shots {', '.join(map(str, cell['shots']))}{limit}.")
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
    writer.writerow(["method", "metric", "value", "stderr", "n", "difference", "low", "high", "within_noise"])
    for name, cells in table["rows"].items():
        for column, cell in cells.items():
            d = cell.get("difference", {})
            writer.writerow([
                name, column, cell["value"], cell["stderr"], cell["n"], d.get("value"), d.get("low"), d.get("high"),
                d.get("within_noise"),
            ])
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
