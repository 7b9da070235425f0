"""Shared fixtures: a tiny random LLaMA on disk, loaded in BF16 and in 8-bit, and a Trainer around it.

Offline by force, and one thread: the models are so small that threads only get in each other's way.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import contextlib
import json
import pathlib
import socket
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from hf_gnmr.backends.bf16_cpu import choose, float32_kernels
from hf_gnmr.run.builtin import byte_tokenizer

sys.path.insert(0, str(pathlib.Path(__file__).parent))
torch.set_num_threads(1)
# Where the CPU emulates BF16 products, tests run them by float32 kernels, as `hf_gnmr.train` does. For the whole process,
# and so also in the ones that import this file to run a part of a test.
_PRODUCTS = contextlib.ExitStack()
_PRODUCTS.enter_context(float32_kernels(choose("auto", "cpu")[0]))

VOCABULARY = 128
PASSED_ON = ("compute_loss_func", "eval_dataset", "model_init", "optimizers")
"""What `trainer_for` gives to the Trainer itself, not to its arguments."""

SMALL = [
    "activation_small",
    "training.max_steps=6",
    "training.eval_steps=3",
    "data.documents=300",
    "data.eval_rows=8",
    "training.logging_steps=1",
    "training.disable_tqdm=true",
    "model.architecture={model_type: llama, vocab_size: 288, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,"
    " num_attention_heads: 2, max_position_embeddings: 128, tie_word_embeddings: false}",
]
"""The recipe activation_small and what makes it train for a second: a run that trains all weights."""


def bf16_in_hardware():
    """Whether this CPU multiplies BF16 matrices itself; elsewhere products are emulated and round at other places."""
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def tiny_config(**changes):
    return LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "pad_token_id": 0,
            **changes,
        }
    )


def random_llama(dtype=torch.float32, **changes):
    """A tiny LLaMA in memory, in train mode: the same weights at each call, biases too."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(attention_dropout=0.0, **changes)).to(dtype)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data.normal_()
    return model.train()


def logits_and_gradients(model, ids, autocast=False):
    """Of one forward and backward; gradients by name."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def save_llama(folder, dtype=torch.bfloat16, seed=0, **changes):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(**changes)).to(dtype)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data.normal_()
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder of a BF16 checkpoint: 3 layers, hidden 64."""
    return save_llama(tmp_path_factory.mktemp("tiny") / "llama")


def load_bf16(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kwargs)


def load_int8(folder, threshold=6.0, dtype=torch.bfloat16, **kwargs):
    quantization = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantization, **kwargs)


def with_lora(model, trained=False, **changes):
    """LoRA on all linears; `trained`: B is not zero, as after training."""
    torch.manual_seed(7)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": not trained, **changes}
    return get_peft_model(model, LoraConfig(**options))


def token_rows(rows=64, length=16, seed=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture
def trainer_for(tmp_path):
    """A function: model and callback -> Trainer on random rows, six steps unless told otherwise."""

    def build(model, *callbacks, rows=None, trainer_class=Trainer, **changes):
        more = {key: changes.pop(key) for key in PASSED_ON if key in changes}
        arguments = {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "report_to": [],
            "max_steps": 6,
            "save_strategy": "no",
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "disable_tqdm": True,
            "seed": 0,
            **changes,
        }
        return trainer_class(
            model, TrainingArguments(**arguments), train_dataset=rows or token_rows(), callbacks=list(callbacks), **more
        )

    return build


def trace_lines(run):
    """Header and step lines of a run's trace."""
    lines = [json.loads(line) for line in (pathlib.Path(run) / "trace.jsonl").read_text().splitlines()]
    return lines[0], lines[1:]


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory):
    """A folder with a tiny BF16 LLaMA and a byte-level tokenizer: what a recipe's model.name takes."""
    folder = tmp_path_factory.mktemp("tiny_lm") / "llama"
    save_llama(folder, vocab_size=288, eos_token_id=2, bos_token_id=1)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "sums.jsonl")


def write_rows(file):
    """Forty sums with their answers, as JSON lines."""
    rows = [{"question": f"What is {a} plus {a + 3}?", "answer": f"It is {2 * a + 3}.\n#### {2 * a + 3}"} for a in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def write_recipe(file, model, rows, *, lora_alpha=8, alpha=0.9, **training):
    """A small recipe: six steps of LoRA on all linears."""
    import yaml

    prompt, answer = "Question: {question}\nAnswer:", " {answer}"
    recipe = {
        "model": {"name": model},
        "lora": {"r": 4, "lora_alpha": lora_alpha},
        "data": {"name": rows, "prompt": prompt, "answer": answer, "max_length": 96},
        "training": {
            "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "save_strategy": "no",
            "report_to": "none", "use_cpu": True, "disable_tqdm": True, **training,
        },
        "gnmr": {"max_o": 1, "alpha": alpha, "alpha_init_fraction": 0.0},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(recipe))
    return str(file)


@pytest.fixture
def recipe_file(tmp_path, tiny_lm, rows_file):
    """A small recipe, its output in the test's folder."""
    more = {"output_dir": str(tmp_path / "run"), "logging_steps": 1, "seed": 0}
    return write_recipe(tmp_path / "small.yaml", tiny_lm, rows_file, **more)


LONG = 1800
"""Seconds that a test marked slow may take, on a CPU without fast BF16 products too."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG))


def place(tmp_path, kind):
    """A path at which there is something of `kind`, where a file is to be written."""
    path = tmp_path / "place"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "below a file":
        path.write_text("x")
        return path / "trace.jsonl"
    elif kind == "recipe":
        path.write_text("model: {}")
    else:
        path.symlink_to({"link to a device": "/dev/null", "link to a folder": tmp_path}[kind])
    return path
