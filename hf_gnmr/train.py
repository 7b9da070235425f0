"""One recipe, one run: ``accelerate launch -m hf_gnmr.train RECIPE [section.key=value ...]``.

What can be told to be wrong from the recipe, the folder, the data and the model's configuration is told before the weights
are loaded, in one line; nothing in the output folder is touched before training begins.  A run leaves there: ``recipe.yaml``
(as resolved), ``environment.json``, ``trace.jsonl``, ``summary.json``, ``results.json`` (peak memory, held-out figures) and
the adapter.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import (
    DataCollatorForSeq2Seq,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from .backends.bnb.int8 import cast_notes_silenced
from .backends.fewbit.fp8 import engine_on
from .config import ConfigError, SetupError
from .control.baselines import promotion_ratio
from .files import free_name, write_json, write_text
from .run.data import check_source, encode, load_rows
from .run.environment import environment, environment_in_words, peak_memory
from .run.folder import OutputFolder
from .run.heldout import held_out_figures, perplexity_figures
from .run.models import (
    add_adapters,
    build_from_scratch,
    check_depth,
    load_adapter,
    load_base,
    load_tokenizer,
    model_source,
    scratch_tokenizer,
)
from .run.packing import check_text_source, text_blocks
from .run.recipe import SCRATCH, find_recipe, load_recipe
from .run.sections import Recipe, RecipeError
from .trace.file import TraceError
from .training.callback import GNMRCallback
from .training.checks import refuse_training_settings
from .training.journal import TRACE_FILE, write_summary
from .training.mixin import GNMRTrainer


class Record(TrainerCallback):
    """Writes what a run is into its folder, once every check at train begin has passed (it stands after GNMRCallback)."""

    def __init__(self, recipe: Recipe, data: dict[str, int]) -> None:
        self.recipe, self.data = recipe, data

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("recipe.yaml", "environment.json"):
            if (folder / name).exists():  # of the run that is resumed
                os.replace(folder / name, free_name(folder / name))
        write_text(folder / "recipe.yaml", self.recipe.to_yaml())
        write_json(folder / "environment.json", environment(args, self.data))


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (2: something to mend, told in one line)."""
    parser = argparse.ArgumentParser(prog="hf_gnmr.train", description="Train from a recipe.")
    parser.add_argument("recipe", help="a YAML file, or the name of a recipe that comes with the package")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the recipe's")
    options = parser.parse_args(argv)
    try:
        train(load_recipe(find_recipe(options.recipe), options.overrides))
    except (ConfigError, SetupError, TraceError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    # A process group's threads that still run while the interpreter goes down can abort a process that has done its work.
    # (After an error the group is left alone: its threads may wait for a peer that never answers.)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def train(recipe: Recipe) -> dict[str, Any]:
    """Run a recipe.

    Returns:
        peak memory and, where asked for, the held-out figures; empty where the run was finished already.

    Raises:
        ConfigError, SetupError: before training starts.
    """
    refuse_training_settings(recipe.training)
    defaults: dict[str, Any] = {"prediction_loss_only": True}  # evaluation would keep the logits of all rows
    if not torch.cuda.is_available() and not _other_accelerator():
        defaults["use_cpu"] = True
    try:
        arguments = TrainingArguments(**{**defaults, **recipe.training})
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(f"training: {error}") from error
    callback = GNMRCallback(
        recipe.gnmr,
        trigger=recipe.trigger.name,
        trigger_options=recipe.trigger.options(),
        layers=recipe.model.layers,
        **recipe.backend.options(),
    )
    if recipe.backend.name == "fp8":
        engine_on(arguments.device, recipe.backend.emulate)
    (check_source if recipe.data.text is None else check_text_source)(recipe.data)
    if recipe.data.streaming and arguments.max_steps < 1:
        raise RecipeError("data.streaming=True needs training.max_steps: a stream does not tell how long it is")
    if arguments.eval_strategy != "no" and not recipe.data.eval_rows:
        raise RecipeError(f"training.eval_strategy={recipe.training['eval_strategy']!r} needs data.eval_rows above 0")
    process = PartialState()
    folder = OutputFolder(recipe)
    say = print if process.is_main_process else _silent
    say(recipe.to_yaml(), end="")
    say(environment_in_words(arguments))
    if recipe.run.resume and not recipe.run.overwrite and folder.checkpoint is None:
        say(f"run.resume=auto: no checkpoint in {folder.path} yet, the run starts anew")
    done = folder.finished_at()
    if done is not None and folder.is_complete():
        say(f"the run in {folder.path} is finished ({done} steps): nothing to do")
        return {}
    if recipe.trigger.trace is not None:
        promotion_ratio(recipe.trigger.trace)  # its refusal, before the model is loaded

    scratch = recipe.model.name == SCRATCH
    with process.main_process_first():
        rows, held_out = ([], []) if recipe.data.text is not None else load_rows(recipe.data, arguments.seed)
        source = "" if scratch else model_source(recipe.model)
    if not scratch:
        by_layer = callback.options.unit_kind == "layer"
        check_depth(source, recipe.model, recipe.gnmr if by_layer else None, recipe.lora)
    tokenizer = scratch_tokenizer(recipe.model) if scratch else load_tokenizer(source, recipe.model)
    if recipe.data.text is not None:
        training_set, held_out_set, text_counts = text_blocks(recipe.data, tokenizer)
        counted = text_counts.to_dict() if text_counts is not None else {}
        say(f"text: {text_counts.in_words() if text_counts is not None else 'streamed'}")
        collator: Any = default_data_collator
    else:
        training_set, counts = encode(rows, tokenizer, recipe.data.max_length)
        held_out_set, held_out_counts = encode(held_out, tokenizer, recipe.data.max_length) if held_out else (None, None)
        counted = counts.to_dict()
        say(f"data: {counts.in_words()}")
        if held_out_counts is not None:
            say(f"held out: {held_out_counts.in_words()}")
        collator = DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100)

    set_seed(arguments.seed)
    if scratch:
        model = build_from_scratch(recipe.model, arguments.seed)
    else:
        dtype = torch.bfloat16 if recipe.lora is not None else getattr(torch, recipe.model.dtype or "float32")
        model = load_base(source, recipe.model, recipe.backend.name, dtype)
        if recipe.lora is not None:
            model = add_adapters(model, recipe.lora, arguments.seed)
    model.config.use_cache = False
    set_seed(arguments.seed)  # so that dropout does not depend on how many numbers loading took
    try:
        trainer = GNMRTrainer(
            model=model,
            args=arguments,
            train_dataset=training_set,
            eval_dataset=held_out_set,
            data_collator=collator,
            processing_class=tokenizer,
            callbacks=[callback, Record(recipe, counted)],
        )
        # What these refuse is refused before anything in the folder is touched; train() makes them anew.
        trainer.get_train_dataloader()
        trainer.create_optimizer_and_scheduler(num_training_steps=max(1, arguments.max_steps))
        trainer.optimizer = trainer.lr_scheduler = None
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(f"training: {error}") from error
    if process.is_main_process:
        if folder.moves:
            callback.rehearse(arguments, model, _total_steps(trainer))  # nothing is moved aside for a start that is refused
        folder.claim()
    process.wait_for_everyone()
    results: dict[str, Any] = {}
    if done is None:
        trainer.train(resume_from_checkpoint=None if folder.checkpoint is None else str(folder.checkpoint))
        results = peak_memory()
    else:
        # Ended between its last checkpoint and its last file: the Trainer would train one step too many.
        say(f"all {done} steps are done ({folder.checkpoint}): what the run leaves at its end is made from there")
        if recipe.lora is not None:
            load_adapter(model, str(folder.checkpoint), "run.resume")
        else:
            trainer._load_from_checkpoint(str(folder.checkpoint))
        if process.is_main_process:
            write_summary(folder.path / TRACE_FILE, done)
    trainer.save_model(arguments.output_dir)
    if held_out_set is not None and recipe.data.text is not None:
        results |= perplexity_figures(trainer, recipe)
    elif held_out:
        with cast_notes_silenced():
            results |= held_out_figures(trainer, recipe, held_out)
    if process.is_main_process:
        write_json(folder.path / "results.json", results)
        say(f"results: {', '.join(f'{key} {value}' for key, value in results.items())}")
        say(f"files are in {arguments.output_dir}")
    return results


def _total_steps(trainer: GNMRTrainer) -> int:
    """Optimizer steps as the Trainer will count them."""
    arguments = trainer.args
    if arguments.max_steps > 0:
        return arguments.max_steps
    batches, accumulation = len(trainer.get_train_dataloader()), arguments.gradient_accumulation_steps
    return math.ceil(arguments.num_train_epochs * max(1, math.ceil(batches / accumulation)))


def _other_accelerator() -> bool:
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return accelerator is not None and accelerator.type != "cpu"


def _silent(*values: Any, **options: Any) -> None:
    """For all ranks but the first."""


if __name__ == "__main__":
    sys.exit(main())
