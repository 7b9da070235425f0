"""What the tests of 8-bit models share: logits on fixed rows, and a backend whose evaluation runs the active paths."""

from __future__ import annotations

import numpy as np
import torch
from conftest import token_rows

from hf_gnmr.backends.bnb.int8 import Int8Backend
from hf_gnmr.backends.units import find_units

IDS = torch.tensor([row["input_ids"] for row in token_rows(4)])


def logits(model, autocast=None):
    with torch.no_grad(), torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        return model(input_ids=IDS).logits


def switched(model, eval_path="active", **options):
    """The backend over a model's layers, and the layers as units."""
    units = find_units(model)
    return Int8Backend(model, units, eval_path=eval_path, **options), units


def backend_for(model, **options):
    return switched(model, **options)[0]


def active(*units, of=3):
    """A mask of so many units with these ones set."""
    mask = np.zeros(of, dtype=bool)
    mask[list(units)] = True
    return mask


def lift(backend, *units):
    backend.apply(active(*units, of=len(backend.recoverable)))


def play_accelerator(monkeypatch):
    """Let the CPU play the device: `host` then keeps slots, as on an accelerator."""
    monkeypatch.setattr("hf_gnmr.backends.bnb.int8.is_accelerator", lambda device: True)
