"""Whether a checkpoint's weights are those of the model that is to be resumed from it.

The Trainer loads what fits and skips the rest: training would continue with those weights as they were initialised.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..backends.units import unwrap
from ..config import SetupError
from ..files import FileError
from .whole import Shapes, check_torch_file, shapes_in, shapes_of_shards

SAFETENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN = "pytorch_model.bin"
"""Written by older versions of transformers; the Trainer still reads it."""
ADAPTER, ADAPTER_BIN = "adapter_model.safetensors", "adapter_model.bin"
NAMED = 5
"""Names that a message lists."""


def refuse_misfit(model: Any, folder: Path) -> None:
    """Refuse a checkpoint whose weights are not the model's.

    Args:
        model: a model under PEFT, whose adapters are compared name by name; any other, of which only shapes are compared
            here (transformers may store weights under other names: see `checkpoints.load_renamed`). The Trainer skips
            adapters that are stored under another name, and reads a whole model's file in their place.
        folder: the checkpoint.

    Raises:
        SetupError: weights that are missing, unexpected or of another shape, by name; or a file that cannot be read.
    """
    model = unwrap(model)
    try:
        adapted = hasattr(model, "peft_config")
        if adapted and not any((folder / name).is_file() for name in (SAFETENSORS, BIN)):
            adapters = _adapters(model, folder)
            _refuse_unread(model, folder, adapters)
            kept = [_refuse_adapter(model, place, name) for name, place in adapters.items() if name in model.peft_config]
            if adapters:
                _refuse_outside(model, folder, kept)
        else:
            names = stored_shapes(folder)
            own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
            refuse(folder, reshaped=_reshaped(own, names))
            if adapted:  # the Trainer reads a whole model's file before any adapter's
                refuse(folder, missing=_trainable(model) - names.keys(), unexpected=names.keys() - own.keys())
            elif names and not hasattr(model, "save_pretrained"):
                refuse(folder, missing=own.keys() - names.keys(), unexpected=names.keys() - own.keys())
    except FileError as error:
        raise SetupError(f"the checkpoint {folder} cannot be resumed: {error}") from error


def refuse(
    folder: Path,
    missing: Iterable[str] = (),
    unexpected: Iterable[str] = (),
    reshaped: Iterable[str] = (),
    advice: str = ": resume with the model and adapters of the checkpoint",
) -> None:
    """Raise SetupError if any of these weights of a checkpoint do not fit the model."""
    parts = [
        f"{what}: {', '.join(sorted(names)[:NAMED])}{f', … ({len(names)} in all)' if len(names) > NAMED else ''}"
        for what, names in (("missing", [*missing]), ("unexpected", [*unexpected]), ("of another shape", [*reshaped]))
        if names
    ]
    if parts:
        raise SetupError(f"the weights in {folder} do not fit the model ({'; '.join(parts)}){advice}")


def stored_shapes(folder: Path) -> Shapes:
    """Names and shapes of a checkpoint's whole model; empty if it holds none.

    Raises:
        FileError: a file that is cut off.
    """
    if (folder / SAFETENSORS).is_file():  # in the order in which the Trainer reads them
        return shapes_in(folder / SAFETENSORS)
    if (folder / BIN).is_file():
        return _shapes_in_bin(folder / BIN)
    return shapes_of_shards(folder / INDEX) if (folder / INDEX).is_file() else {}


def _reshaped(own: Shapes, stored: Shapes) -> list[str]:
    return [
        f"{name} ({list(stored[name])} instead of {list(shape)})"
        for name, shape in own.items()
        if name in stored and stored[name] != shape
    ]


def _shapes_in_bin(file: Path) -> Shapes:
    import torch

    check_torch_file(file)
    try:
        # Mapped, no tensor's data is read; torch's format before 1.6 cannot be mapped.
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    except (pickle.UnpicklingError, RuntimeError, AttributeError) as error:
        raise FileError(f"{file} cannot be read as a model's weights: {error}") from error


def _trainable(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _adapters(model: Any, folder: Path) -> dict[str, Path]:
    """Folders of the adapters that the Trainer loads from a checkpoint, also of those that the model does not have."""
    active = model.active_adapters[0]
    below = [f.parent for name in (ADAPTER, ADAPTER_BIN) for f in sorted(folder.glob(f"*/{name}"))]
    places = {"default" if below else active: folder} if _weights_of(folder) is not None else {}
    return places | {place.name: place for place in below}


def _refuse_unread(model: Any, folder: Path, adapters: dict[str, Path]) -> None:
    """Refuse a checkpoint of adapters that leaves another adapter, which is trained, as it was initialised."""
    unread = [re.compile(rf"\.{re.escape(name)}(\.|$)") for name in model.peft_config if name not in adapters]
    if adapters:
        missing = [name for name in _trainable(model) if any(part.search(name) for part in unread)]
        unexpected = [f"the adapter {name}" for name in adapters if name not in model.peft_config] if missing else []
        refuse(folder, missing, unexpected)


def _weights_of(folder: Path) -> Path | None:
    return next((folder / name for name in (ADAPTER, ADAPTER_BIN) if (folder / name).is_file()), None)


def _refuse_outside(model: Any, folder: Path, kept: list[tuple[set[int], Shapes]]) -> None:
    """Refuse a checkpoint of adapters without weights that were unfrozen outside them: PEFT stores only what it knows."""
    known = {address for addresses, _ in kept for address in addresses}
    stored = {name for _, names in kept for name in names}
    of_adapter = re.compile("|".join(rf"\.{re.escape(name)}(\.|$)" for name in model.peft_config))
    parameters = model.named_parameters()
    refuse(
        folder,
        missing=[
            name
            for name, p in parameters
            if p.requires_grad and p.data_ptr() not in known and name not in stored and not of_adapter.search(name)
        ],
        advice=". Weights that are trained beside an adapter are stored with it if its modules_to_save names their module",
    )


def _refuse_adapter(model: Any, folder: Path, adapter: str) -> tuple[set[int], Shapes]:
    """Refuse an adapter's file that does not fit; the addresses of the weights that PEFT stores, and what the file holds."""
    from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    expected = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    own = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    addresses = {tensor.data_ptr() for tensor in expected.values()}
    weights: dict[str, Any] | None = None
    if (folder / ADAPTER).is_file():
        stored = shapes_in(folder / ADAPTER)
    else:
        weights = load_peft_weights(str(folder), device="cpu")
        stored = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if stored == own:
        return addresses, stored
    refuse(folder, reshaped=_reshaped(own, stored))
    # Other versions of PEFT name some weights otherwise, and embeddings may be stored too: PEFT's own loading decides.
    weights = weights or load_peft_weights(str(folder), device="cpu")
    try:
        result = set_peft_model_state_dict(model, weights, adapter_name=adapter)
    except (KeyError, ValueError, RuntimeError) as error:
        refuse(folder, own.keys() - stored.keys(), stored.keys() - own.keys())
        raise SetupError(f"the weights in {folder} do not fit the model: {error}") from error
    parameters = {name for name, _ in model.named_parameters()}
    part = re.compile(rf"\.{re.escape(adapter)}(\.|$)")
    missing = [name for name in result.missing_keys if name in parameters and part.search(name)]
    refuse(folder, missing, result.unexpected_keys)
    return addresses, stored
