"""Test the emulator's instructions in their real encodings, each against a scalar computation.

Every case is one assembled kernel of one wave. Its six source registers v2 to v7 hold a column of `inputs` per lane,
v10 to v13 start as 0xAAAAAAAA and are compared.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from assembly import LOAD_POINTERS, Kernel, assemble

from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.instructions import transfer

OLD = 0xAAAAAAAA
LANES = range(64)
INF, NAN = 0x7F800000, 0x7FC00000

# Bit patterns: zeros, ones, denormals, the largest, infinities, NaN, ties, small and large integers
CORNERS = [
    0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, INF, 0xFF800000,
    NAN, 0x3FC00000, 0x40200000, 0xC0200000, 0x4B000001, 0x5F000000, 0x4F000000, 0x4F800000, 0xCF000000, 0x3EAAAAAB,
    0x42FE0000, 0x477FE000, 0x477FF000, 0x33800000, 0x00000003, 0x7FFFFFFF, 0x80000001, 0xFFFFFFFF, 0x0000FFFF, 0xFFFF0000,
    0x12345678,
]  # fmt: skip


def rows() -> np.ndarray:
    """Return the [6, 64] sources: the corners, random bits, random floats, in different orders."""
    generator = np.random.default_rng(7)
    corners = np.array(CORNERS, np.uint32)
    bits = generator.integers(0, 1 << 32, 32, dtype=np.uint32)
    floats = (generator.standard_normal(32) * 10.0 ** generator.integers(-3, 4, 32)).astype(np.float32).view(np.uint32)
    out = [np.concatenate([corners, bits]), np.concatenate([np.roll(corners, 5), floats])]
    out += [np.concatenate([floats, np.roll(corners, 11)]), np.concatenate([bits[::-1], floats[::-1]])]
    out += [np.concatenate([np.roll(corners, 17), bits]), generator.permutation(np.concatenate([corners, floats]))]
    return np.stack(out).astype(np.uint32)


INPUTS = rows()


# Scalar helpers, on bit patterns


def f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def b32(value: float) -> int:
    """Return a value's float32 bits, rounded to nearest even; overflow gives infinity."""
    if math.isnan(value):
        return NAN
    try:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return INF if value > 0 else INF | 1 << 31


def f16(bits: int) -> float:
    return struct.unpack("<e", struct.pack("<H", bits & 0xFFFF))[0]


def b16(value: float) -> int:
    if math.isnan(value):
        return 0x7E00
    try:
        return struct.unpack("<H", struct.pack("<e", value))[0]
    except OverflowError:
        return 0x7C00 if value > 0 else 0xFC00


def i32(bits: int) -> int:
    return (bits & 0xFFFFFFFF) - ((bits & 0x80000000) << 1)


def i16(bits: int) -> int:
    return (bits & 0xFFFF) - ((bits & 0x8000) << 1)


def exact_b32(value: Fraction) -> int:
    """Return a rational's float32 bits, rounded once to nearest even."""
    if value == 0:
        return 0
    magnitude, sign = abs(value), 1 << 31 if value < 0 else 0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    steps, rest = divmod(magnitude, unit)
    steps += rest * 2 > unit or (rest * 2 == unit and steps & 1)
    value = float(steps * unit) if steps * unit < Fraction(2) ** 128 else math.inf
    return b32(value) | sign


def fma32(a: int, b: int, c: int) -> int:
    x, y, z = f32(a), f32(b), f32(c)
    if all(map(math.isfinite, (x, y, z))):
        total = Fraction(x) * Fraction(y) + Fraction(z)
        if total:
            return exact_b32(total)
    with np.errstate(all="ignore"):
        return b32(float(np.float64(x) * np.float64(y) + np.float64(z)))


def arithmetic(fn) -> Callable:
    """Return `fn` on float64 numpy scalars, rounded to f32; exact for + - *."""

    def run(*bits):
        with np.errstate(all="ignore"):
            return b32(float(fn(*(np.float64(f32(x)) for x in bits))))

    return run


def extreme(bits: tuple, largest: bool) -> int:
    """Return the minimum or maximum of two floats: NaN loses, -0 < +0."""
    a, b = bits
    if math.isnan(f32(a)):
        return NAN if math.isnan(f32(b)) else b
    if math.isnan(f32(b)):
        return a
    key = lambda x: (f32(x), math.copysign(1, f32(x)))
    return max(a, b, key=key) if largest else min(a, b, key=key)


def saturated(value: float, low: int, high: int) -> int:
    if math.isnan(value):
        return 0
    if math.isinf(value):
        return high if value > 0 else low
    return max(low, min(high, int(value)))


def bfe(a: int, offset: int, width: int, signed: bool) -> int:
    field = (i32(a) if signed else a) >> (offset & 31)
    width &= 31
    field &= (1 << width) - 1
    if signed and width and field >> (width - 1):
        field -= 1 << width
    return field


def perm(a: int, b: int, selector: int) -> int:
    data = b | a << 32
    out = 0
    for i in range(4):
        s = selector >> 8 * i & 255
        if s < 8:
            byte = data >> 8 * s & 255
        elif s < 12:
            byte = 255 * (data >> 16 * (s - 8) + 15 & 1)
        else:
            byte = 0 if s == 12 else 255
        out |= byte << 8 * i
    return out


@dataclass(frozen=True)
class Case:
    """Instructions and their expected results.

    `expected(lane, v)` returns the results in v10, v11, ..., where v[i] is register v2 + i of that lane; if `whole`, it
    is a function of all lanes. None is not compared. Floats compare as bits, with every NaN the same: NaNs of f32, or
    of both halves if not `floats`.
    """

    name: str
    body: str
    expected: Callable
    archs: tuple[str, ...] = ("gfx942", "gfx950")
    whole: bool = False
    ulp: int = 0
    floats: bool = True
    denormals: bool = True
    lds: int = 0


CASES: list[Case] = []


def case(body: str, expected: Callable, **options) -> None:
    CASES.append(Case(f"case_{len(CASES)}", body, expected, **options))


def per_lane(fn) -> Callable:
    return lambda lane, v: fn(*v)


