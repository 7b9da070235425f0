"""Makes the stored runs that later versions must go on reading: checkpoints, traces, session states.

    cd $(mktemp -d) && PYTHONPATH=REPOSITORY python REPOSITORY/tests/stored/make.py

What is here was written by version 0.1.0 at commit 4776f7d, before its modules were moved into wings.  Do not make it anew
with newer code: that an *old* file is still read is what the tests are for.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

ELSEWHERE = "/elsewhere"
"""Stands for the folder in which the runs were made."""
KEPT = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "gnmr_trigger.safetensors",
)
COMMON = [
    "training.max_steps=8",
    "training.save_strategy=steps",
    "training.save_steps=4",
    "training.per_device_train_batch_size=2",
    "training.learning_rate=3e-3",
    "training.bf16=true",
    "gnmr.max_o=1",
    "gnmr.alpha=1.0",
    "gnmr.alpha_init=1.2",
    "gnmr.alpha_init_fraction=0.25",
    "gnmr.beta=1.1",
    "gnmr.delta=3",
    "lora.r=2",
    "lora.target_modules=[q_proj, down_proj]",
]
RUNS = {
    "int8_gnmr": [],
    "int8_random": ["trigger.name=random", "trigger.promotion_ratio=0.25", "backend.recovery=device"],
    "activation_gsnr": ["backend.name=activation", "trigger.name=gsnr", "backend.unit=layer"],
    "fp8_static": ["backend.name=fp8", "backend.emulate=true", "trigger.name=static", "trigger.warmup=2"],
    "lowbit_listed": ["backend.name=lowbit", "trigger.name=listed", "trigger.units=['*.1']"],
}


def setting(folder: pathlib.Path) -> None:
    """The model, the rows and the recipe that the runs were begun with, in a folder."""
    from conftest import byte_tokenizer, save_llama, write_rows

    model = save_llama(folder / "llama", vocab_size=288, eos_token_id=2, bos_token_id=1)
    byte_tokenizer().save_pretrained(model)
    write_rows(folder / "sums.jsonl")
    (folder / "stored.yaml").write_text(
        "model: {name: ./llama}\n"
        'data: {name: sums.jsonl, prompt: "Question: {question}\\nAnswer:", answer: " {answer}", max_length: 96}\n'
        "training: {logging_steps: 1, report_to: none, seed: 0, use_cpu: true, disable_tqdm: true}\n"
    )


def overrides(name: str) -> list[str]:
    return [f"training.output_dir={name}", *COMMON, *RUNS[name]]


def main() -> None:
    folder = pathlib.Path.cwd()
    setting(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in RUNS:
        command = [sys.executable, "-m", "hf_gnmr.train", "stored.yaml", *overrides(name)]
        subprocess.run(command, check=True, env=environment)
        target = HERE / name
        shutil.rmtree(target, ignore_errors=True)
        (target / "checkpoint-4").mkdir(parents=True)
        for file in KEPT:
            source = folder / name / "checkpoint-4" / file
            if source.is_file():
                shutil.copy(source, target / "checkpoint-4" / file)
        for file in ("recipe.yaml", "trace.jsonl", "summary.json"):
            shutil.copy(folder / name / file, target / file)
        for file in target.rglob("*.json*"):
            text = file.read_text()
            if str(folder) in text:
                file.write_text(text.replace(str(folder), ELSEWHERE))
    traces(HERE / "traces")
    (HERE / "sessions.json").write_text(json.dumps(sessions(), indent=1) + "\n")


def traces(folder: pathlib.Path) -> None:
    """A short trace of each trigger, from norms of a known kind."""
    import numpy as np
    from synthetic import stationary, write_trace

    folder.mkdir(exist_ok=True)
    norms = stationary(12, 4, spikes=0.2)
    signal = np.random.default_rng(1).random((12, 4))
    for trigger, options in (
        ("gnmr", None),
        ("none", None),
        ("all", None),
        ("gsnr", None),
        ("jacobian", None),
        ("static", {"warmup": 3}),
        ("random", {"promotion_ratio": 0.2}),
    ):
        write_trace(
            folder / f"{trigger}.jsonl",
            norms,
            trigger=trigger,
            options=options,
            max_o=2,
            alpha_init_fraction=0.25,
            signal=signal if trigger in ("gsnr", "jacobian") else None,
            skipped=(6,),
        )


def sessions() -> dict[str, dict]:
    """States of a loop without a Trainer after three steps, by what was switched and how units were chosen."""
    from conftest import load_bf16, load_int8, token_rows, with_lora

    from hf_gnmr import GNMRSession

    states = {}
    for name, eight_bit, settings in SESSIONS:
        model = with_lora((load_int8 if eight_bit else load_bf16)("llama"), r=2, target_modules=["q_proj", "down_proj"])
        session = GNMRSession(model.train(), max_o=1, alpha=0.9, alpha_init_fraction=0.0, total_steps=6, **settings)
        three_steps(session, model, token_rows(6), 0)
        state = session.state_dict()
        states[name] = {**state, "signal": {}} if "signal" in state else state
        session.close()
    return states


SESSIONS = [
    ("int8 gnmr", True, {}),
    ("int8 dequantize none", True, {"recovery": "dequantize", "trigger": "none"}),
    ("activation jacobian", False, {"backend": "activation", "trigger": "jacobian", "bits_low": 6, "bits_recovery": 16}),
    ("fp8 all", False, {"backend": "fp8", "emulate": True, "trigger": "all"}),
    ("lowbit static", False, {"backend": "lowbit", "trigger": "static", "trigger_options": {"warmup": 2}}),
    ("none gnmr", False, {"backend": "none"}),
]


def three_steps(session, model, rows: list[dict], first: int) -> list[list[int]]:
    """Three steps of two rows; the active units after each."""
    import torch

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    chosen = []
    for i in range(first, first + 3):
        ids = torch.tensor([row["input_ids"] for row in rows[i : i + 2]])
        model(input_ids=ids, labels=ids).loss.backward()
        session.observe()
        optimizer.step()
        decision = session.decide()
        chosen.append(decision.active.nonzero()[0].tolist())
        optimizer.zero_grad()
    return chosen


if __name__ == "__main__":
    main()
