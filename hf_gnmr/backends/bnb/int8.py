"""INT8 ↔ BF16: the frozen base's bitsandbytes linears, each decoder layer switchable to its original BF16 weights.

`switchable` defines the two paths, `originals` locates the original weights, `stores` keeps them; here they become units
with a byte count and a census.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import numpy as np
import torch
from torch import nn

from ...config import ConfigError, SetupError, one_of
from ...control.monitor import Bools
from ..base import Backend, BackendOptions, BasePlan, Seats, Way, check_eval_path
from ..units import Unit, base_model, canonical, in_adapter
from .originals import Originals, find_originals
from .scales import refuse_broken_scales, warn_of_zeros
from .stores import STORES
from .stores.base import PlannedWeights, Store, SwitchedBase
from .switchable import PathSwitch, SwitchableLinear8bitLt, make_plain_8bit, make_switchable, restore_plain

CAST_NOTES = logging.getLogger("bitsandbytes.autograd._functions")


@dataclass(frozen=True)
class Int8Options(BackendOptions):
    """Where the recovery path's weights are kept, and which path evaluation runs."""

    recovery: str = "host"
    """The store of recovery weights."""
    recovery_source: str | os.PathLike[str] | None = None
    """Folder or Hub id of the original weights; None: the one the model was loaded from."""
    pin_memory: bool = False
    """With ``host`` on an accelerator: hold the originals in pinned host memory."""
    eval_path: str = "low"
    """Path in evaluation during training: ``low``, ``recovery``, or ``active`` (whatever training runs at that moment)."""

    def __post_init__(self) -> None:
        one_of("recovery", self.recovery, STORES)
        check_eval_path(self.eval_path)
        if self.recovery_source is not None and not isinstance(self.recovery_source, (str, os.PathLike)):
            raise ConfigError(f"recovery_source={self.recovery_source!r}: expected a folder, a Hub id or None")
        if not isinstance(self.pin_memory, bool) or (self.pin_memory and not STORES[self.recovery].pins):
            raise ConfigError(f"pin_memory={self.pin_memory!r}: expected true or false, and true with recovery='host' only")
        if self.recovery_source is not None and not STORES[self.recovery].originals_used:
            raise ConfigError(
                f"recovery_source={self.recovery_source!r} is not read with recovery={self.recovery!r}: give one of them"
            )

    @classmethod
    def choices(cls, name: str) -> dict[str, str]:
        return {key: kind.summary for key, kind in STORES.items()} if name == "recovery" else {}

    def paths(self) -> dict[str, str]:
        return {} if self.recovery_source is None else {"recovery_source": os.fspath(self.recovery_source)}

    def store_for_all(self) -> str:
        return next(f"recovery={name!r}" for name, kind in STORES.items() if kind.originals_used and kind.holds_all_anywhere)

    def store(self) -> str:
        return f"recovery={self.recovery!r}"

    def to_dict(self) -> dict[str, Any]:
        source = self.recovery_source
        return {**super().to_dict(), "recovery_source": None if source is None else os.fspath(source)}


