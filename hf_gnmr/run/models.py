"""Models for a run: loaded from the Hub or a folder (or built in), quantised, with adapters that do not depend on that."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from ..backends import BACKENDS
from ..backends.units import lora_part
from ..config import ConfigError, GNMRConfig
from ..terminal import shown
from .architecture import cause, check_folder, check_sizes, load_config, on_meta
from .gguf import import_gguf as import_gguf
from .patterns import check_patterns
from .sections import LoraSection, ModelSection, RecipeError

BUILTIN = "builtin"
OF_LOADING = (OSError, ValueError, ImportError, TypeError, KeyError, AttributeError, AssertionError, SafetensorError)
"""What libraries raise for files of a model that they cannot use."""


def model_source(section: ModelSection) -> str:
    """Folder or Hub id of the base model; the built-in one is pre-trained first if it is not in the cache.

    Raises:
        RecipeError: a path that does not exist.
    """
    if section.name == BUILTIN:
        from .builtin import pretrained_base

        return str(pretrained_base(size=section.builtin_size))
    looks_local = section.name.startswith((".", "/", "~")) or section.name.count("/") > 1
    if looks_local and not Path(section.name).expanduser().is_dir():
        raise RecipeError(f"model.name={section.name!r}: no such folder")
    return os.path.expanduser(section.name)


def readable_config(source: str, section: ModelSection) -> Any:
    """A model's configuration, within the limits of `architecture`.

    Raises:
        RecipeError: it cannot be loaded.
    """
    try:
        return load_config(source, section)
    except RecipeError:
        raise
    except (OSError, ValueError) as error:
        raise RecipeError(f"model.name={section.name!r}: its configuration cannot be loaded: {error}") from error


def check_depth(source: str, section: ModelSection, gnmr: GNMRConfig | None, lora: LoraSection | None) -> None:
    """Compare settings that count layers with the model's configuration, before its weights are loaded.

    Raises:
        RecipeError: no readable configuration, another architecture than the recipe's, `gnmr.max_o` above the number of
            layers, or an adapter for a layer that does not exist.
    """
    config = readable_config(source, section)
    check_architecture(section, config)
    depth = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if depth is None:
        return
    if gnmr is not None and isinstance(gnmr.max_o, int) and gnmr.max_o > depth:
        raise RecipeError(f"gnmr.max_o={gnmr.max_o}: expected at most {depth}, the model's decoder layers")
    layers = None if lora is None else lora.layers_to_transform
    beyond = [layer for layer in layers or [] if not 0 <= layer < depth]
    if beyond and lora is not None:
        raise RecipeError(f"lora.layers_to_transform={lora.layers_to_transform}: expected layers from 0 to {depth - 1}")


def check_history(config: Any, gnmr: GNMRConfig, unit_kind: str) -> None:
    """Compare `gnmr.delta` with the number of units that a model has at least, before its weights are loaded.

    Args:
        config: the model's.
        gnmr: thresholds and window.
        unit_kind: one of `backends.units.FINDERS`.

    Raises:
        RecipeError: a window that is too long for so many units (a run's controller compares it with the exact number).
    """
    text = config.get_text_config(decoder=True)
    experts = ("num_experts", "num_local_experts", "n_routed_experts") if unit_kind == "expert" else ()
    layers, *counts = (getattr(text, name, None) or 1 for name in ("num_hidden_layers", *experts))
    try:
        gnmr.check_history(layers * max(counts, default=1))
    except ConfigError as error:
        raise RecipeError(f"gnmr.{error}") from error


def check_architecture(section: ModelSection, config: Any) -> None:
    """Compare the recipe's architecture, if it states one, with the model's own configuration.

    Raises:
        RecipeError: another value.
    """
    for key, value in (section.architecture or {}).items():
        if key != "dtype" and getattr(config, key, value) != value:
            raise RecipeError(f"model.architecture.{key}={value!r}: {section.name} has {getattr(config, key)!r}")


def build_from_scratch(section: ModelSection, seed: int) -> Any:
    """A model of `section.architecture` with random weights: the same weights for the same seed, in fp32 or cast to BF16.

    Raises:
        RecipeError: values from which no model can be built.
    """
    from transformers import AutoModelForCausalLM, set_seed

    config = architecture_config(section)
    try:
        on_meta(config, section, torch.float32)  # refuses what is too large
        set_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=section.attn_implementation, trust_remote_code=section.trust_remote_code
        )
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"model.architecture: cannot build a model from it: {cause(error)}") from error
    return model.to(torch.bfloat16 if section.dtype == "bfloat16" else torch.float32)


def architecture_config(section: ModelSection) -> Any:
    """`section.architecture` as a transformers configuration.

    Raises:
        RecipeError: an unknown model_type, or values that its configuration refuses.
    """
    from transformers import AutoConfig

    values = dict(section.architecture or {})
    check_sizes(values, "model.architecture")
    try:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        config.to_dict()
    except Exception as error:
        raise RecipeError(f"model.architecture={shown(section.architecture)}: {cause(error, values)}") from error
    return config


def scratch_tokenizer(section: ModelSection) -> Any:
    """The tokenizer for a model from scratch.

    Raises:
        RecipeError: it cannot be loaded, or has more tokens than the model's vocabulary.
    """
    assert section.tokenizer is not None and section.architecture is not None
    if section.tokenizer == "bytes":
        from .builtin import byte_tokenizer

        tokenizer = byte_tokenizer()
    else:
        tokenizer = load_tokenizer(os.path.expanduser(section.tokenizer), section)
    size = getattr(architecture_config(section), "vocab_size", None)
    if size is not None and len(tokenizer) > size:
        raise RecipeError(
            f"model.architecture.vocab_size={size}: expected at least {len(tokenizer)}, the tokens of {section.tokenizer}"
        )
    return tokenizer


def load_tokenizer(source: str, section: ModelSection) -> Any:
    """The model's fast tokenizer, with an end-of-sequence and a padding token.

    Raises:
        RecipeError: no fast tokenizer, or no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    check_folder(source, f"model.name={shown(section.name)}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
    except Exception as error:  # of the tokenizers library: of no more specific type
        raise RecipeError(f"model.name={section.name!r}: the tokenizer cannot be loaded: {cause(error)}") from error
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise RecipeError(f"model.name={section.name!r}: expected a fast tokenizer with an end-of-sequence token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_base(source: str, section: ModelSection, backend: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The base model in `dtype`, or as the named backend stores it (8-bit linears for int8).

    Raises:
        RecipeError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    quantization = BACKENDS[backend].quantization_config(section.llm_int8_threshold)
    options = {} if quantization is None else {"quantization_config": quantization}
    try:
        return AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
            attn_implementation=section.attn_implementation,
            **options,
        )
    except torch.OutOfMemoryError:
        raise
    except (*OF_LOADING, RuntimeError) as error:
        raise RecipeError(f"model.name={section.name!r}: the model cannot be loaded: {cause(error)}") from error


def add_adapters(model: Any, section: LoraSection, seed: int) -> Any:
    """The model under PEFT, with adapters that do not depend on the base's dtype.

    PEFT draws A in the base's dtype, so the same seed gives different adapters over an 8-bit and a BF16 base. Here they are
    drawn again in fp32, each seeded by its own name, or copied from `init_adapter`.

    Raises:
        RecipeError: targets that match nothing, or an adapter that does not fit.
    """
    from peft import get_peft_model

    check_patterns({"target_modules": section.target_modules}, module_names(model), "lora.")
    try:
        model = get_peft_model(model, lora_config(section))
    except (ValueError, TypeError) as error:
        raise RecipeError(f"lora (target_modules={shown(section.target_modules)}): {error}") from error
    if section.init_adapter is None:
        draw_adapters(model, seed)
        return model
    load_adapter(model, section.init_adapter, "lora.init_adapter")
    return model


def module_names(model: Any) -> list[str]:
    """The names that PEFT's options are matched against."""
    return [name for name, _ in (*model.named_modules(), *model.named_parameters())]


def lora_config(section: LoraSection) -> Any:
    """The section as a PEFT configuration."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=section.r,
        lora_alpha=section.lora_alpha,
        lora_dropout=section.lora_dropout,
        target_modules=section.target_modules,
        layers_to_transform=section.layers_to_transform,
        use_rslora=section.use_rslora,
    )


def load_adapter(model: Any, folder: str, key: str) -> None:
    """Load an adapter's weights into a PEFT model that has adapters of the same shape.

    Raises:
        RecipeError: no such folder, or tensors that are missing, unexpected or of another shape; the message names `key`.
    """
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    if not Path(folder).is_dir():
        raise RecipeError(f"{key}={folder!r}: no such folder")
    check_folder(folder, key)
    try:
        result = set_peft_model_state_dict(model, load_peft_weights(folder, device="cpu"))
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, UnpicklingError) as error:
        raise RecipeError(f"{key}={folder!r} does not fit, or its file is cut off: {error}") from error
    prefix = getattr(model.base_model, "prefix", "lora_")
    missing = [name for name in result.missing_keys if prefix in name]
    if missing or result.unexpected_keys:
        named = "; ".join(
            f"{what}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
            for what, names in (("missing", missing), ("unexpected", list(result.unexpected_keys)))
            if names
        )
        raise RecipeError(
            f"{key}={folder!r} does not fit: {len(missing)} tensors missing, {len(result.unexpected_keys)} unexpected "
            f"({named})"
        )


def draw_adapters(model: Any, seed: int) -> None:
    """Draw A ~ U(±1/√fan_in), PEFT's distribution (Kaiming with a = √5), in fp32 and seeded per name; set B to 0."""
    for name, p in model.named_parameters():
        if lora_part(name) == "A":
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            bound = 1 / math.sqrt(p.shape[1])
            with torch.no_grad():
                p.copy_(torch.empty(p.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator))
        elif lora_part(name) == "B":
            torch.nn.init.zeros_(p)