# 32-bit floats
case("v_add_f32 v10, v2, v3", lambda _, v: arithmetic(lambda a, b: a + b)(v[0], v[1]))
case("v_sub_f32 v10, |v2|, -v3", lambda _, v: arithmetic(lambda a, b: abs(a) + b)(v[0], v[1]))
case("v_mul_f32 v10, v2, v3", lambda _, v: arithmetic(lambda a, b: a * b)(v[0], v[1]))
case("v_mul_f32 v10, 0x40490fdb, v3", lambda _, v: arithmetic(lambda a: a * f32(0x40490FDB))(v[1]))
case("v_fma_f32 v10, v2, v3, v4", lambda _, v: fma32(v[0], v[1], v[2]))
case("v_fma_f32 v10, -v2, v3, 1.0", lambda _, v: fma32(v[0] ^ 1 << 31, v[1], b32(1.0)))
case("v_mov_b32 v10, v4\n v_fmac_f32 v10, v2, v3", lambda _, v: fma32(v[0], v[1], v[2]))
case("v_fmamk_f32 v10, v2, 0x3fb8aa3b, v3", lambda _, v: fma32(v[0], 0x3FB8AA3B, v[1]))
case("v_fmaak_f32 v10, v2, v3, 0x3fb8aa3b", lambda _, v: fma32(v[0], v[1], 0x3FB8AA3B))
case("v_max_f32 v10, v2, v3", lambda _, v: extreme((v[0], v[1]), True))
case("v_min_f32 v10, v2, v3", lambda _, v: extreme((v[0], v[1]), False))
case("v_max3_f32 v10, v2, v3, v4", lambda _, v: extreme((extreme((v[0], v[1]), True), v[2]), True))
case(
    "v_med3_f32 v10, v2, v3, v4",
    lambda _, v: (
        sorted(v[:3], key=lambda x: (f32(x), math.copysign(1, f32(x))))[1]
        if not any(math.isnan(f32(x)) for x in v[:3])
        else extreme((extreme((v[0], v[1]), False), v[2]), False)
    ),
)
case("v_add_f32 v10, v2, v3 clamp", lambda _, v: clamped(arithmetic(lambda a, b: a + b)(v[0], v[1])))
case("v_mul_f32 v10, v3, 2.0 div:2", lambda _, v: arithmetic(lambda a: a / 2)(arithmetic(lambda a: a * 2)(v[1])))
case(
    "v_mul_legacy_f32 v10, v2, v3",
    lambda _, v: 0 if 0 in (f32(v[0]), f32(v[1])) else arithmetic(lambda a, b: a * b)(*v[:2]),
)


def clamped(bits: int) -> int:
    value = f32(bits)
    return 0 if math.isnan(value) else b32(min(max(value, 0.0), 1.0) + 0.0)


def transcendental(fn):
    """Return `fn` in float64, with denormals flushed on both sides."""

    def run(bits: int) -> int:
        value = f32(bits)
        if 0 < abs(value) < 2.0**-126:
            value = math.copysign(0.0, value)
        with np.errstate(all="ignore"):
            out = float(fn(np.float64(value)))
        return b32(math.copysign(0.0, out) if 0 < abs(f32(b32(out))) < 2.0**-126 else out)

    return run


for _name, _fn in {
    "exp": np.exp2,
    "log": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsq": lambda x: 1 / np.sqrt(x) if x else math.copysign(math.inf, x),
}.items():
    case(f"v_{_name}_f32 v10, v3", lambda _, v, fn=_fn: transcendental(fn)(v[1]), ulp=1)
for _name, _fn in {"trunc": np.trunc, "floor": np.floor, "ceil": np.ceil, "rndne": np.rint}.items():
    case(f"v_{_name}_f32 v10, v2", lambda _, v, fn=_fn: arithmetic(fn)(v[0]))
case("v_fract_f32 v10, v3", lambda _, v: fraction(v[1]))
case("v_ldexp_f32 v10, v3, v2", lambda _, v: b32(scaled(f32(v[1]), i32(v[0]))))
case("v_frexp_exp_i32_f32 v10, v2", lambda _, v: frexp(v[0])[1] & 0xFFFFFFFF, floats=False)
case("v_frexp_mant_f32 v10, v2", lambda _, v: b32(frexp(v[0])[0]))


def fraction(bits: int) -> int:
    value = f32(bits)
    if not math.isfinite(value):
        return NAN
    return min(b32(value - math.floor(value) + 0.0), 0x3F7FFFFF)


def scaled(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, max(-1000, min(1000, exponent)))
    except OverflowError:
        return math.copysign(math.inf, value)


def frexp(bits: int) -> tuple[float, int]:
    value = f32(bits)
    return math.frexp(value) if math.isfinite(value) else (value, 0)


# Division, as compilers emit it: correctly rounded
DIVIDE = """
  v_div_scale_f32 v10, s[10:11], {d}, {d}, {n}
  v_rcp_f32 v11, v10
  v_div_scale_f32 v12, vcc, {n}, {d}, {n}
  v_fma_f32 v13, -v10, v11, 1.0
  v_fmac_f32 v11, v13, v11
  v_mul_f32 v13, v12, v11
  v_fma_f32 v14, -v10, v13, v12
  v_fmac_f32 v13, v14, v11
  v_fma_f32 v10, -v10, v13, v12
  v_div_fmas_f32 v10, v10, v11, v13
  v_div_fixup_f32 v10, v10, {d}, {n}
"""


def divide(n: int, d: int) -> int:
    x, y = f32(n), f32(d)
    if math.isfinite(x) and math.isfinite(y) and x and y:
        return exact_b32(Fraction(x) / Fraction(y))
    with np.errstate(all="ignore"):
        return b32(float(np.float64(x) / np.float64(y)))


def comparable_quotient(n: int, d: int) -> bool:
    """True if the sequence's last step is exact: not with denormal results."""
    x, y = f32(n), f32(d)
    return not (math.isfinite(x) and math.isfinite(y) and x and y) or abs(x / y) > 2.0**-125


for _pair in ((0, 1), (1, 2), (5, 0)):
    case(
        DIVIDE.format(n=f"v{2 + _pair[0]}", d=f"v{2 + _pair[1]}"),
        lambda _, v, p=_pair: divide(v[p[0]], v[p[1]]) if comparable_quotient(v[p[0]], v[p[1]]) else None,
    )

# Conversions
case("v_cvt_i32_f32 v10, v2", lambda _, v: saturated(f32(v[0]), -(1 << 31), (1 << 31) - 1), floats=False)
case("v_cvt_u32_f32 v10, v2", lambda _, v: saturated(f32(v[0]), 0, (1 << 32) - 1), floats=False)
case("v_cvt_f32_i32 v10, v2", lambda _, v: exact_b32(Fraction(i32(v[0]))))
case("v_cvt_f32_u32 v10, v2", lambda _, v: exact_b32(Fraction(v[0])))
case("v_cvt_f16_f32 v10, v2", lambda _, v: b16(f32(v[0])), floats=False)
case("v_cvt_f32_f16 v10, v2", lambda _, v: b32(f16(v[0])))
case("v_cvt_pkrtz_f16_f32 v10, v3, 1.0", lambda _, v: toward_zero(f32(v[1])) | 0x3C00 << 16, floats=False)
case("v_cvt_f32_ubyte2 v10, v2", lambda _, v: b32(float(v[0] >> 16 & 255)))
case("v_cvt_f64_f32 v[10:11], v2", lambda _, v: doubles(f32(v[0])) if f32(v[0]) == f32(v[0]) else None, floats=False)
case(
    "v_cvt_pk_bf16_f32 v10, v2, v3",
    lambda _, v: None if math.isnan(f32(v[0])) or math.isnan(f32(v[1])) else bf16(v[0]) | bf16(v[1]) << 16,
    archs=("gfx950",),
    floats=False,
)


