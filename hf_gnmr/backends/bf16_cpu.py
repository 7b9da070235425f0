"""BF16 products on CPUs that emulate them: what the CPU can do, and the same products by float32 kernels.

torch multiplies BF16 matrices fast where the CPU has instructions for it.  Elsewhere (x86 without AVX-512, most laptops) it
falls back to a plain loop: 7 times slower than float32 forward, 50 times backward.  A BF16 product by a float32 kernel is as
good: inputs and result are BF16, the products of BF16 numbers are exact in float32, sums are accumulated in float32 as BF16
instructions do, and only their order differs, as it does between any two CPUs.  So models, activations and gradients stay
BF16, and every path that multiplies in BF16 (the BF16 model, the recovery path, adapters under autocast) is treated alike.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor

Kernels = Literal["auto", "native", "float32"]
KERNELS = ("auto", "native", "float32")
EMULATED = 3.0
"""BF16 products that take this many times the time of float32 products are emulated.

With BF16 instructions the ratio is below 1, with AVX-512 but no such instructions about 1, and here (AVX2) 10 to 50."""
SIZE, REPEATS, ATTEMPTS = 128, 5, 4
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""Environment variables that keep torch from using instructions that the CPU has."""
REASON = "HF_GNMR_BF16_REASON"
"""Environment variable for a process whose `kernels` another one chose: why, as the end of a sentence."""
ATEN = torch.ops.aten
_depth = 0
"""How many `float32_kernels` are open, in all threads; read and changed under `_lock`."""
_lock = threading.Lock()
_library: torch.library.Library | None = None
"""The kernels in the place of torch's own, while any is open: whoever closes last removes it, whoever opened first."""


