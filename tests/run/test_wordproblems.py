"""The generated word problems: right, deterministic, and no question in two splits."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gnmr.run.wordproblems import SPLITS, generate, pretrain_text, split_of

STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SPLITS), st.integers(0, 10_000))
def test_every_step_is_right_and_the_last_is_the_answer(split, seed):
    for row in generate(split, 20, seed):
        steps = STEP.findall(row["answer"])
        assert steps
        for left, operator, right, result in steps:
            value = {
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
                "/": int(left) / int(right),
            }[operator]
            assert value == int(result)
        assert row["answer"].splitlines()[-1] == f"#### {steps[-1][3]}"
        assert split_of(row["question"]) == split


def test_no_question_is_in_two_splits_and_fewer_rows_begin_more_rows():
    questions = {split: {row["question"] for row in generate(split, 3000)} for split in SPLITS}
    assert not questions["train"] & questions["test"]
    assert not questions["pretrain"] & (questions["train"] | questions["test"])
    assert generate("train", 10) == generate("train", 50)[:10]
    assert generate("train", 10, seed=1) != generate("train", 10, seed=2)


def test_pretraining_text_has_the_layout_that_the_recipes_prompt_with():
    documents = list(pretrain_text(200))
    assert len(documents) == 200 and documents == list(pretrain_text(200))
    assert any(document.startswith("Question: ") and "\nAnswer: " in document for document in documents)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="split must be one of"):
        generate("validation", 1)
    with pytest.raises(ValueError, match="negative"):
        generate("train", -1)
