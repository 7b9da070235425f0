"""``hf-gnmr eval RUN ...``: fine-tuned runs, adapters or base models on the four downstream tasks, through lm-eval.

A RUN is an output folder of ours, a PEFT adapter's folder (with its base), or a base model.  The model is built here and
handed to lm-eval, since its own arguments cannot build an 8-bit one; it is loaded once for a run and precision, and each
task's figures and per-item results go to a file of their own when the task is done: a finished one is not evaluated again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from .backends.int8 import Int8Backend, cast_notes_silenced
from .config import ConfigError, SetupError
from .environment import machine
from .models import load_adapter, load_base, load_tokenizer, model_source
from .recipe import ModelSection, Recipe, load_recipe
from .tasks import (
    BUILTIN,
    NAMES,
    Request,
    fingerprint,
    harness_tasks,
    parse_tasks,
    perplexity,
    splits_of,
    text_of,
    token_perplexity,
)
from .trace import TraceError, free_name, read_json, read_trace, write_json
from .units import all_layers

PRECISIONS = ("low", "recovery", "final")
DTYPES = ("bfloat16", "float16", "float32")
EVAL_FOLDER = "eval"
"""Folder for results inside a run's or adapter's folder."""


@dataclass(frozen=True)
class Subject:
    """What is evaluated."""

    label: str
    """The RUN as given."""
    section: ModelSection
    """Its base model."""
    adapter: Path | None
    int8: bool
    """Whether it was trained over an 8-bit base (or, without training, is asked for in INT8)."""
    recipe: Recipe | None = None
    """Of a run of ours."""

    @property
    def place(self) -> str:
        """Where it is: a resolved folder, or a name on the Hub."""
        folder = Path(self.label).expanduser()
        return str(folder.resolve()) if folder.is_dir() else self.label

    @property
    def precision(self) -> str:
        """The path it was trained on: `low` for INT8 and GNMR, `recovery` for BF16, all-lifted and anything else."""
        if self.recipe is None or not self.int8 or self.recipe.trigger.name == "all":
            return "recovery"
        return "low"


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
    parser.add_argument("--max-gen-tokens", type=int, default=256, help="gsm8k: tokens of an answer at most")
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
        if any(request.name != "wikitext_tokens" for request in requests) and not importlib.util.find_spec("lm_eval"):
            raise ConfigError("these tasks need lm-eval: pip install 'hf-gnmr[eval]'")
        for request in requests:  # missing and broken files are told before a model is loaded
            splits = splits_of(request, options.data)
            _check_shots(request, splits, options.shots)
        subjects = [resolve(run, options.base, options.precision) for run in options.runs]
        plans = [plan_of(subject, requests, options) for subject in subjects]
        for subject, (folder, wanted) in zip(subjects, plans, strict=True):
            evaluate(subject, folder, wanted, options)
    except (ConfigError, SetupError, TraceError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    from .compare import main as compare

    folders = [str(folder) for folder, _ in plans]
    output = options.output or (folders[0] if len(folders) == 1 else "eval-results")
    return compare([*folders, "--output", output])


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


def resolve(run: str, base: str | None, precision: str | None) -> Subject:
    """What a RUN on the command line is.

    Raises:
        ConfigError: a folder that is none of the three kinds, or a run without an adapter.
    """
    folder = Path(run).expanduser()
    adapter = folder / "adapter_model.safetensors"
    if base is not None and ((folder / "recipe.yaml").is_file() or not (folder / "adapter_config.json").is_file()):
        raise ConfigError(f"--base {base}: {run} has a base of its own; the option is for a PEFT adapter's folder")
    if (folder / "recipe.yaml").is_file():
        recipe = load_recipe(folder / "recipe.yaml")
        if not adapter.is_file():
            raise ConfigError(f"{run}: no adapter_model.safetensors in it: the run is not finished")
        return Subject(run, recipe.model, folder, recipe.backend.name == "int8", recipe)
    if (folder / "adapter_config.json").is_file():
        if not adapter.is_file():
            raise ConfigError(f"{run}: adapter_config.json without adapter_model.safetensors")
        config = read_json(folder / "adapter_config.json")
        if config.get("peft_type") != "LORA":
            raise ConfigError(f"{run}: a {config.get('peft_type')} adapter; LoRA adapters are evaluated here")
        named = config.get("base_model_name_or_path")
        name = base or named
        if base is not None and named and str(named) != base:
            print(f"{run}: the adapter names {named} as its base, and is put over {base}", flush=True)
        if not name:
            raise ConfigError(f"{run}: the adapter does not say what its base model is: give --base")
        return Subject(run, ModelSection(name=str(name)), folder, precision in ("low", "final"))
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{run}: neither a run (recipe.yaml), nor an adapter (adapter_config.json), nor a model (config.json)"
        )
    if not folder.is_dir() and run.startswith((".", "/", "~")):
        raise ConfigError(f"{run}: no such folder")
    return Subject(run, ModelSection(name=run), None, precision in ("low", "final"))


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
        folder = folder / f"{Path(subject.label).name}-{_short(subject.place)}"
    identity = identity_of(subject)
    wanted = []
    for request in requests:
        key = {
            **identity, "precision": precision, "task": request.label, "limit": options.limit, "dtype": options.dtype,
            "files": fingerprint(request, options.data), "lm_eval": version_of("lm_eval"),
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
        there = read_json(file).get("key", {}) if file.is_file() else None
        if there == key:
            print(f"{subject.label}, {precision}, {request.label}: there already ({file})", flush=True)
            continue
        if there is not None and there.get("place") != subject.place:
            raise ConfigError(f"{file} is the result of {there.get('place')}, not of {subject.place}: give another --output")
        wanted.append((request, file, key))
    return folder, wanted


def identity_of(subject: Subject) -> dict[str, Any]:
    """What makes two evaluations ones of the same model: places and contents."""
    adapter = None
    if subject.adapter is not None:
        adapter = hashlib.sha256((subject.adapter / "adapter_model.safetensors").read_bytes()).hexdigest()[:16]
    base = Path(subject.section.name).expanduser()
    weights = sorted(base.glob("*.safetensors")) if base.is_dir() else []
    return {
        "place": subject.place,
        "base": str(base.resolve()) if base.is_dir() else subject.section.name,
        "base_files": {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in weights},
        "adapter": adapter,
        "int8": subject.int8,
        "threshold": subject.section.llm_int8_threshold if subject.int8 else None,
    }


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
    effect = adapter_effect(model) if subject.adapter is not None else None
    if effect == 0.0:
        print(f"{subject.label}: ADAPTER WITHOUT EFFECT: it changes no logit; these are the base model's scores", flush=True)
    for request, file, key in wanted:
        start = time.perf_counter()
        print(f"{subject.label}, {precision}, {request.label} ...", flush=True)
        with cast_notes_silenced():
            found = run_task(model, tokenizer, request, tasks.get(request, {}), options)
        if file.is_file():
            os.replace(file, free_name(file))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {
            "run": subject.label, "base": subject.section.name, "precision": precision, "model": what, "task": request.label,
            "in_bf16": not subject.int8 and options.dtype == "bfloat16", "smoke": options.data == BUILTIN, "key": key,
            "adapter_effect": effect, "seconds": round(time.perf_counter() - start, 1), "batch_size": options.batch_size,
            "machine": machine(), "lm_eval": version_of("lm_eval"), **found,
        })
        print(f"  {', '.join(f'{k} {v:.4f}' for k, v in found['metrics'].items())} (n {found['n']}) -> {file}", flush=True)


def version_of(package: str) -> str:
    """A package's version, or that it is not there."""
    return importlib.metadata.version(package) if importlib.util.find_spec(package) else "not installed"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def check_before_loading(subject: Subject, requests: list[Request], options: argparse.Namespace) -> None:
    """Raise ConfigError for what the model's tokenizer and configuration do not allow."""
    from transformers import AutoConfig

    source = model_source(subject.section)
    if options.chat_template and not getattr(load_tokenizer(source, subject.section), "chat_template", None):
        raise ConfigError(f"--chat-template: the tokenizer of {subject.section.name} has none")
    try:
        config = AutoConfig.from_pretrained(
            source, revision=subject.section.revision, trust_remote_code=subject.section.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{subject.label}: the configuration of {source} cannot be loaded: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{subject.label}: {source} holds quantised weights already: neither of the two precisions is that. Give the "
            "original model"
        )
    if any(request.name == "wikitext_tokens" for request in requests):
        _block(config, options)


