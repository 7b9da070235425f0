"""Plain text for pre-training: documents packed into token blocks of equal length, with an end token after each document.

Documents come from the Hub (streamed or not), a local .txt, .json, .jsonl or .parquet file, or the built-in generator.  They
are concatenated into one stream of tokens and cut into blocks; every token counts in the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, load_dataset

from ..reading import MAX_TEXT_BYTES, FileError, read_utf8
from ..terminal import printable, shown
from .data import BUILTIN, ENDINGS, check_local
from .rowfiles import holds_half, local_file, rows_of, rows_of_folder, written
from .sections import DataSection, RecipeError

END_OF_TEXT = "<|endoftext|>"
"""Between documents in a .txt file."""
STREAMED_AT_A_TIME = 1000
"""Streamed documents that are concatenated at a time; tokens that do not fill their last block are dropped."""


@dataclass
class TextCounts:
    """What became of a text."""

    documents: int
    tokens: int
    blocks: int
    left_out: int
    """Tokens at the end of the stream that do not fill a block, and are dropped."""

    def in_words(self) -> str:
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens, {self.blocks:,} blocks; "
            f"{self.left_out:,} tokens left out"
        )

    def to_dict(self) -> dict[str, int]:
        return dict(vars(self))


def check_text_source(section: DataSection) -> None:
    """Raise RecipeError for errors in a text source that are visible without reading it."""
    check_local(section, (".txt", *ENDINGS))
    path = local_file(section.name)
    local = (path is not None and path.is_file()) or section.name == BUILTIN
    if section.streaming and local:
        raise RecipeError("data.streaming=True: expected a data set on the Hub; local text is read whole")
    if local and section.eval_split is not None:
        raise RecipeError(
            f"data.eval_split={section.eval_split!r}: local text has no splits; leave it out (null), and the last "
            "data.eval_rows blocks are held out"
        )
    if section.eval_split is not None and not section.eval_rows:
        raise RecipeError(f"data.eval_split={section.eval_split!r} needs data.eval_rows above 0")
    if section.streaming and section.rows is not None:
        raise RecipeError(f"data.rows={section.rows} with data.streaming=True: training.max_steps sets how much is read")
    if section.generate_rows:
        raise RecipeError(f"data.generate_rows={section.generate_rows}: text has no answers to generate")
    if section.streaming and section.eval_rows and section.eval_split is None:
        raise RecipeError("data.streaming=True with data.eval_rows needs data.eval_split: a stream has no end to hold out")


def text_blocks(section: DataSection, tokenizer: Any) -> tuple[Any, Any, TextCounts | None]:
    """Training blocks, held-out blocks (None: none) and the counts of the text (None: it is streamed).

    Blocks are {"input_ids": [max_length], "labels": the same}. The last `data.eval_rows` blocks of the text are held out, or
    the first ones of `data.eval_split` are taken; `data.rows` limits the training blocks.

    Raises:
        RecipeError: a text that cannot be read, lacks the column, or is too short.
    """
    if section.streaming:
        return _streamed(section, tokenizer)
    blocks, counts = _blocks(documents(section, section.split), tokenizer, section.max_length)
    held_out = None
    if section.eval_split is not None:
        held_out, _ = _blocks(documents(section, section.eval_split), tokenizer, section.max_length, section.eval_rows)
    elif section.eval_rows:
        if section.eval_rows >= len(blocks):
            raise RecipeError(f"data.eval_rows={section.eval_rows}: {section.name} has only {len(blocks)} blocks")
        blocks, held_out = blocks[: -section.eval_rows], blocks[-section.eval_rows :]
    if section.rows is not None:
        blocks = blocks[: section.rows]
    if not len(blocks):
        raise RecipeError(
            f"data.name={section.name!r}: {counts.tokens} tokens do not fill one block of {section.max_length}"
        )
    return _data_set(blocks), None if held_out is None else _data_set(held_out), counts


def documents(section: DataSection, split: str) -> Iterator[str]:
    """The documents of a source that is not streamed, in order; empty ones are skipped."""
    if section.name == BUILTIN:
        from .wordproblems import pretrain_text

        yield from pretrain_text(section.documents or 20_000, seed=0)
        return
    path = local_file(section.name)
    where = f"data.name={shown(section.name)}"
    try:
        if path is not None and path.is_file() and path.suffix.lower() == ".txt":
            text = read_utf8(path, MAX_TEXT_BYTES).replace("\r\n", "\n").replace("\r", "\n")
            yield from (part for part in text.split(END_OF_TEXT) if part.strip())
            return
        if path is not None and path.is_file():
            yield from _texts(section, rows_of(path))
            return
    except FileError as error:
        raise RecipeError(f"{where} cannot be read as text: {error}") from error
    try:
        local = None if path is None else rows_of_folder(str(path), section.subset, split)
        if local is None:
            data_set = load_dataset(section.name, section.subset, split=split)
            _column(section, data_set.column_names)
        yield from _texts(section, data_set if local is None else local)
    except RecipeError:
        raise
    except FileError as error:
        raise RecipeError(f"{where} cannot be read as text: {error}") from error
    except Exception as error:  # the loaders raise whatever their file systems and parsers raise
        raise RecipeError(f"{where}, split {split!r}: cannot be loaded: {error}") from error


def _texts(section: DataSection, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The texts of the column `data.text`, numbers as they are written; empty ones are skipped."""
    columns: dict[str, None] = {}
    for number, row in enumerate(rows):
        columns.update(dict.fromkeys(row))
        value = row.get(str(section.text))
        if value is None or value == "":
            continue
        value = value if isinstance(value, bool) else written(value)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            kind = type(value).__name__
            raise RecipeError(f"{section.name}, row {number}: data.text={shown(section.text)} holds a {kind}: expected text")
        if holds_half(value):
            raise RecipeError(
                f"{section.name}, row {number}: data.text={shown(section.text)} holds half of a surrogate pair"
            )
        yield str(value)
    _column(section, list(columns))


