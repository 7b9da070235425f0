"""Seeded generator of small, school-style word problems, so that examples and tests need no download.

A problem fills in a *template* (`wordproblem_templates`): a question with slots, and one to three worked
sentences.  A slot such as ``{name}`` takes a word; ``{a}``, ``{b}``, ``{c}``, ``{d}`` take whole numbers; and
``[x=a+b]`` in a worked sentence is computed, written out as ``12 + 7 = 19`` and kept under the name ``x`` for
the sentences that follow.  The last result is the answer, so an answer always looks like this::

    Mia has 12 + 7 = 19 apples.
    Then 19 - 4 = 15 apples remain.
    #### 15

Numbers are drawn until every result is a whole number within the range a very small language model can
learn by heart (``MAX_RESULT``).

Splits.  ``pretrain`` holds one-step problems, bare sums and a few short two-step ones; ``train`` and ``test``
hold two- and three-step problems in different wording.  A model that has seen only ``pretrain`` therefore knows
the vocabulary, the layout and the arithmetic, and has to learn which steps a new kind of story needs.

No question is ever in two splits, whatever ``n`` and ``seed``: ``split_of`` derives a question's split from
the numbers in it.  Fewer than three numbers belong to ``pretrain``; three or more are hashed (CRC-32) in
the order of the text, and the hash chooses the split.  Equal questions contain equal numbers, so they have the same
split; and no list of three or more numbers in ``test`` occurs in another split, whatever the words around it.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from itertools import islice

from .wordproblem_templates import HOLDERS, MIX, NAMES, PLACES, PLURALS, THINGS, Template

RECIPE_VERSION = 1
"""Raise it with every change to the generated text: the names of cached models depend on it."""

SPLITS = ("pretrain", "train", "test")
MAX_TERM = 20
"""Largest number in a question; factors and divisors are at most 9."""
MAX_RESULT = 40
"""Largest result of a step."""

_BUCKETS = ("test",) * 2 + ("pretrain",) * 3 + ("train",) * 3
"""The split for each remainder of the hash of three or more numbers."""

_STEP = re.compile(r"\[(\w)=(\w)([-+*/])(\w)\]")
_INPUT = re.compile(r"\{([abcd])\}")
_NUMBER = re.compile(r"\d+")


def _compute(left: int, operator: str, right: int) -> int | None:
    """The result of a step; None unless it is a whole number in 2..MAX_RESULT (plurals need two or more)."""
    if operator == "/":
        result = left // right if left % right == 0 else 0
    else:
        result = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return result if 2 <= result <= MAX_RESULT else None


def _draw_numbers(template: Template, rng: random.Random) -> tuple[dict[str, int], dict[str, str]]:
    """Draw a template's numbers; returns the value under each name, and each result's written-out step."""
    steps = [match.groups() for sentence in template[1:] for match in _STEP.finditer(sentence)]
    inputs = sorted(set(_INPUT.findall(template[0])))
    # Factors and divisors stay within the times tables.
    small = {right for _, _, operator, right in steps if operator in "*/"}
    small |= {left for _, left, operator, _ in steps if operator == "*"}
    while True:
        values = {name: rng.randint(2, 9 if name in small else MAX_TERM) for name in inputs}
        written: dict[str, str] = {}
        for name, left, operator, right in steps:
            result = _compute(values[left], operator, values[right])
            if result is None:
                break
            values[name] = result
            written[name] = f"{values[left]} {operator} {values[right]} = {result}"
        else:
            return values, written


def _render(template: Template, rng: random.Random) -> dict[str, str]:
    """Fill a template with words and numbers; returns the row."""
    name, other = rng.sample(NAMES, 2)
    holder = rng.choice(HOLDERS)
    words = {"name": name, "other": other, "thing": rng.choice(THINGS), "place": rng.choice(PLACES)}
    words |= {"holder": holder, "holders": PLURALS[holder]}
    values, written = _draw_numbers(template, rng)
    lines = [_STEP.sub(lambda match: written[match[1]], line).format(**words) for line in template[1:]]
    answer = "\n".join([*lines, f"#### {values[list(written)[-1]]}"])
    return {"question": template[0].format(**words, **values), "answer": answer}


def split_of(question: str) -> str:
    """The only split in which a question can occur: ``"pretrain"``, ``"train"`` or ``"test"``."""
    numbers = _NUMBER.findall(question)
    if len(numbers) < 3:
        return "pretrain"
    return _BUCKETS[zlib.crc32(" ".join(numbers).encode()) % len(_BUCKETS)]


def _rows(split: str, rng: random.Random) -> Iterator[dict[str, str]]:
    """An endless stream of a split's rows."""
    weights, kinds = zip(*MIX[split], strict=True)
    while True:
        (kind,) = rng.choices(kinds, weights)
        row = _render(rng.choice(kind), rng)
        if split_of(row["question"]) == split:
            yield row


def generate(split: str, n: int, seed: int = 0) -> list[dict[str, str]]:
    """Generate ``n`` rows ``{"question": ..., "answer": ...}`` of a split.

    The same arguments give the same rows on every machine, and a smaller ``n`` gives a prefix of a larger one's rows.
    Within a call no question of ``train`` or ``test`` repeats; those of ``pretrain`` may (there are few bare sums).

    Args:
        split: ``"pretrain"``, ``"train"`` or ``"test"``.
        n: number of rows, at least 0.
        seed: any integer.  Other seeds give other rows, but never a question of another split.

    Raises:
        ValueError: an unknown split, or a negative ``n``.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: expected one of {', '.join(map(repr, SPLITS))}")
    if n < 0:
        raise ValueError(f"n={n}: expected at least 0")
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    stream = _rows(split, random.Random(f"{split}/{seed}"))
    while len(rows) < n:
        row = next(stream)
        if split == "pretrain" or row["question"] not in seen:
            seen.add(row["question"])
            rows.append(row)
    return rows


def _facts(rng: random.Random) -> Iterator[str]:
    """An endless stream of facts such as ``12 + 7 = 19``; about every second one starts from the last result."""
    result: int | None = None
    while True:
        operator = rng.choice("++--*/")
        left = rng.randint(2, 9 if operator == "*" else MAX_RESULT)
        if result is not None and rng.random() < 0.5:
            left = result
        right = rng.randint(2, 9 if operator in "*/" else MAX_TERM)
        value = _compute(left, operator, right)
        if value is not None:
            result = value
            yield f"{left} {operator} {right} = {value}"


def pretrain_text(n: int, seed: int = 0) -> Iterator[str]:
    """Yield ``n`` documents for language-model pre-training.

    About one in three is a list of eight facts, ``12 + 7 = 19. 19 - 4 = 15. ...``; the others are problems from
    the ``pretrain`` split, laid out as ``Question: ...\\nAnswer: ...``.
    """
    rng = random.Random(f"text/{seed}")
    rows = _rows("pretrain", rng)
    for _ in range(n):
        if rng.random() < 0.35:
            yield ". ".join(islice(_facts(rng), 8)) + "."
        else:
            row = next(rows)
            yield f"Question: {row['question']}\nAnswer: {row['answer']}"
