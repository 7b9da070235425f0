"""The built-in base model: a small LLaMA built from scratch, so that a quickstart or test needs no download.

LoRA fine-tuning shows something only on a base that already knows something.  This module trains a
tokenizer on the text of :mod:`hf_gnmr.run.wordproblems`, pre-trains a LLaMA of 2.5 million parameters on its
``pretrain`` split for about a minute on two CPU cores, and keeps the result in a cache folder that
``AutoModelForCausalLM`` and ``AutoTokenizer`` load.  The base then solves most one-step problems and few of
the ``train`` and ``test`` problems, which fine-tuning is meant to change.

So little training gives a usable model only because

* every batch holds whole documents of about equal length, one per row: there is nothing to copy from a
  neighbour by mistake, and hardly any padding;
* the loss has full weight where a reader could know what comes next (answers, results, ends of documents) and
  ``RECIPE["guess_weight"]`` where only chance decides (the numbers and names of a new question);
* initial weights are large (0.08); with the usual 0.02 the heads that copy numbers form several times later;
* matrices are multiplied in BF16 where the processor has instructions for it (in float32 elsewhere), and attention is the
  "eager" one, whose backward pass is much faster than the fused one at this size on a CPU.

Without such instructions a step takes three times as long.  For those processors there is a smaller model (`SIZES`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from ..backends.bf16_cpu import has_instructions
from . import wordproblems

STEPS = 1000
"""Optimizer steps of the full recipe."""
RECIPE: dict[str, Any] = {
    "version": 1,
    "batch_tokens": 1024,
    "learning_rate": 1.5e-3,
    "last_learning_rate": 0.05,
    "warmup_steps": 50,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "guess_weight": 0.1,
}
"""What determines the weights besides model, tokenizer, data, steps and seed; part of a folder's fingerprint.

