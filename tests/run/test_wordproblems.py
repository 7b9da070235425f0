"""The generated word problems: right, deterministic, and no question in two splits."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gnmr.run.wordproblem_templates import MIX
from hf_gnmr.run.wordproblems import RECIPE_VERSION, SPLITS, generate, pretrain_text, split_of

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


def test_no_question_is_in_two_splits():
    questions = {split: {row["question"] for row in generate(split, 3000)} for split in SPLITS}
    assert not questions["train"] & questions["test"]
    assert not questions["pretrain"] & (questions["train"] | questions["test"])


@pytest.mark.parametrize("split", SPLITS)
def test_a_smaller_number_of_rows_is_a_prefix_and_seeds_differ(split):
    assert generate(split, 10) == generate(split, 50)[:10]
    assert generate(split, 10, seed=1) != generate(split, 10, seed=2)
    assert generate(split, 0) == []


def test_pretraining_text_has_the_layout_that_the_recipes_prompt_with():
    documents = list(pretrain_text(200))
    assert len(documents) == 200 and documents == list(pretrain_text(200))
    assert any(document.startswith("Question: ") and "\nAnswer: " in document for document in documents)


def test_the_generated_text_is_that_of_its_version():
    """The names of cached base models depend on the text: whoever changes it raises RECIPE_VERSION."""
    texts = [generate(split, 200, seed) for split in SPLITS for seed in (0, 1)]
    texts += [list(pretrain_text(300, seed)) for seed in (0, 1)]
    assert (RECIPE_VERSION, hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]) == (1, "843e6d83780bda99")


@pytest.mark.parametrize(
    ("split", "n", "message"),
    [("validation", 1, "split='validation': expected one of 'pretrain', 'train', 'test'"), ("train", -1, "n=-1: expected")],
)
def test_wrong_arguments_are_refused(split, n, message):
    with pytest.raises(ValueError, match=message):
        generate(split, n)


# -- templates -----------------------------------------------------------------------------------------------------------

TEMPLATES = [template for kinds in MIX.values() for _, templates in kinds for template in templates]


@pytest.mark.parametrize("split", SPLITS)
def test_the_shares_of_a_split_sum_to_one(split):
    assert sum(share for share, _ in MIX[split]) == pytest.approx(1)


@pytest.mark.parametrize("template", TEMPLATES, ids=[template[0][:30] for template in TEMPLATES])
def test_each_step_uses_numbers_that_are_known_by_then(template):
    known = set(re.findall(r"\{([abcd])\}", template[0]))
    for result, left, _, right in re.findall(r"\[(\w)=(\w)([-+*/])(\w)\]", " ".join(template[1:])):
        assert {left, right} <= known and result not in known
        known.add(result)
