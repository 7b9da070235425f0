"""Rows are read as they are written: numbers and dates keep their text, a path is a path, a line ends at a line feed."""

from __future__ import annotations

import datetime
import json
import pathlib
import pickle
from decimal import Decimal

import pytest
from conftest import byte_tokenizer
from datasets import Dataset

from hf_gnmr.config import ConfigError
from hf_gnmr.evaluation.harness import _as_dataset
from hf_gnmr.evaluation.rows import json_lines, of_equal_types
from hf_gnmr.run.data import check_source, load_rows
from hf_gnmr.run.packing import documents, text_blocks
from hf_gnmr.run.rowfiles import Written, rows_of, written
from hf_gnmr.run.sections import DataSection, RecipeError

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"
NUMBERS = [
    "2",
    "2.5",
    "2.50",
    "1e5",
    "1E5",
    "1e+05",
    "100000000000000000000001",
    "-0",
    "0.10",
    "9" * 500,
    "1e400",
    "3.0",
    "-7",
]


def answers(path, **changes):
    return [row["answer"] for row in load_rows(DataSection(str(path), prompt="{question}?", **changes), seed=0)[0]]


def write(path, rows):
    path.write_text("".join(row + "\n" for row in rows), encoding="utf-8", newline="\n")
    return path


@pytest.mark.parametrize("template", ["answer", " {answer}", " {answer!s}", " {answer!r}"])
def test_numbers_keep_the_text_of_the_file_whatever_other_rows_hold(tmp_path, template):
    path = write(tmp_path / "rows.jsonl", [f'{{"question": "q", "answer": {number}}}' for number in NUMBERS])
    texts = [f"'{n}'" if template.endswith("!r}") and len(n) > 100 else n for n in NUMBERS]
    assert answers(path, answer=template) == [f" {text}" for text in texts]


def test_one_fraction_does_not_make_fractions_of_the_others(tmp_path):
    path = write(tmp_path / "rows.jsonl", ['{"question": "q", "answer": 2}'] * 10 + ['{"question": "q", "answer": 2.5}'])
    assert answers(path) == [" 2"] * 10 + [" 2.5"]


