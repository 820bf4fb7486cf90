"""Test the emulator's number formats against torch's dtypes, the format tables, and exact rational arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_rocm_ops.emulator import formats
from vllm_rocm_ops.emulator.formats import BF16, E2M1, E2M3, E3M2, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, F16, Format

TORCH = {
    E4M3FNUZ: torch.float8_e4m3fnuz,
    E5M2FNUZ: torch.float8_e5m2fnuz,
    E4M3FN: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    F16: torch.float16,
    BF16: torch.bfloat16,
}
ALL = [*TORCH, E2M3, E3M2, E2M1]
WORD = {8: (torch.uint8, np.uint8), 16: (torch.int16, np.uint16)}
named = pytest.mark.parametrize("format", ALL, ids=lambda format: format.name)
in_torch = pytest.mark.parametrize("format", TORCH, ids=lambda format: format.name)


def bits(values) -> np.ndarray:
    return np.asarray(values, dtype=np.float32).view(np.uint32)


def interesting(format: Format) -> np.ndarray:
    """Return every value and midpoint, their float32 neighbors, both signs, specials and random words."""
    values = np.unique(format.values[np.isfinite(format.values)])
    middle = (values[:-1].astype(np.float64) + values[1:]) / 2
    last = values[-1].astype(np.float64)
    beyond = last + (last - values[-2]) * np.array([0.25, 0.5, 0.75, 1, 2, 1000])
    with np.errstate(over="ignore"):
        exact = np.concatenate([values, middle, beyond, [0.0, np.inf, np.nan, 1e-45, 1e-38, 3e38]]).astype(np.float32)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, -np.float32(np.inf))])
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32).view(np.float32)
    return np.concatenate([near, -near, random])


def from_torch(format: Format, values: np.ndarray) -> np.ndarray:
    view, unsigned = WORD[format.bits]
    return torch.from_numpy(values).to(TORCH[format]).view(view).numpy().view(unsigned).astype(np.uint32)


@in_torch
def test_every_code_decodes_as_in_torch(format):
    view, unsigned = WORD[format.bits]
    codes = np.arange(1 << format.bits)
    expected = torch.from_numpy(codes.astype(unsigned).view(np.dtype(str(view).split(".")[1]))).view(TORCH[format])
    expected = expected.float().numpy()
    actual = format.decode(codes)
    number = ~np.isnan(expected)
    assert np.array_equal(number, ~np.isnan(actual))
    assert np.array_equal(bits(expected)[number], bits(actual)[number])


@in_torch
def test_encode_rounds_as_torch(format):
    values = interesting(format)
    if format is E4M3FN:  # torch saturates this one where the hardware returns NaN; the overflow test covers the rest
        values = values[~(np.abs(values) > format.largest + 16)]
    if format.bits == 16:  # torch propagates NaN payloads
        values = values[~np.isnan(values)]
    assert np.array_equal(format.encode(values), from_torch(format, values))


@named
def test_encode_inverts_decode(format):
    codes = np.arange(1 << format.bits, dtype=np.uint32)
    codes = codes[~np.isnan(format.values)]
    assert np.array_equal(format.encode(format.values[codes]), codes)


@named
def test_encode_is_the_nearest_and_ties_go_to_even(format):
    values = interesting(format)
    values = values[np.abs(values) <= format.largest]
    ladder = np.unique(format.values[np.isfinite(format.values)]).astype(np.float64)
    above = np.clip(np.searchsorted(ladder, values), 1, len(ladder) - 1)
    low, high = ladder[above - 1], ladder[above]
    exact = values.astype(np.float64)
    codes = format.encode(values)
    rounded = format.values[codes].astype(np.float64)
    tie = exact - low == high - exact
    nearest = np.where(exact - low < high - exact, low, high)
    assert np.array_equal(rounded[~tie], nearest[~tie])
    assert tie.any() and np.all(codes[tie] & 1 == 0)


@pytest.mark.parametrize(
    "format, infinity, nan, largest",
    [(E4M3FNUZ, 0x80, 0x80, 0x7F), (E5M2FNUZ, 0x80, 0x80, 0x7F), (E4M3FN, 0x7F, 0x7F, 0x7E), (E5M2, 0x7C, 0x7F, 0x7B)],
    ids=lambda value: getattr(value, "name", None),
)
def test_overflow_follows_fp16_ovfl(format, infinity, nan, largest):
    """CDNA4 ISA, 7.3: overflow gives infinity, or NaN without infinities; with the mode bit, the largest number."""
    step = format.largest - float(format.values[largest - 1])
    too_large = np.array([format.largest + 0.75 * step, format.largest * 4, np.inf], dtype=np.float32)
    assert list(format.encode(too_large)) == [infinity] * 3
    assert list(format.encode(too_large, saturate=True)) == [largest] * 3
    assert list(format.encode(-too_large, saturate=True)) == [largest | 0x80] * 3
    assert list(format.encode(-too_large)) == [infinity | 0x80] * 3
    for saturate in (False, True):
        assert format.encode(np.array([np.nan]), saturate=saturate)[0] & 0x7F == nan & 0x7F
        assert np.isnan(format.values[format.encode(np.array([np.nan]), saturate=saturate)[0]])


@pytest.mark.parametrize("format", [E2M3, E3M2, E2M1], ids=lambda format: format.name)
def test_formats_without_specials_saturate(format):
    values = np.array([format.largest * 1.5, np.inf, -np.inf], dtype=np.float32)
    assert list(format.values[format.encode(values)]) == [format.largest, format.largest, -format.largest]


def test_limits_are_those_of_the_isa_table():
    """CDNA4 ISA, table 30, and the FNUZ limits of torch.finfo."""
    limits = {format: (format.largest, float(format.values[1])) for format in ALL}
    assert limits[E4M3FN] == (448, 2**-9) and limits[E5M2] == (57344, 2**-16) and limits[F16] == (65504, 2**-24)
    assert limits[E2M3] == (7.5, 0.125) and limits[E3M2] == (28, 0.0625) and limits[E2M1] == (6, 0.5)
    for format in (E4M3FNUZ, E5M2FNUZ):
        info = torch.finfo(TORCH[format])
        assert limits[format] == (info.max, info.smallest_normal * 2**-format.mantissa)


def test_fnuz_has_no_negative_zero():
    for format in (E4M3FNUZ, E5M2FNUZ):
        assert list(format.encode(np.array([-0.0, -1e-30, 1e-30], dtype=np.float32))) == [0, 0, 0]
    assert list(E4M3FN.encode(np.array([-0.0, -1e-30], dtype=np.float32))) == [0x80, 0x80]


def test_the_arch_chooses_the_eight_bit_formats():
    one = {arch: formats.eight_bit("fp8", arch).encode(np.float32([1]))[0] for arch in ("gfx942", "gfx950")}
    assert one == {"gfx942": 0x40, "gfx950": 0x38}
    assert formats.eight_bit("bf8", "gfx942") is E5M2FNUZ and formats.eight_bit("bf8", "gfx950") is E5M2


@pytest.mark.parametrize("word", ["fp8", "bf8"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_stochastic_rounding_is_unbiased_and_truncates(word, arch):
    target = formats.eight_bit(word, arch)
    smallest = float(target.values[1])
    for value in (1.3, -1.3, 200.1, 2.6 * smallest, -0.3 * smallest):
        values = np.full(1 << 12, value, dtype=np.float32)
        random = np.arange(1 << 12, dtype=np.uint32) << np.uint32(20)
        codes = formats.convert_stochastic(values, random, word, arch, saturate=False)
        rounded = target.values[codes].astype(np.float64)
        step = np.unique(np.abs(rounded))
        assert len(step) == 2 and step[0] <= abs(np.float32(value)) <= step[1]
        assert abs(rounded.mean() - np.float32(value)) <= (step[1] - step[0]) / (1 << 11)
    exact = target.values[np.isfinite(target.values)]
    codes = formats.convert_stochastic(exact, np.full(len(exact), 0xFFFFFFFF), word, arch, saturate=False)
    assert np.array_equal(target.values[codes], exact)
    special = formats.convert_stochastic(
        np.float32([np.inf, -np.inf, 1e30]), np.zeros(3, np.uint32), word, arch, saturate=True
    )
    assert list(target.values[special]) == [target.largest, -target.largest, target.largest]


def test_stochastic_rounding_adds_the_high_bits_of_the_word():
    """CDNA pseudocode: mantissa + S1[31:12] for fp8; a word one unit below the carry must not round up, one at it must."""
    value = np.float32([1 + 2**-5])  # a quarter of a step above 1
    for word, expected in ((0xBFFFFFFF, 1.0), (0xC0000000, 1.125)):
        code = formats.convert_stochastic(value, np.uint32([word]), "fp8", "gfx950", saturate=False)
        assert E4M3FN.values[code[0]] == expected


def test_e8m0():
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(formats.decode_e8m0(codes).astype(np.float32), expected, equal_nan=True)
