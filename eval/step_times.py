"""Time and memory of a whole optimizer step under each trigger, for `stress.py --times`."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from pathlib import Path

import numpy as np
import torch

from hf_gnmr.control.triggers import TRIGGERS
from hf_gnmr.run.models import build_from_scratch, scratch_tokenizer
from hf_gnmr.run.packing import text_blocks
from hf_gnmr.run.sections import Recipe
from hf_gnmr.training.options import Options, take_over
from hf_gnmr.training.session import GNMRSession


def step_times(recipe: Recipe, rounds: int) -> dict[str, dict]:
    """Median, quartiles and growth by side, alternating on one model and equal batches.

    `plain` is the model as it is; `fixed` is the low-cost path with nothing that watches or decides: against it, `none`
    shows what control costs at an equal active set. Times are against the plain one of the same round. Memory is what the
    process grows by, at its peak, over what it holds with model and optimizer (Linux; start with
    MALLOC_MMAP_THRESHOLD_=131072, or freed blocks hide in it).
    """
    torch.set_num_threads(1)
    tokenizer = scratch_tokenizer(recipe.model)
    model = build_from_scratch(recipe.model, 0).train()
    model.config.use_cache = False
    blocks, _, _ = text_blocks(recipe.data, tokenizer)
    size = recipe.training["per_device_train_batch_size"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    more = {
        "random": {"promotion_ratio": 0.03},
        "static": {"warmup": 1},
    }

    def one(arm: str, number: int, session: GNMRSession | None) -> float:
        ids = torch.stack([blocks[(number * size + i) % len(blocks)]["input_ids"] for i in range(size)])
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        if session is not None:
            session.observe()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if session is not None:
            session.decide()
        optimizer.zero_grad()
        return time.perf_counter() - start

    switched = recipe.backend.options()
    # `listed` costs what `random` costs; experts in one tensor have nothing that the other two could measure.
    unmeasured = ("listed", *(("gsnr", "jacobian") if switched["unit"] == "expert" else ()))
    sides = ["plain", "fixed", *(t for t in TRIGGERS if t not in unmeasured)]
    ratios: dict[str, list[float]] = {side: [] for side in sides}
    grown: dict[str, list[float]] = {side: [] for side in sides}
    control: list[float] = []
    one("plain", 0, None)  # the optimizer's state is there from now on
    with contextlib.redirect_stdout(None):
        for round_ in range(rounds):
            seconds = {}
            for side in sides:
                session, bare = None, None
                gc.collect()
                before = _resident_peak(reset=True)
                if side == "fixed":
                    _, bare, _ = take_over(model, recipe.gnmr, Options(layers=recipe.model.layers, **switched))
                elif side != "plain":
                    session = GNMRSession(
                        model,
                        recipe.gnmr,
                        total_steps=1000,
                        trigger=side,
                        trigger_options=more.get(side, {}),
                        **switched,
                    )
                steps = [one(side, 4 * round_ + i, session) for i in range(4)]
                seconds[side] = min(steps[1:])
                grown[side].append(_resident_peak() - before)
                if session is not None:
                    session.detach()
                if bare is not None:
                    bare.remove()
            for side in sides:
                ratios[side].append(seconds[side] / seconds["plain"])
            control.append(seconds["none"] / seconds["fixed"])
    ratios["none, against fixed"] = control
    grown["none, against fixed"] = [math.nan]
    return {
        side: {
            **dict(zip(("low", "median", "high"), (float(q) for q in np.quantile(r, [0.25, 0.5, 0.75])), strict=True)),
            "peak_bytes": float(np.median(grown[side])),
        }
        for side, r in ratios.items()
    }


def _resident_peak(reset: bool = False) -> float:
    """Peak resident bytes of this process since the last reset, which sets it to what is resident now; nan off Linux."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return math.nan
    return 1024 * float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