def _block(config: Any, options: argparse.Namespace) -> int:
    """Tokens a block of wikitext_tokens."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", 2048) or 2048
    block = options.block or min(2048, longest)
    if block > longest:
        raise ConfigError(f"--block {block}: the model takes {longest} tokens")
    if options.stride is not None and options.stride > block:
        raise ConfigError(f"--stride {options.stride}: at most the block's length, {block}")
    return block


def folder_for(subject: Subject) -> Path:
    """Where results go unless told otherwise."""
    if subject.adapter is not None:
        return subject.adapter / EVAL_FOLDER
    return Path("eval-results") / f"{Path(subject.label).name}-{_short(subject.place)}"


def build(subject: Subject, precision: str, dtype: str) -> tuple[Any, Any, str]:
    """Model in eval mode, tokenizer, and what runs, in words.

    Raises:
        ConfigError, SetupError: a model that cannot be loaded, or an adapter that does not fit it.
    """
    from peft import PeftConfig, get_peft_model

    source = model_source(subject.section)
    tokenizer = load_tokenizer(source, subject.section)
    model = load_base(source, subject.section, "int8" if subject.int8 else "none", getattr(torch, dtype))
    if subject.adapter is not None:
        try:
            config = PeftConfig.from_pretrained(subject.adapter)
            config.inference_mode = False  # else its parameters are frozen, and layers are known by what is trainable
            model = get_peft_model(model, config)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{subject.label}: its adapter does not fit {subject.section.name}: {error}") from error
        try:
            load_adapter(model, str(subject.adapter), subject.label)
        except (KeyError, SafetensorError) as error:
            raise ConfigError(f"{subject.label}: its adapter file is not whole: {error}") from error
    model.eval()
    if torch.cuda.is_available():
        model.to("cuda")
    kind = f"{'adapter over ' if subject.adapter is not None else ''}{subject.section.name}"
    if not subject.int8:
        return model, tokenizer, f"{kind}, {dtype}"
    # Every layer, adapted or not; the low-cost path too runs through the switched modules (DoRA's plain one fails on a CPU).
    units = all_layers(model, subject.section.layers)
    recovery = "dequantize" if precision == "low" else "host" if subject.recipe is None else subject.recipe.backend.recovery
    source_of = None if recovery == "dequantize" or subject.recipe is None else subject.recipe.backend.recovery_source
    backend = Int8Backend(model, units, eval_path="active", recovery=recovery, recovery_source=source_of)
    active = np.zeros(len(units), dtype=bool)
    if precision == "recovery":
        active = backend.recoverable
    elif precision == "final":
        active[_last_layers(subject)] = True
    backend.reserve(int(active.sum()))
    backend.apply(active)
    if precision == "low":
        return model, tokenizer, f"{kind}, bitsandbytes INT8 everywhere"
    weights = "" if recovery != "dequantize" else " (dequantised weights)"
    if precision == "final":
        return model, tokenizer, f"{kind}, INT8 with layers {np.flatnonzero(active).tolist()} in BF16{weights}"
    return model, tokenizer, f"{kind}, every layer of the 8-bit model on its BF16 path{weights}"


def _last_layers(subject: Subject) -> list[int]:
    """The model's layers on the recovery path in the last step of training."""
    assert subject.adapter is not None
    trace = read_trace(subject.adapter / "trace.jsonl")
    active = trace.steps[-1]["active"] if trace.steps else []
    return [trace.header["units"][unit]["layer"] for unit in active]


