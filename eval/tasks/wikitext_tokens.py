"""Token perplexity over fixed blocks: the WikiText-2 figure that quantisation papers report.

lm-eval's own `wikitext` task computes word and byte perplexity by document. Blocks of an exact length need token ids, which
none of lm-eval's request types takes. So this task, ``wikitext_tokens`` of ``hf-gnmr eval``, is a plain function.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch


def token_perplexity(
    model: Any, tokenizer: Any, text: str, *, block: int, stride: int | None = None, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """Autoregressive log-likelihoods by token over fixed blocks of a text.

    The text is tokenised as a whole, without special tokens. Each block of `block` tokens goes through the model on its own.
    With a stride below the block's length blocks overlap, and only tokens that no earlier block has scored count. The first
    token of a block is never scored.

    Args:
        model: a causal language model in eval mode; logits (1, n, vocabulary).
        tokenizer: the model's.
        text: scored as a whole, unless `limit` cuts it.
        block: tokens per block, at most the model's maximum length.
        stride: tokens from the start of one block to the start of the next; None: `block`, no overlap.
        limit: blocks at most; None: the whole text.

    Yields:
        after each block: `nll` (summed over scored tokens, nats), `tokens` (how many were scored) and `hash` (of its ids
        and of where scoring starts).
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], device=model.device)
    stride = block if stride is None else stride
    scored = 0
    for count, start in enumerate(range(0, max(1, len(ids) - 1), stride)):
        if limit is not None and count >= limit:
            return
        piece = ids[start : start + block]
        first = max(scored - start, 1)  # position in the block of the first token that counts
        if len(piece) <= first:
            return
        with torch.no_grad():
            logits = model(input_ids=piece[None], use_cache=False).logits[0].float()
        nll = torch.nn.functional.cross_entropy(logits[first - 1 : -1], piece[first:], reduction="sum")
        digest = hashlib.sha256(f"{first} {piece.tolist()}".encode()).hexdigest()[:12]
        yield {"nll": float(nll), "tokens": len(piece) - first, "hash": digest}
        scored = start + len(piece)
        if scored >= len(ids):
            return


def perplexity(blocks: list[dict[str, Any]]) -> float:
    """exp of the mean negative log-likelihood over all scored tokens of `token_perplexity`'s blocks."""
    return math.exp(sum(b["nll"] for b in blocks) / sum(b["tokens"] for b in blocks))
