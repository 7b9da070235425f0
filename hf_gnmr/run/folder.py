"""The output folder of a run: what may be started in it, what is gone on from, and what is moved aside.

Nothing that a run has produced is ever overwritten by another one: a folder that holds a run is refused, resumed, or moved
aside whole.  Checks come first and touch nothing; `claim` moves, just before the new run writes its first file.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import yaml

from ..training.journal import SUMMARY_FILE, TRACE_FILE
from .recipe import normalised
from .sections import Recipe, RecipeError

FINISHED = ("adapter_model.safetensors", "results.json", SUMMARY_FILE)
"""Files that a run under LoRA leaves at its end; one that trains all weights leaves the model instead of the adapter."""
MODEL = ("model.safetensors", "model.safetensors.index.json")
BEGUN = (TRACE_FILE, "recipe.yaml", "environment.json")
"""Files that a run leaves at its beginning."""
SECTIONS_KEPT = ("model", "lora", "data", "training", "gnmr", "backend", "trigger")
"""Sections in which a resumed run must have the settings it was begun with, but for these:"""
FREE_ON_RESUME = re.compile(
    r"data\.(generate_rows|max_new_tokens|answer_marker)|training\.(output_dir|max_steps|num_train_epochs|report_to|run_name|"
    r"disable_tqdm|logging_.*|save_.*|eval_.*|dataloader_num_workers|use_cpu)"
)
CHECKPOINT = ("trainer_state.json", "optimizer.pt", "scheduler.pt")
"""Without these files a checkpoint cannot be gone on from exactly; the Trainer writes trainer_state.json last."""


WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json", "adapter_model.bin")
"""One of these holds the parameters."""


class OutputFolder:
    """The folder named by `training.output_dir`, and what `run` asks to do with a run that is in it.

    Raises:
        RecipeError: the folder cannot be written, or holds a run and `run` does not say what to do with it.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.path = Path(recipe.training["output_dir"])
        self.checkpoint: Path | None = None
        """Where the run goes on from; None: it starts anew."""
        self.begun_with: dict[str, Any] = {}
        """The resolved recipe of the run that is resumed, as plain values; empty where there is none."""
        self.moves = False
        """Whether `claim` will move a run aside."""
        self._writable()
        run = recipe.run
        found = self.files(FINISHED + BEGUN) + [p.name for p in self.path.glob("checkpoint-*")]
        if run.overwrite or not run.resume:
            if found and not run.overwrite:
                raise RecipeError(
                    f"training.output_dir={str(self.path)!r} holds a run already ({', '.join(found[:3])}): give "
                    "another folder, run.resume=auto to go on with it, or run.overwrite=true to move it aside"
                )
            self.moves = bool(found)
            if self.moves:
                self._nothing_needed_moves()
            return
        self.checkpoint = last_checkpoint(self.path) if run.resume == "auto" else Path(str(run.resume))
        if self.checkpoint is None:
            finished = self.files((*FINISHED, *MODEL))
            if finished:
                raise RecipeError(
                    f"run.resume=auto: {str(self.path)!r} holds a run ({', '.join(finished[:3])}) but no whole "
                    "checkpoint to go on from: give another folder, or run.overwrite=true to move it aside"
                )
            return
        if not is_whole(self.checkpoint):
            raise RecipeError(f"run.resume={str(run.resume)!r}: not a whole checkpoint (it takes {', '.join(CHECKPOINT)})")
        if found and self.checkpoint.resolve().parent != self.path.resolve():
            raise RecipeError(
                f"run.resume={str(run.resume)!r} belongs to another folder, and training.output_dir={str(self.path)!r} "
                "holds a run of its own: give an empty folder, or that run's"
            )
        self.begun_with = self._stored_recipe(self.checkpoint.parent / "recipe.yaml")
        self._same_recipe()

    def files(self, names: tuple[str, ...]) -> list[str]:
        """Which of these files are in the folder."""
        return [name for name in names if (self.path / name).exists()]

    def finished_at(self) -> int | None:
        """The step at which the run that is to be resumed has already done all its steps; None: some are left."""
        if self.checkpoint is None:
            return None
        state = json.loads((self.checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        training, before = self.recipe.training, self.begun_with.get("training", {})
        last = training.get("max_steps", -1)
        if last < 0:
            # By epochs: the Trainer keeps their number rounded up, the recipe as it was given.
            epochs = training.get("num_train_epochs", 3)
            known = before.get("num_train_epochs", 3) if before else state.get("num_train_epochs", 0)
            prolonged = epochs > known if before else math.ceil(epochs) > known
            last = math.inf if prolonged else state["max_steps"]
        return state["global_step"] if last <= state["global_step"] else None

    def is_complete(self) -> bool:
        """Whether a run that has done all its steps has also left what it leaves at its end."""
        weights = FINISHED[:1] if self.recipe.lora is not None else MODEL
        return bool(self.files(weights)) and len(self.files(FINISHED[1:])) == len(FINISHED[1:])

    def claim(self) -> None:
        """Move a run that is to be overwritten aside (folder.1, folder.2, …), and make the folder."""
        if self.moves:
            folder = self.path.resolve()  # a link stays, and points to the new run's folder
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            try:
                os.replace(folder, aside)
            except OSError as error:
                raise RecipeError(f"run.overwrite=true: {folder} cannot be moved to {aside}: {error}") from error
            print(f"the run in {folder} was moved to {aside}", flush=True)
        self.path.resolve().mkdir(parents=True, exist_ok=True)

    def _nothing_needed_moves(self) -> None:
        """Refuse to move a folder aside that this process stands in, or that the new run reads from."""
        folder, recipe = self.path.resolve(), self.recipe
        if Path.cwd().is_relative_to(folder):
            raise RecipeError(f"run.overwrite=true: {folder} is (or holds) the current folder and cannot be moved aside")
        for key, value in (
            ("model.name", recipe.model.name),
            ("data.name", recipe.data.name),
            ("model.tokenizer", recipe.model.tokenizer),
            ("lora.init_adapter", None if recipe.lora is None else recipe.lora.init_adapter),
            ("trigger.trace", getattr(recipe.trigger.options, "trace", None)),
            ("backend.recovery_source", getattr(recipe.backend.options, "recovery_source", None)),
        ):
            if value and Path(value).exists() and Path(value).resolve().is_relative_to(folder):
                raise RecipeError(f"run.overwrite=true would move {key}={value!r} away with the old run in {folder}")

    def _writable(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RecipeError(f"training.output_dir={str(self.path)!r} is not a folder")
        existing = next(p for p in (self.path.resolve(), *self.path.resolve().parents) if p.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise RecipeError(f"training.output_dir={str(self.path)!r} cannot be written ({existing})")

    def _stored_recipe(self, stored: Path) -> dict[str, Any]:
        if not stored.is_file():
            print(f"no recipe.yaml beside {self.checkpoint}: its settings cannot be compared with these", flush=True)
            return {}
        try:
            old = yaml.safe_load(stored.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RecipeError(f"{stored}, which the resumed run was begun with, cannot be read: {error}") from error
        if not isinstance(old, dict):
            raise RecipeError(f"{stored}, which the resumed run was begun with, holds no recipe (cut?)")
        return normalised(old)

    def _same_recipe(self) -> None:
        """Refuse to go on with a run under other settings than it was begun with."""
        new = self.recipe.to_dict()
        for section in SECTIONS_KEPT if self.begun_with else ():
            old, now = self.begun_with.get(section) or {}, new[section] or {}
            for key in {**old, **now}:
                value, before = now.get(key), old.get(key)
                if value != before and not FREE_ON_RESUME.fullmatch(f"{section}.{key}"):
                    raise RecipeError(
                        f"{section}.{key}={value!r}: the run that is to be resumed was begun with {before!r}; resume with "
                        "its settings (they are in its recipe.yaml), or start anew in another folder"
                    )


def last_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint in an output folder; None where there is none.

    A run that was killed while it saved leaves a folder that transformers' `get_last_checkpoint` (and
    `resume_from_checkpoint=True`) picks and then cannot read; this one goes by what is in it.
    """
    there = [p for p in Path(folder).glob("checkpoint-*") if re.fullmatch(r"checkpoint-[0-9]+", p.name)]
    whole = [p for p in there if is_whole(p)]
    if there and not whole:
        warnings.warn(
            f"{folder} has {len(there)} checkpoints and none is whole ({', '.join(CHECKPOINT)} and weights; save_only_model "
            "leaves them out): there is nothing to resume from",
            stacklevel=2,
        )
    return max(whole, key=lambda p: int(p.name.split("-")[1]), default=None)


def is_whole(checkpoint: Path) -> bool:
    """Whether the Trainer finished writing it, and it holds all that an exact resume takes."""
    if not all((checkpoint / name).is_file() for name in CHECKPOINT):
        return False
    if not any((checkpoint / name).is_file() for name in WEIGHTS):
        return False
    try:
        return isinstance(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        return False
