"""One recipe, one run: ``accelerate launch RECIPE [section.key=value ...]``, or ``python -m hf_gnmr.train RECIPE …``.

A run has four stages: check, data, model, run.  Errors that can be detected early are reported, in one line, before the
weights are loaded: those of the recipe, the output folder, the data and the model's configuration.  Nothing in the output
folder is touched before training begins.  A run leaves there: ``recipe.yaml`` (as resolved), ``environment.json``,
``trace.jsonl``, ``summary.json``, ``results.json`` (peak memory, held-out figures) and the adapter.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .backends import BACKENDS
from .backends.bf16_cpu import float32_kernels
from .config import ConfigError, SetupError, refusing
from .files import FileError, free_number, numbered, regular, write_json
from .run.architecture import check_folder
from .run.emulated import kernels, same_on_all_ranks
from .run.environment import environment, environment_in_words, peak_memory
from .run.folder import OutputFolder
from .run.models import load_adapter
from .run.prepare import TrainingData, find_model, kind_of, prepare_model, prepare_tokenizer
from .run.recipe import find_recipe, load_recipe
from .run.sections import Recipe, RecipeError
from .run.training_arguments import refused_setting, training_arguments
from .script import write_script
from .terminal import TRACEBACK, TRACEBACK_HELP, cleaned, described, is_own, keep_traceback, refused, shown
from .trace.lifted import LiftedRecord
from .training.callback import GNMRCallback
from .training.checks import refuse_training_settings
from .training.journal import TRACE_FILE, write_summary
from .training.mixin import GNMRTrainer

OF_SETTINGS = (ValueError, TypeError, ImportError, KeyError, AttributeError, ArithmeticError, AssertionError, RecursionError)
"""What transformers and torch raise for settings that they cannot use."""


@cleaned
def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (2: an error that the user can fix, reported in one line)."""
    parser = argparse.ArgumentParser(prog="hf_gnmr.train", description="Train from a recipe.")
    parser.add_argument("recipe", help="a YAML file, or the name of a recipe that comes with the package")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the recipe's")
    parser.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)
    options = parser.parse_args(argv)
    try:
        train(load_recipe(find_recipe(options.recipe), options.overrides))
    except (ConfigError, SetupError, FileError) as error:
        return refused(error)
    # Threads of a process group that still run during interpreter shutdown can abort a process that has finished its work.
    # (After an error the group is left alone: its threads may wait for a peer that never answers.)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def train(recipe: Recipe) -> dict[str, Any]:
    """Run a recipe.

    Returns:
        peak memory and, where asked for, the held-out figures; empty where the run was finished already.

    Raises:
        ConfigError, SetupError, FileError: before training starts.
    """
    start = check(recipe)
    if start is None:
        return {}
    try:
        with float32_kernels(start.float32_kernels):
            return _train(start)
    finally:
        start.folder.release()


def _train(start: Start) -> dict[str, Any]:
    recipe, seed = start.recipe, start.arguments.seed
    with start.process.main_process_first():
        with refusing(f"data.name={shown(recipe.data.name)}: the rows cannot be read", RecipeError):
            tokenise = kind_of(recipe.data).read(recipe.data, seed)
        source = find_model(recipe)
    by_layer = start.callback.options.unit_kind == "layer"
    tokenizer = prepare_tokenizer(recipe, source, units_are_layers=by_layer)
    with refusing(f"data.name={shown(recipe.data.name)}: the rows cannot be tokenised", RecipeError):
        data = tokenise(tokenizer)
    for line in data.lines:
        start.say(line)
    model = prepare_model(recipe, source, seed)
    return run(start, data, model, tokenizer)


# -- check ---------------------------------------------------------------------------------------------------------------


@dataclass
class Start:
    """A run that has passed every check that needs neither data nor model."""

    recipe: Recipe
    arguments: TrainingArguments
    callback: GNMRCallback
    process: PartialState
    folder: OutputFolder
    say: Callable[..., None]
    """`print` on the main process, silent on the others."""
    float32_kernels: bool
    """Whether BF16 products run by float32 kernels (`backends.bf16_cpu`)."""
    finished_at: int | None
    """The step at which the run to be resumed finished all its steps; None: there are steps to train."""


def check(recipe: Recipe) -> Start | None:
    """Refuse what can be refused before data and model are read; None: the run is finished, with nothing left to do.

    Raises:
        ConfigError, SetupError, FileError: the first error found.
    """
    refuse_training_settings(recipe.training)
    output_dir = recipe.training["output_dir"]
    if not isinstance(output_dir, str) or not output_dir or "\0" in output_dir:
        raise RecipeError(f"training.output_dir={shown(output_dir)}: expected a folder")
    arguments = training_arguments(recipe.training)
    callback = GNMRCallback(
        recipe.gnmr,
        layers=recipe.model.layers,
        resume_history=recipe.run.resume_history,
        **recipe.trigger.keywords(),
        **recipe.backend.keywords(),
    )
    BACKENDS[recipe.backend.name].check_device(recipe.backend.options, arguments.device)
    _check_data(recipe, arguments)
    for key, path in recipe.backend.options.paths().items():
        if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
            raise RecipeError(f"backend.{key}={shown(path)}: no such folder")
        check_folder(path, f"backend.{key}={shown(path)}")
    process = PartialState()
    folder = OutputFolder(recipe)
    say = print if process.is_main_process else _silent
    emulated, line = kernels(recipe)
    same_on_all_ranks("run.bf16_products", [emulated, recipe.adapted])
    say(line)
    say(recipe.to_yaml(), end="")
    say(environment_in_words(arguments))
    if recipe.run.resume and not recipe.run.overwrite and folder.checkpoint is None:
        say(f"run.resume=auto: no checkpoint in {folder.path} yet, the run starts from scratch")
    finished_at = folder.finished_at()
    if finished_at is not None and folder.is_complete():
        say(f"the run in {folder.path} is finished ({finished_at} steps): nothing to do")
        return None
    trace = getattr(recipe.trigger.options, "trace", None)
    if trace is not None:
        LiftedRecord(trace).promotion_ratio()  # an unusable trace is refused here, before the model is loaded
    if process.is_main_process:
        folder.lock()
    return Start(recipe, arguments, callback, process, folder, say, emulated, finished_at)


