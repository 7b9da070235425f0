"""The built-in base model: a small LLaMA, its tokenizer, and its brief pre-training on generated word problems.

It exists so that everything here can be run for real on a machine without GPU, Hub or data: quickstart, examples, tests.
Nothing is downloaded.  The finished model is kept in a cache folder whose name carries a fingerprint of all that determines
its weights, and appears there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from . import wordproblems

VOCABULARY = 1024
STEPS = 900
BATCH = 24
LENGTH = 64
LEARNING_RATE = 3e-3
DOCUMENTS = 20_000


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on generated text; deterministic, and lossless for any text.

    Small numbers are frequent in that text and become one token each, so that a small model can learn sums by heart.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = list(wordproblems.pretrain_text(4000))
    texts += [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in wordproblems.generate("train", 2000)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """About 2.5M parameters: 6 layers, hidden 192, grouped-query attention, tied embeddings."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.05,
    )


def pretrained_base(
    cache_dir: str | os.PathLike[str] | None = None, *, steps: int | None = None, seed: int = 0
) -> Path:
    """Folder of the pre-trained base (BF16 safetensors, configuration, tokenizer), made where it is not in the cache.

    Args:
        cache_dir: None means the environment's HF_GNMR_CACHE, or ``~/.cache/hf_gnmr``.
        steps: optimizer steps of pre-training; None means the default, about a minute on 2 cores.
        seed: of the initial weights and the order of the data.
    """
    steps = STEPS if steps is None else steps
    root = Path(cache_dir or os.environ.get("HF_GNMR_CACHE") or Path.home() / ".cache" / "hf_gnmr")
    folder = root / f"base-{_fingerprint(steps, seed)}"
    if (folder / "pretraining.json").is_file():
        print(f"built-in base: reused from {folder}", flush=True)
        return folder
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=root))
    try:
        _pretrain(partial, steps, seed)
        try:
            os.replace(partial, folder)
        except OSError:
            # Another process was faster; what it made is the same.
            if not (folder / "pretraining.json").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _fingerprint(steps: int, seed: int) -> str:
    settings = (
        wordproblems.RECIPE_VERSION, VOCABULARY, BATCH, LENGTH, LEARNING_RATE, DOCUMENTS, steps, seed,
        Path(__file__).read_bytes(), Path(wordproblems.__file__).read_bytes(),
    )  # fmt: skip
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:12]


def _pretrain(folder: Path, steps: int, seed: int) -> None:
    """Next-token training in fp32 weights under BF16 autocast; AdamW, linear warm-up, cosine to a twentieth."""
    start = time.perf_counter()
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(build_config(tokenizer)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 50, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    blocks = _blocks(tokenizer, seed)
    loss = torch.tensor(math.nan)
    bar = tqdm(range(steps), desc=f"pre-training the built-in base ({model.num_parameters():,} parameters)", unit="step")
    for step in bar:
        batch = torch.stack([next(blocks) for _ in range(BATCH)])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record: dict[str, Any] = {
        "steps": steps,
        "tokens": steps * BATCH * LENGTH,
        "seed": seed,
        "parameters": model.num_parameters(),
        "final_loss": loss.item(),
        "seconds": round(time.perf_counter() - start, 1),
        "torch": torch.__version__,
    }
    (folder / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _blocks(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[torch.Tensor]:
    """Packed blocks of LENGTH tokens without end, the documents in a new order each time around."""
    documents = tokenizer(list(wordproblems.pretrain_text(DOCUMENTS, seed)))["input_ids"]
    generator = random.Random(seed)
    rest: list[int] = []
    while True:
        generator.shuffle(documents)
        for document in documents:
            rest += [*document, tokenizer.eos_token_id]
            while len(rest) >= LENGTH:
                yield torch.tensor(rest[:LENGTH])
                rest = rest[LENGTH:]
