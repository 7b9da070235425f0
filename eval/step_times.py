"""Time and memory of a whole optimizer step under each trigger, for `stress.py --times`."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_gnmr.backends.units import FINDERS, Unit
from hf_gnmr.control.triggers import TRIGGERS
from hf_gnmr.run.models import build_from_scratch, scratch_tokenizer
from hf_gnmr.run.packing import text_blocks
from hf_gnmr.run.sections import Recipe
from hf_gnmr.training.options import Options, take_over
from hf_gnmr.training.session import GNMRSession

LEFT_OUT = ("listed",)
"""Triggers that are not timed: `listed` costs what `random` costs."""
OPTIONS: dict[str, dict[str, Any]] = {"static": {"warmup": 1}, "random": {"promotion_ratio": 0.03}}
"""Of those that need some, or whose defaults are for longer runs."""
SIDES: dict[str, dict[str, Any]] = {name: OPTIONS.get(name, {}) for name in TRIGGERS if name not in LEFT_OUT}
"""Triggers that are timed, with their options."""
PLAIN, FIXED = "plain", "fixed"
"""The two sides without a trigger."""
STEPS = 4
"""Steps of a side in a round; the first one is not counted."""


def step_times(recipe: Recipe, rounds: int) -> dict[str, dict[str, float]]:
    """Median, quartiles and growth by side, alternating on one model and equal batches.

    `plain` is the model as it is; `fixed` is the low-cost path without monitoring or decisions: compared with it, `none`
    shows what control costs at an equal active set. Times are relative to the plain model's in the same round. Memory is the
    peak by which the process grows over what it holds with model and optimizer, in bytes (Linux; start with
    MALLOC_MMAP_THRESHOLD_=131072, or freed blocks hide the growth).
    """
    torch.set_num_threads(1)
    stepper = Stepper(recipe)
    units = FINDERS[Options(**recipe.backend.keywords()).unit_kind](stepper.model, recipe.model.layers)
    sides = [PLAIN, FIXED, *(trigger for trigger in SIDES if measurable(trigger, units))]
    ratios: dict[str, list[float]] = {side: [] for side in sides}
    growth: dict[str, list[float]] = {side: [] for side in sides}
    control: list[float] = []
    stepper.step(0, None)  # from here on the optimizer has its state
    with contextlib.redirect_stdout(None):
        for round_number in range(rounds):
            seconds = {}
            for side in sides:
                seconds[side], grown = stepper.timed(side, STEPS * round_number)
                growth[side].append(grown)
            for side in sides:
                ratios[side].append(seconds[side] / seconds[PLAIN])
            control.append(seconds["none"] / seconds[FIXED])
    ratios["none, against fixed"] = control
    growth["none, against fixed"] = [math.nan]
    return {
        side: {
            **dict(zip(("low", "median", "high"), (float(q) for q in np.quantile(r, [0.25, 0.5, 0.75])), strict=True)),
            "peak_bytes": float(np.median(growth[side])),
        }
        for side, r in ratios.items()
    }


def measurable(trigger: str, units: Sequence[Unit]) -> bool:
    """Whether a trigger can run over these units: parts of one tensor have no inputs or parameters to take a signal from."""
    return TRIGGERS[trigger].signal is None or all(unit.part is None for unit in units)


class Stepper:
    """A recipe's model, built from scratch, with an optimizer and batches."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        tokenizer = scratch_tokenizer(recipe.model)
        self.model = build_from_scratch(recipe.model, 0).train()
        self.model.config.use_cache = False
        self.blocks, _, _ = text_blocks(recipe.data, tokenizer)
        self.batch_size = recipe.training["per_device_train_batch_size"]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def timed(self, side: str, first: int) -> tuple[float, float]:
        """Seconds of the fastest step but the first, and the bytes by which the process grew, on batches from `first` on."""
        session, backend = None, None
        switched = self.recipe.backend.keywords()
        gc.collect()
        before = _resident_peak(reset=True)
        if side == FIXED:
            _, backend, _ = take_over(self.model, self.recipe.gnmr, Options(layers=self.recipe.model.layers, **switched))
        elif side != PLAIN:
            session = GNMRSession(
                self.model, self.recipe.gnmr, total_steps=1000, trigger=side, trigger_options=SIDES[side], **switched
            )
        steps = [self.step(first + i, session) for i in range(STEPS)]
        grown = _resident_peak() - before
        if session is not None:
            session.detach()
        if backend is not None:
            backend.remove()
        return min(steps[1:]), grown

    def step(self, number: int, session: GNMRSession | None) -> float:
        """Seconds of an optimizer step on a batch, monitored where there is a session."""
        rows = [(number * self.batch_size + i) % len(self.blocks) for i in range(self.batch_size)]
        ids = torch.stack([self.blocks[row]["input_ids"] for row in rows])
        start = time.perf_counter()
        self.model(input_ids=ids, labels=ids).loss.backward()
        if session is not None:
            session.observe()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if session is not None:
            session.decide()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def _resident_peak(reset: bool = False) -> float:
    """Peak resident bytes of this process since the last reset, which sets it to what is resident now; nan off Linux."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return math.nan
    return 1024 * float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
