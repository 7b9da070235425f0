"""The comparison as Markdown and as CSV, with everything that a reader needs to judge its numbers."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import numpy as np

from ..terminal import clean

Cell = dict[str, Any]
Table = dict[str, Any]
"""As `compare.compare` returns it."""
CSV_COLUMNS = (
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
    "batch_size",
    "softmax_dtype",
)


def markdown(table: Table) -> str:
    """The table as Markdown: methods as rows, metrics as columns, then notes on columns, rows and versions."""
    lines = []
    if table["smoke"]:
        which = "" if len(table["smoke"]) == len(table["columns"]) else f" in {', '.join(table['smoke'])}"
        lines += [f"**SMOKE{which}: built-in rows; they show that everything runs, and say nothing about a model.**", ""]
    lines += ["| method | " + " | ".join(table["columns"]) + " |", "|---|" + "---|" * len(table["columns"])]
    for name, cells in table["rows"].items():
        texts = [_cell_text(table, name, column, cells.get(column)) for column in table["columns"]]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    lines.append("")
    if table["reference"]:
        lines.append(f"In brackets: difference from {table['reference']}; noise: its interval contains 0 ({table['test']}).")
    lines += [_column_note(table, column) for column in table["columns"]]
    for name, cells in table["rows"].items():
        cell = next(iter(cells.values()))
        dtype = "" if cell["dtype"] in cell["model"] else f", {cell['dtype']} beside it"
        lines.append(f"{name}: {cell['model']}{dtype}.")
    lines += [f"{name}: ADAPTER WITHOUT EFFECT." for name in table["without_effect"]]
    lines.append("Versions: " + ", ".join(f"{package} {version}" for package, version in table["versions"].items()) + ".")
    return "\n".join(lines)


def _cell_text(table: Table, name: str, column: str, cell: Cell | None) -> str:
    """Value, standard error, and the difference from the reference row in brackets."""
    if cell is None:
        return ""
    text = f"{cell['value']:.4f}" + (f" ± {cell['stderr']:.4f}" if cell["stderr"] is not None else "")
    difference = cell.get("difference")
    if difference is not None:
        verdict = {True: ", noise", False: "", None: ", too few items to tell"}[difference["within_noise"]]
        paired = "" if difference["items"] == cell["n"] else f", {difference['items']} items in common"
        return f"{text} ({difference['value']:+.4f}{verdict}{paired})"
    reference = table["reference"]
    comparable = reference and name != reference and column in table["rows"][reference]
    return text + (" (no item in common)" if comparable and np.isfinite(cell["value"]) else "")


def _column_note(table: Table, column: str) -> str:
    """What the rows of a column were evaluated on; more than one description: they are not comparable."""
    cells = [cells[column] for cells in table["rows"].values() if column in cells]
    conditions = dict.fromkeys(_conditions(cell) for cell in cells)
    scoring = dict.fromkeys(_scoring(cell) for cell in cells)
    return (
        f"{column}: {'; '.join(conditions)}; {' or '.join(scoring)}."
        + (" NOT THE SAME ITEMS in all rows." if len(conditions) > 1 else "")
        + (" NOT SCORED IN THE SAME WAY in all rows." if len(scoring) > 1 else "")
    )


def _scoring(cell: Cell) -> str:
    """Rows per batch, and the dtype of the log-softmax: results that differ in them differ by rounding too."""
    return ", ".join(f"{name} {value}" for name, value in cell["scoring"].items())


def _conditions(cell: Cell) -> str:
    parts = [f"n {cell['n']}", f"shots {', '.join(map(str, cell['shots']))}"]
    if cell["limit"]:
        parts.append(f"limit {cell['limit']}")
    parts += [f"{name} {value}" for name, value in cell["settings"].items()]
    if cell["truncated"]:
        parts.append(f"{cell['truncated']} prompts cut on the left")
    return ", ".join([*parts, _source(cell["files"])])


def _source(files: dict[str, str]) -> str:
    """Where the items come from; for local files with the start of their hash, as names alone do not identify contents."""
    if "data" in files:
        return "the Hub's rows" if files["data"] == "Hub" else "built-in rows"
    return ", ".join(f"{name} ({digest[:6]})" for name, digest in files.items())


FORMULA = re.compile(r"\s*[=+\-@\t\r\uff1d\uff0b\uff0d\uff20]")
"""How a cell begins that spreadsheets run as a formula, the full-width forms included."""


def as_text(value: Any) -> Any:
    """A cell that no spreadsheet runs: a text that would be a formula has an apostrophe before it; numbers stay numbers."""
    if not isinstance(value, str):
        return value if isinstance(value, (int, float)) or value is None else as_text(str(value))
    text = clean(value)
    try:
        float(text)
    except ValueError:
        return f"'{text}" if FORMULA.match(value) else text
    return text


def as_csv(table: Table) -> str:
    """One line per cell, under `CSV_COLUMNS`."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(CSV_COLUMNS)
    for name, cells in table["rows"].items():
        for column, cell in cells.items():
            difference = cell.get("difference") or {}
            writer.writerow(
                as_text(cell_value)
                for cell_value in [
                    name,
                    column,
                    cell["value"],
                    cell["stderr"],
                    cell["n"],
                    "/".join(map(str, cell["shots"])),
                    cell["limit"],
                    " ".join(f"{k}={v}" for k, v in cell["settings"].items()),
                    cell["dtype"],
                    *(difference.get(field) for field in ("value", "low", "high", "items", "within_noise")),
                    cell["lm_eval"],
                    *(cell["scoring"].get(field) for field in ("batch", "softmax")),
                ]
            )
    return out.getvalue()