def doubles(value: float) -> list[int]:
    return list(struct.unpack("<II", struct.pack("<d", value)))


def toward_zero(value: float) -> int:
    bits = b16(value)
    if math.isfinite(value) and abs(f16(bits)) > abs(value):
        bits -= 1
    return bits


def bf16(bits: int) -> int:
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


# 16 bits: the result clears the high half, op_sel keeps the other one
case("v_add_f16 v10, v2, v3", lambda _, v: b16(f16(v[0]) + f16(v[1])), floats=False)
case(
    "v_fma_f16 v10, v2, v3, 1.0 op_sel:[1,0,0,1]",
    lambda _, v: b16(f16(v[0] >> 16) * f16(v[1]) + 1) << 16 | OLD & 0xFFFF,
    floats=False,
)
case("v_mul_lo_u16 v10, v2, v3", lambda _, v: (v[0] & 0xFFFF) * (v[1] & 0xFFFF) & 0xFFFF)
case("v_add_u16 v10, v2, v3 clamp", lambda _, v: min(0xFFFF, (v[0] & 0xFFFF) + (v[1] & 0xFFFF)))
case("v_ashrrev_i16 v10, v2, v3", lambda _, v: i16(v[1]) >> (v[0] & 15) & 0xFFFF)
case("v_pack_b32_f16 v10, v2, v3 op_sel:[1,0,0]", lambda _, v: v[0] >> 16 | (v[1] & 0xFFFF) << 16, floats=False)

# Packed
case("v_pk_fma_f32 v[10:11], v[2:3], v[4:5], v[6:7]", lambda _, v: [fma32(v[0], v[2], v[4]), fma32(v[1], v[3], v[5])])
case(
    "v_pk_mul_f32 v[10:11], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[0,0]",
    lambda _, v: [arithmetic(lambda a, b: a * b)(v[1], v[2]), arithmetic(lambda a, b: a * b)(v[0], v[2])],
)
case(
    "v_pk_add_f32 v[10:11], v[2:3], v[4:5] neg_lo:[0,1] neg_hi:[1,0]",
    lambda _, v: [arithmetic(lambda a, b: a - b)(v[0], v[2]), arithmetic(lambda a, b: b - a)(v[1], v[3])],
)
case("v_pk_mov_b32 v[10:11], v[2:3], v[4:5] op_sel:[1,0]", lambda _, v: [v[1], v[2]])
case(
    "v_pk_add_f16 v10, v2, v3 op_sel:[0,1] op_sel_hi:[1,0]",
    lambda _, v: b16(f16(v[0]) + f16(v[1] >> 16)) | b16(f16(v[0] >> 16) + f16(v[1])) << 16,
    floats=False,
)
case(
    "v_pk_mul_f16 v10, v2, 2.0 op_sel_hi:[1,0]",
    lambda _, v: b16(f16(v[0]) * 2) | b16(f16(v[0] >> 16) * 2) << 16,
    floats=False,
)
case("v_pk_sub_u16 v10, v2, v3", lambda _, v: (v[0] - v[1]) & 0xFFFF | ((v[0] >> 16) - (v[1] >> 16) & 0xFFFF) << 16)
case(
    "v_pk_max_i16 v10, v2, v3",
    lambda _, v: max(i16(v[0]), i16(v[1])) & 0xFFFF | (max(i16(v[0] >> 16), i16(v[1] >> 16)) & 0xFFFF) << 16,
)
case("v_pk_lshlrev_b16 v10, 3, v2 op_sel_hi:[0,1]", lambda _, v: v[0] << 3 & 0xFFFF | (v[0] >> 16 << 3 & 0xFFFF) << 16)
case(
    "v_fma_mix_f32 v10, v2, v3, v4 op_sel:[1,0,0] op_sel_hi:[1,1,0]",
    lambda _, v: fma32(b32(f16(v[0] >> 16)), b32(f16(v[1])), v[2]),
)
case("v_fma_mixlo_f16 v10, v2, v3, v4", lambda _, v: b16(f32(fma32(v[0], v[1], v[2]))) | OLD & 0xFFFF0000, floats=False)
case(
    "v_fma_mixhi_f16 v10, v2, v3, -|v4|",
    lambda _, v: b16(f32(fma32(v[0], v[1], v[2] | 1 << 31))) << 16 | OLD & 0xFFFF,
    floats=False,
)
case("v_dot4_i32_i8 v10, v2, v3, v4", lambda _, v: dot(v[0], v[1], 8) + v[2] & 0xFFFFFFFF)


def dot(a: int, b: int, bits: int) -> int:
    signed = lambda x: x - ((x >> (bits - 1)) << bits)
    mask = (1 << bits) - 1
    return sum(signed(a >> s & mask) * signed(b >> s & mask) for s in range(0, 32, bits))