def _check_data(recipe: Recipe, arguments: TrainingArguments) -> None:
    kind_of(recipe.data).check(recipe.data)
    if recipe.data.streaming and arguments.max_steps < 1:
        raise RecipeError("data.streaming=True needs training.max_steps: the length of a stream is unknown")
    if arguments.eval_strategy != "no" and not recipe.data.eval_rows:
        raise RecipeError(f"training.eval_strategy={recipe.training['eval_strategy']!r} needs data.eval_rows above 0")


def _silent(*values: Any, **options: Any) -> None:
    """For all ranks but the first."""


# -- run -----------------------------------------------------------------------------------------------------------------


class Record(TrainerCallback):
    """Writes recipe and environment into the folder once every check at train begin has passed (it follows GNMRCallback)."""

    def __init__(self, recipe: Recipe, data: dict[str, int]) -> None:
        self.recipe, self.data = recipe, data

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        earlier = [folder / name for name in ("recipe.yaml", "environment.json")]
        number = free_number(*earlier)
        for file in earlier:
            if regular(file).exists():  # from the run that is resumed
                os.replace(file, numbered(file, number))
        write_script(folder / "recipe.yaml", self.recipe.to_yaml())
        write_json(folder / "environment.json", environment(args, self.data))


def run(start: Start, data: TrainingData, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Train, or finish a run that was killed after its last step; write the results and return them.

    Raises:
        ConfigError, SetupError: before anything in the output folder is touched.
    """
    trainer = _trainer(start, data, model, tokenizer)
    _claim_folder(start, trainer)
    results: dict[str, Any] = {}
    if start.finished_at is None:
        checkpoint = start.folder.checkpoint
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except Exception as error:
            if start.callback.decision is not None:  # steps were trained: no input is at fault
                keep_traceback(error)
            elif not is_own(error) and checkpoint is not None:
                raise SetupError(f"{checkpoint} cannot be resumed: {described(error, hint=False)}") from error
            raise
        results = peak_memory()
    else:
        _load_finished(start, trainer, start.finished_at)
    trainer.save_model(start.arguments.output_dir)
    if data.held_out_set is not None:
        results |= data.figures(trainer, start.recipe)
    if start.process.is_main_process:
        write_json(start.folder.path / "results.json", results)
        start.say(f"results: {', '.join(f'{key} {value}' for key, value in results.items())}")
        start.say(f"files are in {start.arguments.output_dir}")
    return results


def _trainer(start: Start, data: TrainingData, model: Any, tokenizer: Any) -> GNMRTrainer:
    try:
        trainer = GNMRTrainer(
            model=model,
            args=start.arguments,
            train_dataset=data.training_set,
            eval_dataset=data.held_out_set,
            data_collator=data.collator,
            processing_class=tokenizer,
            callbacks=[start.callback, Record(start.recipe, data.counts)],
        )
        # Build loader, optimizer and schedule once, so that settings they refuse are refused before anything in the folder
        # is touched; train() builds them again.
        trainer.get_train_dataloader()
        trainer.create_optimizer_and_scheduler(num_training_steps=max(1, start.arguments.max_steps))
        trainer.optimizer = trainer.lr_scheduler = None
    except Exception as error:
        raise refused_setting(start.recipe.training, error) from error
    return trainer


def _claim_folder(start: Start, trainer: GNMRTrainer) -> None:
    if start.process.is_main_process:
        if start.folder.moves:  # nothing is moved aside for a start that is then refused
            start.callback.rehearse(start.arguments, trainer.model, _total_steps(trainer))
        start.folder.claim()
    start.process.wait_for_everyone()


def _total_steps(trainer: GNMRTrainer) -> int:
    """Optimizer steps as the Trainer will count them."""
    arguments = trainer.args
    if arguments.max_steps > 0:
        return arguments.max_steps
    batches, accumulation = len(trainer.get_train_dataloader()), arguments.gradient_accumulation_steps
    return math.ceil(arguments.num_train_epochs * max(1, math.ceil(batches / accumulation)))


def _load_finished(start: Start, trainer: GNMRTrainer, steps: int) -> None:
    """The weights and the summary of a run that was killed between its last checkpoint and its last file.

    (Resumed in the ordinary way, the Trainer would train one step too many.)
    """
    checkpoint = str(start.folder.checkpoint)
    start.say(f"all {steps} steps are done ({checkpoint}): writing the run's final files from there")
    if start.recipe.lora is not None:
        load_adapter(trainer.model, checkpoint, "run.resume")
    else:
        trainer._load_from_checkpoint(checkpoint)
    if start.process.is_main_process:
        write_summary(start.folder.path / TRACE_FILE, steps)


if __name__ == "__main__":
    sys.exit(main())
