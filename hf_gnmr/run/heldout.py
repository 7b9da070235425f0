"""Held-out figures of a trained model: loss, and exact match of the final answer under greedy decoding."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from transformers import Trainer

from ..backends import BACKENDS
from .sections import Recipe


def held_out_figures(trainer: Trainer, recipe: Recipe, held_out: list[dict[str, str]]) -> dict[str, Any]:
    """Loss and, where asked for, exact match on the held-out rows, of the model as it is after training."""
    figures: dict[str, Any] = {
        "eval_loss": trainer.evaluate()["eval_loss"],
        "eval_rows": len(held_out),
        "evaluated_on": BACKENDS[recipe.backend.name].base_in_words,
    }
    if recipe.data.generate_rows and trainer.is_world_process_zero():
        rows = held_out[: recipe.data.generate_rows]
        start = time.perf_counter()
        matches = exact_matches(trainer.model, trainer.processing_class, rows, recipe)
        figures |= {
            "exact_match": matches / len(rows),
            "generate_rows": len(rows),
            "generate_seconds": round(time.perf_counter() - start, 1),
        }
    return figures


def perplexity_figures(trainer: Trainer, recipe: Recipe) -> dict[str, Any]:
    """Held-out loss and perplexity of a model trained on packed text, at the end of training and at earlier evaluations.

    `evaluations` has one entry for each evaluation: `step`, `tokens` (trained on so far), `loss`, `perplexity`.
    """
    arguments = trainer.args
    tokens_per_step = (
        arguments.per_device_train_batch_size
        * arguments.gradient_accumulation_steps
        * arguments.world_size
        * recipe.data.max_length
    )
    evaluations = [
        {
            "step": line["step"],
            "tokens": line["step"] * tokens_per_step,
            "loss": line["eval_loss"],
            "perplexity": perplexity_of(line["eval_loss"]),
        }
        for line in trainer.state.log_history
        if "eval_loss" in line
    ]
    loss = trainer.evaluate()["eval_loss"]
    return {
        "eval_loss": loss,
        "eval_perplexity": perplexity_of(loss),
        "eval_blocks": len(trainer.eval_dataset),
        "tokens": trainer.state.global_step * tokens_per_step,
        "evaluations": evaluations,
    }


def perplexity_of(loss: float) -> float:
    """exp of a loss in nats per token; inf where that overflows."""
    return math.inf if loss > 700 else math.exp(loss)


def exact_matches(model: Any, tokenizer: Any, rows: list[dict[str, str]], recipe: Recipe) -> int:
    """How many rows greedy decoding answers with the reference's final answer. Prompts are not cut."""
    model.eval()
    model.config.use_cache = True
    matches = 0
    side, tokenizer.padding_side = tokenizer.padding_side, "left"
    for first in range(0, len(rows), 32):
        batch = rows[first : first + 32]
        inputs = tokenizer([row["prompt"] for row in batch], return_tensors="pt", padding=True).to(model.device)
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            output = model.generate(
                **inputs,
                max_new_tokens=recipe.data.max_new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        matches += sum(
            is_right(text, row["answer"], recipe.data.answer_marker) for text, row in zip(texts, batch, strict=True)
        )
    tokenizer.padding_side = side
    return matches


def is_right(text: str, reference: str, marker: str) -> bool:
    """Whether `text` gives the reference's answer: what follows the marker, or everything if the reference has no marker."""
    if not marker or marker not in reference:
        return text.strip() == reference.strip()
    return after_marker(text, marker) == after_marker(reference, marker)


def after_marker(text: str, marker: str) -> str | None:
    """The rest of the line after the last marker, without thousands separators; None if there is no marker."""
    _, separator, rest = text.rpartition(marker)
    return rest.strip().split("\n")[0].strip().replace(",", "") if separator else None