# Integers
case("v_add_u32 v10, v2, v3", lambda _, v: v[0] + v[1] & 0xFFFFFFFF)
case("v_sub_u32 v10, v2, v3 clamp", lambda _, v: max(0, v[0] - v[1]))
case(
    "v_add_i32 v10, v2, v3 clamp", lambda _, v: max(-(1 << 31), min((1 << 31) - 1, i32(v[0]) + i32(v[1]))) & 0xFFFFFFFF
)
case("v_mul_lo_u32 v10, v2, v3", lambda _, v: v[0] * v[1] & 0xFFFFFFFF)
case("v_mul_hi_u32 v10, v2, v3", lambda _, v: v[0] * v[1] >> 32)
case("v_mul_hi_i32 v10, v2, v3", lambda _, v: i32(v[0]) * i32(v[1]) >> 32 & 0xFFFFFFFF)
case("v_mul_u32_u24 v10, v2, v3", lambda _, v: (v[0] & 0xFFFFFF) * (v[1] & 0xFFFFFF) & 0xFFFFFFFF)
case("v_mad_i32_i24 v10, v2, v3, v4", lambda _, v: (i32(v[0] << 8) >> 8) * (i32(v[1] << 8) >> 8) + v[2] & 0xFFFFFFFF)
case("v_mad_u64_u32 v[10:11], s[10:11], v2, v3, v[4:5]", lambda _, v: words64(v[0] * v[1] + (v[2] | v[3] << 32)))
case(
    "v_lshl_add_u64 v[10:11], v[2:3], 3, v[4:5]", lambda _, v: words64(((v[0] | v[1] << 32) << 3) + (v[2] | v[3] << 32))
)
case("v_lshlrev_b64 v[10:11], v2, v[4:5]", lambda _, v: words64((v[2] | v[3] << 32) << (v[0] & 63)))
case("v_ashrrev_i64 v[10:11], v2, v[4:5]", lambda _, v: words64((v[2] | i32(v[3]) << 32) >> (v[0] & 63)))
case(
    "v_add_co_u32 v10, vcc, v2, v3\n v_addc_co_u32 v11, vcc, v4, v5, vcc",
    lambda _, v: words64((v[0] | v[2] << 32) + (v[1] | v[3] << 32)),
)
case(
    "v_sub_co_u32 v10, vcc, v2, v3\n v_subb_co_u32 v11, vcc, v4, v5, vcc",
    lambda _, v: words64((v[0] | v[2] << 32) - (v[1] | v[3] << 32)),
)
case("v_lshrrev_b32 v10, v2, v3", lambda _, v: v[1] >> (v[0] & 31))
case("v_bfe_u32 v10, v2, v3, v4", lambda _, v: bfe(v[0], v[1], v[2], False))
case("v_bfe_i32 v10, v2, v3, v4", lambda _, v: bfe(v[0], v[1], v[2], True) & 0xFFFFFFFF)
case("v_bfi_b32 v10, v2, v3, v4", lambda _, v: v[0] & v[1] | ~v[0] & v[2])
case("v_alignbit_b32 v10, v2, v3, v4", lambda _, v: (v[1] | v[0] << 32) >> (v[2] & 31) & 0xFFFFFFFF)
case("v_alignbyte_b32 v10, v2, v3, v4", lambda _, v: (v[1] | v[0] << 32) >> 8 * (v[2] & 3) & 0xFFFFFFFF)
case("v_and_b32 v4, 0x0f0f0f0f, v4\n v_perm_b32 v10, v2, v3, v4", lambda _, v: perm(v[0], v[1], v[2] & 0x0F0F0F0F))
case("s_mov_b32 s10, 0x0c0b0700\n v_perm_b32 v10, v2, v3, s10", lambda _, v: perm(v[0], v[1], 0x0C0B0700))
case("v_add3_u32 v10, v2, v3, v4", lambda _, v: v[0] + v[1] + v[2] & 0xFFFFFFFF)
case("v_lshl_or_b32 v10, v2, v3, v4", lambda _, v: v[0] << (v[1] & 31) & 0xFFFFFFFF | v[2])
case("v_xad_u32 v10, v2, v3, v4", lambda _, v: (v[0] ^ v[1]) + v[2] & 0xFFFFFFFF)
case(
    "v_sad_u8 v10, v2, v3, v4",
    lambda _, v: v[2] + sum(abs((v[0] >> s & 255) - (v[1] >> s & 255)) for s in (0, 8, 16, 24)) & 0xFFFFFFFF,
)
case("v_bcnt_u32_b32 v10, v2, v3", lambda _, v: v[0].bit_count() + v[1] & 0xFFFFFFFF)
case("v_ffbh_u32 v10, v2", lambda _, v: 32 - v[0].bit_length() if v[0] else 0xFFFFFFFF)
case("v_ffbl_b32 v10, v2", lambda _, v: (v[0] & -v[0]).bit_length() - 1 if v[0] else 0xFFFFFFFF)
case("v_ffbh_i32 v10, v2", lambda _, v: sign_run(v[0]))
case("v_bfrev_b32 v10, v2", lambda _, v: int(f"{v[0]:032b}"[::-1], 2))
case("v_med3_i32 v10, v2, v3, v4", lambda _, v: sorted(i32(x) for x in v[:3])[1] & 0xFFFFFFFF)
case("v_min3_u32 v10, v2, v3, v4", lambda _, v: min(v[:3]))
case("v_bitop3_b32 v10, v2, v3, v4 bitop3:0x5a", lambda _, v: v[0] ^ v[2], archs=("gfx950",))
case(
    "v_bitop3_b32 v10, v2, v3, v4 bitop3:0xe8", lambda _, v: v[0] & v[1] | v[1] & v[2] | v[0] & v[2], archs=("gfx950",)
)
case(
    "v_ashr_pk_u8_i32 v10, v2, v3, 4",
    lambda _, v: OLD & 0xFFFF0000 | sum(max(0, min(255, i32(x) >> 4)) << 8 * i for i, x in enumerate(v[:2])),
    archs=("gfx950",),
)
case("v_prng_b32 v10, v2", lambda _, v: v[0] << 1 & 0xFFFFFFFF ^ (197 if v[0] >> 31 else 0), archs=("gfx950",))


def words64(value: int) -> list[int]:
    return [value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF]


def sign_run(bits: int) -> int:
    x = bits ^ 0xFFFFFFFF if bits >> 31 else bits
    return 32 - x.bit_length() if x else 0xFFFFFFFF


# Comparisons and masks
for _name, _fn in {"lt": "<", "eq": "==", "le": "<=", "gt": ">", "ge": ">="}.items():
    case(
        f"v_cmp_{_name}_f32 vcc, v2, v3\n v_cndmask_b32 v10, 0, 1, vcc",
        lambda _, v, op=_fn: int(eval(f"a {op} b", {"a": f32(v[0]), "b": f32(v[1])})),
    )
    case(
        f"v_cmp_n{_name}_f32 s[10:11], v2, v3\n v_cndmask_b32 v10, 0, 1, s[10:11]",
        lambda _, v, op=_fn: int(not eval(f"a {op} b", {"a": f32(v[0]), "b": f32(v[1])})),
    )
    case(
        f"v_cmp_{_name}_i32 vcc, v2, v3\n v_cndmask_b32 v10, 0, 1, vcc",
        lambda _, v, op=_fn: int(eval(f"a {op} b", {"a": i32(v[0]), "b": i32(v[1])})),
    )
case(
    "v_cmp_lt_u64 vcc, v[2:3], v[4:5]\n v_cndmask_b32 v10, 0, 1, vcc",
    lambda _, v: int((v[0] | v[1] << 32) < (v[2] | v[3] << 32)),
)
case(
    "v_mov_b32 v10, 0x204\n v_cmp_class_f32 vcc, v2, v10\n v_cndmask_b32 v10, 0, 1, vcc",
    lambda _, v: int(math.isinf(f32(v[0]))),
)
case(
    "s_movk_i32 s10, 0x90\n v_cmp_class_f32 s[12:13], v2, s10\n v_cndmask_b32 v10, 0, 1, s[12:13]",
    lambda _, v: int(0 < abs(f32(v[0])) < 2.0**-126),
)
case(
    "v_cmpx_gt_i32 vcc, v2, v3\n v_mov_b32 v10, 1\n s_mov_b64 exec, -1",
    lambda _, v: 1 if i32(v[0]) > i32(v[1]) else OLD,
)
case(
    "v_cmp_gt_i32 vcc, v2, v3\n v_mbcnt_lo_u32_b32 v10, vcc_lo, 0\n v_mbcnt_hi_u32_b32 v10, vcc_hi, v10",
    lambda all_: [sum(i32(a) > i32(b) for a, b in zip(all_[0][:lane], all_[1][:lane], strict=True)) for lane in LANES],
    whole=True,
)

