"""``hf-gnmr eval RUN ...``: fine-tuned runs, adapters or base models on downstream tasks, through lm-eval.

A RUN is the output folder of a training, a PEFT adapter's folder (with its base), or a base model.  The model is built here
and passed to lm-eval, whose own arguments cannot build an 8-bit one.  It is loaded once per run and precision.  Each task's
figures and per-item results go to a separate file when the task is done: a finished task is not evaluated again.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
import time
from pathlib import Path

import torch

from ..backends.bf16_cpu import KERNELS, choose, float32_kernels
from ..backends.bnb.int8 import cast_notes_silenced
from ..config import MAX_COUNT, ConfigError, SetupError, refusing
from ..files import FileError, free_name, write_json
from ..run.environment import machine
from ..terminal import TRACEBACK, TRACEBACK_HELP, cleaned, refused, shown
from .compare import check_output, write
from .data import BUILTIN, check_shots, splits_of
from .harness import harness_tasks, run_task
from .models import adapter_effect, build
from .plan import Plan, plan_of, version_of
from .subjects import PRECISIONS, Subject, resolve, with_trust
from .tasks import OPTIONS, Request, default_tasks, names_taking, parse_tasks, subject_forms

MAX_GEN_TOKENS = 256
DTYPES = ("bfloat16", "float16", "float32")


@cleaned
def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (2: something to fix)."""
    options = _parser().parse_args(argv)
    try:
        requests, subjects = _checked(options)
        if options.output is not None:
            check_output(Path(options.output))
        plans = [plan_of(subject, requests, options) for subject in subjects]
        emulated, line = choose(options.bf16_products, "cuda" if torch.cuda.is_available() else "cpu")
        if emulated:
            print(line, flush=True)
        with float32_kernels(emulated):
            for plan in plans:
                evaluate(plan, options)
        folders = [plan.folder for plan in plans]
        output = Path(options.output or (folders[0] if len(folders) == 1 else "eval-results"))
        write(folders, None, output, {(plan.precision, request.label) for plan in plans for request in requests})
    except (ConfigError, SetupError, FileError) as error:
        return refused(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-gnmr eval", description="Downstream evaluation of runs.")
    add = parser.add_argument
    defaults, forms = default_tasks(), ", ".join(subject_forms())
    add("runs", nargs="+", metavar="RUN", help="a run's folder, an adapter's folder, or a base model")
    add("--tasks", nargs="+", default=defaults, help=f"default: {' '.join(defaults)}; also {forms}")
    add("--data", help=f"folder with the tasks' files, or {BUILTIN} (a few rows: smoke, no results); default: the Hub")
    add("--limit", type=int, help="items per task at most (per subject for mmlu, blocks for wikitext_tokens)")
    add("--shots", type=int, help=f"few-shot examples ({names_taking('shots')}); default: lm-eval's own (GSM8K 5, MMLU 0)")
    add("--batch-size", type=int, default=8)
    add("--precision", choices=PRECISIONS, help="default: the path that the run was trained on")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of everything that is not 8-bit")
    add("--bf16-products", choices=KERNELS, default="auto", help="who multiplies BF16 on a CPU, as run.bf16_products")
    add("--base", help="the adapter's base model, where the name it recorded does not lead there")
    add("--block", type=int, help=f"{names_taking('block')}: tokens per block; default: 2048 or the model's length")
    add("--stride", type=int, help=f"{names_taking('stride')}: tokens between blocks; default: no overlap")
    add("--max-gen-tokens", type=int, help=f"{names_taking('max_gen_tokens')}: tokens per answer at most (default 256)")
    add("--chat-template", action="store_true", help="put prompts into the tokenizer's chat template")
    add("--output", help="folder for results; default: RUN/eval, or eval-results/NAME-… for a base model")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model, if you trust its author")
    add("--offline", action="store_true", help="no network: nothing is requested from the Hub")
    add(TRACEBACK, action="store_true", help=TRACEBACK_HELP)
    return parser


def _checked(options: argparse.Namespace) -> tuple[list[Request], list[Subject]]:
    """Tasks and subjects, with every error that can be detected before a model is looked at.

    Sets `options.max_gen_tokens` where it was not given.
    """
    if options.offline:
        go_offline()
        if options.data is None:
            raise ConfigError(f"--offline needs --data: a folder with the tasks' files, or {BUILTIN}")
    requests = parse_tasks(options.tasks)
    for name in ("limit", "batch_size", "block", "stride", "max_gen_tokens"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= MAX_COUNT:
            raise ConfigError(f"{_flag(name)} {shown(value)}: expected a whole number above 0, at most {MAX_COUNT:,}")
    subjects = [with_trust(resolve(run, options.base, options.precision), options.trust_remote_code) for run in options.runs]
    if any(request.task.by_lm_eval for request in requests) and not importlib.util.find_spec("lm_eval"):
        raise ConfigError("these tasks need lm-eval: pip install 'hf-gnmr[eval]'")
    _name_options_without_effect(requests, options)
    for request in requests:
        splits = splits_of(request, options.data)
        check_shots(request, splits, options.shots)
        if splits is not None and request.task.by_lm_eval:
            harness_tasks(request, options.data)
    options.max_gen_tokens = options.max_gen_tokens or MAX_GEN_TOKENS
    places = [subject.place for subject in subjects]
    repeated = next((subject.label for i, subject in enumerate(subjects) if subject.place in places[:i]), None)
    if repeated is not None:
        raise ConfigError(f"{repeated}: given twice")
    return requests, subjects


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _name_options_without_effect(requests: list[Request], options: argparse.Namespace) -> None:
    for option in OPTIONS:
        value = getattr(options, option)
        if value is None or value is False:
            continue
        unaffected = [request.label for request in requests if not request.task.takes(option)]
        if unaffected:
            print(f"{_flag(option)} does not apply to {', '.join(unaffected)}", flush=True)


def go_offline() -> None:
    """Switch the Hub off in this process, whose libraries have read the environment already."""
    import datasets
    import huggingface_hub

    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True


def evaluate(plan: Plan, options: argparse.Namespace) -> None:
    """Evaluate what is pending, and write one file per task."""
    if not plan.pending:
        return
    subject, precision = plan.subject, plan.precision
    # Definitions and rows are put together before the model is loaded, so that their errors come first.
    with refusing("the tasks' rows cannot be read (--data; default: from the Hub)"):
        tasks = {p.request: harness_tasks(p.request, options.data) for p in plan.pending if p.request.task.by_lm_eval}
    model, tokenizer, description = build(subject, precision, options.dtype)
    print(f"{subject.label}: {description}", flush=True)
    autocast = subject.autocast(options.dtype)
    effect = adapter_effect(model, autocast) if subject.adapter is not None else None
    if effect == 0.0:
        print(f"{subject.label}: ADAPTER WITHOUT EFFECT: it changes no logit of a fixed input", flush=True)
    for pending in plan.pending:
        request, file = pending.request, pending.file
        start = time.perf_counter()
        print(f"{subject.label}, {precision}, {request.label} ...", flush=True)
        with cast_notes_silenced():
            figures = run_task(model, tokenizer, request, tasks.get(request, {}), options, autocast)
        if figures.get("truncated"):
            print(
                f"  {figures['truncated']} of {figures['n']} prompts were cut on the left, too long for the model",
                flush=True,
            )
        if file.is_file():
            os.replace(file, free_name(file))
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(
            file,
            {
                "run": subject.label,
                "base": subject.section.name,
                "precision": precision,
                "model": description,
                "task": request.label,
                "in_bf16": not subject.int8 and options.dtype == "bfloat16",
                "smoke": options.data == BUILTIN,
                "key": pending.key,
                "adapter_effect": effect,
                "seconds": round(time.perf_counter() - start, 1),
                "batch_size": options.batch_size,
                "machine": machine(),
                "lm_eval": version_of("lm_eval"),
                **figures,
            },
        )
        summary = ", ".join(f"{metric} {value:.4f}" for metric, value in figures["metrics"].items())
        print(f"  {summary} (n {figures['n']}) -> {file}", flush=True)
    # Adapted models are reference cycles: without a collection the next run's model would be loaded beside this one.
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
