"""No cell of compare.csv is run by a spreadsheet; numbers stay numbers."""

from __future__ import annotations

import csv
import io

import pytest

from hf_gnmr.evaluation.table import CSV_COLUMNS, as_csv, as_text

FORMULAS = [
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    " =1",
    "＝1",
    "=HYPERLINK(1)",
    "-",
    "--1",
    "+",
    "-x",
]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_text(text):
    cell = as_text(text)
    assert cell.startswith("'") and len(cell) == len(text) + 1


@pytest.mark.parametrize("value", [-1.5, 0, "-1.5", "-1e-5", "+3", "inf", "-inf", "nan", None, True, "run (low)", "a=b", ""])
def test_numbers_and_plain_text_stay(value):
    assert as_text(value) == value


@pytest.mark.parametrize("text", FORMULAS)
def test_every_column_is_written_so(text):
    cell = {
        "value": text, "stderr": text, "n": text, "shots": [text], "limit": text, "settings": {text: 1}, "dtype": text,
        "lm_eval": text, "difference": dict.fromkeys(("value", "low", "high", "items", "within_noise"), text),
        "scoring": {"batch": text, "softmax": text},
    }  # fmt: skip
    rows = list(csv.reader(io.StringIO(as_csv({"rows": {text: {text: cell}}}), newline="")))
    assert rows[0] == list(CSV_COLUMNS) and all(value.startswith("'") for value in rows[1])
