"""lm-eval: its task objects on our rows, and one task scored on one model."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..config import ConfigError
from .data import splits_of
from .plan import SOFTMAX_DTYPE
from .rows import Splits, of_equal_types
from .scores import figure, standard_error
from .tasks import Request, Subjects
from .tokens import score_by_token

Samples = dict[str, list[dict[str, Any]]]
"""lm-eval's logged samples by its task's name."""


def harness_tasks(request: Request, data: str | None) -> dict[str, Any]:
    """lm-eval's task objects for `request` by name: one per subject where the task has subjects.

    Raises:
        ConfigError: missing files, or subjects without rows or definition.
    """
    from lm_eval.api.task import ConfigurableTask

    splits = splits_of(request, data)
    subjects = request.task.subjects
    if subjects is None:
        return {request.name: ConfigurableTask(config=_configuration(request, request.name, splits))}
    if splits is None:
        names = _subjects_on_the_hub(request, subjects)
        return {name: ConfigurableTask(config=_configuration(request, name, None)) for name in names}
    tasks = {}
    for subject in sorted({row["subject"] for row in splits[request.task.scored_split]}):
        name = subjects.definition.format(subject=subject)
        rows = {split: [row for row in part if row["subject"] == subject] for split, part in splits.items()}
        tasks[name] = ConfigurableTask(config=_configuration(request, name, rows, subject))
    return tasks


@functools.cache
def _manager() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()  # reads all definitions of lm-eval: seconds


def _subjects_on_the_hub(request: Request, subjects: Subjects) -> list[str]:
    """The names of lm-eval's definitions of one subject or, where none is requested, of all."""
    from lm_eval.tasks._yaml_loader import load_yaml

    manager = _manager()
    pattern = subjects.definition.format(subject="[a-z_]+" if request.subject is None else re.escape(request.subject))
    names = [
        name
        for name in manager.all_tasks
        if re.fullmatch(pattern, name)
        and subjects.group in str(getattr(manager.task_index[name], "yaml_path", ""))
        and "dataset_name" in load_yaml(manager.task_index[name].yaml_path, resolve_func=False)  # a subject, no group
    ]
    if not names:
        raise ConfigError(f"--tasks {request.label}: lm-eval has no such {request.name} subject")
    return names


