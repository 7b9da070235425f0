"""``hf-gnmr eval RUN ...``: fine-tuned runs, adapters or base models on the four downstream tasks, through lm-eval.

A RUN is an output folder of ours, a PEFT adapter's folder (with its base), or a base model.  The model is built here and
handed to lm-eval, since its own arguments cannot build an 8-bit one; it is loaded once for a run and precision, and each
task's figures and per-item results go to a file of their own when the task is done: a finished one is not evaluated again.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ..backends.bnb.int8 import cast_notes_silenced
from ..config import ConfigError, SetupError
from ..files import free_name, read_json, write_json
from ..run.environment import machine
from ..run.models import load_tokenizer, model_source
from ..trace.file import TraceError
from .harness import block_of, run_task
from .subjects import PRECISIONS, Subject, adapter_effect, build, folder_for, identity_of, resolve, short_hash
from .tasks import (
    BUILTIN,
    NAMES,
    Request,
    fingerprint,
    harness_tasks,
    parse_tasks,
    splits_of,
)

MAX_GEN_TOKENS = 256
DTYPES = ("bfloat16", "float16", "float32")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (2: something to mend)."""
    parser = argparse.ArgumentParser(prog="hf-gnmr eval", description="Downstream evaluation of runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, an adapter's folder, or a base model")
    parser.add_argument("--tasks", nargs="+", default=list(NAMES), help=f"default: {' '.join(NAMES)}; also mmlu:SUBJECT")
    parser.add_argument("--data", help="folder with the tasks' files, or builtin (a few rows: smoke, no results)")
    parser.add_argument("--limit", type=int, help="items at most, a task (a subject for MMLU, blocks for wikitext_tokens)")
    parser.add_argument("--shots", type=int, help="few-shot examples; default: lm-eval's own (GSM8K 5, MMLU 0)")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--precision", choices=PRECISIONS, help="default: the path that the run was trained on")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of what is not 8-bit")
    parser.add_argument("--base", help="the adapter's base model, where its own note of it does not lead there")
    parser.add_argument("--block", type=int, help="wikitext_tokens: tokens a block; default: 2048 or the model's length")
    parser.add_argument("--stride", type=int, help="wikitext_tokens: tokens between blocks; default: no overlap")
    parser.add_argument("--max-gen-tokens", type=int, help="gsm8k: tokens of an answer at most (default 256)")
    parser.add_argument("--chat-template", action="store_true", help="put prompts into the tokenizer's chat template")
    parser.add_argument("--output", help="folder for results; default: RUN/eval, or eval-results/NAME-… for a base model")
    parser.add_argument("--offline", action="store_true", help="no network: nothing is asked of the Hub")
    options = parser.parse_args(argv)
    try:
        if options.offline:
            go_offline()
            if options.data is None:
                raise ConfigError("--offline needs --data: a folder with the tasks' files, or builtin")
        requests = parse_tasks(options.tasks)
        for name in ("limit", "batch_size", "block", "stride", "max_gen_tokens"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: a whole number above 0 is allowed")
        subjects = [resolve(run, options.base, options.precision) for run in options.runs]
        if any(request.name != "wikitext_tokens" for request in requests) and not importlib.util.find_spec("lm_eval"):
            raise ConfigError("these tasks need lm-eval: pip install 'hf-gnmr[eval]'")
        for option, given, names in (
            ("--shots", options.shots is not None, ("gsm8k", "mmlu")),
            ("--chat-template", options.chat_template, NAMES[:3]),
            ("--block", options.block is not None, ("wikitext_tokens",)),
            ("--stride", options.stride is not None, ("wikitext_tokens",)),
            ("--max-gen-tokens", options.max_gen_tokens is not None, ("gsm8k",)),
        ):
            without = [request.label for request in requests if given and request.name not in names]
            if without:
                print(f"{option} says nothing to {', '.join(without)}", flush=True)
        for request in requests:  # missing and broken files are told before a model is loaded
            splits = splits_of(request, options.data)
            _check_shots(request, splits, options.shots)
            if splits is not None and request.name != "wikitext_tokens":
                harness_tasks(request, options.data)
        options.max_gen_tokens = options.max_gen_tokens or MAX_GEN_TOKENS
        places = [subject.place for subject in subjects]
        twice = next((s.label for i, s in enumerate(subjects) if s.place in places[:i]), None)
        if twice is not None:
            raise ConfigError(f"{twice}: given twice")
        plans = [plan_of(subject, requests, options) for subject in subjects]
        for subject, (folder, wanted) in zip(subjects, plans, strict=True):
            evaluate(subject, folder, wanted, options)
    except (ConfigError, SetupError, TraceError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    from .compare import write

    folders = [folder for folder, _ in plans]
    output = Path(options.output or (folders[0] if len(folders) == 1 else "eval-results"))
    shown = {(options.precision or subject.precision, request.label) for subject in subjects for request in requests}
    try:
        write(folders, None, output, shown)
    except (ConfigError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def go_offline() -> None:
    """Switch the Hub off in this process; its libraries have read the environment already."""
    import datasets
    import huggingface_hub

    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True


def _check_shots(request: Request, splits: dict[str, list[dict[str, Any]]] | None, shots: int | None) -> None:
    if shots is not None and shots < 0:
        raise ConfigError(f"--shots {shots}: 0 or more is allowed")
    if not shots or splits is None or request.name not in ("gsm8k", "mmlu"):
        return
    if request.name == "gsm8k":
        there = len(splits["train"])
    else:
        shown = Counter(row["subject"] for row in splits["dev"])
        there = min(shown[row["subject"]] for row in splits["test"])
    if shots > there:
        raise ConfigError(f"--shots {shots}: {request.label} has {there} examples to show")


def plan_of(
    subject: Subject, requests: list[Request], options: argparse.Namespace
) -> tuple[Path, list[tuple[Request, Path, dict[str, Any]]]]:
    """The folder of the results, and what has still to be evaluated: (task, file, its key).

    Raises:
        ConfigError: a precision the run does not have, or results of something else in the folder.
    """
    precision = options.precision or subject.precision
    if precision == "final" and subject.recipe is None:
        raise ConfigError(f"--precision final: {subject.label} is no run of ours, its last active set is not known")
    if precision != "recovery" and not subject.int8:
        raise ConfigError(f"--precision {precision}: {subject.label} was trained in BF16; only recovery is that model")
    check_before_loading(subject, requests, options)
    folder = Path(options.output) if options.output else folder_for(subject)
    if options.output and len(options.runs) > 1:
        folder = folder / f"{Path(subject.label).name}-{short_hash(subject.place)}"
    identity = identity_of(subject, precision)
    wanted = []
    for request in requests:
        key = {
            **identity,
            "precision": precision,
            "task": request.label,
            "limit": options.limit,
            "dtype": options.dtype,
            "files": fingerprint(request, options.data),
            "lm_eval": version_of("lm_eval"),
        }
        if request.name == "wikitext_tokens":
            key |= {"block": options.block, "stride": options.stride}
        else:
            key |= {"chat_template": options.chat_template}
        if request.name in ("gsm8k", "mmlu"):
            key["shots"] = options.shots
        if request.name == "gsm8k":
            key["max_gen_tokens"] = options.max_gen_tokens
        file = folder / precision / f"{request.label.replace(':', '-')}.json"
        if _found(file, key):
            print(f"{subject.label}, {precision}, {request.label}: there already ({file})", flush=True)
            continue
        there = _key_in(file)
        if there is not None and options.output and there.get("place") != subject.place:
            raise ConfigError(f"{file} is the result of {there.get('place')}, not of {subject.place}: give another --output")
        wanted.append((request, file, key))
    return folder, wanted


def _key_in(file: Path) -> dict[str, Any] | None:
    """The key of a result; None where there is none, or nothing that can be read."""
    try:
        return dict(read_json(file).get("key", {})) if file.is_file() else None
    except (TraceError, ValueError):
        print(f"{file} cannot be read (cut?): it is set aside, and the task evaluated again", flush=True)
        return {}


def _found(file: Path, key: dict[str, Any]) -> bool:
    """Whether a result of this key is there; one that another evaluation set aside is put back in its place."""
    numbered = sorted(p for p in file.parent.glob(f"{file.stem}.*.json") if p.stem.rpartition(".")[2].isdigit())
    for candidate in (file, *numbered):
        there = _key_in(candidate)
        if there is None or {**there, "place": None} != {**key, "place": None}:
            continue
        if candidate != file:
            if file.is_file():
                os.replace(file, free_name(file))
            os.replace(candidate, file)
        return True
    return False


def evaluate(
    subject: Subject, folder: Path, wanted: list[tuple[Request, Path, dict[str, Any]]], options: argparse.Namespace
) -> None:
    """Evaluate what is not there yet, one file a task."""
    if not wanted:
        return
    precision = options.precision or subject.precision
    # Definitions and rows are put together before the model: what is wrong with them is told at once.
    tasks = {r: harness_tasks(r, options.data) for r, _, _ in wanted if r.name != "wikitext_tokens"}
    model, tokenizer, what = build(subject, precision, options.dtype)
    print(f"{subject.label}: {what}", flush=True)
    autocast = subject.autocast(options.dtype)
    effect = adapter_effect(model, autocast) if subject.adapter is not None else None
    if effect == 0.0:
        print(f"{subject.label}: ADAPTER WITHOUT EFFECT: it changes no logit of a fixed input", flush=True)
    for request, file, key in wanted:
        start = time.perf_counter()
        print(f"{subject.label}, {precision}, {request.label} ...", flush=True)
        with cast_notes_silenced():
            found = run_task(model, tokenizer, request, tasks.get(request, {}), options, autocast)
        if found.get("truncated"):
            print(f"  {found['truncated']} of {found['n']} prompts were cut on the left, too long for the model", flush=True)
        if file.is_file():
            os.replace(file, free_name(file))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(
            file,
            {
                "run": subject.label,
                "base": subject.section.name,
                "precision": precision,
                "model": what,
                "task": request.label,
                "in_bf16": not subject.int8 and options.dtype == "bfloat16",
                "smoke": options.data == BUILTIN,
                "key": key,
                "adapter_effect": effect,
                "seconds": round(time.perf_counter() - start, 1),
                "batch_size": options.batch_size,
                "machine": machine(),
                "lm_eval": version_of("lm_eval"),
                **found,
            },
        )
        print(f"  {', '.join(f'{k} {v:.4f}' for k, v in found['metrics'].items())} (n {found['n']}) -> {file}", flush=True)
    # Adapted models are cycles: without a collection the next run's model would be loaded beside this one.
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def version_of(package: str) -> str:
    """A package's version, or that it is not there."""
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else "not installed"


def check_before_loading(subject: Subject, requests: list[Request], options: argparse.Namespace) -> None:
    """Raise ConfigError for what the model's tokenizer and configuration do not allow."""
    from transformers import AutoConfig

    source = model_source(subject.section)
    if not Path(source).is_dir() and Path(source).is_absolute():
        raise ConfigError(f"{subject.label}: {source}: no such folder")
    if options.chat_template and not getattr(load_tokenizer(source, subject.section), "chat_template", None):
        raise ConfigError(f"--chat-template: the tokenizer of {subject.section.name} has none")
    try:
        config = AutoConfig.from_pretrained(
            source, revision=subject.section.revision, trust_remote_code=subject.section.trust_remote_code
        )
    except (OSError, ValueError) as error:
        local = "" if Path(source).is_dir() else f"no folder {source} here, and no such model on the Hub or in its cache. "
        raise ConfigError(f"{subject.label}: {local}The configuration of {source} cannot be loaded: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{subject.label}: {source} holds quantised weights already: neither of the two precisions is that. Give the "
            "original model"
        )
    if any(request.name == "wikitext_tokens" for request in requests):
        block_of(config, options)


if __name__ == "__main__":
    sys.exit(main())
