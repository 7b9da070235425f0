"""Recipes: one YAML file per run, plus ``section.key=value`` overrides, checked before anything is loaded.

A recipe has the sections below.  `training` takes the fields of transformers' `TrainingArguments` and `gnmr` those of
`GNMRConfig`, by their own names.  A recipe may extend another (`extends:`), and overrides apply on top of both; either may
name another backend, which removes the old one's options, or another model, which removes what describes the old one.  Every
value is converted to the type of its field (``2e-5`` is a number here, although YAML 1.1 reads it as text) or refused,
naming key, value and what is expected; unknown keys are refused with the nearest known one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..backends import BACKENDS, option_names
from ..config import ConfigError, GNMRConfig, field_defaults, one_of
from ..control.triggers import TRIGGERS
from ..reading import SHIPPED
from ..terminal import shown
from ..training.options import DEFAULT_BACKEND, DEFAULT_TRIGGER
from .emulated import EMULATED, differences, kernels, merge_settings
from .extends import extended_by, read_values
from .overrides import read_overrides
from .script_key import drop_script_key, refuse_script_key
from .sections import (
    BackendSection,
    DataSection,
    LoraSection,
    ModelSection,
    Recipe,
    RecipeError,
    RunSection,
    TriggerSection,
)
from .values import check_finite, check_known, check_value

SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "lora": LoraSection,
    "data": DataSection,
    "training": dict,
    "gnmr": GNMRConfig,
    "backend": BackendSection,
    "trigger": TriggerSection,
    "run": RunSection,
}

SCRATCH = "scratch"
OF_A_MODEL = {"architecture", "revision", "tokenizer", "layers", "trust_remote_code"}
"""Keys of the section `model` that describe the model of that name, and do not outlive it where another one is named: its
dimensions, its branch, the pattern of its layers, and trust in its author."""
OF_SCRATCH = {"architecture", "tokenizer"}
"""Of these, what a model built from scratch takes from the recipe that it is based on."""


def find_recipe(name: str) -> Path:
    """A recipe file by path, or by the name of a recipe in the package (``quickstart``, ``quickstart.yaml``).

    Raises:
        RecipeError: no such file; the message lists the package's recipes.
    """
    path = Path(name)
    if path.is_file():
        return path
    if path.parent == Path(".") or path.parent == Path("recipes"):
        for folder in SHIPPED:
            for candidate in (folder / path.name, folder / f"{path.name}.yaml"):
                if candidate.is_file():
                    return candidate
    known = sorted({p.stem for folder in SHIPPED if folder.is_dir() for p in folder.glob("*.yaml")})
    raise RecipeError(f"no recipe file {shown(name)}; available by name: {', '.join(known)}")


def load_recipe(path: str | os.PathLike[str], overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe, apply the overrides, check the result.

    Args:
        path: the YAML file.
        overrides: ``section.key=value``, the value in YAML.

    Raises:
        RecipeError: naming key, value and what was expected.
    """
    raw = _read(Path(path))
    settings = raw.pop(EMULATED, None)
    changes = read_overrides(overrides, SECTIONS, off=[section for section in SECTIONS if raw.get(section) is False])
    recipe = _build(path, raw, changes)
    if settings is None:
        return recipe
    adapted = _build(path, raw, settings, changes)  # its errors are reported on every machine
    return dataclasses.replace(adapted, adapted=differences(recipe, adapted)) if kernels(adapted)[0] else recipe


def _build(path: str | os.PathLike[str], raw: dict[str, Any], *layers: dict[str, dict[str, Any]]) -> Recipe:
    """The checked recipe of a file's sections, with further settings on top, the last one uppermost."""
    raw = dict(raw)
    for layer in layers:
        _drop_recovery_source(raw, layer)
        for section, values in layer.items():
            raw[section] = _over(section, raw.get(section) or {}, values)
    refuse_script_key(raw)
    training = check_training(raw.get("training", {}))
    training.setdefault("output_dir", os.path.join("runs", Path(path).stem))
    sections: dict[str, Any] = {"training": training}
    for section in ("model", "data"):
        if section not in raw:
            raise RecipeError(f"{section}: the section is missing; {section}.name chooses the {section} to use")
    for section, cls in SECTIONS.items():
        if section == "lora" and raw.get(section) is False:
            sections[section] = None
        elif section in READERS:
            sections[section] = READERS[section](raw.get(section, {}))
        elif section != "training":
            sections[section] = _section(section, cls, raw.get(section, {}))
    recipe = Recipe(**sections)
    _fits_together(recipe)
    return recipe