def _configuration(request: Request, name: str, rows: Splits | None, subject: str | None = None) -> dict[str, Any]:
    """lm-eval's definition `name`, on `rows` where they are given.

    Raises:
        ConfigError: lm-eval has no such definition, and it is no custom subject that could borrow another's.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    manager, subjects = _manager(), request.task.subjects
    entry = manager.task_index.get(name)
    if entry is not None:
        config = load_yaml(entry.yaml_path, resolve_func=True)
    elif subjects is not None and subject is not None:
        config = load_yaml(manager.task_index[subjects.template].yaml_path, resolve_func=True)
        words = subject.replace("_", " ")
        config |= {"task": name, "task_alias": words, "description": subjects.description.format(subject=words)}
    else:
        raise ConfigError(f"--tasks {request.label}: lm-eval has no task {name}")
    if rows is None:
        return dict(config)
    config = {key: value for key, value in config.items() if key not in ("dataset_path", "dataset_name")}
    config["custom_dataset"] = _as_dataset(rows, request.task.fields)
    for split in ("training_split", "validation_split", "test_split", "fewshot_split"):
        if config.get(split) is not None and config[split] not in rows:
            config[split] = None
    return config


def _as_dataset(splits: Splits, fields: tuple[str, ...]) -> Callable[..., Any]:
    from datasets import Dataset

    datasets = {split: Dataset.from_list(of_equal_types(rows, fields)) for split, rows in splits.items()}
    return lambda **ignored: datasets


def language_model(model: Any, tokenizer: Any, options: argparse.Namespace, autocast: torch.dtype | None) -> Any:
    """The model as lm-eval takes it; arguments as for `run_task`.

    The log-softmax is taken in float32: in the logits' own BF16, log-likelihoods would be rounded to steps of up to 1, and
    ties decided by the order of the choices.
    """
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=options.batch_size,
        softmax_dtype=SOFTMAX_DTYPE,
        mixed_precision_dtype=autocast,
    )


def run_task(
    model: Any,
    tokenizer: Any,
    request: Request,
    tasks: dict[str, Any],
    options: argparse.Namespace,
    autocast: torch.dtype | None = None,
) -> dict[str, Any]:
    """One task on one model.

    Args:
        model: in eval mode.
        tokenizer: the model's.
        request: the task.
        tasks: lm-eval's objects for it, see `harness_tasks`; not used where our own function scores it.
        options: of the command line.
        autocast: the dtype to run under autocast; None: without.

    Returns:
        `metrics`, `stderr`, `n`, `shots`, `per_item` (metric -> scores by item), `per_item_weight`, `item_hash`, and what
        the scorer adds.
    """
    if not request.task.by_lm_eval:
        with torch.autocast(model.device.type, dtype=autocast, enabled=autocast is not None):
            return score_by_token(model, tokenizer, request, options)
    from lm_eval import evaluator

    lm = language_model(model, tokenizer, options, autocast)
    output = evaluator.simple_evaluate(
        model=lm,
        tasks=list(tasks.values()),
        task_manager=_manager(),  # without it lm-eval reads all its definitions again
        num_fewshot=options.shots if request.task.takes("shots") else None,
        limit=options.limit,
        bootstrap_iters=1000,
        apply_chat_template=options.chat_template,
        gen_kwargs=f"max_gen_toks={options.max_gen_tokens}" if request.task.generates else None,
    )
    scores, weights = _scores_by_item(output["samples"])
    # Every item weighs the same, so a subject weighs as much as it has items: as in lm-eval's own group of MMLU.
    metrics = {}
    for name, items in scores.items():
        weight = np.array([weights.get(f"{name}|{item}", 1.0) for item in items])
        metrics[name] = float(figure(name, np.array(list(items.values())), weight))
    shots = {config.get("num_fewshot") or 0 for config in output["configs"].values()}
    hashes, answers = _hashes_and_answers(output["samples"])
    return {
        "metrics": metrics,
        "stderr": {name: standard_error(name, items, weights) for name, items in scores.items()},
        "n": len(next(iter(scores.values()))),
        "shots": sorted(shots),
        "subtasks": {
            task: {key: value for key, value in figures.items() if isinstance(value, float)}
            for task, figures in output["results"].items()
        },
        "truncated": truncated_items(lm, output["samples"], options.max_gen_tokens),
        "per_item": scores,
        "per_item_weight": weights,
        "item_hash": hashes,
        "answers": answers,
    }


def _item(task: str, sample: dict[str, Any]) -> str:
    return f"{task}/{sample['doc_id']}"


def _scores_by_item(samples: Samples) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Scores by metric and item, and weights by ``metric|item`` where a score is the log-likelihood of words or bytes."""
    scores: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    for task, logged in samples.items():
        for sample in logged:
            item = _item(task, sample)
            for metric in sample["metrics"]:
                name = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
                value = sample[metric]
                if isinstance(value, (tuple, list)):  # (log-likelihood, words or bytes)
                    weights[f"{name}|{item}"] = float(value[1])
                    value = value[0]
                scores.setdefault(name, {})[item] = float(value)
    return scores, weights


def _hashes_and_answers(samples: Samples) -> tuple[dict[str, str], dict[str, Any]]:
    """By item: what it asked and expects (hashes of prompt and target), and the model's raw responses."""
    hashes: dict[str, str] = {}
    answers: dict[str, Any] = {}
    for task, logged in samples.items():
        for sample in logged:
            item = _item(task, sample)
            hashes[item] = f"{sample['prompt_hash'][:12]}-{sample['target_hash'][:12]}"
            answers[item] = sample["resps"]
    return hashes, answers


def truncated_items(lm: Any, samples: Samples, max_gen_tokens: int) -> int:
    """How many items have a prompt that lm-eval cuts on the left, too long for the model (it warns, but does not count).

    A text without a prompt is scored in rolling windows, and never cut.
    """
    cut: set[str] = set()
    for task, logged in samples.items():
        for sample in logged:
            for prompt, *rest in sample["arguments"]:
                if rest and _is_cut(lm, prompt, rest[0], max_gen_tokens):
                    cut.add(_item(task, sample))
    return len(cut)


def _is_cut(lm: Any, prompt: str, request: Any, max_gen_tokens: int) -> bool:
    """`request`: the continuation whose log-likelihood is asked for, or how to generate an answer."""
    length = len(lm.tok_encode(prompt))
    if isinstance(request, str):  # its last token is predicted, not read
        return bool(length + len(lm.tok_encode(request, add_special_tokens=False)) - 1 > lm.max_length)
    return bool(length > lm.max_length - max_gen_tokens)
