"""What a run trains and on what: data of either kind in one form, and the model.

Each kind of data is a `Kind`: a check that reads nothing, and a reader.  The reader returns a function that makes
`TrainingData` of what was read, once there is a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DataCollatorForSeq2Seq, Trainer, default_data_collator, set_seed

from ..backends import BACKENDS
from ..backends.bnb.int8 import cast_notes_silenced
from ..config import refusing
from ..terminal import shown
from .data import IGNORED, check_source, encode, load_rows
from .heldout import held_out_figures, perplexity_figures
from .modelfiles import check_model_files
from .models import (
    add_adapters,
    architecture_config,
    build_from_scratch,
    check_depth,
    check_history,
    load_base,
    load_tokenizer,
    model_source,
    readable_config,
    scratch_tokenizer,
)
from .packing import check_text_source, text_blocks
from .recipe import SCRATCH
from .sections import DataSection, Recipe, RecipeError


@dataclass
class TrainingData:
    """Tokenised data, whatever it was made from."""

    training_set: Any
    held_out_set: Any
    """None: nothing is held out."""
    collator: Any
    counts: dict[str, int]
    """How much was read and what was cut, for `environment.json`; empty where that is unknown (streamed)."""
    lines: list[str]
    """The same for the user."""
    figures: Callable[[Trainer, Recipe], dict[str, Any]]
    """The figures on the held-out set of a trained model, for `results.json`."""


Tokenise = Callable[[Any], TrainingData]
"""From a tokenizer to the data."""


@dataclass(frozen=True)
class Kind:
    """A kind of data."""

    check: Callable[[DataSection], None]
    """Raises RecipeError for errors that are visible without reading the data."""
    read: Callable[[DataSection, int], Tokenise]
    """Reads the data that `DataSection` names, drawing from the seed where it is generated."""


def kind_of(section: DataSection) -> Kind:
    """The kind of data that a recipe names."""
    return ROWS if section.text is None else TEXT


def read_rows(section: DataSection, seed: int) -> Tokenise:
    """Rows of prompt and answer, read now."""
    rows, held_out = load_rows(section, seed)

    def figures(trainer: Trainer, recipe: Recipe) -> dict[str, Any]:
        with cast_notes_silenced():
            return held_out_figures(trainer, recipe, held_out)

    def tokenise(tokenizer: Any) -> TrainingData:
        training_set, counts = encode(rows, tokenizer, section.max_length)
        lines = [f"data: {counts.in_words()}"]
        held_out_set = None
        if held_out:
            held_out_set, held_out_counts = encode(held_out, tokenizer, section.max_length)
            lines.append(f"held out: {held_out_counts.in_words()}")
        return TrainingData(
            training_set=training_set,
            held_out_set=held_out_set,
            collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=IGNORED),
            counts=counts.to_dict(),
            lines=lines,
            figures=figures,
        )

    return tokenise


def read_text(section: DataSection, seed: int) -> Tokenise:
    """Packed blocks of plain text: documents are tokenised as they are read, so nothing is read yet."""

    def tokenise(tokenizer: Any) -> TrainingData:
        training_set, held_out_set, counts = text_blocks(section, tokenizer)
        return TrainingData(
            training_set=training_set,
            held_out_set=held_out_set,
            collator=default_data_collator,
            counts={} if counts is None else counts.to_dict(),
            lines=[f"text: {'streamed' if counts is None else counts.in_words()}"],
            figures=perplexity_figures,
        )

    return tokenise


ROWS = Kind(check_source, read_rows)
TEXT = Kind(check_text_source, read_text)


def find_model(recipe: Recipe) -> str | None:
    """Folder or Hub id of the base model; None: the model is built from scratch.

    Raises:
        RecipeError: a folder that does not exist, or a file in it that cannot be read.
    """
    if recipe.model.name == SCRATCH:
        return None
    with refusing(_where(recipe), RecipeError):
        source = model_source(recipe.model)
    check_model_files(source, _where(recipe))
    return source


def _where(recipe: Recipe) -> str:
    return f"model.name={shown(recipe.model.name)}"


def prepare_tokenizer(recipe: Recipe, source: str | None, *, units_are_layers: bool) -> Any:
    """The tokenizer, once the recipe is known to fit the depth of the model.

    Args:
        recipe: the run.
        source: the base model, from `find_model`.
        units_are_layers: whether `gnmr.max_o` counts decoder layers.

    Raises:
        RecipeError: no readable configuration or tokenizer, or a recipe that does not fit the model.
    """
    unit_kind = BACKENDS[recipe.backend.name].unit_kind(recipe.backend.options)
    if source is None:
        check_history(architecture_config(recipe.model), recipe.gnmr, unit_kind)
        return scratch_tokenizer(recipe.model)
    with refusing(f"{_where(recipe)}: config.json cannot be used", RecipeError):
        check_history(readable_config(source, recipe.model), recipe.gnmr, unit_kind)
        check_depth(source, recipe.model, recipe.gnmr if units_are_layers else None, recipe.lora)
    with refusing(f"{_where(recipe)}: the tokenizer cannot be loaded (tokenizer.json, tokenizer_config.json)", RecipeError):
        return load_tokenizer(source, recipe.model)


def prepare_model(recipe: Recipe, source: str | None, seed: int) -> Any:
    """The model with its adapters, and torch's random state as the seed sets it.

    Args:
        recipe: the run.
        source: the base model, from `find_model`.
        seed: `training.seed`.

    Raises:
        RecipeError: a model that cannot be built or loaded, or adapters that do not fit it.
    """
    set_seed(seed)
    if source is None:
        model = build_from_scratch(recipe.model, seed)
    else:
        dtype = torch.bfloat16 if recipe.lora is not None else getattr(torch, recipe.model.dtype or "float32")
        with refusing(f"{_where(recipe)}: the model cannot be loaded", RecipeError):
            model = load_base(source, recipe.model, recipe.backend.name, dtype)
        if recipe.lora is not None:
            model = add_adapters(model, recipe.lora, seed)
    model.config.use_cache = False
    set_seed(seed)  # so that dropout does not depend on how many random numbers loading drew
    return model
