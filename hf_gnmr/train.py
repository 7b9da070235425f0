"""One recipe, one run: ``accelerate launch -m hf_gnmr.train RECIPE [section.key=value ...]``.

Everything that can be wrong is checked before the model is loaded, in this order: the recipe, the training arguments, the
controller's settings, the output folder, the data source.  A run leaves in its output folder: ``recipe.yaml`` (as resolved),
``environment.json``, ``trace.jsonl``, ``summary.json``, ``results.json`` (peak memory, held-out figures) and the adapter.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed

from . import __version__
from .backends.int8 import silence_cast_notes
from .callback import TRACE_FILE, GNMRCallback
from .config import ConfigError, SetupError
from .data import check_source, encode, load_rows
from .models import add_adapters, load_base, load_tokenizer, model_source
from .recipe import Recipe, RecipeError, find_recipe, load_recipe
from .trace import TraceError, write_json

LEFT_BY_A_RUN = (TRACE_FILE, "summary.json", "results.json", "recipe.yaml", "environment.json", "adapter_model.safetensors")


class GNMRTrainer(Trainer):
    """The Trainer, with the controller's latest figures among its logs (log_history, TensorBoard, W&B, Trackio)."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, GNMRCallback):
                    logs = {**logs, **callback.scalars()}
        super().log(logs, start_time)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status (2: something to mend, told in one line)."""
    parser = argparse.ArgumentParser(prog="hf_gnmr.train", description="Train from a recipe.")
    parser.add_argument("recipe", help="a YAML file, or the name of a recipe that comes with the package")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the recipe's")
    options = parser.parse_args(argv)
    try:
        train(load_recipe(find_recipe(options.recipe), options.overrides))
    except (ConfigError, SetupError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def train(recipe: Recipe) -> dict[str, Any]:
    """Run a recipe.

    Returns:
        peak memory and, where asked for, the held-out figures.

    Raises:
        ConfigError, SetupError: before training starts; see the module's docstring for the order.
    """
    if not torch.cuda.is_available() and not _other_accelerator():
        recipe.training.setdefault("use_cpu", True)
    recipe.training.setdefault("prediction_loss_only", True)  # evaluation would keep the logits of all rows
    try:
        arguments = TrainingArguments(**recipe.training)
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(f"training: {error}") from error
    callback = GNMRCallback(
        recipe.gnmr,
        backend=recipe.backend.name,
        trigger=recipe.trigger.name,
        recovery=recipe.backend.recovery,
        recovery_source=recipe.backend.recovery_source,
        eval_path=recipe.backend.eval_path,
        layers=recipe.model.layers,
    )
    check_source(recipe.data)
    if arguments.eval_strategy != "no" and not recipe.data.eval_rows:
        raise RecipeError(f"training.eval_strategy={recipe.training['eval_strategy']!r} needs data.eval_rows above 0")
    process = PartialState()
    checkpoint = None
    if process.is_main_process:
        prepare_output(recipe, arguments.output_dir)
    process.wait_for_everyone()
    if recipe.run.resume:
        checkpoint = checkpoint_to_resume(recipe, arguments.output_dir)
    say = print if process.is_main_process else _silent
    say(recipe.to_yaml(), end="")
    say(environment_in_words(arguments))

    source = model_source(recipe.model)
    tokenizer = load_tokenizer(source, recipe.model)
    rows, held_out = load_rows(recipe.data, arguments.seed)
    with process.main_process_first():
        training_set, counts = encode(rows, tokenizer, recipe.data.max_length)
        held_out_set, held_out_counts = encode(held_out, tokenizer, recipe.data.max_length) if held_out else (None, None)
    say(f"data: {counts.in_words()}")
    if held_out_counts is not None:
        say(f"held out: {held_out_counts.in_words()}")
    if process.is_main_process:
        folder = Path(arguments.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        write_json(folder / "environment.json", environment(arguments, counts.to_dict()))

    set_seed(arguments.seed)
    model = add_adapters(load_base(source, recipe.model, recipe.backend.name), recipe.lora, arguments.seed)
    model.config.use_cache = False
    set_seed(arguments.seed)  # so that dropout does not depend on how many numbers loading took
    trainer = GNMRTrainer(
        model=model,
        args=arguments,
        train_dataset=training_set,
        eval_dataset=held_out_set,
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100),
        processing_class=tokenizer,
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(arguments.output_dir)
    results = peak_memory()
    if held_out:
        silence_cast_notes()
        results |= held_out_figures(trainer, recipe, held_out)
    if process.is_main_process:
        write_json(Path(arguments.output_dir) / "results.json", results)
        say(f"results: {', '.join(f'{key} {value}' for key, value in results.items())}")
        say(f"files are in {arguments.output_dir}")
    return results


def prepare_output(recipe: Recipe, output_dir: str) -> None:
    """Refuse an output folder that holds a run, or move that run aside, as `run` says.

    Raises:
        RecipeError: it holds a run and neither `run.overwrite` nor `run.resume` is given.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"training.output_dir={output_dir!r} is not a folder")
    found = [name for name in LEFT_BY_A_RUN if (folder / name).exists()]
    found += [p.name for p in folder.glob("checkpoint-*")] if folder.is_dir() else []
    if not found or recipe.run.resume:
        return
    if not recipe.run.overwrite:
        raise RecipeError(
            f"training.output_dir={output_dir!r} holds a run already ({', '.join(found[:3])}): give another folder, "
            "run.resume=auto to go on with it, or run.overwrite=true to move it aside"
        )
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    os.replace(folder, aside)
    print(f"the run in {folder} was moved to {aside}", flush=True)