# SDWA
case(
    "v_add_u32_sdwa v10, v2, v3 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2 src1_sel:WORD_1",
    lambda _, v: (v[0] >> 16 & 255) + (v[1] >> 16),
)
case(
    "v_add_u32_sdwa v10, sext(v2), v3 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:DWORD",
    lambda _, v: (v[0] & 255) - ((v[0] & 128) << 1) + v[1] & 0xFFFFFFFF,
)
case(
    "v_add_f16_sdwa v10, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:WORD_0",
    lambda _, v: OLD & 0xFFFF | b16(f16(v[0] >> 16) + f16(v[1])) << 16,
    floats=False,
)
case(
    "v_or_b32_sdwa v10, v2, v3 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
    lambda _, v: ((v[0] | v[1]) & 255) << 8,
)
case(
    "v_cmp_eq_u32_sdwa s[10:11], v2, v3 src0_sel:BYTE_0 src1_sel:BYTE_0\n v_cndmask_b32 v10, 0, 1, s[10:11]",
    lambda _, v: int(v[0] & 255 == v[1] & 255),
)


# DPP: the lane that each lane reads, or None
def dpp(control: str, source: Callable, row_mask: int = 15, bank_mask: int = 15) -> None:
    for bound in (False, True):

        def expected(all_, bound=bound):
            out = []
            for lane in LANES:
                enabled = row_mask >> lane // 16 & 1 and bank_mask >> lane % 16 // 4 & 1
                read = source(lane)
                if not enabled or (read is None and not bound):
                    out.append(OLD)
                else:
                    out.append(all_[0][read] if read is not None else 0)
            return out

        suffix = " bound_ctrl:0" if bound else ""
        case(
            f"v_mov_b32_dpp v10, v2 {control} row_mask:{row_mask:#x} bank_mask:{bank_mask:#x}{suffix}",
            expected,
            whole=True,
        )


dpp("quad_perm:[1,0,3,2]", lambda n: n ^ 1)
dpp("quad_perm:[3,3,0,1]", lambda n: n & ~3 | (3, 3, 0, 1)[n & 3], 0x5, 0xC)
dpp("row_shl:3", lambda n: n + 3 if n % 16 + 3 < 16 else None)
dpp("row_shr:1", lambda n: n - 1 if n % 16 else None, 0xA)
dpp("row_ror:4", lambda n: n & ~15 | (n - 4) % 16)
dpp("wave_shl:1", lambda n: n + 1 if n < 63 else None)
dpp("wave_shr:1", lambda n: n - 1 if n else None)
dpp("wave_rol:1", lambda n: (n + 1) % 64)
dpp("wave_ror:1", lambda n: (n - 1) % 64)
dpp("row_mirror", lambda n: n ^ 15)
dpp("row_half_mirror", lambda n: n ^ 7)
dpp("row_bcast:15", lambda n: n // 16 * 16 - 1 if n >= 16 else None, 0xA)
dpp("row_bcast:31", lambda n: 31 if n >= 32 else None, 0xC)
dpp("row_newbcast:5", lambda n: n & ~15 | 5)


def shifted_under_mask(all_):
    """Return the results of row_shr:1, which reads lane - 1, with lanes 0-31 inactive and not readable."""
    out = []
    for lane in LANES:
        if lane < 32:
            out.append(OLD)
        else:
            out.append(all_[0][lane - 1] if lane % 16 else 0)
    return out


case(
    "s_mov_b64 exec, 0xffffffff00000000\n v_mov_b32_dpp v10, v2 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:0\n s_mov_b64 exec, -1".replace(
        "s_mov_b64 exec, 0xffffffff00000000", "s_mov_b32 exec_lo, 0"
    ),
    shifted_under_mask,
    whole=True,
)

# Between lanes
case("v_readlane_b32 s10, v2, 37\n v_mov_b32 v10, s10", lambda all_: [all_[0][37]] * 64, whole=True)
case(
    "s_mov_b32 exec_lo, 0x100\n v_readfirstlane_b32 s10, v2\n s_mov_b64 exec, -1\n v_mov_b32 v10, s10",
    lambda all_: [all_[0][8]] * 64,
    whole=True,
)
case(
    "s_movk_i32 s10, 0x123\n v_writelane_b32 v10, s10, 9",
    lambda all_: [0x123 if lane == 9 else OLD for lane in LANES],
    whole=True,
)
case(
    "v_lshlrev_b32 v8, 2, v2\n ds_bpermute_b32 v10, v8, v3\n s_waitcnt lgkmcnt(0)",
    lambda all_: [all_[1][all_[0][lane] & 63] for lane in LANES],
    whole=True,
)
case(
    "v_sub_u32 v8, 63, v0\n v_lshlrev_b32 v8, 2, v8\n ds_permute_b32 v10, v8, v3\n s_waitcnt lgkmcnt(0)",
    lambda all_: [all_[1][63 - lane] for lane in LANES],
    whole=True,
)
case(
    "ds_swizzle_b32 v10, v2 offset:swizzle(SWAP,8)\n s_waitcnt lgkmcnt(0)",
    lambda all_: [all_[0][lane ^ 8] for lane in LANES],
    whole=True,
)
case(
    "ds_swizzle_b32 v10, v2 offset:swizzle(BROADCAST,8,3)\n s_waitcnt lgkmcnt(0)",
    lambda all_: [all_[0][lane & ~7 | 3] for lane in LANES],
    whole=True,
)
case(
    "ds_swizzle_b32 v10, v2 offset:swizzle(QUAD_PERM,2,0,1,3)\n s_waitcnt lgkmcnt(0)",
    lambda all_: [all_[0][lane & ~3 | (2, 0, 1, 3)[lane & 3]] for lane in LANES],
    whole=True,
)
case(
    "v_mov_b32 v10, v2\n v_mov_b32 v11, v3\n v_permlane32_swap_b32 v10, v11",
    lambda all_: [
        [all_[0][lane] if lane < 32 else all_[1][lane - 32], all_[0][lane + 32] if lane < 32 else all_[1][lane]]
        for lane in LANES
    ],
    whole=True,
    archs=("gfx950",),
)
case(
    "v_mov_b32 v10, v2\n v_mov_b32 v11, v3\n v_permlane16_swap_b32 v10, v11",
    lambda all_: [
        [all_[0][lane] if not lane & 16 else all_[1][lane - 16], all_[0][lane + 16] if not lane & 16 else all_[1][lane]]
        for lane in LANES
    ],
    whole=True,
    archs=("gfx950",),
)
case("v_mov_b32 v10, v2\n v_mov_b32 v11, v3\n v_swap_b32 v10, v11", lambda _, v: [v[1], v[0]])
case("v_accvgpr_write_b32 a3, v2\n v_accvgpr_read_b32 v10, a3", lambda _, v: v[0])

# 8-bit floats: torch's formats
FP8 = {"gfx942": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), "gfx950": (torch.float8_e4m3fn, torch.float8_e5m2)}


