"""Low-bit formats: against ml_dtypes, against explicit formulas, packed and unpacked."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gnmr.backends.formats import (
    E2M1,
    E3M2,
    E4M3,
    E5M2,
    IntFormat,
    format_of,
    pack,
    packed_bytes,
    quantise,
    quantise_rows,
    row_scale,
    unpack,
    widths,
)
from hf_gnmr.config import ConfigError

ORACLE = {
    E2M1: ml_dtypes.float4_e2m1fn,
    E3M2: ml_dtypes.float6_e3m2fn,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
}
FORMATS = [*ORACLE, *(IntFormat(bits) for bits in range(2, 9))]


def by_oracle(form, values):
    clipped = np.clip(values.astype(np.float32), -form.largest, form.largest)
    return clipped.astype(ORACLE[form]).astype(np.float32)


def numbers_of(form):
    """Every finite number of a format, ascending."""
    codes = np.arange(2**form.bits, dtype=np.uint8)
    values = (
        codes.view(ORACLE[form]).astype(np.float32)
        if form.bits == 8
        else np.array([np.uint8(c) for c in codes], dtype=np.uint8).view(ORACLE[form]).astype(np.float32)
    )
    return np.unique(values[np.isfinite(values) & (np.abs(values) <= form.largest)])


@pytest.mark.parametrize("form", list(ORACLE), ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_that_of_ml_dtypes(form, dtype):
    numbers = numbers_of(form)
    assert len(numbers) == 2 * {"e2m1": 8, "e3m2": 32, "e4m3": 127, "e5m2": 124}[form.name] - 1
    middles = ((numbers[1:].astype(np.float64) + numbers[:-1]) / 2).astype(np.float32)
    generator = np.random.default_rng(0)
    random = generator.standard_normal(20_000).astype(np.float32) * form.largest / 3
    small = generator.standard_normal(20_000).astype(np.float32) * form.least_normal
    values = np.concatenate(
        [
            numbers,
            middles,
            np.nextafter(middles, np.inf, dtype=np.float32),
            np.nextafter(middles, -np.inf, dtype=np.float32),
            random,
            small,
            [0.0, -0.0, form.largest * 4, -form.largest * 4, 1e-30],
        ]
    ).astype(np.float32)
    values = torch.from_numpy(values).to(dtype).float()
    rounded = form.round_(values.clone()).numpy()
    np.testing.assert_array_equal(rounded, by_oracle(form, values.numpy()))


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_codes_are_one_to_one(form):
    if isinstance(form, IntFormat):
        numbers = np.arange(-form.largest, form.largest + 1, dtype=np.float32)
    else:
        numbers = numbers_of(form)
    values = torch.from_numpy(numbers)
    codes = form.encode_(values.clone())
    assert codes.min() >= 0 and codes.max() < 2**form.bits and len(set(codes.tolist())) == len(numbers)
    assert torch.equal(form.decode(codes.clone()), values)


@st.composite
def matrices(draw):
    rows, columns = draw(st.integers(0, 9)), draw(st.integers(1, 9))
    wide = st.floats(-(2.0**60), 2.0**60, width=32)
    values = draw(st.lists(wide, min_size=rows * columns, max_size=rows * columns))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    return torch.tensor(values, dtype=torch.float32).reshape(rows, columns).to(dtype)


@settings(max_examples=60, deadline=None)
@given(matrices(), st.sampled_from(FORMATS))
def test_packed_is_quantised_and_takes_the_stated_bits(x, form):
    packed = pack(x, form)
    assert packed.nbytes == packed_bytes(*x.shape, form) == sum(p.numel() for p in packed.planes) + 4 * x.shape[0]
    back = unpack(packed)
    assert back.dtype == x.dtype and torch.equal(back, quantise_rows(x, form))
    for row, unpacked in zip(x.double().tolist(), back.double().tolist(), strict=True):
        largest = max(map(abs, row))
        coarsest = 1.0 if isinstance(form, IntFormat) else 2.0 ** (math.floor(math.log2(form.largest)) - form.mantissa_bits)
        step = largest / form.largest * coarsest
        for a, b in zip(row, unpacked, strict=True):
            assert abs(a - b) <= 0.51 * step + 0.01 * largest + 1e-36
            assert abs(b) <= largest * 1.01 + 1e-36  # the scale of a subnormal row is subnormal too


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_are_the_explicit_formula(bits):
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    largest = 2 ** (bits - 1) - 1
    scale = x.abs().amax(dim=1, keepdim=True) / largest
    expected = torch.round(x / scale).clamp(-largest, largest) * scale
    torch.testing.assert_close(quantise_rows(x, IntFormat(bits)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_edges(form):
    rows = torch.tensor([[0.0, 0.0, 0.0], [1e30, 1.0, -1.0], [1e-42, -1e-42, 0.0], [3.0e38, -3.0e38, 1.0]])
    back = unpack(pack(rows, form))
    assert torch.equal(back[0], torch.zeros(3)), "a zero row gives zeros"
    assert back[1].tolist() == pytest.approx([1e30, 0.0, 0.0], rel=1e-6)
    assert torch.isfinite(back).all() and back[2].abs().max() <= 2e-38
    assert back[3][:2].tolist() == pytest.approx([3.0e38, -3.0e38], rel=1e-6)
    assert unpack(pack(torch.zeros(0, 5), form)).shape == (0, 5)
    assert unpack(pack(torch.zeros(5, 0), form)).shape == (5, 0)


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_with_a_number_that_is_not_finite(form, bad):
    back = unpack(pack(torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]]), form))
    assert not torch.isfinite(back[0]).any(), "non-finite values are not hidden"
    assert torch.isfinite(back[1]).all()
    assert not torch.isfinite(quantise_rows(torch.tensor([[1.0, bad, 2.0]]), form)).any()


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
def test_the_memory_is_the_arithmetic_minimum(form):
    packed = pack(torch.randn(2048, 130), form)
    assert packed.nbytes == pytest.approx(2048 * 130 * form.bits / 8 + 4 * 2048, rel=0.02)
    assert all(plane.dtype == torch.uint8 for plane in packed.planes)


@pytest.mark.parametrize(("bits", "parts"), [(2, [2]), (3, [2, 1]), (5, [4, 1]), (7, [4, 2, 1]), (8, [8])])
def test_widths_divide_a_byte(bits, parts):
    assert widths(bits) == parts


def test_the_scale_is_the_largest_magnitude():
    x = torch.tensor([[1.0, -6.0], [3.0, 0.5]])
    assert row_scale(x, E2M1).flatten().tolist() == pytest.approx([1.0, 0.5])


def test_formats_by_kind_and_bits():
    assert format_of("bits_low", "float", 4) is E2M1 and format_of("bits_recovery", "int", 16) is None


@pytest.mark.parametrize(
    ("kind", "bits", "message"),
    [
        ("float", 5, "bits_low=5: expected 4, 6"),
        ("float", 2, "bits_low=2: expected"),
        ("int", 1, "bits_low=1: expected 2, 3"),
        ("int", 9, "bits_low=9: expected"),
        ("int", 4.0, "bits_low=4.0: expected"),
        ("int", True, "bits_low=True: expected"),
        ("fp", 4, "format='fp': expected one of 'float', 'int'"),
    ],
)
def test_unknown_formats_are_refused(kind, bits, message):
    with pytest.raises(ConfigError, match=message):
        format_of("bits_low", kind, bits)


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", ["token", "tensor", "block"])
def test_scalings(form, dtype, scaling):
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(3, 5, 37, generator=generator) * torch.logspace(-6, 6, 5)[:, None]).to(dtype)
    x[0, 1] = 0
    before = x.clone()
    quantised = quantise(x, form, scaling, block=16)
    assert quantised.shape == x.shape and quantised.dtype == dtype and torch.equal(x, before)
    expected = torch.empty_like(x)
    if scaling == "tensor":
        scale = x.float().abs().max() / form.largest
        expected = (form.round_(x.float() * scale.reciprocal()) * scale).to(dtype)
    else:
        parts = [(0, 37)] if scaling == "token" else [(0, 16), (16, 32), (32, 37)]
        for low, high in parts:
            expected[..., low:high] = quantise_rows(x[..., low:high].reshape(15, -1), form).view(3, 5, -1)
    assert torch.equal(quantised, expected)
    assert torch.all(quantised[0, 1] == 0)
    x[2, 3, 30] = torch.nan
    bad = ~torch.isfinite(quantise(x, form, scaling, block=16))
    where = {"token": bad[2, 3].all() and bad.sum() == 37, "tensor": bad.all(), "block": bad.sum() == 16}
    assert where[scaling] or (scaling == "block" and bad[2, 3, 16:32].all()), "what shares a scale with it, and nothing else"


@pytest.mark.parametrize(
    ("options", "message"), [({"scaling": "row"}, "scaling='row'"), ({"scaling": "block", "block": 0}, "block=0")]
)
def test_unknown_scalings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        quantise(torch.ones(2, 2), E2M1, **options)


def test_an_empty_tensor_is_quantised_to_an_empty_one():
    assert quantise(torch.ones(0, 4), E2M1, "tensor").shape == (0, 4)
