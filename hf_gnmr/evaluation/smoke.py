"""A handful of rows in the tasks' formats, made by the project: they show that everything runs, and nothing else.

Every call returns the same rows.
"""

from __future__ import annotations

import random

from ..run.wordproblems import generate
from .rows import Row, Splits

SUBJECTS = ("sums", "differences")


def word_problems() -> Splits:
    """Eight questions with worked answers in each of `train` and `test`."""
    return {
        split: [{"question": row["question"], "answer": row["answer"]} for row in generate(split, 8)]
        for split in ("train", "test")
    }


def choices() -> Splits:
    """Six questions with four options for each of two subjects, in each of `dev` and `test`."""
    generator = random.Random(0)
    return {split: [_choice(generator, subject) for subject in SUBJECTS for _ in range(6)] for split in ("dev", "test")}


def continuations() -> Splits:
    """Eight beginnings with four endings each, in `validation`."""
    generator = random.Random(0)
    return {"validation": [_continuation(generator) for _ in range(8)]}


def articles() -> Splits:
    """Three short articles in `test`, one `page` per row."""
    generator = random.Random(0)
    return {"test": [{"page": _article(title, generator)} for title in ("The Mill", "The Harbour", "The Orchard")]}


def smoke_text() -> str:
    """The articles as one text."""
    return "".join(row["page"] for row in articles()["test"])


def _choice(generator: random.Random, subject: str) -> Row:
    a, b = generator.randint(20, 90), generator.randint(2, 19)
    right = a + b if subject == "sums" else a - b
    options = [right, right + 1, right + 10, right - 2]
    generator.shuffle(options)
    sign = "+" if subject == "sums" else "-"
    return {
        "question": f"What is {a} {sign} {b}?",
        "subject": subject,
        "choices": [str(option) for option in options],
        "answer": options.index(right),
    }


def _continuation(generator: random.Random) -> Row:
    name, thing = generator.choice(["Ada", "Ben", "Cem", "Dora"]), generator.choice(["kettle", "lamp", "gate", "drum"])
    endings = [
        f"puts the {thing} back where it was.",
        "and and the of blue seven.",
        "is a number below four.",
        f"because {thing} {thing} {thing}.",
    ]
    right = endings[0]
    generator.shuffle(endings)
    return {
        "activity_label": f"Using a {thing}",
        "ctx_a": f"{name} takes the {thing} and uses it for a while.",
        "ctx_b": "then the owner",
        "endings": endings,
        "label": endings.index(right),
    }


def _article(title: str, generator: random.Random) -> str:
    sentences = [
        f"In the year {generator.randint(1700, 1990)} it had {generator.randint(2, 90)} workers ."
        for _ in range(generator.randint(8, 14))
    ]
    return f" = {title} = \n \n {' '.join(sentences)} \n \n"
