"""Rows of prompt and answer, from the Hub, a file or the built-in generator, turned into token sequences.

The loss is taken on the answer and the end token only.  No row is dropped: a row that is too long loses the end of its
answer and, if the prompt still leaves too little room, the beginning of its prompt.  Both are counted and printed.
"""

from __future__ import annotations

import re
import string
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from ..reading import FileError
from ..terminal import printable, shown
from .rowfiles import ENDINGS, holds_half, local_file, rows_of, rows_of_folder, written
from .sections import DataSection, RecipeError

MAX_GENERATED = 10**7
"""Rows of ``builtin``, which are held in memory."""
WIDEST = 4
"""Digits of a width or precision in a template: {question:9999} is the widest."""
BUILTIN = "builtin"
IGNORED = -100
"""The label that transformers' losses ignore."""


@dataclass
class Counts:
    """What became of the rows of one set."""

    rows: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    answers_cut: int = 0
    """Rows whose answer lost its end."""
    prompts_cut: int = 0
    """Rows whose prompt lost its beginning as well."""

    def in_words(self) -> str:
        return (
            f"{self.rows:,} rows, {self.tokens:,} tokens, {self.answer_tokens:,} of them answer; "
            f"{self.answers_cut:,} answers and {self.prompts_cut:,} prompts cut to the length limit"
        )

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def load_rows(section: DataSection, seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows as {"prompt", "answer"} texts, in a fixed order.

    Raises:
        RecipeError: no such file, data set, split or column, or an empty value; the message names it.
    """
    if section.name == BUILTIN:
        from . import wordproblems

        table = wordproblems.generate("train", section.rows or 2000, seed=seed)
        held_out = wordproblems.generate("test", section.eval_rows, seed=seed) if section.eval_rows else []
    else:
        table = _load(section, section.split)
        if section.eval_split is not None:
            held_out = _load(section, section.eval_split)[: section.eval_rows]
        else:
            if section.eval_rows >= len(table):
                raise RecipeError(f"data.eval_rows={section.eval_rows}: {section.name} has only {len(table)} rows")
            kept = len(table) - section.eval_rows
            table, held_out = table[:kept], table[kept:]
        if section.rows is not None:
            table = table[: section.rows]
    return _texts(table, section, section.split), _texts(held_out, section, section.eval_split or section.split)


def check_source(section: DataSection) -> None:
    """Raise RecipeError for errors in a data source that are visible without reading it."""
    if section.name == BUILTIN and (section.subset, section.split, section.eval_split) != (None, "train", None):
        raise RecipeError("data.name='builtin' has its own train and test rows: leave out subset, split and eval_split")
    for key in ("rows", "eval_rows") if section.name == BUILTIN else ():
        if (getattr(section, key) or 0) > MAX_GENERATED:
            raise RecipeError(f"data.{key}={getattr(section, key)}: expected at most {MAX_GENERATED:,} generated rows")
    check_local(section, ENDINGS)
    for key in ("prompt", "answer"):
        pattern = getattr(section, key)
        try:
            formats = [spec or "" for _, _, spec, _ in string.Formatter().parse(pattern)]
        except ValueError as error:
            raise RecipeError(f"data.{key}={shown(pattern)}: not a template: {error}") from error
        if any(re.search(rf"[0-9]{{{WIDEST + 1}}}", spec) for spec in formats):
            raise RecipeError(f"data.{key}={shown(pattern)}: expected widths of at most {WIDEST} digits")
    if section.eval_split is not None and not section.eval_rows:
        raise RecipeError(f"data.eval_split={section.eval_split!r} needs data.eval_rows above 0")
    if section.generate_rows > section.eval_rows:
        raise RecipeError(f"data.generate_rows={section.generate_rows}: expected at most data.eval_rows={section.eval_rows}")


def check_local(section: DataSection, endings: tuple[str, ...]) -> None:
    """Raise RecipeError where `data.name` is a local file that is missing or of another kind."""
    path = local_file(section.name)
    if path is None and Path(section.name).suffix.lower() in endings:
        raise RecipeError(f"data.name={shown(section.name)}: no such file")
    if path is not None and path.is_dir() and re.search(r"[\[\]*?]", str(path.resolve())):
        # Another folder may match: datasets takes the name as a pattern.
        raise RecipeError(
            f"data.name={shown(section.name)}: expected a folder without any of [ ] * ? in its path, or a file"
        )
    if path is None or path.is_dir():
        return
    if not path.is_file():
        raise RecipeError(f"data.name={shown(section.name)}: expected a regular file")
    if path.suffix.lower() not in endings:
        raise RecipeError(f"data.name={shown(section.name)}: expected a file that ends in {', '.join(endings)}")


def _load(section: DataSection, split: str) -> list[dict[str, Any]]:
    path = local_file(section.name)
    try:
        if path is not None and path.is_file():
            return list(rows_of(path))
        local = None if path is None else rows_of_folder(str(path), section.subset, split)
        if local is not None:
            return list(local)
        return load_dataset(section.name, section.subset, split=split).to_list()
    except FileError as error:
        raise RecipeError(f"data.name={shown(section.name)}, split {split!r}: cannot be loaded: {error}") from error
    except Exception as error:  # the loaders raise whatever their file systems and parsers raise
        why = str(error).strip() or f"{type(error).__name__} (is it empty?)"
        raise RecipeError(f"data.name={section.name!r}, split {split!r}: cannot be loaded: {why}") from error


def _texts(table: list[dict[str, Any]], section: DataSection, split: str) -> list[dict[str, str]]:
    texts = []
    columns = dict.fromkeys(column for row in table for column in row)
    for number, row in enumerate(table):
        prompt = _fill("prompt", section.prompt, row, f"{section.name}, {split} row {number}", columns)
        answer = _fill("answer", section.answer, row, f"{section.name}, {split} row {number}", columns)
        if "{" not in section.answer and not prompt[-1:].isspace():
            answer = " " + answer
        for key, text in (("prompt", prompt), ("answer", answer)):
            if holds_half(text):
                raise RecipeError(
                    f"{section.name}, {split} row {number}: the {key} holds half of a surrogate pair: expected text"
                )
        texts.append({"prompt": prompt, "answer": answer})
    return texts


def _fill(key: str, pattern: str, row: dict[str, Any], where: str, known: dict[str, None]) -> str:
    """A column's text, or the template filled with columns; `known` are those of all rows."""
    if "{" in pattern:
        columns = [name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None]
    else:
        columns = [pattern]
    for column in columns:
        if column not in known:
            names = printable(", ".join(known), 400)
            raise RecipeError(f"data.{key}={shown(pattern)}: no column {shown(column)}; the columns are {names}")
        value = written(row.get(column))
        if value is None or str(value).strip() == "":
            raise RecipeError(f"{where}: column {column!r} is empty")
        if not isinstance(value, (str, int, float)):
            raise RecipeError(f"{where}: column {column!r} holds a {type(value).__name__}: expected text or a number")
    if "{" in pattern:
        try:
            return pattern.format(**{column: written(row[column]) for column in columns})
        except (ValueError, KeyError, IndexError, AttributeError) as error:
            raise RecipeError(f"data.{key}={pattern!r} cannot be filled from {where}: {error}") from error
    return str(written(row[columns[0]]))


def encode(rows: list[dict[str, str]], tokenizer: Any, max_length: int) -> tuple[Dataset, Counts]:
    """Token sequences with labels on the answer only.

    Prompt and answer are tokenised as one text; a token that spans the boundary counts as answer. If the prompt ends
    where a token ends (before a space, with most tokenizers), the model sees the same tokens when it generates.

    Args:
        rows: {"prompt", "answer"} texts.
        tokenizer: a fast tokenizer (its character offsets separate prompt from answer).
        max_length: most tokens of a sequence.

    Returns:
        a data set with input_ids, attention_mask and labels (lists of int), and counts of what was cut.
    """
    counts = Counts(rows=len(rows))
    encoded: list[dict[str, list[int]]] = []
    for row in rows:
        text = row["prompt"] + row["answer"]
        tokens = tokenizer(text, return_offsets_mapping=True)
        boundary = len(row["prompt"])
        start = next((i for i, (_, end) in enumerate(tokens["offset_mapping"]) if end > boundary), len(tokens["input_ids"]))
        prompt, answer = tokens["input_ids"][:start], tokens["input_ids"][start:]
        if answer[-1:] != [tokenizer.eos_token_id]:
            answer = [*answer, tokenizer.eos_token_id]
        prompt, answer = _cut(prompt, answer, max_length, counts)
        counts.tokens += len(prompt) + len(answer)
        counts.answer_tokens += len(answer)
        encoded.append(
            {
                "input_ids": prompt + answer,
                "attention_mask": [1] * (len(prompt) + len(answer)),
                "labels": [IGNORED] * len(prompt) + answer,
            }
        )
    return Dataset.from_list(encoded), counts


def _cut(prompt: list[int], answer: list[int], max_length: int, counts: Counts) -> tuple[list[int], list[int]]:
    """Fit a row: the answer is cut first, but keeps a quarter of the length if it has that many tokens."""
    if len(prompt) + len(answer) <= max_length:
        return prompt, answer
    room = max(max_length - len(prompt), min(len(answer), max_length // 4))
    if room < len(answer):
        counts.answers_cut += 1
    answer = answer[:room]
    if len(prompt) + len(answer) > max_length:
        counts.prompts_cut += 1
        keep = max_length - len(answer)  # the first token stays: for many models it marks the beginning
        prompt = prompt[:1] + prompt[len(prompt) - keep + 1 :]
    return prompt, answer
