"""A handful of rows in the four tasks' formats, made by the project: they show that everything runs, and nothing else."""

from __future__ import annotations

import random
from typing import Any

from ..run.wordproblems import generate

SUBJECTS = ("sums", "differences")


def smoke_rows(task: str) -> dict[str, list[dict[str, Any]]]:
    """Rows by split for a task of `tasks.NAMES`; the same ones each time."""
    generator = random.Random(0)
    if task == "gsm8k":
        return {
            split: [{"question": row["question"], "answer": row["answer"]} for row in generate(split, 8)]
            for split in ("train", "test")
        }
    if task == "mmlu":
        return {split: [_choice(generator, subject) for subject in SUBJECTS for _ in range(6)] for split in ("dev", "test")}
    if task == "hellaswag":
        return {"validation": [_continuation(generator) for _ in range(8)]}
    return {"test": [{"page": page} for page in _articles(generator)]}


def _choice(generator: random.Random, subject: str) -> dict[str, Any]:
    a, b = generator.randint(20, 90), generator.randint(2, 19)
    right = a + b if subject == "sums" else a - b
    choices = [right, right + 1, right + 10, right - 2]
    generator.shuffle(choices)
    sign = "+" if subject == "sums" else "-"
    return {
        "question": f"What is {a} {sign} {b}?",
        "subject": subject,
        "choices": [str(c) for c in choices],
        "answer": choices.index(right),
    }


def _continuation(generator: random.Random) -> dict[str, Any]:
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


def _articles(generator: random.Random) -> list[str]:
    pages = []
    for title in ("The Mill", "The Harbour", "The Orchard"):
        sentences = [
            f"In the year {generator.randint(1700, 1990)} it had {generator.randint(2, 90)} workers ."
            for _ in range(generator.randint(8, 14))
        ]
        pages.append(f" = {title} = \n \n {' '.join(sentences)} \n \n")
    return pages


def smoke_text() -> str:
    """The articles as one text, for token perplexity."""
    return "".join(row["page"] for row in smoke_rows("wikitext")["test"])