def adapter_effect(model: Any) -> float:
    """Largest change of a logit that the adapter makes on a fixed input; 0.0: none."""
    ids = torch.arange(5, 21, device=model.device)[None]
    with torch.no_grad(), cast_notes_silenced():
        on = model(input_ids=ids).logits
        with model.disable_adapter():
            off = model(input_ids=ids).logits
    return float((on - off).abs().max())


def run_task(
    model: Any, tokenizer: Any, request: Request, tasks: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """`metrics`, `stderr`, `n`, `shots`, `per_item` (metric -> scores by item) and what else belongs to the figures."""
    if request.name == "wikitext_tokens":
        return _tokens(model, tokenizer, request, options)
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size)
    shots = options.shots if request.name in ("gsm8k", "mmlu") else None
    found = evaluator.simple_evaluate(
        model=lm, tasks=list(tasks.values()), num_fewshot=shots, limit=options.limit, bootstrap_iters=1000,
        apply_chat_template=options.chat_template,
        gen_kwargs=f"max_gen_toks={options.max_gen_tokens}" if request.name == "gsm8k" else None,
    )
    per_item: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    hashes: dict[str, str] = {}
    answers: dict[str, Any] = {}
    for task, samples in found["samples"].items():
        for sample in samples:
            item = f"{task}/{sample['doc_id']}"
            hashes[item] = f"{sample['prompt_hash'][:12]}-{sample['target_hash'][:12]}"
            answers[item] = sample["resps"]
            for metric in sample["metrics"]:
                name = metric if sample["filter"] == "none" else f"{metric},{sample['filter']}"
                value = sample[metric]
                if isinstance(value, (tuple, list)):  # (log-likelihood, words or bytes)
                    weights[f"{name}|{item}"] = float(value[1])
                    value = value[0]
                per_item.setdefault(name, {})[item] = float(value)
    metrics: dict[str, float] = {}
    stderr: dict[str, float | None] = {}
    for name, items in per_item.items():
        values = np.array(list(items.values()))
        if "perplexity" in name or name == "bits_per_byte":
            total = -values.sum() / sum(weights[f"{name}|{item}"] for item in items)
            metrics[name] = float(total / np.log(2)) if name == "bits_per_byte" else float(np.exp(total))
        else:
            # MMLU's subjects weigh as many as their items, and their variances are pooled, as lm-eval's own group does.
            metrics[name] = float(values.mean())
            stderr[name] = _pooled_stderr(items)
    fewshot = {task: config.get("num_fewshot") for task, config in found["configs"].items()}
    return {
        "metrics": metrics, "stderr": stderr, "n": len(next(iter(per_item.values()))),
        "shots": sorted({0 if n is None else n for n in fewshot.values()}),
        "subtasks": {task: {k: v for k, v in figures.items() if isinstance(v, float)}
                     for task, figures in found["results"].items()},
        "per_item": per_item, "per_item_weight": weights, "item_hash": hashes, "answers": answers,
    }