def encoded(bits: int, dtype) -> int | None:
    value = torch.tensor(bits - ((bits >> 31) << 32), dtype=torch.int32).view(torch.float32)
    limit = torch.finfo(dtype).max
    if value.isnan() or value.abs() > limit:  # overflow has its own test
        return None
    return int(value.to(dtype).view(torch.uint8))


def decoded(byte: int, dtype) -> int:
    return b32(float(torch.tensor(byte, dtype=torch.uint8).view(dtype).float()))


for _arch, _dtypes in FP8.items():
    for _word, _dtype in zip(("fp8", "bf8"), _dtypes, strict=True):

        def packed(_, v, dtype=_dtype, high=False):
            low, upper = encoded(v[1], dtype), encoded(v[2], dtype)
            if low is None or upper is None:
                return None
            return (low | upper << 8) << 16 | OLD & 0xFFFF if high else low | upper << 8 | OLD & 0xFFFF0000

        case(f"v_cvt_pk_{_word}_f32 v10, v3, v4", packed, archs=(_arch,))
        case(
            f"v_cvt_pk_{_word}_f32 v10, v3, v4 op_sel:[0,0,1]",
            lambda _, v, f=packed: f(_, v, high=True),
            archs=(_arch,),
        )
        case(
            f"v_cvt_f32_{_word}_sdwa v10, v2 src0_sel:BYTE_2",
            lambda _, v, d=_dtype: decoded(v[0] >> 16 & 255, d),
            archs=(_arch,),
        )
        case(
            f"v_cvt_pk_f32_{_word}_sdwa v[10:11], v2 src0_sel:WORD_1",
            lambda _, v, d=_dtype: [decoded(v[0] >> s & 255, d) for s in (16, 24)],
            archs=(_arch,),
        )


def power_of_two(bits: int) -> float:
    exponent = bits >> 23 & 255
    return math.nan if exponent == 255 else 2.0 ** (exponent - 127)


case(
    "v_cvt_scalef32_pk_f32_fp8 v[10:11], v2, v3 op_sel:[1,0,0]",
    lambda _, v: [b32(f32(decoded(v[0] >> s & 255, torch.float8_e4m3fn)) * power_of_two(v[1])) for s in (16, 24)],
    archs=("gfx950",),
)
case(
    "v_mov_b32 v8, 4.0\n v_cvt_scalef32_pk_fp8_f32 v10, v3, v4, v8 op_sel:[0,0,0,1]",
    lambda _, v: (
        None
        if None in (parts := [encoded(b32(f32(x) / 4), torch.float8_e4m3fn) for x in v[1:3]])
        else (parts[0] | parts[1] << 8) << 16 | OLD & 0xFFFF
    ),
    archs=("gfx950",),
)
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
case(
    "v_cvt_scalef32_pk_f32_fp4 v[10:11], v2, 2.0 op_sel:[1,0,0]",
    lambda _, v: [b32(math.copysign(2.0 * FP4[v[0] >> s & 7], -1 if v[0] >> s & 8 else 1)) for s in (8, 12)],
    archs=("gfx950",),
)


# LDS
def lds(body: str, expected: Callable, **options) -> None:
    """Return a case in which v8 is the address of this thread's 16 bytes."""
    case("v_lshlrev_b32 v8, 4, v0\n" + body + "\n s_waitcnt lgkmcnt(0)", expected, lds=16 * 64, **options)


lds(
    "v_mov_b64 v[14:15], v[2:3]\n v_mov_b64 v[16:17], v[4:5]\n ds_write_b128 v8, v[14:17]\n ds_read_b128 v[10:13], v8",
    lambda _, v: v[:4],
)
lds(
    "v_mov_b64 v[14:15], v[2:3]\n v_mov_b32 v16, v4\n ds_write_b96 v8, v[14:16]\n ds_read_b96 v[10:12], v8",
    lambda _, v: [*v[:3], OLD],
)
lds(
    "ds_write2_b32 v8, v2, v3 offset0:1 offset1:3\n ds_read2_b32 v[10:11], v8 offset0:3 offset1:1",
    lambda _, v: [v[1], v[0]],
)
lds("ds_write2_b64 v8, v[2:3], v[4:5] offset1:1\n ds_read2_b64 v[10:13], v8 offset0:1", lambda _, v: [*v[2:4], *v[:2]])
lds(
    "v_lshlrev_b32 v8, 2, v0\n ds_write2st64_b32 v8, v2, v3 offset0:1 offset1:2\n ds_read2st64_b32 v[10:11], v8 offset0:2 offset1:1",
    lambda _, v: [v[1], v[0]],
)
lds(
    "ds_write_b32 v8, v2\n ds_read_i8 v10, v8 offset:1\n ds_read_u16 v11, v8 offset:2\n ds_read_u8_d16_hi v12, v8 offset:3",
    lambda _, v: [
        (v[0] >> 8 & 255) - ((v[0] >> 8 & 128) << 1) & 0xFFFFFFFF,
        v[0] >> 16,
        OLD & 0xFFFF | v[0] >> 24 << 16,
    ],
)
lds(
    "ds_write_b32 v8, v2\n ds_write_b8 v8, v3 offset:1\n ds_write_b16_d16_hi v8, v3 offset:2\n ds_read_b32 v10, v8",
    lambda _, v: v[0] & 255 | (v[1] & 255) << 8 | v[1] & 0xFFFF0000,
)
lds(
    "ds_write_b32 v8, v2\n ds_max_rtn_i32 v10, v8, v3\n ds_sub_rtn_u32 v11, v8, v4\n ds_cmpst_rtn_b32 v12, v8, v5, v6\n ds_read_b32 v13, v8",
    lambda _, v: [
        v[0],
        high := max(i32(v[0]), i32(v[1])) & 0xFFFFFFFF,
        low := high - v[2] & 0xFFFFFFFF,
        v[4] if low == v[3] else low,
    ],
)
lds(
    "ds_write_b64 v8, v[2:3]\n ds_wrxchg_rtn_b64 v[10:11], v8, v[4:5]\n ds_read_b64 v[12:13], v8", lambda _, v: [*v[:4]]
)
lds(
    "ds_write_b32 v8, v2\n ds_add_f32 v8, v3\n ds_read_b32 v10, v8",
    lambda _, v: arithmetic(lambda a, b: a + b)(v[0], v[1]),
)


# Loads straight to LDS, wider than a dword on gfx950; s[4:5] are the inputs: lane l gets bytes 16 l to 16 l + 15
def loaded(all_, words: int):
    flat = [x for row in all_ for x in row]
    return [flat[words * lane : words * (lane + 1)] for lane in LANES]


