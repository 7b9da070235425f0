"""Held-out figures: exact match of answers, perplexity."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import byte_tokenizer

from hf_gnmr.run.heldout import after_marker, exact_matches, is_right, perplexity_of


def test_exact_match_counts_what_greedy_decoding_gets_right_in_any_batch():
    """A model that answers by the length of the prompt: right for some rows, in batches of unequal prompts."""
    tokenizer = byte_tokenizer()

    class AnswersByLength(torch.nn.Module):
        device, config = torch.device("cpu"), type("C", (), {})()

        def generate(self, input_ids, attention_mask, max_new_tokens, **options):
            assert bool(attention_mask[:, -1].all()), "prompts must end where decoding begins"
            answers = [f"#### {int(n) % 3}" for n in attention_mask.sum(1)]
            new = tokenizer(answers, add_special_tokens=False, return_tensors="pt")["input_ids"]
            return torch.cat([input_ids, new], dim=1)

    rows = [{"prompt": "x" * n, "answer": f" so\n#### {n % 3 if n % 4 else 9}"} for n in range(1, 41)]
    recipe = type("R", (), {"data": type("D", (), {"answer_marker": "####", "max_new_tokens": 8})})
    assert exact_matches(AnswersByLength(), tokenizer, rows, recipe) == 30
    assert tokenizer.padding_side == byte_tokenizer().padding_side


@pytest.mark.parametrize(
    ("text", "reference", "marker", "right"),
    [
        (" 3 + 4 = 7\n#### 7", "#### 7", "####", True),
        ("#### 1,200 \nmore", "so\n#### 1200", "####", True),
        ("#### 3\n#### 7", "#### 7", "####", True),
        ("no marker", "#### 7", "####", False),
        ("anything", "answer without marker", "####", False),
        (" yes ", "yes", "####", True),
        ("yes", "yes", "", True),
    ],
)
def test_exact_match_is_decided_by_the_reference(text, reference, marker, right):
    assert is_right(text, reference, marker) is right


def test_a_text_without_the_marker_has_no_answer():
    assert after_marker("nothing", "####") is None


@pytest.mark.parametrize(("loss", "perplexity"), [(0.0, 1.0), (2.5, math.exp(2.5)), (701.0, math.inf), (math.inf, math.inf)])
def test_perplexity_is_the_exponential_of_the_loss(loss, perplexity):
    assert perplexity_of(loss) == perplexity


def test_perplexity_of_a_loss_that_is_not_a_number():
    assert math.isnan(perplexity_of(math.nan))
