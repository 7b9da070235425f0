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

Splits.  ``pretrain`` holds one-step problems and bare sums; ``train`` and ``test`` hold two- and three-step
problems told in other words, so a model which has seen only ``pretrain`` knows the vocabulary and the
arithmetic but has to learn how steps are put together.  The splits are disjoint by construction, whatever
``n`` and ``seed``:

* a ``pretrain`` question states exactly two numbers, a ``train`` or ``test`` question three or more;
* the numbers of a ``train`` or ``test`` question, in the order in which the text states them, are hashed
  (CRC-32); one hash in ``TEST_SHARE`` belongs to ``test`` and all others to ``train``.  Equal questions state
  equal numbers, so they can only be in one split; and no list of numbers in ``test`` occurs in ``train``.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator

RECIPE_VERSION = 1
"""Raised with every change to the text made here; caches of models trained on it depend on it."""

SPLITS = ("pretrain", "train", "test")
TEST_SHARE = 4
MAX_RESULT = 60

_NAMES = ["Abel", "Bruna", "Cyril", "Dilys", "Edda", "Femi", "Gwen", "Hari", "Ines", "Jory", "Kaya", "Lorcan", "Mirel", "Nuno", "Odile", "Pavel", "Quin", "Rosa", "Sami", "Tilda", "Umar", "Vesna", "Wim", "Yara"]
_THINGS = ["apples", "pears", "shells", "buttons", "stamps", "marbles", "beads", "pencils", "stickers", "coins", "cards", "plums", "nuts", "candles", "ribbons", "tickets", "postcards", "figs", "lemons", "badges"]
_HOLDERS = ["box", "bag", "basket", "jar", "crate", "tin", "drawer", "tray"]
_PLURALS = {h: ("boxes" if h == "box" else h + "s") for h in _HOLDERS}
_PLACES = ["shop", "farm", "library", "museum", "bakery", "school", "garden", "harbour", "market", "station"]

# One template is (question, worked sentence, ...).
_Template = tuple[str, ...]

_ONE_STEP: tuple[_Template, ...] = (
    ("{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
     "{name} has [x=a+b] {thing} now."),
    ("{name} finds {a} {thing} and {other} finds {b} {thing}. How many {thing} do they find together?",
     "Together they find [x=a+b] {thing}."),
    ("There are {a} {thing} in a {holder}. {name} puts in {b} more. How many {thing} are in the {holder}?",
     "The {holder} has [x=a+b] {thing}."),
    ("A {place} sold {a} {thing} in the morning and {b} in the evening. How many {thing} were sold?",
     "The {place} sold [x=a+b] {thing}."),
    ("{name} is {a} years old. How old will {name} be in {b} years?",
     "{name} will be [x=a+b] years old."),
    ("{name} has {a} {thing} and gives {b} to {other}. How many {thing} does {name} have left?",
     "{name} has [x=a-b] {thing} left."),
    ("There are {a} {thing} in a {holder}. {name} takes out {b}. How many {thing} remain?",
     "Then [x=a-b] {thing} remain."),
    ("{name} has {a} {thing} and {other} has {b}. How many more {thing} does {name} have than {other}?",
     "{name} has [x=a-b] more {thing}."),
    ("A {place} had {a} {thing} and lost {b} of them. How many {thing} remain?",
     "Then [x=a-b] {thing} remain."),
    ("{name} needs {a} {thing} but has only {b}. How many more {thing} does {name} need?",
     "{name} needs [x=a-b] more {thing}."),
    ("There are {a} {holders} with {b} {thing} in each. How many {thing} are there in all?",
     "In all there are [x=a*b] {thing}."),
    ("{name} buys {a} {thing} for {b} dollars each. How many dollars does {name} pay?",
     "{name} pays [x=a*b] dollars."),
    ("Each day {name} makes {a} {thing}. How many {thing} does {name} make in {b} days?",
     "{name} makes [x=a*b] {thing}."),
    ("A {place} has {a} rows of {b} {thing}. How many {thing} does the {place} have?",
     "The {place} has [x=a*b] {thing}."),
    ("{name} shares {a} {thing} among {b} friends. How many {thing} does each friend get?",
     "Each friend gets [x=a/b] {thing}."),
    ("{name} packs {a} {thing} into {b} {holders}, the same number in each. How many {thing} are in one {holder}?",
     "One {holder} has [x=a/b] {thing}."),
    ("{name} pays {a} dollars for {b} {thing}. How many dollars does one cost?",
     "One costs [x=a/b] dollars."),
)

