"""Rows to tokens: loss on the answer only, nothing dropped, everything cut is counted, wrong columns named."""

from __future__ import annotations

import json

import pytest
from conftest import byte_tokenizer
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gnmr.run.data import IGNORED, check_source, encode, load_rows
from hf_gnmr.run.recipe import DataSection, RecipeError

TOKENIZER = byte_tokenizer()
TEMPLATES = {"prompt": "Q: {question}\nA:", "answer": " {answer}"}


def text_of(ids):
    return TOKENIZER.decode([i for i in ids if i > 2])


def test_labels_are_on_the_answer_and_the_end_token_only():
    data, counts = encode([{"prompt": "Q: 1+1\nA:", "answer": " 2"}], TOKENIZER, 64)
    row = data[0]
    learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != IGNORED]
    assert text_of(row["input_ids"]) == "Q: 1+1\nA: 2"
    assert text_of(learned) == " 2" and learned[-1] == TOKENIZER.eos_token_id
    assert counts.rows == 1 and counts.tokens == 12 and counts.answer_tokens == 3
    assert counts.answers_cut == counts.prompts_cut == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=60)), min_size=1, max_size=5),
    st.integers(8, 40),
)
def test_no_row_is_lost_too_long_or_without_an_answer(texts, max_length):
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in texts]
    data, counts = encode(rows, TOKENIZER, max_length)
    assert len(data) == counts.rows == len(rows)
    cut = 0
    for row, encoded in zip(rows, data, strict=True):
        assert 0 < len(encoded["input_ids"]) <= max_length
        assert any(label != IGNORED for label in encoded["labels"])
        whole = len((row["prompt"] + row["answer"]).encode()) + 1
        cut += len(encoded["input_ids"]) < whole
    assert cut == 0 or counts.answers_cut + counts.prompts_cut >= cut


def test_cutting_takes_the_answer_first_and_then_the_beginning_of_the_prompt():
    long_answer = {"prompt": "p" * 10, "answer": "a" * 100}
    long_prompt = {"prompt": "p" * 50 + "end", "answer": "a" * 100}
    data, counts = encode([long_answer, long_prompt], TOKENIZER, 40)
    assert text_of(data[0]["input_ids"]) == "p" * 10 + "a" * 30
    assert text_of(data[1]["input_ids"]).endswith("end" + "a" * 10) and len(data[1]["input_ids"]) == 40
    assert (counts.answers_cut, counts.prompts_cut) == (2, 1)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_local_files_of_each_kind(tmp_path, suffix):
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(10)]
    file = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(file)
    elif suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, held_out = load_rows(DataSection(str(file), eval_rows=3, rows=5, **TEMPLATES), seed=0)
    assert [row["prompt"] for row in train] == [f"Q: q{i}\nA:" for i in range(5)]
    assert [row["answer"] for row in held_out] == [" a7", " a8", " a9"]


def test_columns_by_name_are_joined_by_a_space(rows_file):
    train, _ = load_rows(DataSection(rows_file), seed=0)
    assert train[0]["prompt"] == "What is 0 plus 3?" and train[0]["answer"].startswith(" It is 3.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "ask"}, r"data.prompt='ask': no column 'ask'; the columns are question, answer"),
        ({"answer": " {reply}"}, "no column 'reply'"),
        ({"prompt": "{question:d}"}, "data.prompt='{question:d}' cannot be filled from .* row 0"),
        ({"eval_rows": 99}, r"data.eval_rows=99: .* has only 40 rows"),
    ],
)
def test_rows_that_do_not_fit_the_recipe_are_refused(rows_file, changes, message):
    with pytest.raises(RecipeError, match=message):
        load_rows(DataSection(rows_file, **changes), seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "q", "answer": "a"}\n{"question": "q", "answer": null}\n', r"row 1: column 'answer' is empty"),
        ('{"question": ["a", "b"], "answer": "a"}\n', r"row 0: column 'question' holds a list: expected text or a number"),
        ('{"question": "q", \n', r"rows.jsonl', split 'train': cannot be loaded"),
        ("", r"cannot be loaded: .+"),
    ],
    ids=["empty value", "list", "broken", "empty file"],
)
def test_a_file_with_unusable_rows_is_refused(tmp_path, text, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_rows(DataSection(str(file)), seed=0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gone.jsonl", {}, "no such file"),
        ("rows.csv", {}, r"expected a file that ends in .json, .jsonl, .parquet"),
        ("rows.json", {"prompt": "{question"}, "data.prompt='{question': not a template"),
        ("rows.json", {"eval_split": "test"}, "data.eval_split='test' needs data.eval_rows above 0"),
        ("rows.json", {"eval_rows": 2, "generate_rows": 5}, r"data.generate_rows=5: expected at most data.eval_rows=2"),
    ],
)
def test_sources_are_checked_without_reading_them(tmp_path, name, changes, message):
    for existing in ("rows.csv", "rows.json"):
        (tmp_path / existing).write_text("not read\n")
    with pytest.raises(RecipeError, match=message):
        check_source(DataSection(str(tmp_path / name), **changes))


@pytest.mark.parametrize("key", ["subset", "split", "eval_split"])
def test_the_built_in_rows_have_no_other_splits(key):
    with pytest.raises(RecipeError, match="its own train and test rows"):
        check_source(DataSection("builtin", eval_rows=1, **{key: "other"}))


def test_built_in_rows_are_drawn_from_the_seed():
    section = DataSection("builtin", rows=5, eval_rows=3)
    (train, held_out), again, other = (load_rows(section, seed) for seed in (1, 1, 2))
    assert (train, held_out) == again != other and len(train) == 5 and len(held_out) == 3