def _column(section: DataSection, names: list[str]) -> None:
    """Raise RecipeError where none of these columns is `data.text`."""
    if section.text not in names:
        known = printable(", ".join(names), 400)
        raise RecipeError(f"data.text={shown(section.text)}: no such column; the columns are {known}")


def _blocks(texts: Iterable[str], tokenizer: Any, length: int, most: int | None = None) -> tuple[np.ndarray, TextCounts]:
    """Blocks as (blocks, length) int32, only the first `most` of them, and the counts."""
    parts: list[np.ndarray] = []
    read = tokens = 0
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(np.array([*ids, tokenizer.eos_token_id], np.int32))
        read, tokens = read + 1, tokens + len(ids) + 1
        if most is not None and tokens >= most * length:
            break
    stream = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    whole = len(stream) // length if most is None else min(most, len(stream) // length)
    return stream[: whole * length].reshape(whole, length), TextCounts(read, tokens, whole, tokens - whole * length)


def _data_set(blocks: np.ndarray) -> Dataset:
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks}).with_format("torch")


def _streamed(section: DataSection, tokenizer: Any) -> tuple[IterableDataset, Dataset | None, None]:
    def packed(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        blocks, _ = _blocks((t for t in batch[str(section.text)] if t), tokenizer, section.max_length)
        return {"input_ids": blocks.tolist(), "labels": blocks.tolist()}

    try:
        data_set = load_dataset(section.name, section.subset, split=section.split, streaming=True)
        names = data_set.column_names or list(next(iter(data_set)))
        _column(section, names)
        stream = data_set.map(packed, batched=True, batch_size=STREAMED_AT_A_TIME, remove_columns=names).with_format("torch")
        if not section.eval_rows:
            return stream, None, None
        held_out = load_dataset(section.name, section.subset, split=section.eval_split, streaming=True)
        texts = (row[str(section.text)] for row in held_out)
        blocks, _ = _blocks(texts, tokenizer, section.max_length, section.eval_rows)
    except RecipeError:
        raise
    except Exception as error:  # as above
        raise RecipeError(f"data.name={section.name!r}: cannot be streamed: {error}") from error
    return stream, _data_set(blocks), None
