"""Row scales that make the INT8 path wrong from the start are reported before training, by module and number of rows."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from conftest import load_int8, tiny_config, trace_lines, with_lora
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

from hf_gnmr import GNMRCallback, SetupError, quantize_int8
from hf_gnmr.backends.bnb.int8 import Int8Backend
from hf_gnmr.backends.units import find_units

MODULE = "model.layers.1.mlp.down_proj"


def edited(folder, edit, dtype=torch.bfloat16, module=MODULE):
    """A checkpoint of the tiny LLaMA with one weight edited in place."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).to(dtype)
    with torch.no_grad():
        edit(model.get_submodule(module).weight)
    model.save_pretrained(folder)
    return str(folder)


def one_large(weight):
    weight[5, 3] = 1e5


def two_infinite(weight):
    weight[5, 3] = weight[7, 0] = float("inf")


def one_nan(weight):
    weight[60, 127] = float("nan")


def tiny_all(weight):
    weight *= 1e-9


def tiny_rows(weight):
    weight[3] = 1e-9
    weight[40] = -1e-10


BROKEN = {
    "one weight above FP16's range": (one_large, "1 of 64 rows", "not finite"),
    "infinite weights": (two_infinite, "2 of 64 rows", "not finite"),
    "NaN": (one_nan, "1 of 64 rows", "not finite"),
    "a layer that underflows": (tiny_all, "64 of 64 rows", "are 0, although the original weights are not"),
    "two rows that underflow": (tiny_rows, "2 of 64 rows", "are 0, although the original weights are not"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_scales_are_refused_at_train_begin(tmp_path, trainer_for, case):
    edit, rows, what = BROKEN[case]
    model = with_lora(load_int8(edited(tmp_path / "base", edit)))
    with pytest.raises(SetupError) as error:
        trainer_for(model, GNMRCallback()).train()
    text = str(error.value)
    assert f"{MODULE} ({rows})" in text and what in text and "llm_int8_skip_modules" in text


@pytest.mark.parametrize("recovery", ["device", "dequantize"])
def test_scales_that_are_not_finite_are_refused_for_every_store(tmp_path, recovery):
    model = with_lora(load_int8(edited(tmp_path / "base", one_large)))
    with pytest.raises(SetupError, match=r"down_proj \(1 of 64 rows\) are not finite"):
        Int8Backend(model, find_units(model), recovery=recovery)


@pytest.mark.parametrize(("edit", "rows"), [(tiny_all, 64), (tiny_rows, 2)])
def test_rows_that_are_zero_in_8_bits_without_originals_are_reported(tmp_path, edit, rows):
    model = with_lora(load_int8(edited(tmp_path / "base", edit)))
    with pytest.warns(UserWarning, match=rf"rows that are 0 in 8 bits: model.layers.1.mlp.down_proj \({rows} of 64 rows\)"):
        Int8Backend(model, find_units(model), recovery="dequantize").remove()


def test_converted_in_memory_they_are_refused_too(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(edited(tmp_path / "base", one_large), dtype=torch.bfloat16)
    model = with_lora(quantize_int8(model))
    with pytest.raises(SetupError, match=r"down_proj \(1 of 64 rows\) are not finite"):
        Int8Backend(model, find_units(model))


def test_rows_that_are_zero_in_the_original_are_right(tmp_path, trainer_for):
    def zero_rows(weight):
        weight[10:20] = 0

    model = with_lora(load_int8(edited(tmp_path / "base", zero_rows)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer_for(model, GNMRCallback(), max_steps=1).train()
    assert np.isfinite(trace_lines(tmp_path / "run")[1][0]["norms"]).all()


def test_the_mend_in_the_message_works(tmp_path, trainer_for):
    folder = edited(tmp_path / "base", tiny_all)
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=[MODULE, "lm_head"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    trainer_for(with_lora(model), GNMRCallback(), max_steps=1).train()
    header, lines = trace_lines(tmp_path / "run")
    assert header["census"]["modules_not_switched"] == {"Linear": 1}, "kept in 16 bits"
    assert np.isfinite(lines[0]["norms"]).all()
