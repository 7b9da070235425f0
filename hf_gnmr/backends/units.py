"""Which modules form a unit, and what architectures and PEFT call them.

A unit is a decoder layer with trainable parameters, one of its projections, its experts or one of them.  Layers are found
by structure, not by a table of model names: the one `nn.ModuleList` inside the (text) decoder that is as long as the text
configuration's `num_hidden_layers`.  That holds for `model.layers` (Llama, Mistral, Qwen, Gemma), `transformer.h` (GPT-2,
BLOOM), `model.decoder.layers` (OPT) and `gpt_neox.layers`, and excludes vision towers and lists of experts.  Where it does
not hold, the user names the layers with a pattern such as ``"transformer.blocks.*"``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..config import SetupError

PEFT_INFIX = ".base_layer"
"""PEFT keeps the module it adapts under this name; names without it are those of the model as loaded."""
PEFT_COPY = re.compile(r"\.modules_to_save\.[^.]+")
"""And under this one, the trained copy of a module in `modules_to_save`, by adapter."""


@dataclass(frozen=True)
class Unit:
    """One monitored decoder layer or projection."""

    index: int
    """Position among the units."""
    layer: int
    """The model's own layer index."""
    name: str
    """Module name in the base model, without PEFT's additions."""
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    """Its trainable parameters, at least one."""
    part: int | None = None
    """The unit's expert, where one tensor holds all of a layer's experts: index in the parameters' first
    dimension. None: the parameters as a whole."""

    @property
    def numel(self) -> int:
        """How many trainable numbers it has."""
        return sum(p.numel() // (1 if self.part is None else p.shape[0]) for p in self.parameters)


def unwrap(model: nn.Module) -> nn.Module:
    """The model below DistributedDataParallel and torch.compile wrappers; PEFT's model is kept."""
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif isinstance(inner, (DistributedDataParallel, nn.DataParallel)):
            inner = inner.module
        else:
            return inner


def base_model(model: nn.Module) -> Any:
    """The transformers model itself, below wrappers and PEFT; also the only one that a user's own module holds."""
    inner: Any = unwrap(model)
    if not _of_library(inner):
        held = [child for child in inner.children() if _of_library(child)]
        inner = held[0] if len(held) == 1 else inner
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _of_library(module: nn.Module) -> bool:
    """Whether a module is a model of transformers or PEFT."""
    return hasattr(module, "get_base_model") or hasattr(module, "get_input_embeddings")


def canonical(name: str) -> str:
    """A module or parameter name as it was before PEFT wrapped the model."""
    return PEFT_COPY.sub("", name.replace(PEFT_INFIX, ""))


def lora_part(name: str) -> str | None:
    """Which part of LoRA a module or parameter of this name belongs to ("A", "B", "embedding_A", …); None: none."""
    match = re.search(r"(^|\.)lora_(\w+)", name)
    return match[2] if match else None


def in_adapter(name: str) -> bool:
    """Whether a module or parameter of this name is part of a LoRA adapter."""
    return lora_part(name) is not None


def decoder_layers(model: nn.Module, pattern: str | None = None) -> list[tuple[int, str, nn.Module]]:
    """The decoder layers as (layer index, name, module), in order.

    Args:
        model: a transformers model, possibly under PEFT, DDP or torch.compile.
        pattern: module names with ``*`` for the layer index, for architectures that the search does not recognise.

    Raises:
        SetupError: no list of layers, or more than one; the message names the candidates and the option.
    """
    base = base_model(model)
    if pattern is not None:
        return _by_pattern(base, pattern, unwrap(model))
    config: Any = getattr(base, "config", None)
    text_config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    depth = getattr(text_config, "num_hidden_layers", None)
    decoder = (base.get_decoder() if hasattr(base, "get_decoder") else None) or base
    prefix = next(name for name, module in base.named_modules() if module is decoder) if decoder is not base else ""
    candidates: list[tuple[str, nn.ModuleList]] = []
    for name, module in decoder.named_modules(prefix=prefix):
        nested = any(name.startswith(outer + ".") for outer, _ in candidates)
        if isinstance(module, nn.ModuleList) and len(module) == depth and not nested:
            candidates.append((name, module))
    if len(candidates) != 1:
        listed = ", ".join(f"{name} ({len(module)})" for name, module in candidates) or "none"
        raise SetupError(
            f"cannot identify the decoder layers of {type(base).__name__}: lists of {depth} modules in its decoder: "
            f'{listed}. Name them with layers="path.to.layers.*"; module lists in the model: {_module_lists(base)}'
        )
    name, layers = candidates[0]
    return [(index, f"{canonical(name)}.{index}", layer) for index, layer in enumerate(layers)]


def find_units(model: nn.Module, pattern: str | None = None) -> list[Unit]:
    """The decoder layers that have trainable parameters, as units.

    Raises:
        SetupError: no decoder layer found, or none of them has a trainable parameter.
    """
    layers = decoder_layers(model, pattern)
    units: list[Unit] = []
    for index, name, module in layers:
        parameters = tuple(p for p in module.parameters() if p.requires_grad)
        if parameters:
            units.append(Unit(len(units), index, name, module, parameters))
    if not units:
        elsewhere = [canonical(name) for name, p in unwrap(model).named_parameters() if p.requires_grad]
        elsewhere = [name.removeprefix("base_model.model.") for name in elsewhere]
        where = f"trainable parameters only in {', '.join(elsewhere[:3])}" if elsewhere else "no trainable parameter"
        raise SetupError(
            f"none of the {len(layers)} decoder layers has a trainable parameter ({where}): there is no gradient to "
            "monitor. Add LoRA to the decoder layers, e.g. LoraConfig(target_modules='all-linear')"
        )
    return units


def find_projections(model: nn.Module, pattern: str | None = None) -> list[Unit]:
    """The linear projections of the decoder layers (attention and MLP) that have trainable parameters, as units.

    Under PEFT a unit is the adapted linear with its adapters.

    Raises:
        SetupError: no decoder layer found, or no such projection in them.
    """
    units: list[Unit] = []
    names: set[str] = set()
    kinds: set[str] = set()
    for unit in find_units(model, pattern):
        for name, module in _linears(unit.module):
            parameters = tuple(p for p in module.parameters() if p.requires_grad)
            if parameters:
                path = f"{unit.name}.{canonical(name)}"
                if path in names:  # another adapter's trained copy of the same module
                    path = f"{unit.name}.{name}"
                names.add(path)
                units.append(Unit(len(units), unit.layer, path, module, parameters))
        kinds |= {type(m).__name__ for m in unit.module.modules() if not any(m.children())}
    if not units:
        raise SetupError(
            "no projection with trainable parameters that is an nn.Linear in the decoder layers (they hold "
            f"{', '.join(sorted(kinds))})"
        )
    return units


def projections_of(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The plain linears in a unit whose weight is trained, the ones that keep their input for the backward, by name.

    LoRA's B is excluded (its input has r columns), and so are routers of experts.
    """
    return [
        (name, m)
        for name, m in module.named_modules()
        if isinstance(m, nn.Linear)
        and _plain(m)
        and m.weight.requires_grad
        and lora_part(name) != "B"
        and not _is_router(name)
    ]


def _plain(module: nn.Module) -> bool:
    """Whether a linear is torch's own, or one whose class a backend changed (8-bit ones are neither)."""
    return type(module) is nn.Linear or getattr(type(module), "plain", None) is nn.Linear


def _is_router(name: str) -> bool:
    return re.search(r"(^|\.)(router|gate|shared_expert_gate)(\.|$)", name) is not None


def linears_of(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The plain linears of a layer or expert, trained or frozen, by name, without adapters and routers."""
    return [
        (name, m)
        for name, m in module.named_modules()
        if isinstance(m, nn.Linear) and _plain(m) and not _is_router(name) and not in_adapter(name)
    ]


def fused_experts_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that hold all of a layer's experts in tensors of (experts, rows, columns), by name."""
    return [
        (name, m)
        for name, m in module.named_modules()
        if (name.rpartition(".")[2] in ("experts", "") or hasattr(m, "num_experts"))
        and any(p.ndim == 3 for p in m.parameters(recurse=False))
    ]


def find_experts(model: nn.Module, pattern: str | None = None, *, each: bool = False) -> list[Unit]:
    """A layer's routed experts as one unit, or each of them.

    Raises:
        SetupError: no decoder layer found, or no trainable experts in them.
    """
    units: list[Unit] = []
    for unit in find_units(model, pattern):
        lists = [
            (name, m)
            for name, m in unit.module.named_modules()
            if isinstance(m, nn.ModuleList) and name.rpartition(".")[2] == "experts"
        ]
        for name, experts in [*fused_experts_of(unit.module), *lists]:
            name = f"{unit.name}.{canonical(name)}"
            members: list[tuple[str, nn.Module, int | None]]
            if not each:
                members = [(name, experts, None)]
            elif isinstance(experts, nn.ModuleList):
                members = [(f"{name}.{i}", expert, None) for i, expert in enumerate(experts)]
            else:
                count = next(p.shape[0] for p in experts.parameters(recurse=False) if p.ndim == 3)
                members = [(f"{name}.{i}", experts, i) for i in range(count)]
            for expert_name, module, part in members:
                parameters = tuple(p for p in module.parameters() if p.requires_grad)
                if parameters:
                    units.append(Unit(len(units), unit.layer, expert_name, module, parameters, part))
    if not units:
        raise SetupError(
            "no trainable experts in the decoder layers: unit='experts' and 'expert' are for mixture-of-experts models "
            "(a module named experts, with tensors of three dimensions or a list of modules). Use unit='layer'"
        )
    return units


FINDERS: dict[str, Callable[[nn.Module, str | None], list[Unit]]] = {
    "layer": find_units,
    "projection": find_projections,
    "experts": find_experts,
    "expert": functools.partial(find_experts, each=True),
}
"""By kind of unit: decoder layer, projection, a layer's experts together, each expert."""


def _linears(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The adapted or plain linears of a layer; an adapted one counts once, as PEFT's wrapper."""
    linears: list[tuple[str, nn.Module]] = []
    for name, module in layer.named_modules():
        if linears and name.startswith(linears[-1][0] + "."):
            continue
        adapted = hasattr(module, "base_layer") and isinstance(module.base_layer, nn.Linear)
        linear = isinstance(module, nn.Linear) and _plain(module) and not _is_router(name)
        if linear or (adapted and projections_of(module)):
            linears.append((name, module))
    return linears


def all_layers(model: nn.Module, pattern: str | None = None) -> list[Unit]:
    """Every decoder layer as a unit, trainable or not: for evaluation, where there is no gradient to monitor."""
    return [Unit(i, layer, name, module, ()) for i, (layer, name, module) in enumerate(decoder_layers(model, pattern))]


def _by_pattern(base: nn.Module, pattern: str, outer: nn.Module) -> list[tuple[int, str, nn.Module]]:
    if pattern.count("*") != 1:
        raise SetupError(f"layers={pattern!r}: expected a module name with one * for the layer index")
    before, after = map(re.escape, pattern.split("*"))
    expression = re.compile(rf"{before}(\d+){after}")
    names = {module: canonical(name) for name, module in base.named_modules() if not name.endswith(PEFT_INFIX)}
    layers: list[tuple[int, str, nn.Module]] = []
    for name, module in [*base.named_modules(), *([] if outer is base else outer.named_modules())]:
        match = expression.fullmatch(canonical(name)) or expression.fullmatch(name)
        if match and not name.endswith(PEFT_INFIX) and module in names and all(module is not m for _, _, m in layers):
            layers.append((int(match[1]), names[module], module))
    if not layers:
        raise SetupError(f"layers={pattern!r} matches no module; module lists in the model: {_module_lists(base)}")
    return sorted(layers, key=lambda entry: entry[0])


def _module_lists(base: nn.Module) -> str:
    lists = [f"{name}.* ({len(m)})" for name, m in base.named_modules() if isinstance(m, nn.ModuleList)]
    return ", ".join(lists[:8]) or "none"
