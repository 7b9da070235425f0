"""The census at train begin, the trace's header, and the line at a run's end."""

from __future__ import annotations

import json

import pytest
import torch
import transformers as hf
from conftest import load_int8, random_llama, trace_lines, with_lora

from hf_gnmr import Controller, GNMRCallback, GNMRConfig
from hf_gnmr.backends import BACKENDS
from hf_gnmr.backends.units import find_units
from hf_gnmr.training.census import census_lines, summary_in_words, take_census, trace_header


@pytest.fixture
def parts():
    """Units, backend and controller of a model in which nothing is switched."""
    model = random_llama()
    units = find_units(model)
    backend = BACKENDS["none"](model, units)
    trigger = Controller(3, GNMRConfig(alpha_init_fraction=0.0), recoverable=backend.recoverable)
    return units, backend, trigger


def test_a_census_counts_units_and_what_can_be_switched(parts):
    census = take_census(*parts)
    units, backend, _ = parts
    assert (census["units"], census["recoverable_units"], census["max_o"]) == (3, 0, 0)
    assert census["unit_names"] == "model.layers.0 to model.layers.2" and census["backend"] == "none"
    assert census["trainable_parameters_in_units"] == sum(p.numel() for unit in units for p in unit.parameters)
    head, *others = census_lines(census, backend)
    assert head == ("GNMR: 3 units (model.layers.0 to model.layers.2), 0 recoverable; backend none, trigger gnmr, maxO 0")
    assert not any("outside these units" in line for line in others)
    assert take_census(units[:1], *parts[1:])["unit_names"] == "model.layers.0"


@pytest.mark.parametrize(
    ("elsewhere", "words"),
    [
        ({"trainable_parameters_elsewhere": 1200}, "neither monitored nor switched: 1,200 trainable parameters"),
        (
            {"trainable_parameters_elsewhere": 5, "modules_8bit_elsewhere": 2},
            "5 trainable parameters; 2 8-bit modules, which stay 8-bit",
        ),
    ],
)
def test_what_is_outside_the_units_is_counted(parts, elsewhere, words):
    lines = census_lines({**take_census(*parts), **elsewhere}, parts[1])
    assert words in lines[1]


def test_a_header_is_plain_json(parts):
    header = trace_header(*parts, take_census(*parts))
    assert json.loads(json.dumps(header, allow_nan=False)) == header
    assert [unit["name"] for unit in header["units"]] == [f"model.layers.{i}" for i in range(3)]
    assert header["trigger"] == "gnmr" and header["max_o"] == 0 and header["units"][2]["recoverable"] is False


def test_a_summary_without_recoverable_units_has_no_shares():
    summary = {
        "steps": 6,
        "skipped_steps": 1,
        "non_finite_steps": 2,
        "promotion_ratio": None,
        "hit_max_o_rate": 0.25,
        "switches": 3,
        "controller_ms": None,
        "controller_share": 0.5,
    }
    assert summary_in_words(summary) == (
        "GNMR: 6 steps (1 skipped, 2 not finite); promotion ratio n/a, hit-maxO 25.00%, 3 switches; "
        "controller 0.00 ms per step (50.00%)"
    )


def test_census_is_printed_once_and_says_what_runs(trainer_for, tiny, capsys):
    trainer_for(with_lora(load_int8(tiny)), GNMRCallback(max_o=1)).train()
    out = capsys.readouterr().out
    assert out.count("3 units (model.layers.0 to model.layers.2), 3 recoverable") == 1
    assert "21 modules switched" in out and "INT8×INT8" in out and "73,728 added at a time" in out


def test_what_lies_outside_the_layers_is_reported(tmp_path, trainer_for, capsys):
    """An encoder-decoder model: the decoder is controlled, and the census does not hide the encoder."""
    config = hf.BartConfig(
        vocab_size=128,
        d_model=64,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=32,
    )
    hf.BartForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(tmp_path / "bart")
    model = hf.BartForConditionalGeneration.from_pretrained(
        tmp_path / "bart", dtype=torch.bfloat16, quantization_config=hf.BitsAndBytesConfig(load_in_8bit=True)
    )
    trainer_for(with_lora(model), GNMRCallback(max_o=1)).train()
    census = trace_lines(tmp_path / "run")[0]["census"]
    assert census["modules_8bit_elsewhere"] == 3 * 6 and census["trainable_parameters_elsewhere"] > 0
    assert "outside these units, neither monitored nor switched" in capsys.readouterr().out
