"""Plain text to token blocks: every token once, an end after each document, blocks held out, streams read as they come."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import byte_tokenizer
from datasets import Dataset, IterableDataset

from hf_gnmr.run import packing
from hf_gnmr.run.packing import check_text_source, documents, text_blocks
from hf_gnmr.run.recipe import DataSection, RecipeError

TOKENIZER = byte_tokenizer()
TEXTS = ["first document.", "second, a bit longer document of the three", "x"]
STREAM = [i for text in TEXTS for i in [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]]
LENGTH = 16


def section(name, **changes):
    return DataSection(**{"name": str(name), "text": "text", "max_length": LENGTH, **changes})


@pytest.fixture
def texts_file(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text, "other": 1}) + "\n" for text in TEXTS))
    return file


def tokens_of(blocks):
    return blocks[:]["input_ids"].flatten().tolist()


def test_documents_are_joined_with_an_end_after_each_and_every_token_is_there_once(texts_file):
    blocks, held_out, counts = text_blocks(section(texts_file), TOKENIZER)
    assert held_out is None
    assert tokens_of(blocks) == STREAM[: LENGTH * len(blocks)]
    assert torch.equal(blocks[0]["labels"], blocks[0]["input_ids"])
    assert counts.to_dict() == {
        "documents": 3,
        "tokens": len(STREAM),
        "blocks": len(STREAM) // LENGTH,
        "left_out": len(STREAM) % LENGTH,
    }


def test_the_last_blocks_are_held_out(texts_file):
    blocks, _, _ = text_blocks(section(texts_file), TOKENIZER)
    training, held_out, _ = text_blocks(section(texts_file, eval_rows=1), TOKENIZER)
    assert tokens_of(training) == tokens_of(blocks)[:-LENGTH] and tokens_of(held_out) == tokens_of(blocks)[-LENGTH:]


def test_rows_limit_the_training_blocks(texts_file):
    assert len(text_blocks(section(texts_file, rows=2), TOKENIZER)[0]) == 2


@pytest.mark.parametrize("suffix", [".txt", ".json", ".parquet"])
def test_files_of_each_kind_hold_the_same_text(texts_file, tmp_path, suffix):
    file = tmp_path / f"texts{suffix}"
    if suffix == ".txt":
        file.write_text("<|endoftext|>".join(TEXTS))
    elif suffix == ".json":
        file.write_text(json.dumps([{"text": text} for text in TEXTS]))
    else:
        Dataset.from_list([{"text": text} for text in TEXTS]).to_parquet(file)
    blocks = [text_blocks(section(path), TOKENIZER)[0] for path in (texts_file, file)]
    assert tokens_of(blocks[0]) == tokens_of(blocks[1])


def test_empty_documents_are_skipped(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a"}\n{"text": ""}\n{"text": null}\n{"text": "b"}\n')
    assert list(documents(section(file), "train")) == ["a", "b"]


def test_the_built_in_text_has_as_many_documents_as_asked_for():
    assert len(list(documents(section("builtin", documents=7), "train"))) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "body"}, "data.text='body': no such column; the columns are text, other"),
        ({"eval_rows": 99}, "data.eval_rows=99: .* has only 3 blocks"),
        ({"max_length": 512}, f"{len(STREAM)} tokens do not fill one block of 512"),
    ],
)
def test_text_that_does_not_fit_is_refused(texts_file, changes, message):
    with pytest.raises(RecipeError, match=message):
        text_blocks(section(texts_file, **changes), TOKENIZER)


@pytest.mark.parametrize(("content", "message"), [(b"\xff\xfe\xfa", "cannot be read as text"), (b" ", "0 tokens")])
def test_a_file_without_text_is_refused(tmp_path, content, message):
    file = tmp_path / "texts.txt"
    file.write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        text_blocks(section(file), TOKENIZER)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "/gone.txt"}, "no such file"),
        ({"streaming": True}, "expected a data set on the Hub"),
        ({"eval_split": "validation", "eval_rows": 1}, "local text has no splits"),
        ({"generate_rows": 1}, "text has no answers"),
        ({"name": "org/set", "eval_split": "validation"}, "needs data.eval_rows above 0"),
        ({"name": "org/set", "streaming": True, "rows": 3}, "training.max_steps sets how much is read"),
        ({"name": "org/set", "streaming": True, "eval_rows": 3}, "needs data.eval_split"),
    ],
)
def test_sources_are_checked_without_reading_them(texts_file, changes, message):
    with pytest.raises(RecipeError, match=message):
        check_text_source(section(changes.pop("name", texts_file), **changes))


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "texts.csv").write_text("text\n")
    with pytest.raises(RecipeError, match="expected a file that ends in .txt, .json, .jsonl, .parquet"):
        check_text_source(section(tmp_path / "texts.csv"))


# -- streamed ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A data set on the Hub that is read as a stream; the splits that were asked for."""
    asked = []

    def load_dataset(name, subset, split, streaming):
        asked.append(split)
        return IterableDataset.from_generator(lambda: ({"text": text, "other": 1} for text in TEXTS))

    monkeypatch.setattr(packing, "load_dataset", load_dataset)
    return asked


def test_a_stream_gives_the_blocks_of_the_whole_text(hub):
    stream, held_out, counts = text_blocks(section("org/set", streaming=True), TOKENIZER)
    assert held_out is None and counts is None and hub == ["train"]
    rows = list(stream)
    assert [i for row in rows for i in row["input_ids"].tolist()] == STREAM[: LENGTH * len(rows)] and len(rows) == 3
    assert all(row.keys() == {"input_ids", "labels"} and torch.equal(*row.values()) for row in rows)


def test_a_streams_held_out_blocks_are_the_first_of_their_split(hub):
    options = {"streaming": True, "eval_split": "validation", "eval_rows": 2}
    _, held_out, _ = text_blocks(section("org/set", **options), TOKENIZER)
    assert tokens_of(held_out) == STREAM[: 2 * LENGTH] and hub == ["train", "validation"]


def test_a_stream_without_the_column_is_refused(hub):
    with pytest.raises(RecipeError, match="data.text='body': no such column"):
        text_blocks(section("org/set", streaming=True, text="body"), TOKENIZER)


def test_a_stream_that_cannot_be_opened_is_named(monkeypatch):
    def offline(*arguments, **options):
        raise ConnectionError("offline")

    monkeypatch.setattr(packing, "load_dataset", offline)
    with pytest.raises(RecipeError, match="data.name='org/set': cannot be streamed: offline"):
        text_blocks(section("org/set", streaming=True), TOKENIZER)
