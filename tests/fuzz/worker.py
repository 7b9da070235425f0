"""The process that tries the cases: ``python worker.py FOLDER`` reads ids from its input, and writes an outcome a line.

Everything is imported once, and the weights of the tiny model are never run here: a process with autograd's threads must not
fork.  ``python worker.py FOLDER --all`` tries every case and prints a table.
"""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.pop("WORLD_SIZE", None)

import contextlib
import importlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[0] = str(TESTS)
sys.path.insert(1, str(TESTS.parent))

from fuzz.cases import all_cases  # noqa: E402
from fuzz.harness import GOOD, KINDS, Case, Outcome, Place, attempt  # noqa: E402

IMPORTS = (
    "bitsandbytes", "datasets", "lm_eval",
    "lm_eval.tasks", "lm_eval.evaluator", "lm_eval.models.huggingface",
    "matplotlib.pyplot", "matplotlib.backends.backend_svg", "peft", "pyarrow.parquet",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.integrations.bitsandbytes", "torch._dynamo",
    "hf_gnmr.train", "hf_gnmr.run.plan", "hf_gnmr.evaluation.evaluate", "hf_gnmr.evaluation.compare", "hf_gnmr.trace.report",
    "hf_gnmr.trace.follow", "hf_gnmr.trace.replay", "hf_gnmr.trace.calibrate", "hf_gnmr.trace.diagnose",
    "hf_gnmr.training.session", "hf_gnmr.backends.bnb.convert", "hf_gnmr.backends.bnb.switchable", "hf_gnmr.run.heldout",
    "transformers.integrations.integration_utils", "torch.distributed.fsdp", "tokenizers",
)  # fmt: skip
LOADED: list[str] = []
"""What has loaded weights, in the process of a case."""


def mark(module: str, name: str) -> None:
    """Let a function that loads weights note when it has done so."""
    owner = importlib.import_module(module)
    load = getattr(owner, name)

    def marked(*arguments: Any, **options: Any) -> Any:
        result = load(*arguments, **options)
        LOADED.append(name)
        return result

    setattr(owner, name, marked)


def prepare(shared: Path) -> None:
    """Import everything, and make what all cases share."""
    with contextlib.redirect_stderr(io.StringIO()):
        for module in IMPORTS:
            importlib.import_module(module)
    import torch
    from conftest import save_llama, write_rows

    from hf_gnmr.run.builtin import byte_tokenizer
    from hf_gnmr.run.plan import main as plan

    torch.set_num_threads(1)
    mark("hf_gnmr.run.prepare", "load_base")
    mark("hf_gnmr.run.prepare", "build_from_scratch")
    mark("hf_gnmr.evaluation.evaluate", "build")
    if not (shared / "ready").exists():
        save_llama(shared / "model", vocab_size=288, eos_token_id=2, bos_token_id=1, num_hidden_layers=2)
        byte_tokenizer().save_pretrained(shared / "model")
        write_rows(shared / "rows.jsonl")
        stored = TESTS / "stored"
        shutil.copytree(stored / "traces", shared / "traces")
        shutil.copytree(stored / "evaluation", shared / "results")
        (shared / "ready").touch()
    from fuzz.recipes import base_recipe, dumped

    # What transformers and pydantic import and build at their first use.
    place = Place(shared / "first", shared)
    with contextlib.redirect_stdout(io.StringIO()):
        recipe = place.file("r.yaml", dumped(base_recipe(place)))
        assert plan([recipe]) == 0
        from transformers import AutoTokenizer, TrainingArguments

        TrainingArguments(output_dir=str(shared / "first"), use_cpu=True, report_to="none")
        AutoTokenizer.from_pretrained(shared / "model")
    shutil.rmtree(shared / "first")


def train_shared(shared: Path) -> None:
    """A finished run with a checkpoint, made in a fork: this process must stay without autograd's threads."""
    if (shared / "run" / "summary.json").exists():
        return
    from fuzz.recipes import base_recipe, dumped

    child = os.fork()
    if child == 0:
        try:
            log = os.open(shared / "run.log", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            from hf_gnmr.train import main

            place = Place(shared, shared)
            values = base_recipe(place)
            values["training"] |= {
                "output_dir": str(shared / "run"), "max_steps": 2, "save_strategy": "steps", "save_steps": 1,
            }  # fmt: skip
            main([place.file("run.yaml", dumped(values))])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (shared / "run" / "summary.json").exists(), (shared / "run.log").read_text()


def tried(case: Case, folder: Path, shared: Path) -> Outcome:
    return attempt(case, Place(folder / "case", shared), lambda: bool(LOADED))


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    shared = folder / "shared"
    shared.mkdir(parents=True, exist_ok=True)
    prepare(shared)
    train_shared(shared)
    cases = {case.id: case for case in all_cases()}
    place = Path(tempfile.mkdtemp(dir=folder))
    if "--all" in sys.argv or "--match" in sys.argv:
        match = sys.argv[sys.argv.index("--match") + 1] if "--match" in sys.argv else ""
        outcomes = []
        for case in cases.values():
            if match in case.id:
                outcomes.append(tried(case, place, shared))
                if outcomes[-1].kind not in GOOD or "--verbose" in sys.argv:
                    print(outcomes[-1].to_json(), flush=True)
        for kind in KINDS:
            print(f"{kind:10} {sum(o.kind == kind for o in outcomes)}")
        with (folder / "all.json").open("w") as file:
            json.dump([json.loads(o.to_json()) for o in outcomes], file, indent=1)
        return 0
    print("ready", flush=True)
    for line in sys.stdin:
        print(tried(cases[line.strip()], place, shared).to_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
