"""The 20-step trajectory that changes are compared with: how it is run, and how it is recorded again.

    python tests/run/trajectory.py        # writes tests/run/trajectory.json

Record it again only when the numbers are meant to change, and say why in the commit.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
FILE = pathlib.Path(__file__).with_name("trajectory.json")
FIELDS = ("step", "loss", "grad_norm", "norms", "risk", "triggered", "active")
OVERRIDES = [
    "training.max_steps=20",
    "training.gradient_accumulation_steps=2",
    "training.per_device_train_batch_size=2",
    "training.learning_rate=3e-3",
    "training.bf16=true",
    "gnmr.max_o=2",
    "gnmr.alpha=1.0",
    "gnmr.alpha_init=1.2",
    "gnmr.alpha_init_fraction=0.1",
    "gnmr.beta=1.1",
    "gnmr.delta=3",
    "lora.r=4",
]


def run(model: str, rows: str, folder: pathlib.Path) -> list[dict]:
    """Train through the command line; the trace's lines, reduced to FIELDS."""
    recipe = folder / "trajectory.yaml"
    recipe.write_text(
        f"model: {{name: {model}}}\n"
        f'data: {{name: {rows}, prompt: "Question: {{question}}\\nAnswer:", answer: " {{answer}}", max_length: 96}}\n'
        "training: {logging_steps: 1, save_strategy: no, report_to: none, seed: 0, use_cpu: true, disable_tqdm: true}\n"
    )
    command = [sys.executable, "-m", "hf_gnmr.train", str(recipe), f"training.output_dir={folder / 'run'}", *OVERRIDES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=600)
    lines = (folder / "run" / "trace.jsonl").read_text().splitlines()[1:]
    return [{field: json.loads(line)[field] for field in FIELDS} for line in lines]


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")}


def main() -> None:
    from conftest import byte_tokenizer, save_llama, write_rows

    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        model = save_llama(root / "llama", vocab_size=288, eos_token_id=2, bos_token_id=1)
        byte_tokenizer().save_pretrained(model)
        lines = run(model, write_rows(root / "sums.jsonl"), root)
    text = ",\n".join(json.dumps(line) for line in lines)
    FILE.write_text(f'{{"versions": {json.dumps(versions())},\n"steps": [\n{text}\n]}}\n')
    print(f"{FILE}: {len(lines)} steps, {sum(bool(line['active']) for line in lines)} with an active set")


if __name__ == "__main__":
    main()