class Int8Backend(Backend):
    """Decoder layers as units; their `Linear8bitLt` modules switch together.

    Takes a model loaded with `BitsAndBytesConfig(load_in_8bit=True)`, usually under PEFT.

    Raises:
        ConfigError: a wrong option.
        SetupError: no 8-bit linear in the units, or no original weights.
    """

    name = "int8"
    Options = Int8Options
    options: Int8Options
    quantised_base = True
    base_in_words = "bitsandbytes INT8"

    @classmethod
    def why_no_budget(cls, options: BackendOptions) -> str | None:
        assert isinstance(options, Int8Options)
        if not STORES[options.recovery].originals_used:
            return f"lifted units add nothing with recovery={options.recovery!r}"
        return None

    @classmethod
    def quantization_config(cls, llm_int8_threshold: float) -> Any:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=llm_int8_threshold)

    @classmethod
    def quantise_on_meta(cls, model: Any) -> None:
        from transformers import BitsAndBytesConfig
        from transformers.quantizers.auto import AutoHfQuantizer

        quantizer = AutoHfQuantizer.from_config(BitsAndBytesConfig(load_in_8bit=True), pre_quantized=False)
        quantizer.preprocess_model(model=model, device_map={"": "cpu"})
        model.is_loaded_in_8bit = True

    @classmethod
    def plan_base(
        cls, model: Any, units: Sequence[Unit], options: BackendOptions, *, cast: bool, on_cpu: bool, seats: Seats
    ) -> BasePlan:
        assert isinstance(options, Int8Options)
        switched = [m for m in model.modules() if isinstance(m, bnb.nn.Linear8bitLt)]
        counted = {id(m.weight) for m in switched}
        # Counted as BF16, whatever the meta device holds (biases of 8-bit linears are FP32 there).
        rest = sum(2 * p.numel() for name, p in model.named_parameters() if not in_adapter(name) and id(p) not in counted)
        weights = sum(m.weight.numel() + 4 * m.out_features for m in switched) + rest
        in_units = [[m for m in unit.module.modules() if isinstance(m, bnb.nn.Linear8bitLt)] for unit in units]
        sizes = [sum(2 * m.weight.numel() for m in modules) for modules in in_units]
        recoverable = sorted((size for size in sizes if size), reverse=True)
        largest = max((m.weight.numel() for modules in in_units for m in modules), default=0)
        store = STORES[options.recovery]
        known = PlannedWeights(weights, recoverable, largest, 0, cast)
        max_o, lifted = seats(
            store.planned_bounds(known, on_cpu), store.planned_holds_all(on_cpu), [size > 0 for size in sizes]
        )
        # If the trigger lifts nothing: what the other ways would take with maxO units.
        planned = PlannedWeights(weights, recoverable, largest, lifted or max_o, cast)
        ways = [Way("int8", "INT8", weights), *(way for kind in STORES.values() for way in kind.ways(planned))]
        return BasePlan(ways, store.way(options, on_cpu) if lifted or not max_o else "int8", recoverable, max_o, lifted)

    def take(self, model: nn.Module, units: Sequence[Unit]) -> None:
        options, kind = self.options, STORES[self.options.recovery]
        restore_plain(model)
        base = base_model(model)
        names = {module: canonical(name) for name, module in base.named_modules()}
        self.modules: list[list[bnb.nn.Linear8bitLt]] = [
            [m for m in _modules(unit) if type(m) is bnb.nn.Linear8bitLt and not m.state.has_fp16_weights] for unit in units
        ]
        by_name = {names[m]: m for modules in self.modules for m in modules}
        if not by_name:
            raise SetupError(_not_8bit(base, units))
        for module in by_name.values():
            if module.weight.CB is not None:
                module.init_8bit_state()
            if module.state.SCB is None:
                raise SetupError(
                    "the scales of the 8-bit weights are lost: PEFT's DoRA drops them in a plain forward on a CPU (an "
                    "evaluation before or between trainings). Load the model again and train before evaluating"
                )

        in_8_bits = {names[m]: m for m in base.modules() if type(m) is bnb.nn.Linear8bitLt}
        refuse_broken_scales(in_8_bits)
        # Only the originals of switched modules are read.
        warn_of_zeros({n: m for n, m in in_8_bits.items() if not kind.originals_used or n not in by_name})

        def find(cast: bool) -> Originals:
            return find_originals(base, by_name, options.recovery_source, cast=cast)

        on_accelerator = any(is_accelerator(m.state.CB.device) for m in by_name.values())
        self.store: Store = kind.open(SwitchedBase(self.modules, find, options, on_accelerator))
        CAST_NOTES.addFilter(quiet)
        self.paths = [PathSwitch() for _ in units]
        for path, modules in zip(self.paths, self.modules, strict=True):
            path.in_eval = options.eval_path == "recovery"
            for module in modules:
                make_switchable(module, path, self.store.product(module), originals=kind.originals_used)
        self._account(units)
        self._outside = sum(type(m) is bnb.nn.Linear8bitLt for m in base.modules())
        self._active = np.zeros(len(units), dtype=bool)

    def _account(self, units: Sequence[Unit]) -> None:
        self.recoverable = np.array([bool(modules) for modules in self.modules])
        rows = np.array([sum(m.state.SCB.numel() for m in modules) for modules in self.modules], dtype=np.int64)
        weights = self.store.weights
        self.bytes_low = weights + 4 * rows
        originals_used = STORES[self.options.recovery].originals_used
        self.bytes_recovery = 2 * weights if originals_used else np.zeros_like(weights)
        self.bytes_added, self.resident_bytes = self.store.bytes_added, self.store.resident_bytes
        self.host_bytes, self.holds_all = self.store.host_bytes, self.store.holds_all
        # Frozen matrices of the layers that bitsandbytes did not quantise (fused experts, routers, skipped modules).
        self._left: Counter[str] = Counter()
        self._left_bytes: Counter[str] = Counter()
        for unit in units:
            for name, module in unit.module.named_modules():
                if in_adapter(name) or isinstance(module, SwitchableLinear8bitLt):
                    continue
                matrices = [p for p in module.parameters(recurse=False) if p.ndim >= 2 and not p.requires_grad]
                if matrices:
                    self._left[type(module).__name__] += 1
                    self._left_bytes[type(module).__name__] += sum(p.numel() * p.element_size() for p in matrices)

    def reserve(self, units: int) -> None:
        # Evaluation on the recovery path passes the units through at least one slot.
        self.store.reserve(max(units, 1) if self.options.eval_path == "recovery" else units)

    def recovery_bytes_bound(self, units: int) -> int:
        return self.store.bound(units)

    def apply(self, active: Bools) -> int:
        unit = int(np.flatnonzero(self.recoverable)[0])
        if getattr(self.modules[unit][0], "_gnmr_path", None) is not self.paths[unit]:
            raise SetupError(
                "the model's paths no longer belong to this backend: a second GNMRCallback took them over, or they were "
                "removed during training (restore_plain). Use a single callback until training ends"
            )
        changed = np.flatnonzero(active != self._active)
        if changed.size:
            self.store.apply(active)
        for unit in changed.tolist():
            path = self.paths[unit]
            path.in_train = bool(active[unit])
            if self.options.eval_path == "active":
                path.in_eval = path.in_train
        self._active = np.array(active, dtype=bool)
        return changed.size

    def remove(self) -> None:
        for path, modules in zip(self.paths, self.modules, strict=True):
            for module in modules:
                if module.__dict__.get("_gnmr_path") is path:  # not if another run took the model over
                    make_plain_8bit(module)
        self.store.close()
        CAST_NOTES.removeFilter(quiet)

    def census(self) -> dict[str, Any]:
        low, not_switched = int(self.bytes_low.sum()), self._left_bytes.total()
        entries: dict[str, Any] = {
            "modules_switched": sum(map(len, self.modules)),
            "modules_not_switched": {kind: self._left[kind] for kind, _ in self._left_bytes.most_common()},
            "bytes_not_switched": not_switched,
            "modules_8bit_elsewhere": self._outside,
            "low_path": low_path_in_words(self.modules[int(np.flatnonzero(self.recoverable)[0])][0]),
            "recovery_path": self.store.in_words(),
            "recovery": self.options.recovery,
            "recovery_source": self.store.source,
            "eval_path": self.options.eval_path,
            "bytes_low": low,
            "bytes_recovery": int(self.bytes_recovery.sum()),
            "share_switched": round(low / (low + not_switched), 4),
        }
        return {**entries, **self.store.census()}

    def census_lines(self, census: Mapping[str, Any]) -> list[str]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in census["modules_not_switched"].items())
        excluded = f"NOT switched: {kinds}, {census['bytes_not_switched']:,} bytes" if kinds else "none left out"
        host = f", {census['host_bytes']:,} in the host's memory" if census["host_bytes"] else ""
        lines = [
            f"{census['modules_switched']} modules switched, {census['share_switched']:.1%} of the layers' frozen weight "
            f"bytes ({excluded})",
            f"low-cost path: {census['low_path']}; {census['bytes_low']:,} bytes",
            f"recovery path: {census['recovery_path']} ({census['recovery_source']}); {census['bytes_recovery']:,} bytes "
            f"for all layers, at most {census['recovery_bytes_bound']:,} added at a time, {census['resident_bytes']:,} "
            f"resident whatever is active{host}",
            f"evaluation during training runs the {census['eval_path']} path",
        ]
        return [*lines, census["note"]] if "note" in census else lines

    def identity(self) -> dict[str, Any]:
        recovery = self.options.recovery
        return {"recovery": "originals" if STORES[recovery].originals_used else recovery}


