"""The output folder of a run: whether a run may start in it, which checkpoint it resumes, and what is moved aside.

No run ever overwrites the files of another: a folder that holds a run is refused, resumed, or moved aside as a whole.
Checks come first and touch nothing; `claim` moves, just before the new run writes its first file.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

from ..config import ConfigError, refusing
from ..files import regular
from ..reading import MAX_YAML_BYTES, FileError, inside, read_json, read_utf8
from ..terminal import shown
from ..trace.lock import hold, release
from ..training.journal import SUMMARY_FILE, TRACE_FILE
from ..training.whole import CHECKPOINT, WEIGHTS, damage, lacks_random_state
from .recipe import normalised
from .rowfiles import local_file
from .sections import Recipe, RecipeError
from .yaml12 import YamlError, load_yaml

FINISHED = ("adapter_model.safetensors", "results.json", SUMMARY_FILE)
"""Files that a run under LoRA writes at its end; a run that trains all weights writes the model instead of the adapter."""
MODEL = ("model.safetensors", "model.safetensors.index.json")
BEGUN = (TRACE_FILE, "recipe.yaml", "environment.json")
"""Files that a run writes at its beginning."""
SECTIONS_KEPT = ("model", "lora", "data", "training", "gnmr", "backend", "trigger")
"""Sections whose settings must not change when a run is resumed, except those of `FREE_ON_RESUME`."""
FREE_ON_RESUME = re.compile(
    r"data\.(generate_rows|max_new_tokens|answer_marker)|training\.(output_dir|max_steps|num_train_epochs|report_to|run_name|"
    r"disable_tqdm|logging_.*|save_.*|eval_.*|dataloader_num_workers|use_cpu|"
    r"per_device_train_batch_size|gradient_accumulation_steps)"
)
"""Settings that a resumed run may change. Batch size and accumulation: the callback compares the rows of a step."""


class OutputFolder:
    """The folder named by `training.output_dir`, and what the section `run` asks to do with a run that is in it.

    Raises:
        RecipeError: the folder cannot be written, or holds a run and `run` does not say what to do with it.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.path = Path(recipe.training["output_dir"])
        self.checkpoint: Path | None = None
        """The checkpoint that the run resumes; None: it starts from scratch."""
        self.begun_with: dict[str, Any] = {}
        """The resolved recipe of the run that is resumed, as plain values; empty if there is none."""
        self.moves = False
        """Whether `claim` will move a run aside."""
        self._lock: Path | None = None
        self._writable()
        run = recipe.run
        files_of_a_run = self.files(tuple(dict.fromkeys(FINISHED + BEGUN + WEIGHTS))) + [
            p.name for p in self.path.glob("checkpoint-*")
        ]
        if run.overwrite or not run.resume:
            self._check_fresh(files_of_a_run)
        else:
            self._check_resumed(files_of_a_run)

    def _check_fresh(self, files_of_a_run: list[str]) -> None:
        """A run from scratch, in a folder that holds these files of another one."""
        if files_of_a_run and not self.recipe.run.overwrite:
            raise RecipeError(
                f"training.output_dir={str(self.path)!r} already holds a run ({', '.join(files_of_a_run[:3])}): give "
                "another folder, run.resume=auto to resume it, or run.overwrite=true to move it aside"
            )
        self.moves = bool(files_of_a_run)
        if self.moves:
            self._nothing_needed_moves()

    def _check_resumed(self, files_of_a_run: list[str]) -> None:
        """Find the checkpoint to resume, and check that it belongs to this recipe and this folder."""
        run = self.recipe.run
        self.checkpoint = last_checkpoint(self.path) if run.resume == "auto" else Path(str(run.resume))
        if self.checkpoint is None:
            final_files = self.files((*FINISHED, *MODEL))
            if final_files:
                raise RecipeError(
                    f"run.resume=auto: {str(self.path)!r} holds a run ({', '.join(final_files[:3])}) but no complete "
                    "checkpoint to resume: give another folder, or run.overwrite=true to move it aside"
                )
            return
        broken = damage(self.checkpoint)
        if broken is not None:
            raise RecipeError(
                f"run.resume={str(run.resume)!r}: expected a complete checkpoint (weights, {', '.join(CHECKPOINT)}), got "
                f"one with {broken}"
            )
        if lacks_random_state(self.checkpoint):
            warnings.warn(
                f"{self.checkpoint} has no rng_state.pth: dropout and sampling will not be those of an uninterrupted run",
                stacklevel=2,
            )
        if files_of_a_run and self.checkpoint.resolve().parent != self.path.resolve():
            raise RecipeError(
                f"run.resume={str(run.resume)!r} belongs to another folder, and training.output_dir={str(self.path)!r} "
                "holds a different run: give an empty folder, or the checkpoint's own"
            )
        self.begun_with = self._stored_recipe(self.checkpoint.parent / "recipe.yaml")
        self._same_recipe()

    def files(self, names: tuple[str, ...]) -> list[str]:
        """Which of these files are in the folder."""
        return [name for name in names if (self.path / name).exists()]

    def finished_at(self) -> int | None:
        """The step at which the run to be resumed finished all its steps; None: there are steps left, or nothing to resume.

        Raises:
            FileError: the checkpoint's trainer_state.json cannot be read.
        """
        if self.checkpoint is None:
            return None
        state = read_json(self.checkpoint / "trainer_state.json")
        _check_state(state, self.checkpoint / "trainer_state.json")
        training, before = self.recipe.training, self.begun_with.get("training", {})
        last = training.get("max_steps", -1)
        if last < 0:
            # By epochs: the Trainer stores their number rounded up, the recipe as it was given.
            epochs = training.get("num_train_epochs", 3)
            epochs_before = before.get("num_train_epochs", 3) if before else state.get("num_train_epochs", 0)
            prolonged = epochs > epochs_before if before else math.ceil(epochs) > epochs_before
            last = math.inf if prolonged else state["max_steps"]
        return state["global_step"] if last <= state["global_step"] else None

    def is_complete(self) -> bool:
        """Whether a run that has done all its steps has also written its final files."""
        weights = FINISHED[:1] if self.recipe.lora is not None else MODEL
        return bool(self.files(weights)) and len(self.files(FINISHED[1:])) == len(FINISHED[1:])

    def lock(self) -> None:
        """Keep other processes out of the folder until `release`, if it exists; on the process that writes, before it reads
        data or model.

        Raises:
            SetupError: another process writes a run there.
        """
        if self._lock is None and self.path.is_dir():
            self._lock = hold(self.path / TRACE_FILE)

    def release(self) -> None:
        """Let others in; may be called twice."""
        if self._lock is not None:
            release(self._lock)
            self._lock = None

    def claim(self) -> None:
        """Move aside a run that is to be overwritten (folder.1, folder.2, …), and create the folder.

        Raises:
            RecipeError: it cannot be moved.
            SetupError: another process writes a run there.
        """
        if self.moves:
            folder = self.path.resolve()  # a link stays, and then points to the new run's folder
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            self.lock()
            self.release()  # the lock's file must not move along
            try:
                os.replace(folder, aside)
            except OSError as error:
                raise RecipeError(f"run.overwrite=true: {folder} cannot be moved to {aside}: {error}") from error
            print(f"the run in {folder} was moved to {aside}", flush=True)
        self.path.resolve().mkdir(parents=True, exist_ok=True)
        self.lock()

    def _nothing_needed_moves(self) -> None:
        """Refuse to move aside a folder that this process runs in, or that the new run reads from."""
        folder, recipe = self.path.resolve(), self.recipe
        if Path.cwd().is_relative_to(folder):
            raise RecipeError(f"run.overwrite=true: {folder} is or contains the current folder and cannot be moved aside")
        for key, value in (
            ("model.name", recipe.model.name),
            ("data.name", recipe.data.name),
            ("model.tokenizer", recipe.model.tokenizer),
            ("lora.init_adapter", None if recipe.lora is None else recipe.lora.init_adapter),
            *((f"trigger.{name}", path) for name, path in recipe.trigger.options.paths().items()),
            *((f"backend.{name}", path) for name, path in recipe.backend.options.paths().items()),
        ):
            path = local_file(value) if value else None
            if path is not None and path.resolve().is_relative_to(folder):
                raise RecipeError(f"run.overwrite=true would move {key}={value!r} aside with the old run in {folder}")

    def _writable(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RecipeError(f"training.output_dir={str(self.path)!r} is not a folder")
        existing = next(p for p in (self.path.resolve(), *self.path.resolve().parents) if p.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise RecipeError(f"training.output_dir={str(self.path)!r} cannot be written ({existing})")
        for name in dict.fromkeys(FINISHED + BEGUN):
            try:
                regular(self.path / name)
            except FileError as error:
                raise RecipeError(f"training.output_dir={str(self.path)!r}: {error}") from error

    def _stored_recipe(self, stored: Path) -> dict[str, Any]:
        if not stored.is_file():
            print(f"no recipe.yaml beside {self.checkpoint}: its settings cannot be compared with this recipe's", flush=True)
            return {}
        if not inside(stored.parent, stored.name):
            raise RecipeError(f"{stored}: the recipe of the run to be resumed is a link to a file outside its folder")
        try:
            old = load_yaml(read_utf8(stored, MAX_YAML_BYTES))
        except (FileError, YamlError) as error:
            raise RecipeError(f"{stored}, the recipe of the run to be resumed, cannot be read: {error}") from error
        if not isinstance(old, dict):
            raise RecipeError(f"{stored}, the recipe of the run to be resumed, holds no recipe (cut off?)")
        return normalised(old)

    def _same_recipe(self) -> None:
        """Refuse to resume a run under other settings than those it was started with."""
        new = self.recipe.to_dict()
        for section in SECTIONS_KEPT if self.begun_with else ():
            old, now = self.begun_with.get(section) or {}, new[section] or {}
            for key in {**old, **now}:
                value, before = now.get(key), old.get(key)
                if value != before and not FREE_ON_RESUME.fullmatch(f"{section}.{key}"):
                    raise RecipeError(
                        f"{section}.{key}={shown(value)}: the run to be resumed was started with {shown(before)}; resume it "
                        "with its own settings (in its recipe.yaml), or start from scratch in another folder"
                    )


def _check_state(state: dict[str, Any], file: Path) -> None:
    """Refuse a Trainer's state with fields that a resumed run fails on without naming them.

    Raises:
        FileError: naming file, field and value.
    """
    from transformers import TrainerState

    for name in ("global_step", "max_steps"):
        value = state.get(name)
        if type(value) is not int or value < 0:
            raise FileError(f"{file}: {name}={shown(value)}: expected a whole number, at least 0")
    callbacks = state.get("stateful_callbacks", {})
    if not isinstance(callbacks, dict) or not all(isinstance(stored, (dict, list)) for stored in callbacks.values()):
        raise FileError(f"{file}: stateful_callbacks={shown(callbacks)}: expected a JSON object of objects, one a callback")
    unknown = state.keys() - {field.name for field in dataclasses.fields(TrainerState)}
    if unknown:
        raise FileError(
            f"{file}: unknown fields {shown(sorted(unknown))}: it is of another version of transformers, or edited"
        )


def check_path(name: str, path: Any) -> None:
    """Raise ConfigError for what no file system takes as a path."""
    if not isinstance(path, (str, os.PathLike)) or "\0" in os.fspath(path):
        raise ConfigError(f"{name}={shown(path)}: expected a path")
    with refusing(f"{name}={shown(os.fspath(path))}"):
        Path(path).exists()


def last_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in an output folder; None if there is none.

    A run that was killed while it saved leaves a folder that transformers' `get_last_checkpoint` (and
    `resume_from_checkpoint=True`) picks and then cannot read; this function looks at the files in it.
    """
    check_path("folder", folder)
    checkpoints = [p for p in Path(folder).glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]+", p.name)]
    passed_over: list[str] = []
    for checkpoint in sorted(checkpoints, key=lambda p: int(p.name.split("-")[1]), reverse=True):
        broken = damage(checkpoint)
        if broken is None:
            if passed_over:
                warnings.warn(f"{'; '.join(passed_over)}. {checkpoint.name} is used", stacklevel=2)
            return checkpoint
        passed_over.append(f"{checkpoint.name} is not complete: {broken}")
    if checkpoints:
        warnings.warn(
            f"{folder} has {len(checkpoints)} checkpoints, none of them complete ({', '.join(CHECKPOINT)} and weights; "
            f"save_only_model omits optimizer and scheduler): there is nothing to resume from. {'; '.join(passed_over)}",
            stacklevel=2,
        )
    return None


def is_whole(checkpoint: Path) -> bool:
    """Whether the Trainer finished writing a checkpoint, and it holds everything that an exact resume needs."""
    return damage(checkpoint) is None