``batch_tokens`` includes padding; ``last_learning_rate`` is a fraction of ``learning_rate``; raise ``version``
with every change to the training loop.
"""

Size = Literal["full", "small"]
SIZES: dict[str, tuple[dict[str, int], float]] = {
    "full": ({"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 2}, 1.0),
    "small": ({"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}, 0.7),
}
"""The widths of the model, 6 layers in either size, and the share of ``STEPS`` that it is trained for."""

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
VOCABULARY = 832
"""Tokens: all bytes, and every word of the templates that is not rare."""

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "pretraining.json")
_CHUNK = 1000
"""Documents that are tokenised and sorted by length at a time."""

_Document = tuple[list[int], list[float]]
"""Token ids, and a loss weight for each."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer: byte-level BPE, one token per digit, ``<s>`` in front of every text.

    It is the same on every call, has ``VOCABULARY`` tokens, and decodes every text it has encoded unchanged.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The words of the training split too, so that fine-tuning meets no word split into fragments.
    rows = wordproblems.generate("train", 3000)
    texts = [*wordproblems.pretrain_text(4000), *(f"{row['question']}\n{row['answer']}" for row in rows)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the special ones: 259 tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def build_config(tokenizer: PreTrainedTokenizerFast, size: Size = "full") -> LlamaConfig:
    """The model's shape: 6 layers, heads of 32, tied embeddings, and the widths of its size (see `SIZES`).

    All dimensions are multiples of 32; the vocabulary size is rounded up to one.
    """
    return LlamaConfig(
        vocab_size=math.ceil(len(tokenizer) / 32) * 32,
        num_hidden_layers=6,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **SIZES[size][0],
    )


def base_config(size: Size = "full") -> LlamaConfig:
    """The built-in model's configuration, without training or loading it."""
    return build_config(build_tokenizer(), size)


def pretrained_base(
    cache_dir: str | os.PathLike[str] | None = None, *, steps: int | None = None, seed: int = 0, size: Size = "full"
) -> Path:
    """The folder of the pre-trained base model: from the cache if it is there, otherwise trained now.

    The folder holds BF16 weights, configuration, tokenizer and ``pretraining.json``, a record of the
    training.  Its name contains a fingerprint of model, tokenizer, data, recipe, steps and seed.  It
    appears complete or not at all; if two processes train it at once, the work of one is wasted and both
    return the same folder.

    Args:
        cache_dir: where these folders are kept; by default ``$HF_GNMR_CACHE``, or else ``~/.cache/hf_gnmr``.
        steps: optimizer steps, at least 1; by default ``STEPS``, about a minute on two cores (seven tenths of it, one to one
            and a half minutes, for the small size on a CPU without BF16 instructions).
        seed: of the initial weights and of the data.
        size: ``full`` (2.5 million parameters) or ``small`` (1.2 million).

    Raises:
        ValueError: if ``steps`` is less than 1.
        OSError: if the cache cannot be written.
    """
    steps = max(1, round(STEPS * SIZES[size][1])) if steps is None else steps
    if steps < 1:
        raise ValueError(f"steps={steps}: expected at least 1")
    cache = Path(cache_dir or os.environ.get("HF_GNMR_CACHE") or "~/.cache/hf_gnmr").expanduser()
    tokenizer = build_tokenizer()
    config = build_config(tokenizer, size)
    folder = cache / f"base-{_fingerprint(tokenizer, config, steps, seed)}"
    if _is_whole(folder):
        print(f"Built-in base model: reusing {folder}", flush=True)
        return folder
    print(f"Built-in base model: pre-training for {steps} steps, to be stored in {folder}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    # A folder inside the temporary one: mkdir gives it ordinary permissions, which a temporary folder lacks.
    with tempfile.TemporaryDirectory(prefix=".building-", dir=cache) as scratch:
        built = Path(scratch) / folder.name
        built.mkdir()
        _pretrain(built, tokenizer, config, steps, seed)
        try:
            built.rename(folder)
        except OSError:
            # Either another process was faster, or a broken folder is in the way and is replaced.
            if not _is_whole(folder):
                folder.rename(Path(scratch) / "broken")
                built.rename(folder)
    return folder


def _is_whole(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _fingerprint(tokenizer: PreTrainedTokenizerFast, config: LlamaConfig, steps: int, seed: int) -> str:
    shape = {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
    text = json.dumps(
        [RECIPE, wordproblems.RECIPE_VERSION, shape, tokenizer.backend_tokenizer.to_str(), steps, seed],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _pretrain(folder: Path, tokenizer: PreTrainedTokenizerFast, config: LlamaConfig, steps: int, seed: int) -> None:
    """Pre-train on the CPU and write all files into ``folder``."""
    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": RECIPE["weight_decay"]},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=RECIPE["learning_rate"],
        betas=tuple(RECIPE["betas"]),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, steps))
    bf16 = has_instructions()
    losses: list[float] = []
    tokens = 0
    batches = _batches(tokenizer, seed)
    progress = tqdm(range(steps), desc="Pre-training", unit="step", mininterval=1.0)
    for _ in progress:
        ids, weights = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(input_ids=ids, use_cache=False).logits
        each = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        loss = (each * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), RECIPE["max_grad_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += int((weights > 0).sum())
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    last = losses[-50:]
    account = {
        "steps": steps,
        "seed": seed,
        "tokens": tokens,
        "parameters": model.num_parameters(),
        "final_loss": round(sum(last) / len(last), 4),  # weighted nats per token, mean of the last 50 steps
        "seconds": round(time.perf_counter() - start, 1),
        "threads": torch.get_num_threads(),
        "precision": "bf16 autocast" if bf16 else "fp32",
        "recipe": RECIPE,
        "data_version": wordproblems.RECIPE_VERSION,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    (folder / "pretraining.json").write_text(json.dumps(account, indent=2) + "\n", encoding="utf-8")


def _learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to the last learning rate."""
    last = RECIPE["last_learning_rate"]
    warm_up = (step + 1) / min(RECIPE["warmup_steps"], max(1, steps // 5))
    return min(warm_up, last + (1 - last) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """An endless stream of batches: token ids and loss weights, both (documents, length); padding has weight 0."""
    rng = random.Random(seed)
    chunk = seed * 1_000_003
    while True:
        documents = sorted(_weighted(tokenizer, chunk), key=lambda document: len(document[0]))
        chunk += 1
        groups: list[list[_Document]] = [[]]
        for document in documents:
            if (len(groups[-1]) + 1) * len(document[0]) > RECIPE["batch_tokens"]:
                groups.append([])
            groups[-1].append(document)
        rng.shuffle(groups)
        for group in groups:
            length = len(group[-1][0])
            ids = torch.full((len(group), length), tokenizer.pad_token_id)
            weights = torch.zeros(len(group), length)
            for row, (document_ids, document_weights) in enumerate(group):
                ids[row, : len(document_ids)] = torch.tensor(document_ids)
                weights[row, : len(document_ids)] = torch.tensor(document_weights)
            yield ids, weights


def _weighted(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[_Document]:
    """One chunk of documents, as token ids with loss weights."""
    answer, equals, stop = (tokenizer.encode(t, add_special_tokens=False)[0] for t in ("Answer", " =", "."))
    texts = [f"{text}{tokenizer.eos_token}" for text in wordproblems.pretrain_text(_CHUNK, seed)]
    for ids in tokenizer(texts)["input_ids"]:
        weights: list[float] = []
        in_answer = in_result = False
        for token in ids:
            known = in_answer or in_result or token == tokenizer.eos_token_id
            weights.append(1.0 if known else RECIPE["guess_weight"])
            in_answer = in_answer or token == answer
            in_result = token == equals or (in_result and token != stop)
        yield ids, weights
