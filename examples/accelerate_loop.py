#!/usr/bin/env python3
"""LoRA over an 8-bit base in a training loop of one's own, with the layers under control.

    python examples/accelerate_loop.py --model MODEL --data rows.jsonl --output-dir out
    torchrun --nproc_per_node 2 examples/accelerate_loop.py ...          (or accelerate launch, on GPUs)

MODEL: a folder or Hub id. Each row of the data has a "question" and an "answer". The four lines that matter are marked; run
again with the same --output-dir to go on from the last state that was saved.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, get_scheduler

from hf_gnmr import GNMRSession


def main() -> None:
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
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=options.accumulation, cpu=not torch.cuda.is_available())
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(load_in_8bit=True)
    )
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))

    rows = [json.loads(line) for line in Path(options.data).read_text(encoding="utf-8").splitlines()]
    texts = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]

    def collate(batch: list[str]) -> dict[str, torch.Tensor]:
        encoded = tokenizer(batch, return_tensors="pt", padding=True, truncation=True, max_length=256)
        labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
        return {**encoded, "labels": labels}

    # Whole windows only: a shorter one at the end of an epoch would be no step for the controller.
    loader = DataLoader(texts, batch_size=options.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=options.lr)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=options.steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    session = GNMRSession(  # <- 1: after prepare, so that parameters are where they are trained
        model,
        max_o=1,
        total_steps=options.steps,
        gradient_accumulation_steps=options.accumulation,
        scaler=accelerator.scaler,
        output_dir=options.output_dir,
    )
    accelerator.register_for_checkpointing(session)
    saved = sorted(options.output_dir.glob("state-*[0-9]"), key=lambda folder: int(folder.name.split("-")[1]))
    if saved:
        accelerator.load_state(str(saved[-1]))

    windows = len(loader) // options.accumulation  # optimizer steps of an epoch
    if windows == 0:
        raise SystemExit(f"{len(texts)} rows make no window of {options.accumulation} x {options.batch_size}")
    model.train()
    while session.steps_done < options.steps:
        epoch, done = divmod(session.steps_done, windows)
        loader.set_epoch(epoch)
        torch.manual_seed(epoch)  # the order of an epoch's rows depends on the epoch alone
        for i, batch in enumerate(loader):
            if not done * options.accumulation <= i < windows * options.accumulation:
                continue  # steps that were done before this run was resumed; the rest of an epoch
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
            step = session.steps_done
            accelerator.print(f"step {step}: loss {loss.item():.4f} {session.scalars()}")
            if step % options.save_steps == 0:
                # Whole or not there: a run that is killed while it saves leaves no folder of this name.
                unfinished = options.output_dir / f"unfinished-{step}"
                accelerator.save_state(str(unfinished))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    unfinished.replace(options.output_dir / f"state-{step}")
            if step in (options.steps, options.stop_after):
                break
        if session.steps_done == options.stop_after:
            break

    session.close()  # <- 4: the model is plain bitsandbytes again, summary.json is written
    accelerator.unwrap_model(model).save_pretrained(options.output_dir / "adapter")
    accelerator.end_training()


if __name__ == "__main__":
    main()
