"""What `cost.py` measures with: a model with batches, intervals of medians, and shares of copies hidden behind kernels."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

from hf_gnmr.backends.bnb.int8 import Int8Backend
from hf_gnmr.backends.units import find_units
from hf_gnmr.control.controller import Bools
from hf_gnmr.run.models import add_adapters, load_base, model_source
from hf_gnmr.run.recipe import LoraSection, ModelSection


class Bench:
    """A LoRA model over an 8-bit (or BF16) base and a fixed list of batches."""

    def __init__(self, options: argparse.Namespace, recovery: str | None = "host") -> None:
        section = ModelSection(name=options.model)
        base = load_base(model_source(section), section, "none" if recovery is None else "int8")
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = add_adapters(base, LoraSection(lora_dropout=0.0), options.seed).to(self.device).train()
        self.model.config.use_cache = False
        self.units = find_units(self.model)
        self.backend = None if recovery is None else Int8Backend(self.model, self.units, recovery=recovery)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)
        generator = torch.Generator().manual_seed(options.seed)
        size = (options.rounds + 8, options.batch_size, options.tokens)
        self.batches = torch.randint(3, base.config.vocab_size, size, generator=generator).to(self.device)

    @property
    def switch(self) -> Int8Backend:
        """The backend of a bench over 8 bits.

        Raises:
            ValueError: a BF16 bench, which switches nothing.
        """
        if self.backend is None:
            raise ValueError("expected a bench over an 8-bit base, got recovery=None")
        return self.backend

    def lift(self, first: int, count: int) -> None:
        """Lift `count` units from `first` on, the first one after the last."""
        self.switch.apply(self.mask([(first + k) % len(self.units) for k in range(count)]))

    def forward_backward(self, i: int) -> None:
        ids = self.batches[i % len(self.batches)]
        self.model(input_ids=ids, labels=ids).loss.backward()

    def step(self, i: int) -> None:
        """A whole optimizer step on batch `i`."""
        self.forward_backward(i)
        self.update()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clock(self) -> float:
        """Seconds, once the device has finished what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def mask(self, units: Sequence[int]) -> Bools:
        active = np.zeros(len(self.units), dtype=bool)
        active[list(units)] = True
        return active


def interval(values: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Median with a 95% bootstrap interval."""
    samples = np.array(values)
    draws = np.random.default_rng(seed).choice(samples, (2000, len(samples)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return {"median": float(np.median(samples)), "low": float(low), "high": float(high)}


def paired(times: dict[str, list[float]], side: str, against: str) -> dict[str, float]:
    """Median ratio of two sides of the same rounds."""
    return interval([a / b for a, b in zip(times[side], times[against], strict=True)])


def copy_overlap(bench: Bench, lifted: int) -> float | None:
    """Share of host-to-device copy time hidden behind running kernels, from a profiler trace of steps with new units."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for i in range(4):
            bench.lift(i * lifted, lifted)
            bench.step(i)
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["HtoD" in event.name].append((event.time_range.start, event.time_range.end))
    return covered(spans[True], spans[False])


def covered(spans: Sequence[tuple[float, float]], by: Sequence[tuple[float, float]]) -> float | None:
    """Share of the length of `spans` that lies within `by`."""
    merged: list[list[float]] = []
    for start, end in sorted(by):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    total = sum(end - start for start, end in spans)
    inside = sum(max(0.0, min(end, b) - max(start, a)) for start, end in spans for a, b in merged)
    return inside / total if total else None