def _pooled_stderr(items: dict[str, float]) -> float | None:
    """Standard error of the mean, variances pooled over the subtasks that items (``subtask/number``) belong to."""
    groups: dict[str, list[float]] = {}
    for item, value in items.items():
        groups.setdefault(item.rpartition("/")[0], []).append(value)
    free = len(items) - len(groups)
    if free < 1:
        return None
    squares = sum(float(np.square(np.array(g) - np.mean(g)).sum()) for g in groups.values())
    return float(np.sqrt(squares / free / len(items)))


def _tokens(model: Any, tokenizer: Any, request: Request, options: argparse.Namespace) -> dict[str, Any]:
    from tqdm import tqdm

    text = text_of(options.data)
    block = _block(model.config, options)
    blocks = list(tqdm(
        token_perplexity(model, tokenizer, text, block=block, stride=options.stride, limit=options.limit), unit="block",
        desc="token perplexity",
    ))
    if not blocks:
        raise ConfigError(f"{request.label}: the text has no token to score")
    name = "token_perplexity"
    return {
        "metrics": {name: perplexity(blocks)}, "stderr": {}, "n": len(blocks), "shots": [0], "block": block,
        "tokens": int(sum(b["tokens"] for b in blocks)),
        "per_item": {name: {f"block/{i}": -b["nll"] for i, b in enumerate(blocks)}},
        "per_item_weight": {f"{name}|block/{i}": b["tokens"] for i, b in enumerate(blocks)},
        "item_hash": {f"block/{i}": f"{block}-{options.stride}-{int(b['tokens'])}" for i, b in enumerate(blocks)},
    }


if __name__ == "__main__":
    sys.exit(main())
