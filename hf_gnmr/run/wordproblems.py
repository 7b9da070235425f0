"""Seeded generator of small, school-style word problems, so that examples and tests need no download.

Idea.  A problem is a *template*: a question with slots, and one to three worked sentences.  A slot such
as ``{name}`` takes a word; ``{a}``, ``{b}``, ``{c}``, ``{d}`` take whole numbers; and ``[x=a+b]`` in a
worked sentence is computed, written out as ``12 + 7 = 19`` and kept under the name ``x`` for the sentences
that follow.  The last result is the answer, so an answer always looks like this::

    Mia has 12 + 7 = 19 apples.
    Then 19 - 4 = 15 apples remain.
    #### 15

Numbers are drawn until every result is a whole number within the range a very small language model can
learn by heart (``MAX_RESULT``).

Splits.  ``pretrain`` holds one-step problems, bare sums and a few short two-step ones; ``train`` and ``test``
hold two- and three-step problems told in other words.  So a model that has seen only ``pretrain`` knows the
vocabulary, the layout and the arithmetic, and has to learn which steps a story of the new kind asks for.

No question is ever in two splits, whatever ``n`` and ``seed``: ``split_of`` tells a question's one split from
the numbers it states.  Fewer than three numbers belong to ``pretrain``; three or more are hashed (CRC-32) in
the order of the text, and the hash chooses the split.  Equal questions state equal numbers, so they have one
split; and no list of three or more numbers in ``test`` occurs in another split, whatever the words around it.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from itertools import islice

RECIPE_VERSION = 1
"""Raised with every change to the text made here; caches of models trained on it depend on it."""

SPLITS = ("pretrain", "train", "test")
MAX_TERM = 20
"""Largest number in a question; factors and divisors are at most 9."""
MAX_RESULT = 40
"""Largest result of a step."""

_BUCKETS = ("test",) * 2 + ("pretrain",) * 3 + ("train",) * 3
"""The split for each remainder of the hash of three or more numbers."""

_NAMES = (
    "Abel",
    "Bruna",
    "Cyril",
    "Dilys",
    "Edda",
    "Femi",
    "Gwen",
    "Hari",
    "Ines",
    "Jory",
    "Kaya",
    "Lorcan",
    "Mirel",
    "Nuno",
    "Odile",
    "Pavel",
    "Quin",
    "Rosa",
    "Sami",
    "Tilda",
    "Umar",
    "Vesna",
    "Wim",
    "Yara",
)
_THINGS = (
    "apples",
    "pears",
    "shells",
    "buttons",
    "stamps",
    "marbles",
    "beads",
    "pencils",
    "stickers",
    "coins",
    "cards",
    "plums",
    "nuts",
    "candles",
    "ribbons",
    "tickets",
    "postcards",
    "figs",
    "lemons",
    "badges",
)
_HOLDERS = ("box", "bag", "basket", "jar", "crate", "tin", "drawer", "tray")
_PLURALS = {h: ("boxes" if h == "box" else h + "s") for h in _HOLDERS}
_PLACES = ("shop", "farm", "library", "museum", "bakery", "school", "garden", "harbour", "market", "station")

# One template is (question, worked sentence, ...).
_Template = tuple[str, ...]

_ONE_STEP: tuple[_Template, ...] = (
    ("{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?", "{name} has [x=a+b] {thing} now."),
    (
        "{name} finds {a} {thing} and {other} finds {b} {thing}. How many {thing} do they find together?",
        "Together they find [x=a+b] {thing}.",
    ),
    (
        "There are {a} {thing} in a {holder}. {name} puts in {b} more. How many {thing} are in the {holder}?",
        "The {holder} has [x=a+b] {thing}.",
    ),
    (
        "A {place} sold {a} {thing} in the morning and {b} in the evening. How many {thing} were sold?",
        "The {place} sold [x=a+b] {thing}.",
    ),
    ("{name} is {a} years old. How old will {name} be in {b} years?", "{name} will be [x=a+b] years old."),
    (
        "{name} has {a} {thing} and gives {b} to {other}. How many {thing} does {name} have left?",
        "{name} has [x=a-b] {thing} left.",
    ),
    ("There are {a} {thing} in a {holder}. {name} takes out {b}. How many {thing} remain?", "Then [x=a-b] {thing} remain."),
    (
        "{name} has {a} {thing} and {other} has {b}. How many more {thing} does {name} have than {other}?",
        "{name} has [x=a-b] more {thing}.",
    ),
    ("A {place} had {a} {thing} and lost {b} of them. How many {thing} remain?", "Then [x=a-b] {thing} remain."),
    (
        "{name} needs {a} {thing} but has only {b}. How many more {thing} does {name} need?",
        "{name} needs [x=a-b] more {thing}.",
    ),
    (
        "There are {a} {holders} with {b} {thing} in each. How many {thing} are there in all?",
        "In all there are [x=a*b] {thing}.",
    ),
    ("{name} buys {a} {thing} for {b} dollars each. How many dollars does {name} pay?", "{name} pays [x=a*b] dollars."),
    ("Each day {name} makes {a} {thing}. How many {thing} does {name} make in {b} days?", "{name} makes [x=a*b] {thing}."),
    ("A {place} has {a} rows of {b} {thing}. How many {thing} does the {place} have?", "The {place} has [x=a*b] {thing}."),
    (
        "{name} shares {a} {thing} among {b} friends. How many {thing} does each friend get?",
        "Each friend gets [x=a/b] {thing}.",
    ),
    (
        "{name} packs {a} {thing} into {b} {holders}, the same number in each. How many {thing} are in one {holder}?",
        "One {holder} has [x=a/b] {thing}.",
    ),
    ("{name} pays {a} dollars for {b} {thing}. How many dollars does one cost?", "One costs [x=a/b] dollars."),
)

_SHORT_CHAINS: tuple[_Template, ...] = (
    (
        "{name} has {a} {thing}, gets {b} more and gives {c} to {other}. How many {thing} does {name} have left?",
        "{name} has [x=a+b] {thing}.",
        "Then [y=x-c] {thing} remain.",
    ),
    (
        "{name} buys {a} {thing} for {b} dollars each and has {c} dollars left. How many dollars did {name} have?",
        "{name} pays [x=a*b] dollars.",
        "In all there are [y=x+c] dollars.",
    ),
    (
        "A {place} had {a} {thing}, lost {b} of them and puts the rest into {c} {holders}. "
        "How many {thing} are in one {holder}?",
        "Then [x=a-b] {thing} remain.",
        "One {holder} has [y=x/c] {thing}.",
    ),
)

_SUMS: tuple[_Template, ...] = (
    ("What is {a} plus {b}?", "The sum is [x=a+b]."),
    ("What is {a} minus {b}?", "The difference is [x=a-b]."),
    ("What is {a} times {b}?", "The product is [x=a*b]."),
    ("What is {a} divided by {b}?", "The quotient is [x=a/b]."),
)

# Worked from left to right, hence no product or quotient after a sum or difference.
_LONG_SUMS: tuple[_Template, ...] = (
    ("What is {a} plus {b} plus {c}?", "First [x=a+b].", "Then [y=x+c]."),
    ("What is {a} plus {b} minus {c}?", "First [x=a+b].", "Then [y=x-c]."),
    ("What is {a} minus {b} plus {c}?", "First [x=a-b].", "Then [y=x+c]."),
    ("What is {a} minus {b} minus {c}?", "First [x=a-b].", "Then [y=x-c]."),
    ("What is {a} times {b} plus {c}?", "First [x=a*b].", "Then [y=x+c]."),
    ("What is {a} times {b} minus {c}?", "First [x=a*b].", "Then [y=x-c]."),
    ("What is {a} times {b} divided by {c}?", "First [x=a*b].", "Then [y=x/c]."),
    ("What is {a} divided by {b} plus {c}?", "First [x=a/b].", "Then [y=x+c]."),
    ("What is {a} divided by {b} minus {c}?", "First [x=a/b].", "Then [y=x-c]."),
)

_MANY_STEPS: tuple[_Template, ...] = (
    (
        "{name} picked {a} {thing} on Monday and {b} on Tuesday, then handed {c} of them to {other}. "
        "How many {thing} does {name} still have?",
        "{name} picked [x=a+b] {thing}.",
        "Then [y=x-c] {thing} remain.",
    ),
    (
        "A {place} kept {a} {thing}. In spring {b} of them were thrown away, and in summer {c} new ones came. "
        "How many {thing} did the {place} have after summer?",
        "After spring there are [x=a-b] {thing}.",
        "After summer there are [y=x+c] {thing}.",
    ),
    (
        "{name} fills {a} {holders} with {b} {thing} each, and {c} {thing} do not fit. "
        "How many {thing} does {name} have altogether?",
        "The {holders} have [x=a*b] {thing}.",
        "In all there are [y=x+c] {thing}.",
    ),
    (
        "Every one of {a} {holders} holds {b} {thing}. {name} sells {c} of the {thing}. How many are unsold?",
        "The {holders} have [x=a*b] {thing}.",
        "Then [y=x-c] {thing} remain.",
    ),
    (
        "{name} collected {a} {thing} and {other} collected {b}. They split them evenly over {c} {holders}. "
        "How many {thing} go into a {holder}?",
        "Together they have [x=a+b] {thing}.",
        "One {holder} gets [y=x/c] {thing}.",
    ),
    (
        "From a pile of {a} {thing}, {name} removed {b} broken ones and dealt the others out to {c} children. "
        "How many {thing} did each child receive?",
        "Then [x=a-b] {thing} remain.",
        "Each child gets [y=x/c] {thing}.",
    ),
    (
        "At the {place}, {thing} cost {a} dollars each. {name} takes {b} of them and hands over {c} dollars. "
        "How much change does {name} receive?",
        "{name} pays [x=a*b] dollars.",
        "The change is [y=c-x] dollars.",
    ),
    (
        "{other} owns {a} {thing}. {name} owns {b} times as many and one {holder} with {c} on top. "
        "How many {thing} belong to {name}?",
        "The first part is [x=a*b] {thing}.",
        "{name} has [y=x+c] {thing}.",
    ),
    (
        "{name} sorted {a} {thing} into {b} equal groups and then added {c} {thing} to one group. "
        "How many {thing} are in that group?",
        "One group has [x=a/b] {thing}.",
        "Then the group has [y=x+c] {thing}.",
    ),
    (
        "{name} wants {a} {thing}. So far {b} came from {other} and {c} from the {place}. How many {thing} are missing?",
        "{name} has [x=b+c] {thing}.",
        "{name} needs [y=a-x] more {thing}.",
    ),
    (
        "On each of {a} days {name} makes {b} {thing} and keeps only {c} of them in the end. "
        "How many {thing} did {name} give away?",
        "{name} makes [x=a*b] {thing}.",
        "Then [y=x-c] {thing} were given away.",
    ),
    (
        "{name} brought {a} {thing}, {other} brought {b}, and the {place} sent {c}. {d} {thing} were lost. "
        "How many {thing} are left over?",
        "Together they have [x=a+b] {thing}.",
        "In all there are [y=x+c] {thing}.",
        "Then [z=y-d] {thing} remain.",
    ),
)

# The share of each kind of template in a split.
_MIX: dict[str, tuple[tuple[float, tuple[_Template, ...]], ...]] = {
    "pretrain": ((0.50, _ONE_STEP), (0.15, _SUMS), (0.15, _LONG_SUMS), (0.20, _SHORT_CHAINS)),
    "train": ((1.0, _MANY_STEPS),),
    "test": ((1.0, _MANY_STEPS),),
}
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


def _draw_numbers(template: _Template, rng: random.Random) -> tuple[dict[str, int], dict[str, str]]:
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


def _render(template: _Template, rng: random.Random) -> dict[str, str]:
    """Fill a template with words and numbers; returns the row."""
    name, other = rng.sample(_NAMES, 2)
    holder = rng.choice(_HOLDERS)
    words = {"name": name, "other": other, "thing": rng.choice(_THINGS), "place": rng.choice(_PLACES)}
    words |= {"holder": holder, "holders": _PLURALS[holder]}
    values, written = _draw_numbers(template, rng)
    lines = [_STEP.sub(lambda match: written[match[1]], line).format(**words) for line in template[1:]]
    answer = "\n".join([*lines, f"#### {values[list(written)[-1]]}"])
    return {"question": template[0].format(**words, **values), "answer": answer}


def split_of(question: str) -> str:
    """The one split in which a question may occur: ``"pretrain"``, ``"train"`` or ``"test"``."""
    numbers = _NUMBER.findall(question)
    if len(numbers) < 3:
        return "pretrain"
    return _BUCKETS[zlib.crc32(" ".join(numbers).encode()) % len(_BUCKETS)]


def _rows(split: str, rng: random.Random) -> Iterator[dict[str, str]]:
    """Rows of a split without end."""
    weights, kinds = zip(*_MIX[split], strict=True)
    while True:
        (kind,) = rng.choices(kinds, weights)
        row = _render(rng.choice(kind), rng)
        if split_of(row["question"]) == split:
            yield row


def generate(split: str, n: int, seed: int = 0) -> list[dict[str, str]]:
    """Make ``n`` rows ``{"question": ..., "answer": ...}`` of a split.

    The same arguments give the same rows on every machine, and fewer rows are the beginning of more rows.
    Within a call no question of ``train`` or ``test`` repeats; those of ``pretrain`` may (bare sums are few).

    Args:
        split: ``"pretrain"``, ``"train"`` or ``"test"``.
        n: rows, at least 0.
        seed: any whole number.  Other seeds give other rows, but never a question of another split.

    Raises:
        ValueError: for an unknown split or a negative ``n``.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
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
    """Facts such as ``12 + 7 = 19`` without end; every second one, or so, starts from the last result."""
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

    About one in three is a list of eight facts, ``12 + 7 = 19. 19 - 4 = 15. ...``; the others are problems of
    the ``pretrain`` split in the layout ``Question: ...\\nAnswer: ...``.
    """
    rng = random.Random(f"text/{seed}")
    rows = _rows("pretrain", rng)
    for _ in range(n):
        if rng.random() < 0.35:
            yield ". ".join(islice(_facts(rng), 8)) + "."
        else:
            row = next(rows)
            yield f"Question: {row['question']}\nAnswer: {row['answer']}"
