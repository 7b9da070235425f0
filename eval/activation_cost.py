"""What packed saved activations cost: time of a linear's forward and backward, and bytes against the arithmetic minimum.

    OMP_NUM_THREADS=1 python eval/activation_cost.py

Sides alternate round by round on the same tensors; ratios are medians over rounds with their quartiles.  Three linears that
read one input (q, k, v) share a copy, as in a model; one alone (o, down) does not.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn

from hf_gnmr.backends.activation import QuantisedInput, Saved
from hf_gnmr.backends.formats import E2M1, E4M3, IntFormat, pack
from hf_gnmr.backends.linears import lend, make_plain
from hf_gnmr.control.gnmr import Controller


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2048)
    options = parser.parse_args()
    torch.manual_seed(0)
    print("| hidden | dtype | linears on one input | format | time against plain, median (quartiles) |")
    print("|---|---|---|---|---|")
    for hidden in (128, 512, 768, 2048):
        for dtype in (torch.float32, torch.bfloat16):
            for shared in (1, 3):
                for form in (E2M1, IntFormat(4), E4M3):
                    low, median, high = ratio(hidden, dtype, shared, form, options)
                    name = str(dtype).removeprefix("torch.")
                    times = f"{median:.3f} ({low:.3f} to {high:.3f})"
                    print(f"| {hidden} | {name} | {shared} | {form.name} | {times} |", flush=True)
    print("\n| format | bytes a token of 768 | arithmetic minimum (bits, and one fp32 scale) | ratio |\n|---|---|---|---|")
    for form in (E2M1, E4M3, *(IntFormat(bits) for bits in range(2, 9))):
        held = pack(torch.randn(options.tokens, 768), form).nbytes / options.tokens
        least = 768 * form.bits / 8 + 4
        print(f"| {form.name} | {held:.2f} | {least:.2f} | {held / least:.4f} |")
    controller = Controller(84, total_steps=1000)
    norms = np.random.default_rng(0).random((1000, 84)) + 0.5
    times = []
    for row in norms:
        start = time.perf_counter()
        controller.step(row)
        times.append(time.perf_counter() - start)
    print(f"\nA decision over 84 units: {1e3 * float(np.median(times)):.3f} ms (median of 1,000).")


def ratio(hidden: int, dtype: torch.dtype, shared: int, form: object, options: argparse.Namespace) -> tuple[float, ...]:
    """Quartiles of the time of `shared` quantised linears over that of plain ones, forward and backward."""
    x = torch.randn(options.tokens, hidden, dtype=dtype, requires_grad=True)
    layers = [nn.Linear(hidden, hidden, bias=False, dtype=dtype) for _ in range(shared)]
    grad = torch.randn(options.tokens, hidden, dtype=dtype)

    def once() -> float:
        for layer in layers:
            layer.weight.grad = None
        x.grad = None
        start = time.perf_counter()
        torch.autograd.backward([layer(x) for layer in layers], [grad] * shared)
        return time.perf_counter() - start

    found = []
    for _ in range(options.rounds):
        seconds = []
        for quantised in (False, True):
            saved = Saved(form, 1)
            for layer in layers:
                make_plain(layer)
                if quantised:
                    lend(layer, QuantisedInput, saved=saved, form=form, unit=0, adapter=False)
            seconds.append(min(once() for _ in range(3)))
        found.append(seconds[1] / seconds[0])
    return tuple(float(q) for q in np.quantile(found, [0.25, 0.5, 0.75]))


if __name__ == "__main__":
    main()
