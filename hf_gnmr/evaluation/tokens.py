"""Tasks that our own functions in ``eval/tasks`` score: perplexity by token over fixed blocks of a text."""

from __future__ import annotations

import argparse
import functools
import importlib.util
from pathlib import Path
from typing import Any

from ..config import ConfigError
from .data import text_of
from .scores import standard_error
from .tasks import Request

METRIC = "token_perplexity"
LONGEST_DEFAULT = 2048
"""Tokens per block unless --block or a shorter model says otherwise."""


@functools.cache
def own_task(name: str) -> Any:
    """The module of one of our own tasks, in ``eval/tasks``; in an installed package, in ``hf_gnmr/eval_tasks``."""
    package = Path(__file__).parents[1]
    folders = (package / "eval_tasks", package.parent / "eval" / "tasks")
    file = next(folder / f"{name}.py" for folder in folders if (folder / f"{name}.py").is_file())
    spec = importlib.util.spec_from_file_location(f"hf_gnmr.eval_tasks.{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def block_of(config: Any, options: argparse.Namespace) -> int:
    """Tokens per block.

    Raises:
        ConfigError: a block longer than the model takes, or a stride longer than the block.
    """
    longest = getattr(config.get_text_config(), "max_position_embeddings", LONGEST_DEFAULT) or LONGEST_DEFAULT
    block = options.block or min(LONGEST_DEFAULT, longest)
    if block > longest:
        raise ConfigError(f"--block {block}: the model takes {longest} tokens")
    if options.stride is not None and options.stride > block:
        raise ConfigError(f"--stride {options.stride}: expected at most the block's length, {block}")
    return block


def score_by_token(model: Any, tokenizer: Any, request: Request, options: argparse.Namespace) -> dict[str, Any]:
    """Figures, standard errors and scores by block, in the form of `harness.run_task`.

    Raises:
        ConfigError: a text without a token to score.
    """
    from tqdm import tqdm

    assert request.task.own_module is not None
    module = own_task(request.task.own_module)
    text = text_of(request, options.data)
    block = block_of(model.config, options)
    scored = module.token_perplexity(model, tokenizer, text, block=block, stride=options.stride, limit=options.limit)
    blocks = list(tqdm(scored, unit="block", desc="token perplexity"))
    if not blocks:
        raise ConfigError(f"{request.label}: the text has no token to score")
    items = {f"block/{i}": -b["nll"] for i, b in enumerate(blocks)}
    weights = {f"{METRIC}|block/{i}": b["tokens"] for i, b in enumerate(blocks)}
    return {
        "metrics": {METRIC: module.perplexity(blocks)},
        "stderr": {METRIC: standard_error(METRIC, items, weights)},
        "n": len(blocks),
        "shots": [0],
        "block": block,
        "tokens": int(sum(b["tokens"] for b in blocks)),
        "per_item": {METRIC: items},
        "per_item_weight": weights,
        "item_hash": {f"block/{i}": b["hash"] for i, b in enumerate(blocks)},
    }