@pytest.mark.parametrize("text", ["2023-01-11", "2023-01-11T10:00:00Z", "10:30", "1e5", "007", "true", "nan", "2.50"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_quoted_text_stays_text(tmp_path, text, suffix):
    path = tmp_path / f"rows{suffix}"
    rows = [{"question": "when", "answer": text}] * 3
    path.write_text(json.dumps(rows) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    assert answers(path) == [f" {text}"] * 3


def test_a_format_still_formats_numbers(tmp_path):
    path = write(tmp_path / "rows.jsonl", ['{"question": "q", "answer": 2}', '{"question": "q", "answer": 2.50}'])
    assert answers(path, answer=" {answer:.1f}") == [" 2.0", " 2.5"]


def test_columns_of_both_kinds_and_rows_with_other_columns(tmp_path):
    path = write(tmp_path / "rows.jsonl", ['{"question": 1, "answer": "a", "x": []}', '{"answer": 2.0, "question": "b"}'])
    assert [row["prompt"] for row in load_rows(DataSection(str(path)), 0)[0]] == ["1", "b"] and answers(path) == [
        " a",
        " 2.0",
    ]


def test_parquet_is_as_typed(tmp_path):
    Dataset.from_dict({"question": ["a", "b"], "answer": [2, 10**15]}).to_parquet(tmp_path / "rows.parquet")
    assert answers(tmp_path / "rows.parquet") == [" 2", f" {10**15}"]


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": 1.50, "b": "x"}, {"a": 2, "b": "y"}]',
        '{\n "a": [1.50, 2],\n "b": ["x", "y"]\n}',
        '{"a": {"0": 1.50, "1": 2},\n "b": {"0": "x", "1": "y"}}',
        '{"a": 1.50, "b": "x"}\n\n{"a": 2, "b": "y"}',
        '\ufeff{"a": 1.50, "b": "x"}\r\n{"a": 2, "b": "y"}\r\n',
        '\ufeff\n [ {"a": 1.50, "b": "x"}, {"a": 2, "b": "y"}]',
    ],
    ids=["list", "columns", "columns by index", "lines", "mark and carriage returns", "mark and list"],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_every_form_of_json(tmp_path, text, suffix):
    (tmp_path / f"rows{suffix}").write_bytes(text.encode())
    rows = list(rows_of(tmp_path / f"rows{suffix}"))
    assert [{k: str(v) for k, v in row.items()} for row in rows] == [{"a": "1.50", "b": "x"}, {"a": "2", "b": "y"}]


def test_a_list_of_texts_is_the_column_text(tmp_path):
    (tmp_path / "rows.json").write_text('["a", "b"]')
    assert list(rows_of(tmp_path / "rows.json")) == [{"text": "a"}, {"text": "b"}]


def test_a_written_number_is_a_number_and_survives_another_process():
    number = pickle.loads(pickle.dumps(Written("2.50")))
    assert number == 2.5 and str(number) == repr(number) == f"{number}" == "2.50"


# -- names ---------------------------------------------------------------------------------------------------------------

NAMES = [
    "part[12]",
    "all*",
    "one?",
    "{a,b}",
    "with space",
    "~tilde",
    "**",
    "a[!b]",
    "percent%41",
    "hash#1",
    "quote'",
    "ümlaut",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_an_existing_path_is_that_file(tmp_path, monkeypatch, name, suffix):
    monkeypatch.chdir(tmp_path)
    for stem, answer in (
        ("part1", "wrong"),
        ("all_b", "wrong"),
        ("one1", "wrong"),
        ("a", "wrong"),
        ("ac", "wrong"),
        (name, "right"),
    ):
        if suffix == ".parquet":
            Dataset.from_dict({"question": ["q"], "answer": [answer]}).to_parquet(tmp_path / f"{stem}{suffix}")
        else:
            (tmp_path / f"{stem}{suffix}").write_text(json.dumps([{"question": "q", "answer": answer}]))
    section = DataSection(f"{name}{suffix}")
    check_source(section)
    assert [row["answer"] for row in load_rows(section, 0)[0]] == [" right"]


@pytest.mark.parametrize("name", NAMES)
def test_an_existing_path_is_that_text(tmp_path, name):
    for stem, text in (("part1", "wrong"), (name, "right")):
        (tmp_path / f"{stem}.jsonl").write_text(json.dumps({"text": text}))
        (tmp_path / f"{stem}.txt").write_text(text)
    for suffix in (".jsonl", ".txt"):
        assert list(documents(DataSection(str(tmp_path / f"{name}{suffix}"), text="text"), "train")) == ["right"]


def test_a_tilde_is_the_home_folder_where_no_such_file_exists(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "rows.jsonl", ['{"question": "q", "answer": "a"}'])
    check_source(DataSection("~/rows.jsonl"))
    assert answers("~/rows.jsonl") == [" a"]


def folder_of_rows(folder):
    """Two splits, each of two files, in the ways that `datasets` knows; in `train` one row of 2.5 among those of 2."""
    folder.mkdir()
    for split, values in (("train", ["2", "2.5"]), ("test", ['"2023-01-11"', "2.50"])):
        for part, value in enumerate(values):
            write(folder / f"{split}-0000{part}-of-00002.jsonl", [f'{{"question": "q", "answer": {value}}}'])
    return str(folder)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", [" 2", " 2.5"]),
        ("test", [" 2023-01-11", " 2.50"]),
        ("train[:50%]", [" 2"]),
        ("train[1:]+test[:1]", [" 2.5", " 2023-01-11"]),
    ],
)
def test_rows_of_a_folder_are_as_written_too(tmp_path, split, expected):
    section = DataSection(folder_of_rows(tmp_path / "data"), split=split)
    assert [row["answer"] for row in load_rows(section, 0)[0]] == expected


def test_so_is_the_text_of_a_folder(tmp_path):
    section = DataSection(folder_of_rows(tmp_path / "data"), text="answer")
    assert list(documents(section, "train")) == ["2", "2.5"] and list(documents(section, "test")) == ["2023-01-11", "2.50"]


def test_an_unknown_split_of_a_folder_is_refused_by_name(tmp_path):
    with pytest.raises(RecipeError, match="split 'dev': cannot be loaded"):
        load_rows(DataSection(folder_of_rows(tmp_path / "data"), split="dev"), 0)


def test_a_folder_whose_name_is_a_pattern_is_refused(tmp_path):
    (tmp_path / "set[12]").mkdir()
    with pytest.raises(RecipeError, match=r"expected a folder without any of \[ \] \* \?"):
        check_source(DataSection(str(tmp_path / "set[12]")))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv", "rows"])
def test_a_file_of_another_kind_is_refused(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(RecipeError, match=r"expected a file that ends in \.json, \.jsonl, \.parquet"):
        check_source(DataSection(str(tmp_path / name)))


# -- lines ---------------------------------------------------------------------------------------------------------------

BREAKS = ["\x85", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r", "\t", "\x7f", "\ufeff"]


@pytest.mark.parametrize("character", BREAKS, ids=[f"U+{ord(c):04X}" for c in BREAKS])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_a_line_feed_ends_a_line(tmp_path, character, end):
    rows = [{"question": f"a{character}b", "answer": f"c{character}"}, {"question": "d", "answer": "e"}]
    path = tmp_path / "rows.jsonl"
    raw = [f'{{"question": "{row["question"]}", "answer": "{row["answer"]}"}}{end}' for row in rows]
    path.write_bytes("".join(raw).encode())
    assert json_lines(path) == rows == list(rows_of(path))
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode())
    assert json_lines(path) == rows == list(rows_of(path))


def test_the_public_mmlu_file_is_read():
    path = DATA / "mmlu" / "test_5_subjects.jsonl"
    if not path.is_file():
        pytest.skip("the public data are not here")
    rows = json_lines(path)
    assert len(rows) == path.read_bytes().count(b"\n") and all(len(row["choices"]) == 4 for row in rows)


@pytest.mark.parametrize("path", sorted(DATA.rglob("*.jsonl")), ids=lambda path: path.name)
def test_real_data_are_read_as_a_plain_parser_reads_them(path):
    with path.open("rb") as file:
        expected = [json.loads(line) for line in file.read().split(b"\n") if line.strip()]
    assert list(rows_of(path)) == expected


@pytest.mark.parametrize("text", ['{"a": 1', '{"a": 1}\n{"a": \n', "[1]", "3", '"x"', '{"a": 1}\n[2]'])
def test_broken_lines_are_named(tmp_path, text):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        json_lines(tmp_path / "rows.jsonl")
    with pytest.raises(RecipeError, match=r"rows\.jsonl"):
        load_rows(DataSection(str(tmp_path / "rows.jsonl")), 0)


# -- text and evaluation -------------------------------------------------------------------------------------------------


def test_numbers_in_a_text_column_are_their_text(tmp_path):
    path = write(
        tmp_path / "t.jsonl", ['{"text": "a"}', '{"text": 2}', '{"text": 2.50}', '{"text": "2023-01-11"}', '{"text": null}']
    )
    assert list(documents(DataSection(str(path), text="text"), "train")) == ["a", "2", "2.50", "2023-01-11"]


@pytest.mark.parametrize("value", ["[1]", "{}", "true"])
def test_what_is_no_text_is_named(tmp_path, value):
    path = write(tmp_path / "t.jsonl", ['{"text": "a"}', f'{{"text": {value}}}'])
    with pytest.raises(RecipeError, match="row 1: data.text='text' holds a"):
        text_blocks(DataSection(str(path), text="text", max_length=8), byte_tokenizer())


def test_options_of_an_evaluation_are_the_texts_of_the_file(tmp_path):
    path = write(
        tmp_path / "test.jsonl",
        [
            '{"question": "q", "subject": "s", "choices": [2, 2.50, "x", 1e5], "answer": 1, "extra": 1}',
            '{"question": "q", "subject": "s", "choices": ["a", "b", "c", "d"], "answer": "3", "extra": "x"}',
        ],
    )
    fields = ("question", "subject", "choices", "answer")
    rows = json_lines(path)
    assert [row["answer"] for row in of_equal_types(rows, fields)] == [1, 3]
    loaded = _as_dataset({"test": rows}, fields)()["test"].to_list()
    assert loaded[0]["choices"] == ["2", "2.50", "x", "1e5"] and loaded[1]["answer"] == 3 and "extra" not in loaded[0]


@pytest.mark.parametrize("index", ['"²"', '"' + "9" * 5000 + '"', "9" * 5000, "1.0", "-1", "true"])
def test_an_index_that_is_none_is_refused(tmp_path, index):
    from hf_gnmr.evaluation.tasks import TASKS

    path = write(
        tmp_path / "x.jsonl", [f'{{"question": "q", "subject": "s", "choices": ["a", "b", "c", "d"], "answer": {index}}}']
    )
    error = TASKS["mmlu"].row_error(json_lines(path)[0])
    assert error is not None and error.startswith("answer=") and len(error) < 400


# -- what is no plain text or number -------------------------------------------------------------------------------------


def texts_of(path, **options):
    rows, _ = load_rows(DataSection(str(path), **options), 0)
    return [row["answer"].strip() for row in rows]


def test_true_and_false_stay_as_written(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"question": "a", "answer": true}\n{"question": "b", "answer": false}\n{"question": "c", "answer": "True"}\n'
    )
    assert texts_of(path) == ["true", "false", "True"]
    assert texts_of(path, answer="{answer}") == ["true", "false", "True"]


def test_decimals_and_dates_of_parquet_are_text(tmp_path):
    import pyarrow
    from pyarrow import parquet

    values = {
        "decimal": ([Decimal("2.50"), Decimal("-0.01")], pyarrow.decimal128(10, 2), ["2.50", "-0.01"]),
        "large": ([Decimal("1E+3"), Decimal("2E+3")], pyarrow.decimal128(10, 0), ["1000", "2000"]),
        "date": ([datetime.date(2023, 1, 11), datetime.date(1, 1, 1)], pyarrow.date32(), ["2023-01-11", "0001-01-01"]),
        "time": ([datetime.datetime(2023, 1, 11, 5, 6), datetime.datetime(2023, 1, 11)], pyarrow.timestamp("us"),
                 ["2023-01-11 05:06:00", "2023-01-11 00:00:00"]),
        "flag": ([True, False], pyarrow.bool_(), ["true", "false"]),
    }  # fmt: skip
    for name, (column, kind, expected) in values.items():
        path = tmp_path / f"{name}.parquet"
        table = {"question": pyarrow.array(["a", "b"]), "answer": pyarrow.array(column, kind)}
        parquet.write_table(pyarrow.table(table), path)
        assert texts_of(path) == expected, name
        if name != "flag":
            assert list(documents(DataSection(str(path), text="answer"), "train")) == expected, name


def test_a_decimal_takes_a_numbers_format():
    assert f"{written(Decimal('2.50'))} {written(Decimal('2.50')):.1f}" == "2.50 2.5"


@pytest.mark.parametrize("key", ["question", "answer", "text"])
@pytest.mark.parametrize("half", [r"\ud800", r"x\udfffy", r"\udc00\ud800"])
def test_half_of_a_surrogate_pair_is_named(tmp_path, key, half):
    path = tmp_path / "rows.jsonl"
    row = '"question": "a", "answer": "b", "text": "c"'
    path.write_text(f'{{{row}}}\n{{{row}, "{key}": "{half}"}}\n')
    with pytest.raises(RecipeError, match=r"row 1: .*half of a surrogate pair") as error:
        load_rows(DataSection(str(path)), 0) if key != "text" else list(
            documents(DataSection(str(path), text="text"), "train")
        )
    str(error.value).encode()


def test_whole_surrogate_pairs_and_unused_halves_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"question": "\ud83d\ude00", "answer": "b", "raw": "\ud800"}' + "\n")
    assert load_rows(DataSection(str(path)), 0)[0] == [{"prompt": "\U0001f600", "answer": " b"}]
