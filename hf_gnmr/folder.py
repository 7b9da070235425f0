"""The output folder of a run: what may be started in it, what is gone on from, and what is moved aside.

Nothing that a run has produced is ever overwritten by another one: a folder that holds a run is refused, resumed, or moved
aside whole.  Checks come first and touch nothing; `claim` moves, just before the new run writes its first file.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import yaml

from .journal import SUMMARY_FILE, TRACE_FILE
from .recipe import Recipe, RecipeError

FINISHED = ("adapter_model.safetensors", "adapter_model.bin", "results.json", SUMMARY_FILE)
"""Files that a run leaves at its end."""
BEGUN = (TRACE_FILE, "recipe.yaml", "environment.json")
"""Files that a run leaves at its beginning."""
SAME_ON_RESUME = ("model", "lora", "data", "gnmr", "backend", "trigger")


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
        self._writable()
        run = recipe.run
        found = self.files(FINISHED + BEGUN) + [p.name for p in self.path.glob("checkpoint-*")]
        if run.overwrite or not run.resume:
            if found and not run.overwrite:
                raise RecipeError(
                    f"training.output_dir={str(self.path)!r} holds a run already ({', '.join(found[:3])}): give "
                    "another folder, run.resume=auto to go on with it, or run.overwrite=true to move it aside"
                )
            self._move = bool(found)
            return
        self._move = False
        self.checkpoint = self._last_checkpoint() if run.resume == "auto" else Path(str(run.resume))
        if self.checkpoint is None:
            finished = self.files(FINISHED)
            if finished:
                raise RecipeError(
                    f"run.resume=auto: {str(self.path)!r} holds a run ({', '.join(finished[:3])}) but no whole "
                    "checkpoint to go on from: give another folder, or run.overwrite=true to move it aside"
                )
            return
        if not is_whole(self.checkpoint):
            raise RecipeError(
                f"run.resume={str(run.resume)!r}: not a whole checkpoint (no readable trainer_state.json in it)"
            )
        if found and self.checkpoint.resolve().parent != self.path.resolve():
            raise RecipeError(
                f"run.resume={str(run.resume)!r} belongs to another folder, and training.output_dir={str(self.path)!r} "
                "holds a run of its own: give an empty folder, or that run's"
            )
        self._same_recipe(self.checkpoint.parent / "recipe.yaml")

    def files(self, names: tuple[str, ...]) -> list[str]:
        """Which of these files are in the folder."""
        return [name for name in names if (self.path / name).exists()]

    def finished_at(self) -> int | None:
        """The step at which the run that is to be resumed has already done all its steps; None: some are left."""
        if self.checkpoint is None:
            return None
        state = json.loads((self.checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        training = self.recipe.training
        last = training.get("max_steps", -1)
        if last < 0 and training.get("num_train_epochs", 3) == state.get("num_train_epochs"):
            last = state["max_steps"]
        return state["global_step"] if 0 <= last <= state["global_step"] else None

    def claim(self) -> None:
        """Move a run that is to be overwritten aside (folder.1, folder.2, …), and make the folder."""
        if self._move:
            folder = self.path.resolve()
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            try:
                os.replace(folder, aside)
            except OSError as error:
                raise RecipeError(f"run.overwrite=true: {folder} cannot be moved to {aside}: {error}") from error
            print(f"the run in {folder} was moved to {aside}", flush=True)
        self.path.mkdir(parents=True, exist_ok=True)

    def _writable(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RecipeError(f"training.output_dir={str(self.path)!r} is not a folder")
        existing = next(p for p in (self.path.resolve(), *self.path.resolve().parents) if p.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise RecipeError(f"training.output_dir={str(self.path)!r} cannot be written ({existing})")

    def _last_checkpoint(self) -> Path | None:
        whole = [p for p in self.path.glob("checkpoint-*") if p.name.split("-")[-1].isdigit() and is_whole(p)]
        return max(whole, key=lambda p: int(p.name.split("-")[-1]), default=None)

    def _same_recipe(self, stored: Path) -> None:
        """Refuse to go on with a run under other settings than it was begun with."""
        if not stored.is_file():
            return
        old: dict[str, Any] = yaml.safe_load(stored.read_text(encoding="utf-8"))
        new = dataclasses.asdict(self.recipe)
        compared = [(s, k, v) for s in SAME_ON_RESUME for k, v in new[s].items()] + [
            ("training", "seed", new["training"].get("seed", 42))
        ]
        for section, key, value in compared:
            default = 42 if key == "seed" else value
            before = old.get(section, {}).get(key, default)
            if before != value:
                raise RecipeError(
                    f"{section}.{key}={value!r}: the run that is to be resumed was begun with {before!r} ({stored}); "
                    "resume with its settings, or start anew in another folder"
                )


def is_whole(checkpoint: Path) -> bool:
    """Whether the Trainer finished writing it: trainer_state.json comes last, and must be readable."""
    try:
        return isinstance(json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        return False
