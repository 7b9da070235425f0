"""A GGUF file as a folder of BF16 safetensors, which everything else reads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from ..config import SetupError
from ..reading import FileError
from .architecture import cause, check_sizes, on_meta
from .gguf_header import check_gguf
from .sections import ModelSection, RecipeError


def import_gguf(gguf_file: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    """Turn a GGUF file into a folder of BF16 safetensors with config and tokenizer.

    The weights are the dequantised ones: as exact as the GGUF file, not as the model that it was made from.

    Args:
        gguf_file: e.g. ``SmolLM2-135M-Instruct.Q4_1.gguf``.
        folder: the folder to create; it must not exist.

    Raises:
        SetupError: no such file, the folder exists, or the file's architecture is unknown to transformers.
        RecipeError: sizes of its model beyond the limits of `architecture`.
        FileError: a header beyond the limits of `gguf_header`, or beyond the file.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    file, target = Path(gguf_file), Path(folder)
    if not file.is_file():
        raise SetupError(f"{file}: no such file")
    if os.path.lexists(target):
        raise SetupError(f"{target} exists already: remove it, or choose another folder")
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK | os.X_OK):
        raise SetupError(f"{target} cannot be created: {target.parent} is no folder that may be written")
    try:
        weights = check_gguf(file)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        check_sizes(config.to_dict(), f"{file}: its configuration")
        parameters = sum(p.numel() for p in on_meta(config, ModelSection(str(file)), torch.bfloat16).parameters())
        if parameters > 2 * weights:  # otherwise the rest would be drawn at random
            raise SetupError(
                f"{file}: expected tensors for the {parameters:,} parameters of its model, got {weights:,} weights"
            )
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as error:
        raise SetupError(f"{file} cannot be read: {cause(error)} (this needs gguf: pip install 'hf-gnmr[gguf]')") from error
    except (SetupError, RecipeError, FileError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what a header makes gguf and transformers raise is open-ended
        raise SetupError(f"{file} cannot be read: {cause(error)}") from error
    # save_pretrained refuses the loaded model because it is marked as GGUF-quantised: copy its weights to a plain twin.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    twin = type(model)(config).to(torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    twin.generation_config = GenerationConfig.from_model_config(config)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        twin.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
