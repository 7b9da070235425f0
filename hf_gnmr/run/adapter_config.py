"""An adapter's configuration, checked before PEFT builds the adapter.

PEFT takes most options as they are: ranks and iterations of any number, the name of a module to import, other adapters to
load.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..terminal import shown
from .architecture import MAX_LAYERS, MAX_RANK, MAX_SIZE, check_sizes
from .sections import RecipeError

MAX_ITERATIONS = 1000
"""Of what an option repeats: PiSSA recommends 16 iterations, LoftQ up to 5, OFT 5 terms."""
FREE_RANK = 1024
"""A higher rank counts only if the adapter's weights have it: rank 65,536 of a 7B model takes 480 GB."""
RANKS = re.compile(r"(^|_)(r|rank)$")
REPEATED = re.compile(r"iters?$|_terms$|(^|_)depth$|butterfly_factor$|^num_B$")
"""Options that say how often something is repeated."""
NITER = re.compile(r"_niter_([0-9]{1,4})")


def check_adapter(values: dict[str, Any], where: str, weights: Path | None = None) -> None:
    """Refuse an adapter's configuration that asks for more work or memory than the limits, or for other code or adapters.

    Args:
        values: as read.
        where: begins the message.
        weights: the adapter's safetensors file, with which high ranks are compared.

    Raises:
        RecipeError: naming key and value.
    """
    check_sizes(values, where)
    ranks = _check_numbers(values, where)
    _check_replication(values, where)
    _check_initialisation(values.get("init_lora_weights"), where)
    _check_code(values, where)
    vectors, length = (values.get(key) for key in ("num_vectors", "vector_length"))  # VB-LoRA's bank
    if isinstance(vectors, int) and isinstance(length, int) and vectors * length > MAX_SIZE:
        raise RecipeError(
            f"{where}: num_vectors={vectors:,} × vector_length={length:,}: expected at most {MAX_SIZE:,} numbers"
        )
    if weights is not None and max(ranks, default=0) > FREE_RANK:
        _compare_ranks(max(ranks), weights, where)


def _check_numbers(values: dict[str, Any], where: str) -> list[int]:
    """Refuse numbers that are not finite, and too high ranks and repetitions; returns the ranks."""
    ranks: list[int] = []
    pending = [(where, "", values)]
    while pending:
        place, kind, part = pending.pop()
        for key, value in part.items():
            name = f"{place}.{key}"
            key = kind or str(key)
            if isinstance(value, dict):
                # A pattern's keys are names of modules; its values are ranks, or numbers of the option alpha.
                pending.append((name, "rank" if key == "rank_pattern" else "alpha" if key == "alpha_pattern" else "", value))
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            if not math.isfinite(value):
                raise RecipeError(f"{name}={shown(value)}: expected a finite number")
            if RANKS.search(key):
                if value > MAX_RANK:
                    raise RecipeError(f"{name}={shown(value)}: expected a rank of at most {MAX_RANK:,}")
                ranks.append(int(value))
            if REPEATED.search(key) and value > MAX_ITERATIONS:
                raise RecipeError(f"{name}={shown(value)}: expected at most {MAX_ITERATIONS:,}")
    return ranks


def _check_replication(values: dict[str, Any], where: str) -> None:
    repeated = values.get("layer_replication") or []
    if not isinstance(repeated, list) or not all(_is_range(pair) for pair in repeated):
        raise RecipeError(f"{where}.layer_replication={shown(repeated)}: expected a list of [first, last + 1], from 0 up")
    if len(repeated) > MAX_LAYERS:
        raise RecipeError(f"{where}.layer_replication={shown(repeated)}: expected at most {MAX_LAYERS:,} ranges")
    if sum(end - start for start, end in repeated) > MAX_LAYERS:
        raise RecipeError(f"{where}.layer_replication={shown(repeated)}: expected at most {MAX_LAYERS:,} layers")


def _is_range(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(i) is int for i in pair) and 0 <= pair[0] < pair[1]


def _check_initialisation(name: Any, where: str) -> None:
    """Refuse ``pissa_niter_1000000000``; PEFT repeats the decomposition as often as the name says."""
    if not isinstance(name, str) or "_niter_" not in name:
        return
    match = NITER.fullmatch(name[name.index("_niter_") :])
    if match is None or int(match[1]) > MAX_ITERATIONS:
        raise RecipeError(
            f"{where}.init_lora_weights={shown(name)}: expected at most {MAX_ITERATIONS:,} iterations, as pissa_niter_16"
        )


def _check_code(values: dict[str, Any], where: str) -> None:
    """Refuse what makes PEFT import a module by name, or load further adapters."""
    if values.get("megatron_config"):
        raise RecipeError(
            f"{where}.megatron_config={shown(values['megatron_config'])}: expected none; PEFT would import the module "
            f"megatron_core={shown(values.get('megatron_core'))}"
        )
    if values.get("adapters"):
        raise RecipeError(f"{where}.adapters={shown(values['adapters'])}: expected one adapter that loads no others")


def _compare_ranks(rank: int, weights: Path, where: str) -> None:
    """Refuse a rank that no tensor of the adapter has."""
    try:
        with safe_open(weights, framework="pt") as file:
            sizes = [size for name in file.keys() for size in file.get_slice(name).get_shape()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"{where}: {weights.name} cannot be read: {error}") from error
    highest = max(sizes, default=0)
    if rank > highest:
        raise RecipeError(
            f"{where}: expected a rank that {weights.name} has (no side of a tensor is above {highest:,}), got {rank:,}"
        )
