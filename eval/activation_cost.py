"""What packed saved activations cost: time of a linear's forward and backward, and bytes against the arithmetic minimum.

    OMP_NUM_THREADS=1 python eval/activation_cost.py

Sides alternate round by round on the same tensors; ratios are medians over rounds with their quartiles.  Three linears that
read one input (q, k, v) share a copy, as in a model; a single one (o, down) does not.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any

import numpy as np
import torch
from results import add_save_option, command_line, save_result
from torch import nn

from hf_gnmr.backends.activation import QuantisedInput, Saved
from hf_gnmr.backends.formats import E2M1, E4M3, FloatFormat, IntFormat, pack
from hf_gnmr.backends.linears import lend, make_plain
from hf_gnmr.control.gnmr import Controller

Format = FloatFormat | IntFormat
TIMED: tuple[Format, ...] = (E2M1, IntFormat(4), E4M3)
SIZED: tuple[Format, ...] = (E2M1, E4M3, *(IntFormat(bits) for bits in range(2, 9)))
WIDTH = 768
"""Numbers a token, of the sizes."""
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2048)
    add_save_option(parser)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    payload = {
        "rounds": options.rounds,
        "tokens": options.tokens,
        "times": time_ratios(options.tokens, options.rounds),
        "bytes": [bytes_of(form, options.tokens) for form in SIZED],
        "decision_ms": decision_milliseconds(),
    }
    print(table(payload))
    if options.save:
        save_result(options.save, bench="activation_cost", command=command_line(), seed=SEED, payload=payload)


def time_ratios(tokens: int, rounds: int) -> list[dict[str, Any]]:
    """One row a hidden size, dtype, number of linears and format; progress goes to stderr."""
    rows = []
    for hidden, dtype, linears, form in itertools.product(
        (128, 512, 768, 2048), (torch.float32, torch.bfloat16), (1, 3), TIMED
    ):
        low, median, high = time_ratio(hidden, dtype, linears, form, tokens=tokens, rounds=rounds)
        name = str(dtype).removeprefix("torch.")
        rows.append(
            {
                "hidden": hidden,
                "dtype": name,
                "linears": linears,
                "format": form.name,
                "low": low,
                "median": median,
                "high": high,
            }
        )
        print(f"{hidden} {name} {linears} {form.name}: {median:.3f}", file=sys.stderr, flush=True)
    return rows


def time_ratio(
    hidden: int, dtype: torch.dtype, linears: int, form: Format, *, tokens: int, rounds: int
) -> tuple[float, float, float]:
    """Quartiles of the time of quantised linears over that of plain ones, forward and backward."""
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    layers = [nn.Linear(hidden, hidden, bias=False, dtype=dtype) for _ in range(linears)]
    grad = torch.randn(tokens, hidden, dtype=dtype)

    def pass_seconds() -> float:
        for layer in layers:
            layer.weight.grad = None
        x.grad = None
        start = time.perf_counter()
        torch.autograd.backward([layer(x) for layer in layers], [grad] * linears)
        return time.perf_counter() - start

    ratios = []
    for _ in range(rounds):
        seconds = []
        for quantised in (False, True):
            saved = Saved(form, 1)
            for layer in layers:
                make_plain(layer)
                if quantised:
                    lend(layer, QuantisedInput, saved=saved, form=form, unit=0, adapter=False)
            seconds.append(min(pass_seconds() for _ in range(3)))
        ratios.append(seconds[1] / seconds[0])
    low, median, high = (float(q) for q in np.quantile(ratios, [0.25, 0.5, 0.75]))
    return low, median, high


def bytes_of(form: Format, tokens: int) -> dict[str, Any]:
    """Bytes a token in a packed format, and their arithmetic minimum: the bits, and one fp32 scale a token."""
    packed = pack(torch.randn(tokens, WIDTH), form).nbytes / tokens
    return {"format": form.name, "bytes": packed, "minimum": WIDTH * form.bits / 8 + 4}


def decision_milliseconds() -> float:
    """Median time of a decision over 84 units."""
    controller = Controller(84, total_steps=1000)
    times = []
    for norms in np.random.default_rng(SEED).random((1000, 84)) + 0.5:
        start = time.perf_counter()
        controller.step(norms)
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def table(payload: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "| hidden | dtype | linears on one input | format | time against plain, median (quartiles) |",
        "|---|---|---|---|---|",
    ]
    for row in payload["times"]:
        span = f"{row['median']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        lines.append(f"| {row['hidden']} | {row['dtype']} | {row['linears']} | {row['format']} | {span} |")
    lines += [
        "",
        f"| format | bytes a token of {WIDTH} | arithmetic minimum (bits, and one fp32 scale) | ratio |",
        "|---|---|---|---|",
    ]
    for row in payload["bytes"]:
        ratio = row["bytes"] / row["minimum"]
        lines.append(f"| {row['format']} | {row['bytes']:.2f} | {row['minimum']:.2f} | {ratio:.4f} |")
    lines += ["", f"A decision over 84 units: {payload['decision_ms']:.3f} ms (median of 1,000)."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
