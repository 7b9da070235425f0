"""The original BF16 weights behind a model's 8-bit ones: found, mapped, checked.

They come from memory where the model was converted by `quantize_int8`, else from the safetensors checkpoint that the
model was loaded from (or `recovery_source`).  A module's name is not a checkpoint's key, so keys go through
transformers' own conversion mapping, the one `from_pretrained` uses.  A BF16 tensor is used as mapped from the file,
without a copy; anything else gets one BF16 copy.  Each module's shape is checked, and a sample of its rows is quantised
again and held against the codes in use, so that the weights of another model, or of a merged one, are never taken for
the original.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from ...config import SetupError
from ..units import canonical
from .pages import Watch, file_backed

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

IN_MEMORY: weakref.WeakKeyDictionary[nn.Module, Tensor] = weakref.WeakKeyDictionary()
"""BF16 weights of modules converted by `quantize_int8`; held here so that nothing of ours stays on the model."""

WAYS_OUT = (
    "Two ways out: give recovery_source= (a folder or Hub id with the original safetensors weights), or accept "
    'recovery="dequantize" (BF16 compute on the dequantised 8-bit weights)'
)

SAMPLE_ROWS = 8
"""Rows of each module that are quantised again."""
MAX_CODES_OFF = 0.005
"""Share of sampled codes that may differ, by one: rounding of ties is not the same on every device."""
MAX_SCALE_OFF = 1e-3
"""Relative difference of a row scale: half a BF16 step is 2e-3."""


@dataclass(frozen=True)
class Original:
    """The BF16 weight of one module."""

    weight: Tensor
    """On the CPU, in the checkpoint's orientation: (out, in), or (in, out) for a former Conv1D. Where it is not BF16
    (only if it was asked for uncast), the original is its cast to BF16."""
    transposed: bool
    """True for (in, out)."""
    mapped: bool
    """True: pages of the checkpoint file. False: held in memory."""


def find_originals(
    base: nn.Module,
    modules: Mapping[str, bnb.nn.Linear8bitLt],
    source: str | os.PathLike[str] | None,
    *,
    cast: bool = True,
) -> tuple[dict[str, Original], str, Watch | None]:
    """The original weights of `modules`.

    Args:
        base: the transformers model (below PEFT).
        modules: 8-bit modules by canonical name (``model.layers.0.self_attn.q_proj``).
        source: folder or Hub id to read instead of the one the model was loaded from.
        cast: make a BF16 copy of what is not BF16; False: leave it mapped as it is.

    Returns:
        The originals by the same names, where they came from, in words, and a watch on the files that are still needed.

    Raises:
        SetupError: no originals, unreadable or truncated files, wrong shapes, or weights that do not quantise to the
            codes in use; the message names the tensor and the ways out.
    """
    if source is None and modules and all(module in IN_MEMORY for module in modules.values()):
        found = {name: Original(IN_MEMORY[module], is_transposed(module), mapped=False) for name, module in modules.items()}
        where = "in memory, kept when the model was converted"
        files: list[Path] = []
    else:
        found, where, files = _from_checkpoint(base, modules, source, cast)
    for name, module in modules.items():
        _check(name, module, found[name], where)
    return found, where, Watch(files) if any(original.mapped for original in found.values()) else None


def is_transposed(module: nn.Module) -> bool:
    """Whether the module was a GPT-2 style Conv1D, whose weight is (in, out), before it was quantised."""
    return getattr(getattr(module, "source_cls", None), "__name__", "") == "Conv1D"


def _from_checkpoint(
    base: nn.Module, modules: Mapping[str, nn.Module], source: str | os.PathLike[str] | None, cast: bool
) -> tuple[dict[str, Original], str, list[Path]]:
    from safetensors import SafetensorError, safe_open

    config = getattr(base, "config", None)
    name_or_path = str(source if source is not None else getattr(config, "_name_or_path", "") or "")
    if not name_or_path:
        raise SetupError(f"the model does not say what checkpoint it was loaded from. {WAYS_OUT}")
    revision = None if source is not None else getattr(config, "_commit_hash", None)
    files = checkpoint_files(name_or_path, revision)
    handles = {}
    keys: dict[str, Path] = {}
    for file in files:
        try:
            handles[file] = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise SetupError(f"{file} cannot be read as safetensors (truncated?): {error}. {WAYS_OUT}") from error
        keys.update(dict.fromkeys(handles[file].keys(), file))
    if any(key.endswith((".SCB", ".weight_format")) for key in keys):
        raise SetupError(f"{name_or_path} holds 8-bit weights already: the originals are not in it. {WAYS_OUT}")

    wanted = {f"{name}.weight": name for name in modules}
    found: dict[str, Original] = {}
    fused: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for key, target, pattern, converter in _map_keys(base, list(keys)):
        if converter is not None:
            # One checkpoint tensor may hold several modules, so every fused group is collected before it is judged.
            fused.setdefault(target, (converter, []))[1].append((key, pattern))
        elif target in wanted:
            tensor = handles[keys[key]].get_tensor(key)
            found[wanted[target]] = _original(key, tensor, modules[wanted[target]], mapped=True, cast=cast)
    for target, (converter, members) in fused.items():
        if not any(name not in found for name in modules):
            break
        converter = copy.deepcopy(converter)
        for key, pattern in members:
            converter.add_tensor(target, key, pattern, handles[keys[key]].get_tensor(key))
        for full_name, tensor in converter.convert(target, model=base, config=config).items():
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            if full_name in wanted:
                module = modules[wanted[full_name]]
                found[wanted[full_name]] = _original(full_name, tensor.clone(), module, mapped=False, cast=True)
    missing = [name for name in modules if name not in found]
    if missing:
        raise SetupError(
            f"{name_or_path} has no weight for {len(missing)} of {len(modules)} 8-bit modules, the first: "
            f"{missing[0]}. {WAYS_OUT}"
        )
    mapped = [name for name, original in found.items() if original.mapped]
    for name, is_mapped in zip(mapped, file_backed(found[name].weight for name in mapped), strict=True):
        if not is_mapped:  # safetensors read it into memory after all
            found[name] = dataclasses.replace(found[name], mapped=False)
    return found, name_or_path, files


def _map_keys(base: nn.Module, keys: list[str]) -> list[tuple[str, str, str, Any]]:
    """(checkpoint key, parameter name, converter's source pattern, converter or None) by transformers' own mapping."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = getattr(base, "_weight_conversions", None)
    if transforms is None:
        transforms = get_model_conversion_mapping(base)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    names = {canonical(name): True for name, _ in base.named_parameters()}
    names |= {canonical(name): True for name, _ in base.named_buffers()}
    result = []
    for key in keys:
        target, pattern = rename_source_key(key, renamings, converters, base.base_model_prefix, names)
        if target not in names and key in names:
            target, pattern = rename_source_key(key, [], [], base.base_model_prefix, names)
        result.append((key, target, pattern or key, by_pattern[pattern] if pattern is not None else None))
    return result


def _original(key: str, tensor: Tensor, module: nn.Module, *, mapped: bool, cast: bool) -> Original:
    if tensor.dtype not in FLOATS:
        raise SetupError(f"{key} is {tensor.dtype} in the checkpoint, not an original weight. {WAYS_OUT}")
    if cast and tensor.dtype is not torch.bfloat16:
        tensor, mapped = tensor.to(torch.bfloat16), False
    return Original(tensor, is_transposed(module), mapped)


def checkpoint_files(source: str, revision: str | None = None) -> list[Path]:
    """The safetensors files of a local folder or of a Hub model (its cache first).

    Raises:
        SetupError: none there; pickled weights are not read.
    """
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    def fetch(name: str) -> str | None:
        if os.path.isdir(source):
            path = os.path.join(source, name)
            return path if os.path.isfile(path) else None
        return cached_file(
            source,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )

    try:
        single = fetch(SAFE_WEIGHTS_NAME)
        if single is not None:
            return [Path(single)]
        index = fetch(SAFE_WEIGHTS_INDEX_NAME)
        if index is not None:
            shards, _ = get_checkpoint_shard_files(source, index, revision=revision)
            return [Path(shard) for shard in shards]
    except (OSError, ValueError) as error:
        raise SetupError(f"the checkpoint {source!r} cannot be read: {error}. {WAYS_OUT}") from error
    raise SetupError(
        f"no safetensors weights in {source!r} (a folder that moved, a GGUF file, or pickled weights, which are not "
        f"read: save the model once with save_pretrained). {WAYS_OUT}"
    )


def _check(name: str, module: bnb.nn.Linear8bitLt, original: Original, where: str) -> None:
    weight = original.weight.T if original.transposed else original.weight
    codes, scales = module.state.CB, module.state.SCB
    if weight.shape != codes.shape:
        raise SetupError(f"{name} is {tuple(codes.shape)} in the model and {tuple(weight.shape)} in {where}. {WAYS_OUT}")
    rows = torch.linspace(0, codes.shape[0] - 1, min(SAMPLE_ROWS, codes.shape[0])).long()
    sample = weight[rows].to(codes.device, torch.bfloat16).to(torch.float16).contiguous()
    expected_codes, expected_scales, _ = bnb.functional.int8_vectorwise_quant(sample)
    rows = rows.to(codes.device)
    difference = (expected_codes.int() - codes[rows].int()).abs()
    scale = scales[rows].float()
    scale_off = ((expected_scales.flatten() - scale).abs() / scale.clamp(min=1e-30)).max().item()
    codes_off = (difference > 0).float().mean().item()
    if difference.max().item() > 1 or codes_off > MAX_CODES_OFF or scale_off > MAX_SCALE_OFF:
        raise SetupError(
            f"{name}: the weight in {where} does not quantise to the 8-bit codes in use ({codes_off:.1%} of a sample "
            f"of codes differ, by up to {difference.max().item()}; row scales by up to {scale_off:.2g}): it is not the "
            "weight this model was quantised from: merged, edited, or loaded in another dtype (then load it with "
            f"dtype=torch.bfloat16). {WAYS_OUT}"
        )