def is_accelerator(device: torch.device) -> bool:
    """Whether weights have to be copied to reach the device."""
    return device.type != "cpu"


def quiet(record: logging.LogRecord) -> bool:
    """Drops bitsandbytes' note, once per module and forward, that BF16 inputs are cast to FP16 for quantisation."""
    return "will be cast from" not in str(record.msg)


@contextlib.contextmanager
def cast_notes_silenced() -> Iterator[None]:
    """Silence those notes while an 8-bit model runs without a backend."""
    CAST_NOTES.addFilter(quiet)
    try:
        yield
    finally:
        CAST_NOTES.removeFilter(quiet)


def _modules(unit: Unit) -> Iterator[Any]:
    return unit.module.modules()


def low_path_in_words(module: bnb.nn.Linear8bitLt) -> str:
    """What the low-cost path actually runs on this module's device."""
    device = module.state.CB.device
    threshold = f"outlier threshold {module.state.threshold:g}"
    if device.type != "cpu":
        return f"INT8×INT8 by bitsandbytes on {device}, {threshold}"
    from bitsandbytes.backends.cpu import ops

    if getattr(ops, "_has_avx512", False):
        return f"INT8×INT8 by torch._int_mm on the CPU (AVX-512), {threshold}"
    return f"INT8×INT8 emulated by an FP32 product of the codes (no AVX-512 on this CPU: slow), {threshold}"


def _not_8bit(base: nn.Module, units: Sequence[Unit]) -> str:
    kinds = {type(m).__name__ for unit in units for m in unit.module.modules() if isinstance(m, nn.Linear)}
    sixteen_bits = any(
        isinstance(m, bnb.nn.Linear8bitLt) and m.state.has_fp16_weights for unit in units for m in _modules(unit)
    )
    why = (
        "its 8-bit linears keep 16-bit weights (llm_int8_has_fp16_weight=True)"
        if sixteen_bits
        else (f"its linears are {', '.join(sorted(kinds)) or 'none'}")
    )
    return (
        f"{type(base).__name__} is not an 8-bit model: {why}. Load it with "
        "quantization_config=BitsAndBytesConfig(load_in_8bit=True), convert it with hf_gnmr.quantize_int8(model), or "
        'use backend="none" to monitor without switching'
    )
