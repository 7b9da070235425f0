"""One task on one model, through lm-eval or by our own function: figures, standard errors, scores by item."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from ..config import ConfigError
from .scores import figure, standard_error
from .tasks import Request, own_task, text_of


def block_of(config: Any, options: argparse.Namespace) -> int:
    """Tokens a block of wikitext_tokens."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", 2048) or 2048
    block = options.block or min(2048, longest)
    if block > longest:
        raise ConfigError(f"--block {block}: the model takes {longest} tokens")
    if options.stride is not None and options.stride > block:
        raise ConfigError(f"--stride {options.stride}: at most the block's length, {block}")
    return block


def run_task(
    model: Any,
    tokenizer: Any,
    request: Request,
    tasks: dict[str, Any],
    options: argparse.Namespace,
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """`metrics`, `stderr`, `n`, `shots`, `per_item` (metric -> scores by item) and what else belongs to the figures."""
    if request.name == "wikitext_tokens":
        with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
            return _tokens(model, tokenizer, request, options)
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size, mixed_precision_dtype=autocast)
    shots = options.shots if request.name in ("gsm8k", "mmlu") else None
    found = evaluator.simple_evaluate(
        model=lm,
        tasks=list(tasks.values()),
        num_fewshot=shots,
        limit=options.limit,
        bootstrap_iters=1000,
        apply_chat_template=options.chat_template,
        gen_kwargs=f"max_gen_toks={options.max_gen_tokens}" if request.name == "gsm8k" else None,
    )
    per_item: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    hashes: dict[str, str] = {}
    answers: dict[str, Any] = {}
    for task, samples in found["samples"].items():
        for sample in samples:
            item = f"{task}/{sample['doc_id']}"
            hashes[item] = f"{sample['prompt_hash'][:12]}-{sample['target_hash'][:12]}"
            answers[item] = sample["resps"]
            for metric in sample["metrics"]:
                name = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
                value = sample[metric]
                if isinstance(value, (tuple, list)):  # (log-likelihood, words or bytes)
                    weights[f"{name}|{item}"] = float(value[1])
                    value = value[0]
                per_item.setdefault(name, {})[item] = float(value)
    # MMLU's subjects weigh as many as their items, as in lm-eval's own group.
    metrics = {}
    for name, items in per_item.items():
        weight = np.array([weights.get(f"{name}|{item}", 1.0) for item in items])
        metrics[name] = float(figure(name, np.array(list(items.values())), weight))
    stderr = {name: standard_error(name, items, weights) for name, items in per_item.items()}
    fewshot = {task: config.get("num_fewshot") for task, config in found["configs"].items()}
    return {
        "metrics": metrics,
        "stderr": stderr,
        "n": len(next(iter(per_item.values()))),
        "shots": sorted({0 if n is None else n for n in fewshot.values()}),
        "subtasks": {
            task: {k: v for k, v in figures.items() if isinstance(v, float)} for task, figures in found["results"].items()
        },
        "truncated": truncated_items(lm, request, found["samples"], options.max_gen_tokens),
        "per_item": per_item,
        "per_item_weight": weights,
        "item_hash": hashes,
        "answers": answers,
    }


def truncated_items(lm: Any, request: Request, samples: dict[str, list[dict[str, Any]]], max_gen_tokens: int) -> int:
    """Items with a prompt that lm-eval cuts on the left, because the model takes no more (it warns, and does not count)."""
    if request.name == "wikitext":
        return 0  # rolling windows: nothing is cut
    cut: set[str] = set()
    for task, rows in samples.items():
        for sample in rows:
            for context, more in sample["arguments"]:
                if isinstance(more, str):  # a continuation; its last token is not put in
                    answer = len(lm.tok_encode(more, add_special_tokens=False))
                    over = len(lm.tok_encode(context)) + answer - 1 > lm.max_length
                else:
                    over = len(lm.tok_encode(context)) > lm.max_length - max_gen_tokens
                if over:
                    cut.add(f"{task}/{sample['doc_id']}")
    return len(cut)


def _tokens(model: Any, tokenizer: Any, request: Request, options: argparse.Namespace) -> dict[str, Any]:
    from tqdm import tqdm

    text = text_of(options.data)
    block = block_of(model.config, options)
    task = own_task("wikitext_tokens")
    blocks = list(
        tqdm(
            task.token_perplexity(model, tokenizer, text, block=block, stride=options.stride, limit=options.limit),
            unit="block",
            desc="token perplexity",
        )
    )
    if not blocks:
        raise ConfigError(f"{request.label}: the text has no token to score")
    name = "token_perplexity"
    items = {f"block/{i}": -b["nll"] for i, b in enumerate(blocks)}
    weights = {f"{name}|block/{i}": b["tokens"] for i, b in enumerate(blocks)}
    return {
        "metrics": {name: task.perplexity(blocks)},
        "stderr": {name: standard_error(name, items, weights)},
        "n": len(blocks),
        "shots": [0],
        "block": block,
        "tokens": int(sum(b["tokens"] for b in blocks)),
        "per_item": {name: items},
        "per_item_weight": weights,
        "item_hash": {f"block/{i}": b["hash"] for i, b in enumerate(blocks)},
    }