def checkpoint_to_resume(recipe: Recipe, output_dir: str) -> str | None:
    """The checkpoint that `run.resume` asks for; None: there is none yet and `auto` starts anew.

    Raises:
        RecipeError: a path that is no whole checkpoint.
    """
    if recipe.run.resume == "auto":
        whole = [p for p in Path(output_dir).glob("checkpoint-*") if is_whole(p) and p.name.split("-")[1].isdigit()]
        return str(max(whole, key=lambda p: int(p.name.split("-")[1]))) if whole else None
    path = Path(str(recipe.run.resume))
    if not is_whole(path):
        raise RecipeError(f"run.resume={str(path)!r}: not a whole checkpoint (no trainer_state.json in it)")
    return str(path)


def is_whole(checkpoint: Path) -> bool:
    """The Trainer writes trainer_state.json last, so a checkpoint that has one is whole."""
    return (checkpoint / "trainer_state.json").is_file()


def peak_memory() -> dict[str, int]:
    """Peak memory of the training so far: the allocator's on a GPU, the whole process's resident set elsewhere."""
    if torch.cuda.is_available():
        return {"peak_device_bytes": torch.cuda.max_memory_allocated()}
    try:
        import resource
    except ImportError:  # not on Windows
        return {}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def held_out_figures(trainer: Trainer, recipe: Recipe, held_out: list[dict[str, str]]) -> dict[str, Any]:
    """Loss and, where asked for, exact match on the held-out rows, by the model as it is after training."""
    figures: dict[str, Any] = {
        "eval_loss": trainer.evaluate()["eval_loss"],
        "eval_rows": len(held_out),
        "evaluated_on": "bitsandbytes INT8" if recipe.backend.name == "int8" else "BF16",
    }
    if recipe.data.generate_rows and trainer.is_world_process_zero():
        rows = held_out[: recipe.data.generate_rows]
        start = time.perf_counter()
        right = exact_matches(trainer.model, trainer.processing_class, rows, recipe)
        figures |= {
            "exact_match": right / len(rows),
            "generate_rows": len(rows),
            "generate_seconds": round(time.perf_counter() - start, 1),
        }
    return figures


def exact_matches(model: Any, tokenizer: Any, rows: list[dict[str, str]], recipe: Recipe) -> int:
    """How many rows greedy decoding answers with the same final answer as the reference."""
    marker = recipe.data.answer_marker
    model.eval()
    model.config.use_cache = True
    right = 0
    side, tokenizer.padding_side = tokenizer.padding_side, "left"
    for first in range(0, len(rows), 32):
        batch = rows[first : first + 32]
        inputs = tokenizer([row["prompt"] for row in batch], return_tensors="pt", padding=True).to(model.device)
        inputs.pop("token_type_ids", None)
        with torch.no_grad():
            output = model.generate(
                **inputs,
                max_new_tokens=recipe.data.max_new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(
            final_answer(text, marker) == final_answer(row["answer"], marker)
            for text, row in zip(texts, batch, strict=True)
        )
    tokenizer.padding_side = side
    return right


def final_answer(text: str, marker: str) -> str | None:
    """What follows the last marker on its line, without thousands separators; the whole text where no marker is used."""
    if not marker:
        return text.strip()
    _, found, rest = text.rpartition(marker)
    if not found:
        return None
    return rest.strip().split("\n")[0].strip().replace(",", "")


def environment(arguments: TrainingArguments, data: dict[str, int]) -> dict[str, Any]:
    """What the run ran on, and what became of its data."""
    packages = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "datasets", "safetensors", "numpy")
    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "hf_gnmr": __version__,
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "processor": processor(),
        "device": str(arguments.device),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "world_size": arguments.world_size,
        "precision": arguments.mixed_precision if hasattr(arguments, "mixed_precision") else None,
        "seed": arguments.seed,
        "data": data,
    }


def environment_in_words(arguments: TrainingArguments) -> str:
    return (
        f"runs on: {arguments.device} ({processor()}, {torch.get_num_threads()} threads), "
        f"world size {arguments.world_size}, "
        f"autocast {'bf16' if arguments.bf16 else 'fp16' if arguments.fp16 else 'off'}, torch {torch.__version__}"
    )


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _other_accelerator() -> bool:
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return accelerator is not None and accelerator.type != "cpu"


def _silent(*values: Any, **options: Any) -> None:
    """For all ranks but the first."""


if __name__ == "__main__":
    sys.exit(main())