lds(
    "s_mov_b32 m0, 0\n s_nop 0\n global_load_lds_dwordx4 v8, s[4:5]\n s_waitcnt vmcnt(0)\n ds_read_b128 v[10:13], v8",
    lambda all_: loaded(all_, 4),
    whole=True,
    archs=("gfx950",),
)
lds(
    "v_mul_u32_u24 v8, 12, v0\n s_mov_b32 m0, 0\n s_nop 0\n global_load_lds_dwordx3 v8, s[4:5]\n s_waitcnt vmcnt(0)\n ds_read2_b32 v[10:11], v8 offset1:1\n ds_read_b32 v12, v8 offset:8",
    lambda all_: loaded(all_, 3),
    whole=True,
    archs=("gfx950",),
)
RESOURCE = "s_mov_b64 s[8:9], s[4:5]\n s_movk_i32 s10, 0x600\n s_mov_b32 s11, 0x27000\n s_mov_b32 m0, 0\n s_nop 0\n"
lds(
    RESOURCE + "buffer_load_dwordx4 v8, s[8:11], 0 offen lds\n s_waitcnt vmcnt(0)\n ds_read_b128 v[10:13], v8",
    lambda all_: loaded(all_, 4),
    whole=True,
    archs=("gfx950",),
)
lds(
    RESOURCE
    + "v_lshlrev_b32 v8, 2, v0\n s_movk_i32 s12, 256\n buffer_load_dword v8, s[8:11], s12 offen lds\n s_waitcnt vmcnt(0)\n ds_read_b32 v10, v8",
    lambda all_: [all_[1][lane] for lane in LANES],
    whole=True,
)