def _read(path: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe's sections as plain values, on top of those of the recipe that it `extends`, if any."""
    raw = read_values(path, foreign=bool(below))
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: expected a recipe with the sections {', '.join(SECTIONS)}")
    drop_script_key(raw, foreign=bool(below))
    extended = raw.pop("extends", None)
    base: dict[str, Any] = {}
    if extended is not None:
        chain = (*below, path.parent.resolve() / path.name if not below else path.resolve())
        base = _read(extended_by(path, extended, chain), chain)
    if below and raw and not raw.keys() & SECTIONS.keys():  # no recipe: nothing of it is shown
        raise RecipeError(f"{path}: expected a recipe with the sections {', '.join(SECTIONS)}, got other keys")
    _drop_recovery_source(base, raw)
    for section, values in raw.items():
        check_known(section, [*SECTIONS, "extends", EMULATED], "section")
        if values is None:
            values = {}
        if section == "lora" and values is False:
            base[section] = False
            continue
        if not isinstance(values, dict):
            got = f"a {type(values).__name__} in {path}" if below else shown(values)
            raise RecipeError(f"{section}={got}: expected a section of key: value lines")
        if section == EMULATED:
            base[section] = merge_settings(base.get(section, {}), values, list(SECTIONS))
            continue
        inherited = base.get(section)
        base[section] = _over(section, inherited if isinstance(inherited, dict) else {}, values)
    return base


def _over(section: str, below: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """`values` on top of those below; if they name another backend, options that it does not have are removed, and if they
    name another model, what describes the old one."""
    if section == "model" and _names_another(below, values):
        of_old = OF_A_MODEL if values["name"] != SCRATCH else OF_A_MODEL - OF_SCRATCH
        below = {key: value for key, value in below.items() if key not in of_old}
    if section == "backend" and "name" in values and values["name"] != below.get("name", DEFAULT_BACKEND):
        backend = BACKENDS.get(str(values["name"]))
        own = {} if backend is None else backend.Options.defaults()
        below = {key: value for key, value in below.items() if key in own or key not in option_names()}
        if backend is None or below.get("unit") not in backend.unit_kinds:
            below.pop("unit", None)
    return {**below, **values}


def _names_another(below: Any, values: Any) -> bool:
    """Whether the section `model` in `values` names another model than the one below."""
    if not isinstance(below, dict) or not isinstance(values, dict) or below.get("name") is None:
        return False
    return values.get("name", below["name"]) != below["name"]


def _drop_recovery_source(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    """Remove the place of the old model's original weights, where `above` names another model."""
    if _names_another(below.get("model"), above.get("model")) and isinstance(below.get("backend"), dict):
        below["backend"] = {key: value for key, value in below["backend"].items() if key != "recovery_source"}


def _fits_together(recipe: Recipe) -> None:
    """Raise RecipeError for sections that do not fit together."""
    model, data = recipe.model, recipe.data
    if model.name == SCRATCH:
        if not model.architecture or "model_type" not in model.architecture or model.tokenizer is None:
            raise RecipeError("model.name='scratch' needs model.architecture (with model_type) and model.tokenizer")
        if "dtype" in model.architecture:
            raise RecipeError("model.architecture.dtype: for model.name='scratch' give model.dtype instead")
        if recipe.lora is not None:
            raise RecipeError("model.name='scratch' trains all weights: expected lora: false")
    elif model.tokenizer is not None:
        raise RecipeError(f"model.tokenizer={model.tokenizer!r}: only for model.name='scratch'; {model.name} has its own")
    if recipe.lora is None and BACKENDS[recipe.backend.name].quantised_base:
        raise RecipeError(
            f"lora: false with backend.name={recipe.backend.name!r}: a quantised base cannot be trained; it needs adapters"
        )
    if recipe.lora is not None and model.dtype is not None:
        raise RecipeError(f"model.dtype={model.dtype!r}: only for lora: false; under LoRA the base is BF16 or INT8")
    if data.text is None and data.streaming:
        raise RecipeError("data.streaming=True needs data.text: prompts and answers cannot be streamed")
    if data.documents is not None and data.text is None:
        raise RecipeError(f"data.documents={data.documents!r}: only with data.text; give data.text, or use data.rows")


def _section(section: str, cls: type, values: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]
    checked = {}
    for name, value in values.items():
        check_known(name, known, "key", f"{section}.")
        checked[name] = check_value(f"{section}.{name}", value, hints[name])
    required = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    for name in required:
        if name not in checked:
            raise RecipeError(f"{section}.{name} is missing")
    return _checked(section, cls, checked)


def _checked(section: str, make: Callable[..., Any], values: dict[str, Any]) -> Any:
    """`make(**values)`; its ConfigError becomes a RecipeError with the section before the field."""
    try:
        return make(**values)
    except RecipeError:
        raise
    except ConfigError as error:
        raise RecipeError(f"{section}.{error}") from error


def backend_section(values: dict[str, Any]) -> BackendSection:
    """The section `backend`: a name, and the options that the backend of that name declares.

    Raises:
        RecipeError: an unknown backend or option, or a wrong value.
    """
    options = {cls.name: cls.Options for cls in BACKENDS.values()}
    name, own = _choice("backend", DEFAULT_BACKEND, options, values, ("max_recovery_memory",))
    budget = own.pop("max_recovery_memory", None)
    hint = typing.get_type_hints(BackendSection)["max_recovery_memory"]
    budget = check_value("backend.max_recovery_memory", budget, hint)
    return BackendSection(name, budget, _checked("backend", options[name], own))


def trigger_section(values: dict[str, Any]) -> TriggerSection:
    """The section `trigger`: a name, and the options that the trigger of that name declares.

    Raises:
        RecipeError: an unknown trigger or option, or a wrong value.
    """
    options = {cls.name: cls.Options for cls in TRIGGERS.values()}
    # A null means that the option is not set.
    values_set = {key: value for key, value in values.items() if value is not None or key == "name"}
    name, own = _choice("trigger", DEFAULT_TRIGGER, options, values_set, ())
    return TriggerSection(name, _checked("trigger", options[name], own))


def _choice(
    section: str, default: str, options: Mapping[str, Any], values: dict[str, Any], common: tuple[str, ...]
) -> tuple[str, dict[str, Any]]:
    """The name that a section chooses, and the values for that choice, each of its field's type.

    An option of another backend is accepted at its default, where it has no effect (recipes resolved by version 0.1.0 list
    the options of all backends).
    """
    name = check_value(f"{section}.name", values.get("name", default), str)
    _checked(section, one_of, {"name": "name", "value": name, "choices": options})
    hints, own = typing.get_type_hints(options[name]), {}
    for key, value in values.items():
        if key == "name":
            continue
        owners = [owner for owner, cls in options.items() if key in cls.defaults()]
        if key in common:
            own[key] = value
        elif key in options[name].defaults():
            own[key] = check_value(f"{section}.{key}", value, hints[key])
        elif not owners:
            known = dict.fromkeys(["name", *common, *(k for cls in options.values() for k in cls.defaults())])
            check_known(key, list(known), "key", f"{section}.")
        elif section != "backend" or not any(
            _at_default(f"{section}.{key}", value, options[owner], key) for owner in owners
        ):
            raise RecipeError(
                f"{section}.{key}={shown(value)} belongs to {section}.name={' or '.join(map(repr, owners))}; this recipe "
                f"uses {name!r}"
            )
    return name, own


def _at_default(label: str, value: Any, cls: Any, key: str) -> bool:
    """Whether `value`, converted to the type of the option `key` of `cls`, is that option's default."""
    with contextlib.suppress(RecipeError):
        value = check_value(label, value, typing.get_type_hints(cls)[key])
    return bool(value == cls.defaults()[key])


READERS: dict[str, Callable[[dict[str, Any]], Any]] = {"backend": backend_section, "trigger": trigger_section}
"""Sections whose keys depend on the name that they choose."""


def normalised(values: dict[str, Any]) -> dict[str, Any]:
    """A stored recipe's sections as `Recipe.to_dict` returns them; sections that can no longer be read stay as they are.

    Keys that the recipe lacks were added after it was written: they get their defaults.  Version 0.1.0 listed the options of
    every backend and trigger.
    """
    result = dict(values)
    for section, cls in SECTIONS.items():
        stored = values.get(section)
        if isinstance(stored, dict) and dataclasses.is_dataclass(cls) and section not in READERS:
            result[section] = {**field_defaults(cls), **stored}
    for section, read in READERS.items():
        with contextlib.suppress(RecipeError):
            result[section] = read(dict(values.get(section) or {})).to_dict()
    return result


def check_training(values: dict[str, Any]) -> dict[str, Any]:
    """The `training` section, with every value converted to the type that `TrainingArguments` declares."""
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    known = [f.name for f in dataclasses.fields(TrainingArguments) if f.init]
    checked = {}
    for name, value in values.items():
        check_known(name, known, "key", "training.")
        result = check_value(f"training.{name}", value, hints[name])
        check_finite(f"training.{name}", result)
        # A step count that may also be a share is declared as a float; a whole number stays a whole number.
        checked[name] = value if type(value) is int and isinstance(result, float) else result
    return checked