_BARE: tuple[_Template, ...] = (
    ("What is {a} plus {b}?", "The sum is [x=a+b]."),
    ("What is {a} minus {b}?", "The difference is [x=a-b]."),
    ("What is {a} times {b}?", "The product is [x=a*b]."),
    ("What is {a} divided by {b}?", "The quotient is [x=a/b]."),
)

_MANY_STEPS: tuple[_Template, ...] = (
    ("{name} picked {a} {thing} on Monday and {b} on Tuesday, then handed {c} of them to {other}. "
     "How many {thing} does {name} still have?",
     "{name} picked [x=a+b] {thing}.", "Then [y=x-c] {thing} remain."),
    ("A {place} kept {a} {thing}. In spring {b} of them were thrown away, and in summer {c} new ones came. "
     "How many {thing} did the {place} have after summer?",
     "After spring there are [x=a-b] {thing}.", "After summer there are [y=x+c] {thing}."),
    ("{name} fills {a} {holders} with {b} {thing} each, and {c} {thing} do not fit. "
     "How many {thing} does {name} have altogether?",
     "The {holders} have [x=a*b] {thing}.", "In all there are [y=x+c] {thing}."),
    ("Every one of {a} {holders} holds {b} {thing}. {name} sells {c} of the {thing}. How many are unsold?",
     "The {holders} have [x=a*b] {thing}.", "Then [y=x-c] {thing} remain."),
    ("{name} collected {a} {thing} and {other} collected {b}. They split them evenly over {c} {holders}. "
     "How many {thing} go into a {holder}?",
     "Together they have [x=a+b] {thing}.", "One {holder} gets [y=x/c] {thing}."),
    ("From a pile of {a} {thing}, {name} removed {b} broken ones and dealt the others out to {c} children. "
     "How many {thing} did each child receive?",
     "Then [x=a-b] {thing} remain.", "Each child gets [y=x/c] {thing}."),
    ("At the {place} one of the {thing} costs {a} dollars. {name} takes {b} of them and hands over {c} dollars. "
     "How much change does {name} receive?",
     "{name} pays [x=a*b] dollars.", "The change is [y=c-x] dollars."),
    ("{other} owns {a} {thing}. {name} owns {b} times as many and one {holder} with {c} on top. "
     "How many {thing} belong to {name}?",
     "The first part is [x=a*b] {thing}.", "{name} has [y=x+c] {thing}."),
    ("{name} cut {a} {thing} into {b} equal groups and then added {c} {thing} to one group. "
     "How many {thing} are in that group?",
     "One group has [x=a/b] {thing}.", "Then the group has [y=x+c] {thing}."),
    ("{name} wants {a} {thing}. So far {b} came from {other} and {c} from the {place}. "
     "How many {thing} are missing?",
     "{name} has [x=b+c] {thing}.", "{name} needs [y=a-x] more {thing}."),
    ("On each of {a} days {name} makes {b} {thing} and keeps only {c} of them in the end. "
     "How many {thing} did {name} give away?",
     "{name} makes [x=a*b] {thing}.", "Then [y=x-c] {thing} were given away."),
    ("{name} brought {a} {thing}, {other} brought {b}, and the {place} sent {c}. {d} {thing} were lost. "
     "How many {thing} are left over?",
     "Together they have [x=a+b] {thing}.", "In all there are [y=x+c] {thing}.", "Then [z=y-d] {thing} remain."),
)

