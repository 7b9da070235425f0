"""What is still to evaluate: which results exist already, by a key of all that they depend on."""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..files import FileError, free_name, read_json, regular
from ..run.architecture import load_config
from ..run.models import load_tokenizer, model_source
from ..terminal import shown
from .data import fingerprint
from .subjects import Subject, folder_for, identity_of, short_hash
from .tasks import Request
from .tokens import block_of

SOFTMAX_DTYPE = "float32"
"""Of the log-softmax over the logits. Results without it in their key were computed in the model's own dtype."""


@dataclass(frozen=True)
class Pending:
    """A task that is still to evaluate."""

    request: Request
    file: Path
    """Where its result goes."""
    key: dict[str, Any]
    """What the result depends on: the model's contents, the task's files, the settings."""


@dataclass(frozen=True)
class Plan:
    """What is still to evaluate of one subject."""

    subject: Subject
    precision: str
    folder: Path
    """Of all its results, those that exist included."""
    pending: list[Pending]


def plan_of(subject: Subject, requests: list[Request], options: argparse.Namespace) -> Plan:
    """Which of `requests` have no result yet.

    Raises:
        ConfigError: a precision that the run does not have, a model or an option that cannot be used, or results of
            another model in the folder.
        FileError: something other than a regular file in a result's place.
    """
    precision = options.precision or subject.precision
    if precision == "final" and subject.recipe is None:
        raise ConfigError(f"--precision final: {subject.label} is not a run of hf-gnmr, so its last active set is unknown")
    if precision != "recovery" and not subject.int8:
        raise ConfigError(f"--precision {precision}: {subject.label} was trained in BF16; expected recovery")
    check_before_loading(subject, requests, options)
    folder = Path(options.output) if options.output else folder_for(subject)
    if options.output and len(options.runs) > 1:
        folder = folder / f"{Path(subject.label).name}-{short_hash(subject.place)}"
    identity = identity_of(subject, precision)
    pending = []
    for request in requests:
        key = {**identity, "precision": precision, **settings_of(request, options)}
        file = folder / precision / f"{request.label.replace(':', '-')}.json"
        regular(file)
        if _exists(file, key):
            print(f"{subject.label}, {precision}, {request.label}: already evaluated ({file})", flush=True)
            continue
        earlier = _key_in(file)
        if earlier is not None and options.output and earlier.get("place") != subject.place:
            raise ConfigError(
                f"{file} is the result of {earlier.get('place')}, not of {subject.place}: give another --output"
            )
        pending.append(Pending(request, file, key))
    return Plan(subject, precision, folder, pending)


def settings_of(request: Request, options: argparse.Namespace) -> dict[str, Any]:
    """The part of a key that the task and the options decide; of the options only what the task depends on."""
    task = request.task
    settings = {
        "task": request.label,
        "limit": options.limit,
        "dtype": options.dtype,
        "files": fingerprint(request, options.data),
        "lm_eval": version_of("lm_eval"),
    }
    # Every task of lm-eval is run with the template or without, and so its key says which, also where prompts are empty.
    # The batch decides which rows an 8-bit product sees together, and how BF16 products are split.
    names = ["chat_template", "batch_size"] if task.by_lm_eval else ["block", "stride"]
    names += [name for name in ("shots", "max_gen_tokens") if task.takes(name)]
    # Scores by token have always been computed in float32.
    softmax = {"softmax_dtype": SOFTMAX_DTYPE} if task.by_lm_eval and not task.generates else {}
    return settings | {name: getattr(options, name) for name in names} | softmax


def _key_in(file: Path) -> dict[str, Any] | None:
    """The key of a result; None without a file, {} where the file cannot be read."""
    try:
        key = read_json(file).get("key", {}) if file.is_file() else None
        if key is not None and not isinstance(key, dict):
            raise FileError(f"{file}: key={shown(key)}: expected a JSON object")
    except FileError:
        print(f"{file} cannot be read (cut?): it is set aside, and the task evaluated again", flush=True)
        return {}
    return key


def _exists(file: Path, key: dict[str, Any]) -> bool:
    """Whether a result with this key exists; one that another evaluation set aside is moved back to `file`."""
    set_aside = sorted(
        p for p in file.parent.glob(f"{glob.escape(file.stem)}.*.json") if p.stem.rpartition(".")[2].isdigit()
    )
    for candidate in (file, *set_aside):
        candidate_key = _key_in(candidate)
        if candidate_key is None or {**candidate_key, "place": None} != {**key, "place": None}:
            continue
        if candidate != file:
            if file.is_file():
                os.replace(file, free_name(file))
            os.replace(candidate, file)
        return True
    return False


def version_of(package: str) -> str:
    """A package's version, or that it is not installed."""
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else "not installed"


def check_before_loading(subject: Subject, requests: list[Request], options: argparse.Namespace) -> None:
    """Raise ConfigError for what the model's tokenizer and configuration rule out, before the weights are loaded."""
    source = model_source(subject.section)
    if not Path(source).is_dir() and Path(source).is_absolute():
        raise ConfigError(f"{subject.label}: {source}: no such folder")
    if options.chat_template and not getattr(load_tokenizer(source, subject.section), "chat_template", None):
        raise ConfigError(f"--chat-template: the tokenizer of {subject.section.name} has none")
    try:
        config = load_config(source, subject.section)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        local = "" if Path(source).is_dir() else f"no folder {source} here, and no such model on the Hub or in its cache. "
        raise ConfigError(f"{subject.label}: {local}The configuration of {source} cannot be loaded: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{subject.label}: {source} holds weights that are quantised already, which is none of the precisions. Give the "
            "original model"
        )
    if any(not request.task.by_lm_eval for request in requests):
        block_of(config, options)