@functools.cache
def slowdown() -> float:
    """Time of BF16 products (forward and backward of a linear) over that of float32 ones on this CPU; inf: torch has none.

    A timed product, not the instruction set: torch's names for it exist on x86 only, they do not know which kernels
    ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY allow, and other builds of torch have other kernels.  It runs on one thread,
    which waits for no other one on a busy machine.  The fastest of several, taken in turns, is compared, and again before a
    CPU is called slow: a machine that is busy for a moment changes nothing.  Takes some 50 ms, once per process.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratio = math.inf
        for _ in range(ATTEMPTS):
            ratio = min(ratio, _measure())
            if ratio < EMULATED:
                break
    except RuntimeError:  # no kernel for BF16 at all ("could not create a primitive")
        return math.inf
    finally:
        torch.set_num_threads(threads)
    return ratio


def has_instructions() -> bool:
    """Whether this CPU is known to have BF16 instructions that torch uses, and no environment variable limits its kernels.

    Such a CPU needs no timing, and a run there is untouched by it.
    """
    known = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(supported is not None and supported() for supported in known) and not any(map(os.environ.get, LIMITS))


def _measure() -> float:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(SIZE, SIZE, generator=generator)
    best: dict[torch.dtype, float] = {}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for repeat in range(REPEATS + 1):
            for dtype in (torch.float32, torch.bfloat16):
                x = numbers.to(dtype)
                start = time.perf_counter()
                torch.nn.functional.linear(x, x)
                torch.mm(x, x)
                seconds = time.perf_counter() - start
                if repeat:  # the first one warms up
                    best[dtype] = min(best.get(dtype, math.inf), seconds)
    return best[torch.bfloat16] / best[torch.float32]


def choose(kernels: Kernels, device: torch.device | str) -> tuple[bool, str]:
    """Whether BF16 products on `device` run by float32 kernels, and the choice and its reason as one line.

    Args:
        kernels: ``auto``: as measured; ``native`` or ``float32``: forced.
        device: where the model runs; float32 kernels concern CPUs only.
    """
    if torch.device(device).type != "cpu":
        return False, f"BF16 products: {torch.device(device).type}'s own"
    if kernels != "auto":
        own = "this CPU's own kernels" if kernels == "native" else "float32 kernels (rounded to BF16)"
        return (
            kernels == "float32",
            f"BF16 products: {own}, {os.environ.get(REASON) or f'as run.bf16_products={kernels} says'}",
        )
    isa = torch.backends.cpu.get_cpu_capability()
    if has_instructions():
        return False, f"BF16 products: this CPU's own kernels ({isa}, with BF16 instructions)"
    if _depth and not slowdown.cache_info().currsize:
        return True, "BF16 products: float32 kernels, as before in this process"
    ratio = slowdown()
    if ratio < EMULATED:
        return False, f"BF16 products: this CPU's own kernels ({isa}), {ratio:.2g} times the time of float32"
    times = "torch has none here" if math.isinf(ratio) else f"the CPU's own take {ratio:.0f} times the time of float32"
    return True, (
        f"BF16 products: float32 kernels, inputs and results in BF16, since this CPU ({isa}) emulates BF16: {times} "
        "(run.bf16_products=native forces them)"
    )


def active() -> bool:
    """Whether BF16 products run by float32 kernels now."""
    return _depth > 0


@contextlib.contextmanager
def float32_kernels(enabled: bool = True) -> Iterator[None]:
    """Within it, all BF16 matrix products on the CPU in this process, forward and backward, run by float32 kernels.

    torch.compile's generated code calls its own kernels and is not affected.
    """
    global _depth, _library
    if not enabled:
        yield
        return
    with _lock:
        if _depth == 0:
            _library = _override()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _library is not None:
                _library._destroy()
                _library = None


def _override() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    native = _attention_backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Overriding a previously registered kernel": that is the purpose
        for name, product in PRODUCTS.items():
            library.impl(name, product, "CPU")
        if native is not None:
            library.impl(ATTENTION_BACKWARD, functools.partial(attention_backward, native), "CPU")
    return library


# The overloads with `out` are other kernels, which are not overridden: they multiply.


def mm(a: Tensor, b: Tensor) -> Tensor:
    """(n, k) by (k, m)."""
    _refuse_mixed(a, b)
    x, y = _wide(a), _wide(b)
    return _narrow(ATEN.mm.out(x, y, out=x.new_empty(a.shape[0], b.shape[1])), a)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """(batch, n, k) by (batch, k, m)."""
    _refuse_mixed(a, b)
    x, y = _wide(a), _wide(b)
    return _narrow(ATEN.bmm.out(x, y, out=x.new_empty(a.shape[0], a.shape[1], b.shape[2])), a)


def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta c + alpha (a by b), rounded once."""
    _refuse_mixed(a, b, c)
    x, y = _wide(a), _wide(b)
    out = x.new_empty(a.shape[0], b.shape[1])
    return _narrow(ATEN.addmm.out(_wide(c), x, y, beta=beta, alpha=alpha, out=out), a)


def baddbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """beta c + alpha (a by b), batched, rounded once."""
    _refuse_mixed(a, b, c)
    x, y = _wide(a), _wide(b)
    out = x.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return _narrow(ATEN.baddbmm.out(_wide(c), x, y, beta=beta, alpha=alpha, out=out), a)


PRODUCTS: dict[str, Callable[..., Tensor]] = {"mm": mm, "bmm": bmm, "addmm": addmm, "baddbmm": baddbmm}
ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


def _attention_backward() -> Any:
    """The CPU's own kernel of attention's backward, which multiplies BF16 without calling a product; None: not reachable."""
    get_kernel = getattr(torch.library, "get_kernel", None)
    return None if get_kernel is None else get_kernel(f"aten::{ATTENTION_BACKWARD}", "CPU")


def attention_backward(native: Any, grad: Tensor, query: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, computed in float32 and rounded to their dtype."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    tensors = [_wide(value) if isinstance(value, Tensor) else value for value in (grad, query, *rest)]
    options = {key: _wide(value) if isinstance(value, Tensor) else value for key, value in options.items()}
    return tuple(_narrow(out, query) for out in native.call_boxed(keys, *tensors, **options))


def _refuse_mixed(*tensors: Tensor) -> None:
    """Raise RuntimeError for several dtypes, as the CPU's own products do: an error must not depend on the CPU."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise RuntimeError(f"expected matrices of the same dtype, got {', '.join(str(tensor.dtype) for tensor in tensors)}")


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


def _narrow(result: Tensor, like: Tensor) -> Tensor:
    return result.to(like.dtype)
