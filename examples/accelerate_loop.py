#!/usr/bin/env python3
"""LoRA over an 8-bit base in a custom training loop, with the layers under control.

    python examples/accelerate_loop.py --model MODEL --data rows.jsonl --output-dir out
    torchrun --nproc_per_node 2 examples/accelerate_loop.py ...          (or accelerate launch, on GPUs)

MODEL: a folder or Hub id. Each row of the data has a "question" and an "answer". The four lines that matter are marked. Run
again with the same --output-dir to resume from the last saved state.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, get_scheduler

from hf_gnmr import GNMRSession
from hf_gnmr.run.rowfiles import rows_of


def main() -> None:
    options = parse_options()
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulation, cpu=not torch.cuda.is_available())
    set_seed(0)
    model, loader = load(options)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=options.lr)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=options.steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    session = GNMRSession(  # <- 1: after prepare, so that parameters are where they are trained
        model,
        max_o=1,
        total_steps=options.steps,
        gradient_accumulation_steps=options.accumulation,
        rows_per_micro_batch=options.batch_size,
        scaler=accelerator.scaler,
        output_dir=options.output_dir,
    )
    accelerator.register_for_checkpointing(session)
    saved = sorted(options.output_dir.glob("state-*[0-9]"), key=lambda folder: int(folder.name.split("-")[1]))
    if saved:
        accelerator.load_state(str(saved[-1]))

    windows = len(loader) // options.accumulation  # optimizer steps of an epoch
    if windows == 0:
        raise SystemExit(
            f"--data: expected {options.accumulation} x {options.batch_size} rows or more, got {len(loader)} batches"
        )
    last = min(options.steps, options.stop_after or options.steps)
    model.train()
    while session.steps_done < last:
        epoch, done = divmod(session.steps_done, windows)
        loader.set_epoch(epoch)
        torch.manual_seed(epoch)  # the order of an epoch's rows depends on the epoch alone
        for i, batch in enumerate(loader):
            if not done * options.accumulation <= i < windows * options.accumulation:
                continue  # steps done before this run was resumed; the rest of an epoch
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    session.observe()  # <- 2: after the backward, before clipping
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                if accelerator.sync_gradients:
                    session.decide(skipped=optimizer.step_was_skipped)  # <- 3: after the optimizer's step
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            accelerator.print(f"step {session.steps_done}: loss {loss.item():.4f} {session.scalars()}")
            if session.steps_done % options.save_steps == 0:
                save_state(accelerator, options.output_dir, session.steps_done)
            if session.steps_done == last:
                break

    session.close()  # <- 4: the model is plain bitsandbytes again, summary.json is written
    accelerator.unwrap_model(model).save_pretrained(options.output_dir / "adapter")
    accelerator.end_training()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output-dir", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps in all (default: %(default)s)")
    parser.add_argument("--stop-after", type=int, help="stop early, after this step, as an interrupted run would")
    parser.add_argument("--save-steps", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The 8-bit model with adapters, and a loader of batches: input_ids, attention_mask, labels."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))

    texts: Any = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows_of(Path(options.data))]

    def collate(batch: list[str]) -> dict[str, torch.Tensor]:
        encoded = tokenizer(batch, return_tensors="pt", padding=True, truncation=True, max_length=256)
        labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        return {**encoded, "labels": labels}

    # Whole windows only: the controller would not count a shorter one at the end of an epoch as a step.
    return model, DataLoader(texts, batch_size=options.batch_size, shuffle=True, drop_last=True, collate_fn=collate)


def save_state(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Save whole or not at all: a run that is killed while it saves leaves no folder `state-STEP`."""
    unfinished = folder / f"unfinished-{step}"
    accelerator.save_state(str(unfinished))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        unfinished.replace(folder / f"state-{step}")


if __name__ == "__main__":
    main()