_STEP = re.compile(r"\[(\w)=(\w)([-+*/])(\w)\]")
_NUMBER = re.compile(r"\d+")


def _compute(left: int, operator: str, right: int) -> int | None:
    """The result of one step, or None where it is no whole number in 1..MAX_RESULT."""
    if operator == "/":
        result = left // right if left % right == 0 else 0
    else:
        result = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return result if 1 <= result <= MAX_RESULT else None


def _draw_numbers(template: _Template, rng: random.Random) -> tuple[dict[str, int], dict[str, str]]:
    """Draw a template's numbers; returns each name's value and each result's written-out step."""
    steps = [match.groups() for sentence in template[1:] for match in _STEP.finditer(sentence)]
    inputs = sorted(set(re.findall(r"\{([abcd])\}", template[0])))
    # Factors and divisors stay within the times tables; everything else is a one- or two-digit number.
    small = {n for _, left, op, right in steps for n in (left, right) if op == "*" or (op == "/" and n == right)}
    while True:
        values = {name: rng.randint(2, 9 if name in small else 30) for name in inputs}
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
    question = template[0].format(**words, **values)
    lines = [_STEP.sub(lambda m: written[m[1]], sentence).format(**words) for sentence in template[1:]]
    return {"question": question, "answer": "\n".join([*lines, f"#### {values[max(written)]}"])}


def split_of(question: str) -> str:
    """The one split in which a question may occur: ``"pretrain"``, ``"train"`` or ``"test"``."""
    numbers = _NUMBER.findall(question)
    if len(numbers) < 3:
        return "pretrain"
    return "train" if zlib.crc32(" ".join(numbers).encode()) % TEST_SHARE else "test"


def generate(split: str, n: int, seed: int = 0) -> list[dict[str, str]]:
    """Make ``n`` rows ``{"question": ..., "answer": ...}`` of a split.

    The same arguments always give the same rows, and fewer rows are the beginning of more rows.  Questions
    of ``train`` and ``test`` do not repeat within a call; bare sums of ``pretrain`` may.

    Raises:
        ValueError: for an unknown split or a negative ``n``.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, not {split!r}")
    if n < 0:
        raise ValueError(f"n must not be negative, got {n}")
    rng = random.Random(f"{split}/{seed}")
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    while len(rows) < n:
        if split == "pretrain":
            template = rng.choice(_BARE if rng.random() < 0.2 else _ONE_STEP)
        else:
            template = rng.choice(_MANY_STEPS)
        row = _render(template, rng)
        if split == "pretrain" or (split_of(row["question"]) == split and row["question"] not in seen):
            seen.add(row["question"])
            rows.append(row)
    return rows


def _fact(rng: random.Random, left: int | None = None) -> tuple[str, int]:
    """One sum, product, difference or quotient; ``left`` fixes its first number."""
    while True:
        operator = rng.choice("++--*/")
        first = left if left is not None else rng.randint(2, 9 if operator == "*" else MAX_RESULT)
        second = rng.randint(2, 9 if operator in "*/" else 30)
        result = _compute(first, operator, second)
        if result is not None:
            return f"{first} {operator} {second} = {result}", result


def pretrain_text(n: int, seed: int = 0) -> Iterator[str]:
    """Yield ``n`` documents for language-model pre-training.

    A third are lists of arithmetic facts, each fact starting from the last result or from a new number; the
    others are ``pretrain`` problems in the layout ``Question: ...\\nAnswer: ...``.
    """
    rng = random.Random(f"text/{seed}")
    rows = iter(generate("pretrain", n, seed))
    for _ in range(n):
        if rng.random() < 1 / 3:
            facts, last = [], None
            for _ in range(8):
                fact, result = _fact(rng, last)
                facts.append(fact)
                last = result if rng.random() < 0.5 else None
            yield ". ".join(facts) + "."
        else:
            row = next(rows)
            yield f"Question: {row['question']}\nAnswer: {row['answer']}"
