"""The original BF16 weights behind a model's 8-bit ones: located, mapped, checked.

They come from memory where the model was converted by `quantize_int8`, else from the safetensors checkpoint that the
model was loaded from (or `recovery_source`).  A module's name is not a checkpoint's key, so keys go through
transformers' own conversion mapping, the one `from_pretrained` uses.  A BF16 tensor is used as mapped from the file,
without a copy; any other dtype gets one BF16 copy.  Each module's shape is checked, and a sample of its rows is quantised
again and compared with the codes in use, so that the weights of another model, or of a merged one, never pass for the
original.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from ...config import SetupError
from ..units import canonical
from .pages import Watch, file_backed
from .scales import refuse_lost_rows

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Kept:
    """The BF16 weight of a module that `quantize_int8` converted, (out, in), attached to the module.

    A copy of the module shares it; a pickled module is without it.
    """

    attribute = "_original_in_memory"

    def __init__(self, weight: Tensor | None = None) -> None:
        self.weight = weight

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()

    @classmethod
    def of(cls, module: nn.Module) -> Tensor | None:
        """A module's weight; None: it was loaded in 8 bits."""
        kept = module.__dict__.get(cls.attribute)
        return kept.weight if isinstance(kept, cls) else None


WAYS_OUT = (
    "Either give recovery_source= (a folder or Hub id with the original safetensors weights), or use "
    'recovery="dequantize" (BF16 compute on the dequantised 8-bit weights)'
)

SAMPLE_ROWS = 8
"""Rows of each module that are quantised again."""
MAX_CODES_OFF = 0.005
"""Share of sampled codes that may differ, by one: ties are not rounded the same way on every device."""
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


@dataclass(frozen=True)
class Originals:
    """The original weights of a model's 8-bit modules."""

    weights: dict[bnb.nn.Linear8bitLt, Original]
    source: str
    """Where they came from, in words."""
    watch: Watch | None
    """On the files that are still needed; None: no file is."""


def find_originals(
    base: nn.Module,
    modules: Mapping[str, bnb.nn.Linear8bitLt],
    source: str | os.PathLike[str] | None,
    *,
    cast: bool = True,
) -> Originals:
    """The original weights of `modules`.

    Args:
        base: the transformers model (below PEFT).
        modules: 8-bit modules by canonical name (``model.layers.0.self_attn.q_proj``).
        source: folder or Hub id to read instead of the one the model was loaded from.
        cast: make a BF16 copy of weights that are not BF16; False: leave them mapped.

    Raises:
        SetupError: no originals, unreadable or truncated files, wrong shapes, or weights that do not quantise to the
            codes in use; the message names the tensor and the ways out.
    """
    in_memory = {name: weight for name, module in modules.items() if (weight := Kept.of(module)) is not None}
    if source is None and modules and len(in_memory) == len(modules):
        by_name = {name: Original(in_memory[name], is_transposed(m), mapped=False) for name, m in modules.items()}
        where = "in memory, kept when the model was converted"
        files: list[Path] = []
    else:
        by_name, where, files = _from_checkpoint(base, modules, source, cast)
    for name, module in modules.items():
        _check(name, module, by_name[name], where)

    def rows_of(name: str, rows: Tensor) -> Tensor:
        weight = by_name[name].weight
        return weight[:, rows].T if by_name[name].transposed else weight[rows]

    refuse_lost_rows(modules, rows_of)
    watch = Watch(files) if any(original.mapped for original in by_name.values()) else None
    return Originals({module: by_name[name] for name, module in modules.items()}, where, watch)


def is_transposed(module: nn.Module) -> bool:
    """Whether the module was a GPT-2 style Conv1D, whose weight is (in, out), before it was quantised."""
    return getattr(getattr(module, "source_cls", None), "__name__", "") == "Conv1D"


def _from_checkpoint(
    base: nn.Module, modules: Mapping[str, nn.Module], source: str | os.PathLike[str] | None, cast: bool
) -> tuple[dict[str, Original], str, list[Path]]:
    """Originals by module name, where they came from, and the files."""
    config = getattr(base, "config", None)
    name_or_path = str(source if source is not None else getattr(config, "_name_or_path", "") or "")
    if not name_or_path:
        raise SetupError(f"the model does not record which checkpoint it was loaded from. {WAYS_OUT}")
    files = checkpoint_files(name_or_path, None if source is not None else getattr(config, "_commit_hash", None))
    tensor_of = _open(files)
    if any(key.endswith((".SCB", ".weight_format")) for key in tensor_of):
        raise SetupError(f"{name_or_path} already holds 8-bit weights: the originals are not in it. {WAYS_OUT}")

    names = {f"{name}.weight": name for name in modules}
    originals: dict[str, Original] = {}
    fused: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for key, target, pattern, converter in _map_keys(base, list(tensor_of)):
        if converter is not None:
            # One checkpoint tensor may hold several modules, so every fused group is collected before it is converted.
            fused.setdefault(target, (converter, []))[1].append((key, pattern))
        elif target in names:
            name = names[target]
            originals[name] = _original(key, tensor_of[key](), modules[name], mapped=True, cast=cast)
    for target, (converter, members) in fused.items():
        if all(name in originals for name in modules):
            break
        for parameter, tensor in _split(base, target, converter, members, tensor_of).items():
            if parameter in names:
                name = names[parameter]
                originals[name] = _original(parameter, tensor.clone(), modules[name], mapped=False, cast=True)
    missing = [name for name in modules if name not in originals]
    if missing:
        raise SetupError(
            f"{name_or_path} has no weight for {len(missing)} of {len(modules)} 8-bit modules, the first: "
            f"{missing[0]}. {WAYS_OUT}"
        )
    mapped = [name for name, original in originals.items() if original.mapped]
    for name, is_mapped in zip(mapped, file_backed(originals[name].weight for name in mapped), strict=True):
        if not is_mapped:  # safetensors read it into memory after all
            originals[name] = dataclasses.replace(originals[name], mapped=False)
    return originals, name_or_path, files


def _open(files: list[Path]) -> dict[str, Callable[[], Tensor]]:
    """A function for each tensor in the files, by key, that gives the tensor as mapped."""
    from safetensors import SafetensorError, safe_open

    tensor_of: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        try:
            handle = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise SetupError(f"{file} cannot be read as safetensors (truncated?): {error}. {WAYS_OUT}") from error
        tensor_of.update({key: functools.partial(handle.get_tensor, key) for key in handle.keys()})  # noqa: SIM118
    return tensor_of


def _split(
    base: Any, target: str, converter: Any, members: list[tuple[str, str]], tensor_of: Mapping[str, Callable[[], Tensor]]
) -> dict[str, Tensor]:
    """A group of checkpoint tensors as converted by transformers, by parameter name."""
    converter = copy.deepcopy(converter)
    for key, pattern in members:
        converter.add_tensor(target, key, pattern, tensor_of[key]())
    converted = converter.convert(target, model=base, config=getattr(base, "config", None))
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}


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
        SetupError: no safetensors files; pickled weights are not read.
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
    within = difference.max().item() <= 1 and codes_off <= MAX_CODES_OFF and scale_off <= MAX_SCALE_OFF
    if not within:  # also where a difference is NaN
        raise SetupError(
            f"{name}: the weight in {where} does not quantise to the 8-bit codes in use ({codes_off:.1%} of a sample "
            f"of codes differ, by up to {difference.max().item()}; row scales by up to {scale_off:.2g}): it is not the "
            "weight this model was quantised from: merged, edited, or loaded in another dtype (then load it with "
            f"dtype=torch.bfloat16). {WAYS_OUT}"
        )
