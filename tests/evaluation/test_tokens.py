"""Token perplexity over fixed blocks: identity with plain PyTorch, and what it counts."""

from __future__ import annotations

import argparse
import math

import pytest
import torch
from conftest import byte_tokenizer, load_bf16
from transformers import LlamaConfig

from hf_gnmr.config import ConfigError
from hf_gnmr.evaluation.smoke import smoke_text
from hf_gnmr.evaluation.tokens import block_of, own_task

perplexity, token_perplexity = (getattr(own_task("wikitext_tokens"), n) for n in ("perplexity", "token_perplexity"))


@pytest.mark.parametrize(("block", "stride"), [(32, None), (32, 8), (64, 64), (2048, None)])
def test_token_perplexity_is_that_of_ten_plain_lines(tiny_lm, block, stride):
    model, tokenizer, text = load_bf16(tiny_lm).eval(), byte_tokenizer(), smoke_text()
    scored = perplexity(list(token_perplexity(model, tokenizer, text, block=block, stride=stride)))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    total, count, seen = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride or block):
        end = min(begin + block, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : max(seen - begin, 0)] = -100  # scored by an earlier block
        labels[:, 0] = -100
        number = int((labels != -100).sum())
        if number:
            with torch.no_grad():
                total += float(model(ids[:, begin:end], labels=labels).loss) * number
            count, seen = count + number, end
        if end == ids.shape[1]:
            break
    assert scored == pytest.approx(math.exp(total / count), rel=1e-4)


def test_the_whole_text_is_scored(tiny_lm):
    tokenizer, text = byte_tokenizer(), smoke_text()
    model = load_bf16(tiny_lm).eval()
    blocks = list(token_perplexity(model, tokenizer, text, block=100))
    tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert sum(b["tokens"] for b in blocks) == tokens - math.ceil(tokens / 100), "all but the first of each block"
    overlapping = list(token_perplexity(model, tokenizer, text, block=100, stride=50))
    assert sum(b["tokens"] for b in overlapping) == tokens - 1


@pytest.mark.parametrize(
    ("block", "stride", "expected"),
    [
        (None, None, 512),
        (64, None, 64),
        (64, 64, 64),
        (513, None, "--block 513: the model takes 512 tokens"),
        (64, 65, "--stride 65: expected at most the block's length, 64"),
    ],
)
def test_a_block_fits_the_model_and_a_stride_the_block(block, stride, expected):
    config, options = LlamaConfig(max_position_embeddings=512), argparse.Namespace(block=block, stride=stride)
    if isinstance(expected, int):
        assert block_of(config, options) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        block_of(config, options)
