"""Results of the benches as data: `eval/results/NAME.json`, from which `tables.py` makes the tables of the documentation.

A bench writes one with `--save NAME`. Fields: `name`, `bench` (its module, whose `table(payload)` renders it), `command`,
`date` (ISO 8601, UTC), `versions`, `machine`, `seed` (a number or a list) and `payload` (the bench's own figures).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from hf_gnmr import __version__
from hf_gnmr.files import FileError, read_json, write_json

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "eval" / "results"
FIELDS = ("name", "bench", "command", "date", "versions", "machine", "seed", "payload")
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "lm-eval")
ENVIRONMENT = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "MALLOC_MMAP_THRESHOLD_")
"""Variables that change what is measured; where set, they are part of the command."""
NOT_FINITE = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def add_save_option(parser: argparse.ArgumentParser) -> None:
    """The option `--save NAME`, with its name checked before anything is measured."""
    parser.add_argument("--save", metavar="NAME", type=_name, help="also write the results to eval/results/NAME.json")


def _name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected letters, digits, '_', '-' or '.'")
    return text


def save_result(
    name: str, *, bench: str, command: str, seed: int | list[int], payload: dict[str, Any], folder: Path = RESULTS
) -> Path:
    """Write a result with its command, date, versions and machine; returns its file."""
    file = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        file,
        {
            "name": name,
            "bench": bench,
            "command": command,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": versions(),
            "machine": machine(),
            "seed": seed,
            "payload": payload,
        },
    )
    print(f"saved {file}", file=sys.stderr)
    return file


def read_result(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """A saved result; numbers that are not finite, which JSON holds as text, are numbers again.

    Raises:
        FileError: no such file, or a field is missing.
    """
    file = folder / f"{name}.json"
    result = read_json(file)
    missing = [field for field in FIELDS if field not in result]
    if missing:
        raise FileError(f"{file}: expected the fields {', '.join(FIELDS)}; missing: {', '.join(missing)}")
    return {**result, "payload": _numbers(result["payload"])}


def _numbers(value: Any) -> Any:
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return value


def command_line() -> str:
    """The command that started this process, with the variables that change what it measures."""
    variables = [f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ]
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(REPOSITORY) if script.is_relative_to(REPOSITORY) else Path(script.name)
    return " ".join([*variables, "python", shlex.join([str(shown), *sys.argv[1:]])])


def versions() -> dict[str, str]:
    """Of hf_gnmr and of those of the packages that are installed."""
    installed = {"hf_gnmr": __version__}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def machine() -> dict[str, Any]:
    """Processor, the instruction set that torch's kernels use (avx512, avx2, …), threads, and GPUs if there are any."""
    import torch

    from hf_gnmr.run.environment import processor

    return {
        "processor": processor(),
        "instruction_set": torch.backends.cpu.get_cpu_capability().lower(),
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def provenance(result: dict[str, Any]) -> str:
    """Command, date, machine, versions and seeds of a result, in Markdown."""
    where = result["machine"]
    threads = f"{where['threads']} thread{'' if where['threads'] == 1 else 's'}"
    seeds = result["seed"] if isinstance(result["seed"], list) else [result["seed"]]
    facts = [
        result["date"][:10],
        f"{where['processor']} ({where['instruction_set']})",
        *where["accelerators"],
        threads,
        *(f"{name} {version}" for name, version in result["versions"].items()),
        f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}",
    ]
    return f"`{result['command']}`: {', '.join(facts)}."
