"""Residuals beside 8-bit codes: decoded to the original, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gnmr.backends.bnb.stores.residual import Workspace, decode, encode


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(["normal", "student", "bits"]), st.integers(0, 2**31 - 1))
def test_a_residual_decodes_to_the_original_whatever_its_bits(rows, columns, kind, seed):
    """Also for bit patterns that are no plausible weight: then nearly every number is an exception."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "bits":
        weight = torch.randint(-(2**15), 2**15, (rows, columns), dtype=torch.int16, generator=generator).view(torch.bfloat16)
    else:
        weight = torch.randn(rows, columns, generator=generator)
        if kind == "student":
            weight = weight / torch.randn(rows, columns, generator=generator).abs().clamp(min=0.05)
        weight = weight.to(torch.bfloat16)
        weight[0, 0], weight[-1, -1] = 0.0, -0.0
    finite = torch.nan_to_num(weight.float(), 0.0, 1.0, -1.0)
    scale = finite.abs().amax(1)
    codes = torch.nan_to_num(finite / scale[:, None] * 127).round().clamp(-127, 127).to(torch.int8)
    workspace = Workspace(weight.numel(), weight.device)
    residual = encode(weight, codes, scale, workspace)
    for _ in range(2):
        assert torch.equal(decode(residual, codes, scale, workspace).view(torch.int16), weight.view(torch.int16))
    assert residual.nbytes == weight.numel() + 6 * residual.index.numel()
