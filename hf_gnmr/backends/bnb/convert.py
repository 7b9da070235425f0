"""A BF16 model in memory, converted to 8-bit with its originals kept: for models without a checkpoint."""

from __future__ import annotations

import math
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn

from ...config import ConfigError, SetupError, number
from ...terminal import shown
from .originals import Kept

HOOKS = ("_forward_", "_backward_", "_is_full_backward_hook")
"""Beginnings of the names under which torch keeps a module's hooks."""


def quantize_int8(model: Any, *, threshold: float = 6.0) -> Any:
    """Convert a BF16 model in memory to 8-bit, in place, and keep its BF16 weights for the recovery path.

    Every `nn.Linear` but the output head becomes a frozen `Linear8bitLt`, as `BitsAndBytesConfig(load_in_8bit=True)`
    does on loading; PEFT, the Trainer and `save_pretrained` then treat the model as one loaded that way.

    Args:
        model: a transformers model whose linears are BF16.
        threshold: LLM.int8's outlier threshold.

    Raises:
        ConfigError: an argument of a wrong type.
        SetupError: a linear that is not BF16 or not in memory, or nothing to convert; the model is unchanged then.
    """
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    _check_model(model)
    threshold = number("threshold", threshold, "a finite number, at least 0")
    if not 0 <= threshold < math.inf:
        raise ConfigError(f"threshold={threshold!r}: expected a finite number, at least 0")
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    if not linears:
        raise SetupError(f"{type(model).__name__} has no nn.Linear to convert")
    for name, linear in linears:
        if "forward" in linear.__dict__:
            raise SetupError(
                f"{name} has a custom forward (accelerate's hooks for device_map or offloading, or a patch), which the "
                "8-bit module would lack: load the model into memory without it"
            )
        if linear.weight.device.type == "meta":
            raise SetupError(f"{name} is on the meta device (offloaded?): load the model into memory to convert it")
        if linear.weight.dtype is not torch.bfloat16:
            raise SetupError(f"{name} is {linear.weight.dtype}: load the model with dtype=torch.bfloat16 to convert it")
    for name, linear in linears:
        device = linear.weight.device
        with torch.device("meta"):
            new = bnb.nn.Linear8bitLt(
                linear.in_features,
                linear.out_features,
                linear.bias is not None,
                has_fp16_weights=False,
                threshold=threshold,
            )
        original = linear.weight.detach()
        new.weight = bnb.nn.Int8Params(original.to("cpu"), requires_grad=False, has_fp16_weights=False).to(device)
        new.bias = linear.bias
        new.source_cls = nn.Linear
        new.requires_grad_(False)
        new.train(linear.training)
        for attribute in (key for key in linear.__dict__ if key.startswith(HOOKS)):
            new.__dict__[attribute] = linear.__dict__[attribute]  # the same dictionaries: their handles stay valid
        model.set_submodule(name, new)
        new.__dict__[Kept.attribute] = Kept(original.to("cpu"))
    model.requires_grad_(False)
    quantization = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=False)
    model.hf_quantizer = quantizer
    model.is_quantized = model.is_loaded_in_8bit = True
    model.quantization_method = quantization.quant_method
    model.config.quantization_config = quantization
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ConfigError(f"model={shown(model)}: expected a transformers model, whose config is marked as quantised")