# Transposing reads of LDS: a row of 16 lanes holds a k x 16 matrix, lane j gets column j
for _bits in (16, 8, 4):

    def columns_of(all_, bits=_bits):
        out = []
        for lane in LANES:
            row = lane & ~15
            stream = sum((all_[0][row + i] | all_[1][row + i] << 32) << 64 * i for i in range(16))
            element = lambda n, stream=stream: stream >> n * bits & ((1 << bits) - 1)
            out.append(words64(sum(element(r * 16 + (lane & 15)) << r * bits for r in range(64 // bits))))
        return out

    case(
        f"v_lshlrev_b32 v8, 3, v0\n ds_write_b64 v8, v[2:3]\n ds_read_b64_tr_b{_bits} v[10:11], v8\n s_waitcnt lgkmcnt(0)",
        columns_of,
        whole=True,
        archs=("gfx950",),
        lds=512,
    )

# f32 denormals follow MODE: off in the descriptor, then on again by s_setreg
case("v_mul_f32 v10, 1.0, v2", lambda _, v: flushed(v[0]), denormals=False)
case(
    "v_add_f32 v10, v2, v3",
    lambda _, v: flushed(arithmetic(lambda a, b: a + b)(flushed(v[0]), flushed(v[1]))),
    denormals=False,
)
case(
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3\n v_mul_f32 v10, 1.0, v2\n s_getreg_b32 s10, hwreg(HW_REG_MODE, 4, 2)\n v_mov_b32 v11, s10",
    lambda _, v: [v[0], 3],
    denormals=False,
)


def flushed(bits: int) -> int:
    return bits & 0x80000000 if 0 < abs(f32(bits)) < 2.0**-126 else bits


# Register indexing
case(
    "s_mov_b32 s10, 2\n s_set_gpr_idx_on s10, gpr_idx(SRC0)\n v_mov_b32 v10, v2\n s_set_gpr_idx_off", lambda _, v: v[2]
)
case(
    "s_mov_b32 s10, 1\n s_set_gpr_idx_on s10, gpr_idx(DST)\n v_mov_b32 v10, v2\n s_set_gpr_idx_off",
    lambda _, v: [OLD, v[0]],
)
case(
    "s_mov_b32 s10, 1\n s_set_gpr_idx_on s10, gpr_idx(SRC0)\n v_sub_u32 v10, v2, v2\n v_sub_u32 v11, v3, v2\n s_set_gpr_idx_off",
    lambda _, v: [v[1] - v[0] & 0xFFFFFFFF, v[2] - v[0] & 0xFFFFFFFF],
)
case(
    "s_mov_b32 s10, 4\n v_mov_b32 v11, 0\n s_setvskip s10, 2\n v_mov_b32 v10, v2\n s_setvskip s10, 1\n v_mov_b32 v11, v2\n"
    " s_setvskip 0, 0\n v_mov_b32 v12, v3",
    lambda _, v: [OLD, v[0], v[1]],
)

# Scalar; s10.. from lane 5 of v2, v3
LANE5 = (
    "v_readlane_b32 s10, v2, 5\n v_readlane_b32 s11, v3, 5\n v_readlane_b32 s12, v4, 37\n v_readlane_b32 s13, v5, 37\n"
)


def scalar(body: str, fn: Callable) -> None:
    """Return a case with its results in s14 and s15, and SCC in v12."""
    text = (
        LANE5
        + " s_mov_b64 s[14:15], 0\n"
        + body
        + "\n s_cselect_b32 s16, 1, 0\n v_mov_b32 v10, s14\n v_mov_b32 v11, s15\n v_mov_b32 v12, s16"
    )
    case(text, lambda all_: [fn(all_[0][5], all_[1][5], all_[2][37], all_[3][37])] * 64, whole=True)


scalar(
    "s_add_u32 s14, s10, s11\n s_addc_u32 s15, s12, s13",
    lambda a, b, c, d: [*words64((a | c << 32) + (b | d << 32)), int((a | c << 32) + (b | d << 32) >> 64)],
)
scalar(
    "s_sub_u32 s14, s10, s11\n s_subb_u32 s15, s12, s13",
    lambda a, b, c, d: [*words64((a | c << 32) - (b | d << 32)), int((a | c << 32) < (b | d << 32))],
)
scalar(
    "s_add_i32 s14, s10, s12",
    lambda a, b, c, d: [a + c & 0xFFFFFFFF, 0, int(not -(1 << 31) <= i32(a) + i32(c) < 1 << 31)],
)
scalar(
    "s_mul_hi_i32 s14, s10, s12\n s_mul_i32 s15, s10, s12\n s_cmp_eq_u32 s10, s10",
    lambda a, b, c, d: [i32(a) * i32(c) >> 32 & 0xFFFFFFFF, a * c & 0xFFFFFFFF, 1],
)
scalar("s_bfe_u32 s14, s10, 0x90005", lambda a, b, c, d: [a >> 5 & 0x1FF, 0, int(a >> 5 & 0x1FF != 0)])
scalar(
    "s_bfe_i32 s14, s12, 0x80004",
    lambda a, b, c, d: [(c >> 4 & 255) - ((c >> 4 & 128) << 1) & 0xFFFFFFFF, 0, int(c >> 4 & 255 != 0)],
)
scalar(
    "s_lshl_b64 s[14:15], s[10:11], 7",
    lambda a, b, c, d: [*words64((a | b << 32) << 7), int((a | b << 32) << 7 & (1 << 64) - 1 != 0)],
)
scalar(
    "s_ashr_i64 s[14:15], s[12:13], 9",
    lambda a, b, c, d: [*words64((c | i32(d) << 32) >> 9), int((c | d << 32) >> 9 != 0)],
)
scalar("s_andn2_b64 s[14:15], s[10:11], s[12:13]", lambda a, b, c, d: [a & ~c, b & ~d, int(bool(a & ~c | b & ~d))])
scalar(
    "s_bcnt1_i32_b64 s14, s[10:11]",
    lambda a, b, c, d: [a.bit_count() + b.bit_count(), 0, int(a.bit_count() + b.bit_count() != 0)],
)
scalar(
    "s_ff1_i32_b32 s14, s12\n s_flbit_i32_b32 s15, s12\n s_cmp_lt_i32 s12, 0",
    lambda a, b, c, d: [
        (c & -c).bit_length() - 1 & 0xFFFFFFFF,
        32 - c.bit_length() if c else 0xFFFFFFFF,
        int(i32(c) < 0),
    ],
)
scalar(
    "s_min_i32 s14, s10, s12\n s_max_u32 s15, s10, s12",
    lambda a, b, c, d: [min(i32(a), i32(c)) & 0xFFFFFFFF, max(a, c), int(a >= c)],
)
scalar(
    "s_pack_lh_b32_b16 s14, s10, s12\n s_brev_b32 s15, s10\n s_cmp_lg_u32 s10, s10",
    lambda a, b, c, d: [a & 0xFFFF | c & 0xFFFF0000, int(f"{a:032b}"[::-1], 2), 0],
)
scalar("s_bitset1_b32 s14, 7\n s_bitcmp1_b32 s14, 7", lambda a, b, c, d: [128, 0, 1])
scalar(
    "s_mov_b32 s14, s10\n s_mulk_i32 s14, -3\n s_addk_i32 s14, 100\n s_sext_i32_i8 s15, s10\n s_cmpk_gt_i32 s15, -1",
    lambda a, b, c, d: [a * -3 + 100 & 0xFFFFFFFF, (a & 255) - ((a & 128) << 1) & 0xFFFFFFFF, int(not a & 128)],
)
scalar(
    "s_lshl2_add_u32 s14, s10, s12\n s_absdiff_i32 s15, s10, s12",
    lambda a, b, c, d: [4 * a + c & 0xFFFFFFFF, abs(i32(a) - i32(c)) & 0xFFFFFFFF, int(a != c)],
)
scalar(
    "s_mov_b32 s14, 0\n0:\n s_add_i32 s14, s14, 3\n s_cmp_lt_i32 s14, 50\n s_cbranch_scc1 0b",
    lambda a, b, c, d: [51, 0, 0],
)

PROLOGUE = (
    LOAD_POINTERS
    + "  v_lshlrev_b32 v1, 2, v0\n"
    + "".join(f"  global_load_dword v{2 + i}, v1, s[4:5] offset:{256 * i}\n" for i in range(6))
    + "".join(f"  v_mov_b32 v{10 + i}, 0xaaaaaaaa\n" for i in range(5))
    + "  s_waitcnt vmcnt(0)\n"
)
EPILOGUE = "".join(f"\n  global_store_dword v1, v{10 + i}, s[6:7] offset:{256 * i}" for i in range(4))


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("instructions")
    out = {}
    for arch in ("gfx942", "gfx950"):
        kernels = [
            Kernel(c.name, PROLOGUE + "  " + c.body + EPILOGUE, lds=c.lds, denormals=c.denormals)
            for c in CASES
            if arch in c.archs
        ]
        out[arch] = (Emulator(arch), assemble(kernels, arch, folder))
    return out


def same(got: int, wanted: int, c: Case) -> bool:
    if got == wanted:
        return True
    if c.floats and math.isnan(f32(got)) and math.isnan(f32(wanted)):
        return True
    if not c.floats:
        pairs = [(got >> s & 0xFFFF, wanted >> s & 0xFFFF) for s in (0, 16)]
        if all(a == b or (math.isnan(f16(a)) and math.isnan(f16(b))) for a, b in pairs):
            return True
    return abs(i32(got) - i32(wanted)) <= c.ulp and c.ulp > 0


@pytest.mark.parametrize(
    "c, arch", [pytest.param(c, a, id=f"{' '.join(c.body.split())}-{a}") for c in CASES for a in c.archs]
)
def test_instruction(c, arch, objects):
    emulator, path = objects[arch]
    inputs = torch.from_numpy(INPUTS.view(np.int32).copy())
    output = torch.empty((4, 64), dtype=torch.int32)
    emulator.run(path, Launch("", c.name, (1, 1, 1), (64, 1, 1), (inputs, output)), (output,))
    got = output.numpy().view(np.uint32)
    columns = [[int(x) for x in row] for row in INPUTS]
    wanted = c.expected(columns) if c.whole else [c.expected(lane, [row[lane] for row in columns]) for lane in LANES]
    for lane, values in enumerate(wanted):
        if values is None:
            continue
        for i, value in enumerate(values if isinstance(values, list) else [values]):
            shown = f"lane {lane}: v{10 + i} is {int(got[i, lane]):#x}, not {value & 0xFFFFFFFF:#x}"
            sources = ", ".join(f"{row[lane]:#x}" for row in columns)
            assert same(int(got[i, lane]), value & 0xFFFFFFFF, c), f"{shown}; sources {sources}"


@pytest.mark.parametrize("name", ["add_f32", "swap", "inc", "pk_add_bf16"])
def test_atomics_of_lanes_that_meet_go_one_after_the_other(name):
    random = np.random.default_rng(3)
    units, data = random.integers(0, 5, 64), random.integers(0x3F80, 0x4F80, 64, np.uint32) << np.uint32(16)
    start, change = random.integers(0x3F80, 0x4F80, 5, np.uint32) << np.uint32(16), transfer.ATOMICS[name]
    memory, olds = start.copy(), []
    for unit, value in zip(units, data, strict=True):
        olds.append(memory[unit])
        memory[unit : unit + 1] = change(memory[unit : unit + 1].copy(), value[None])
    found = start.copy()
    assert (transfer.update(found, units, change, data) == olds).all() and (found == memory).all()


def test_compare_and_swap_of_lanes_that_meet():
    memory, units = np.array([7, 7], np.uint32), np.array([0, 0, 1, 0])
    compare, data = np.array([7, 1, 6, 2], np.uint32), np.array([1, 2, 3, 4], np.uint32)
    assert transfer.update(memory, units, None, data, compare).tolist() == [7, 1, 7, 2] and memory.tolist() == [4, 7]
