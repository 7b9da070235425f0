"""``hf-gnmr eval RUN ...``: fine-tuned runs, adapters or base models on the four downstream tasks, through lm-eval.

A RUN is an output folder of ours, a PEFT adapter's folder (with its base), or a base model.  The model is built here and
handed to lm-eval, since its own arguments cannot build an 8-bit one; it is loaded once for a run and precision, and each
task's figures and per-item results go to a file of their own when the task is done: a finished one is not evaluated again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .backends.int8 import Int8Backend, cast_notes_silenced
from .config import ConfigError, SetupError
from .environment import machine
from .models import load_adapter, load_base, load_tokenizer, model_source
from .recipe import ModelSection, Recipe, load_recipe
from .tasks import BUILTIN, NAMES, Request, harness_tasks, parse_tasks, perplexity, splits_of, token_perplexity
from .trace import TraceError, free_name, read_json, read_trace, write_json
from .units import find_units

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
    parser.add_argument("--output", help="folder for results; default: RUN/eval, or eval-results/NAME for a base model")
    parser.add_argument("--offline", action="store_true", help="no network: nothing is asked of the Hub")
    options = parser.parse_args(argv)
    if options.offline:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    try:
        requests = parse_tasks(options.tasks)
        for name in ("limit", "batch_size", "block", "stride", "max_gen_tokens"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: a whole number above 0 is allowed")
        if options.shots is not None and options.shots < 0:
            raise ConfigError(f"--shots {options.shots}: 0 or more is allowed")
        for request in requests:
            splits_of(request, options.data)  # missing files are told before a model is loaded
        subjects = [resolve(run, options.base, options.precision) for run in options.runs]
        folders = []
        for subject in subjects:
            folders.append(evaluate(subject, requests, options))
    except (ConfigError, SetupError, TraceError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    from .compare import main as compare

    return compare([str(folder) for folder in folders])


def resolve(run: str, base: str | None, precision: str | None) -> Subject:
    """What a RUN on the command line is.

    Raises:
        ConfigError: a folder that is none of the three kinds, or a run without an adapter.
    """
    folder = Path(run).expanduser()
    adapter = folder / "adapter_model.safetensors"
    if (folder / "recipe.yaml").is_file():
        recipe = load_recipe(folder / "recipe.yaml")
        if not adapter.is_file():
            raise ConfigError(f"{run}: no adapter_model.safetensors in it: the run is not finished")
        return Subject(run, recipe.model, folder, recipe.backend.name == "int8", recipe)
    if (folder / "adapter_config.json").is_file():
        if not adapter.is_file():
            raise ConfigError(f"{run}: adapter_config.json without adapter_model.safetensors")
        name = base or read_json(folder / "adapter_config.json").get("base_model_name_or_path")
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


def evaluate(subject: Subject, requests: list[Request], options: argparse.Namespace) -> Path:
    """Evaluate what is not there yet; returns the folder of the results."""
    precision = options.precision or subject.precision
    if precision == "final" and subject.recipe is None:
        raise ConfigError(f"--precision final: {subject.label} is no run of ours, its last active set is not known")
    if precision != "recovery" and not subject.int8:
        raise ConfigError(f"--precision {precision}: {subject.label} was trained in BF16; only recovery is that model")
    folder = Path(options.output) if options.output else _folder_for(subject)
    if options.output and len(options.runs) > 1:
        folder = folder / Path(subject.label).name
    settings = {
        "limit": options.limit, "shots": options.shots, "dtype": options.dtype, "data": options.data or "Hub",
        "block": options.block, "stride": options.stride, "max_gen_tokens": options.max_gen_tokens,
        "chat_template": options.chat_template,
    }
    wanted = []
    for request in requests:
        file = folder / precision / f"{request.label.replace(':', '-')}.json"
        if file.is_file() and read_json(file).get("settings") == settings:
            print(f"{subject.label}, {precision}, {request.label}: there already ({file})", flush=True)
        else:
            wanted.append((request, file))
    if not wanted:
        return folder
    model, tokenizer, what = build(subject, precision, options.dtype)
    print(f"{subject.label}: {what}", flush=True)
    if options.chat_template and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"--chat-template: the tokenizer of {subject.section.name} has none")
    effect = adapter_effect(model) if subject.adapter is not None else None
    if effect == 0.0:
        print(f"{subject.label}: ADAPTER WITHOUT EFFECT: it changes no logit; these are the base model's scores", flush=True)
    for request, file in wanted:
        start = time.perf_counter()
        print(f"{subject.label}, {precision}, {request.label} ...", flush=True)
        with cast_notes_silenced():
            found = run_task(model, tokenizer, request, options)
        if file.is_file():
            os.replace(file, free_name(file))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {
            "run": subject.label, "base": subject.section.name, "precision": precision, "model": what, "task": request.label,
            "smoke": options.data == BUILTIN, "settings": settings, "adapter_effect": effect,
            "seconds": round(time.perf_counter() - start, 1), "batch_size": options.batch_size, "machine": machine(),
            "lm_eval": importlib.metadata.version("lm_eval"), **found,
        })
        print(f"  {', '.join(f'{k} {v:.4f}' for k, v in found['metrics'].items())} (n {found['n']}) -> {file}", flush=True)
    return folder


def _folder_for(subject: Subject) -> Path:
    if subject.adapter is not None:
        return subject.adapter / EVAL_FOLDER
    return Path("eval-results") / Path(subject.label).name


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
        load_adapter(model, str(subject.adapter), subject.label)
    model.eval()
    if torch.cuda.is_available():
        model.to("cuda")
    kind = f"{'adapter over ' if subject.adapter is not None else ''}{subject.section.name}"
    if not subject.int8:
        return model, tokenizer, f"{kind}, {dtype}"
    if precision == "low":
        return model, tokenizer, f"{kind}, bitsandbytes INT8 everywhere"
    units = find_units(model)
    backend = Int8Backend(model, units, eval_path="active", recovery_source=_source(subject))
    if precision == "recovery":
        active = backend.recoverable
    else:
        assert subject.adapter is not None
        lines = read_trace(subject.adapter / "trace.jsonl").steps
        active = np.zeros(len(units), dtype=bool)
        active[lines[-1]["active"] if lines else []] = True
    backend.reserve(int(active.sum()))
    backend.apply(active)
    layers = [unit.layer for unit, on in zip(units, active, strict=True) if on]
    return model, tokenizer, f"{kind}, INT8 with layers {layers} in BF16" if precision == "final" else (
        f"{kind}, every layer of the 8-bit model on its BF16 path"
    )


def _source(subject: Subject) -> str | None:
    return None if subject.recipe is None else subject.recipe.backend.recovery_source


def adapter_effect(model: Any) -> float:
    """Largest change of a logit that the adapter makes on a fixed input; 0.0: none."""
    ids = torch.arange(5, 21, device=model.device)[None]
    with torch.no_grad(), cast_notes_silenced():
        on = model(input_ids=ids).logits
        with model.disable_adapter():
            off = model(input_ids=ids).logits
    return float((on - off).abs().max())


def run_task(model: Any, tokenizer: Any, request: Request, options: argparse.Namespace) -> dict[str, Any]:
    """`metrics`, `stderr`, `n`, `shots`, `per_item` (metric -> scores by item) and what else belongs to the figures."""
    if request.name == "wikitext_tokens":
        return _tokens(model, tokenizer, request, options)
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    tasks = harness_tasks(request, options.data)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size)
    shots = options.shots if request.name in ("gsm8k", "mmlu") else None
    found = evaluator.simple_evaluate(
        model=lm, tasks=list(tasks.values()), num_fewshot=shots, limit=options.limit, bootstrap_iters=1000,
        apply_chat_template=options.chat_template,
        gen_kwargs=f"max_gen_toks={options.max_gen_tokens}" if request.name == "gsm8k" else None,
    )
    per_item: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    for task, samples in found["samples"].items():
        for sample in samples:
            item = f"{task}/{sample['doc_id']}"
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
            # MMLU's subjects weigh as many as their items, as lm-eval's own group does.
            metrics[name] = float(values.mean())
            stderr[name] = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    fewshot = {task: config.get("num_fewshot") for task, config in found["configs"].items()}
    return {
        "metrics": metrics, "stderr": stderr, "n": len(next(iter(per_item.values()))),
        "shots": sorted({0 if n is None else n for n in fewshot.values()}),
        "subtasks": {task: {k: v for k, v in figures.items() if isinstance(v, float)}
                     for task, figures in found["results"].items()},
        "per_item": per_item, "per_item_weight": weights,
    }


def _tokens(model: Any, tokenizer: Any, request: Request, options: argparse.Namespace) -> dict[str, Any]:
    from tqdm import tqdm

    rows = splits_of(request, options.data)
    if rows is None:
        from datasets import load_dataset

        text = "".join(load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")["text"])
    else:
        text = "".join(row["page"] for row in rows["test"])
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", 2048) or 2048
    block = options.block or min(2048, longest)
    if block > longest:
        raise ConfigError(f"--block {block}: the model takes {longest} tokens")
    if options.stride is not None and options.stride > block:
        raise ConfigError(f"--stride {options.stride}: at most the block's length, {block}")
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
    }


if __name__ == "__main__":
    sys.exit(main())
