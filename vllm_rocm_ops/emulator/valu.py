"""Vector ALU instructions: VOP1, VOP2, VOP3, VOP3P, VOPC.

Sources: AMD Instinct MI300 (CDNA3) ISA, chapter 12 "Instructions", its sections on VOP1, VOP2, VOP3, VOP3P and VOPC with AMD's
pseudocode; CDNA4 ISA for gfx950's additions.
A new instruction is one entry in `VECTOR`: a function on numpy arrays of the operand types that the decoding tables give
(`F32` float32, `B32` uint32, `M64` one bool per lane, anything packed or 8-bit: raw uint32).

f32 arithmetic is IEEE, rounded to nearest even. v_exp, v_log, v_rcp, v_rsq, v_sqrt, v_sin and v_cos are computed in float64
and rounded once, where the hardware promises 1 ulp; in f32 they flush denormal inputs and results, as LLVM's lowering of
exp2, log2, sqrt and division assumes (AMDGPULegalizerInfo.cpp).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import formats
from .decode import M0, VCC, Instruction, Operand
from .errors import UnsupportedInstruction
from .salu import find_first_one, leading_signs, leading_zeros, mul_hi, popcount, reader, reverse_bits
from .vector import (
    F16,
    F32,
    F64,
    I16,
    I32,
    I64,
    MASK,
    PACKED,
    U16,
    U32,
    U64,
    Dpp,
    check_allocated,
    dtype_of,
    flush,
    modified,
    output,
    read,
    register,
    sdwa_source,
    sdwa_write,
    write,
    write_lanes,
)


@dataclass(frozen=True)
class Vector:
    """fn(*sources) -> result.

    carries: returns (result, lanes for sdst). accumulates: the old destination is the last source. arch: fn's first
    argument is the program (for .arch and .saturate). keeps: a partial write preserves the rest of the register.
    """

    fn: Callable
    flags: frozenset[str] = frozenset()


VECTOR: dict[str, Vector] = {}


def entries(flags: str = "", **table) -> None:
    """Adds instructions with common flags."""
    for name, fn in table.items():
        VECTOR[name] = Vector(fn, frozenset(flags.split()))


# Arithmetic that numpy does not have


def fma(a, b, c):
    """a * b + c rounded once. The float64 product of float32s is exact; only sums that land on a float32 tie, or among
    its denormals, need the rounding error of the float64 sum to decide."""
    if a.dtype == F64:
        return _fma64(a, b, c)
    product = a.astype(F64) * b
    total = product + c
    if a.dtype == F16:
        return total
    bits = total.view(U64)
    tie = bits & U64(0x1FFFFFFF) == U64(0x10000000)
    if np.count_nonzero(tie) or np.count_nonzero((np.abs(total) < 2.0**-125) & (total != 0)):
        rest = total - product
        error = (product - (total - rest)) + (c - rest)
        # round to odd: an inexact sum gets an odd last bit, so that the second rounding sees which side it is on
        inexact = (error != 0) & np.isfinite(total)
        down = (error < 0) != (total < 0)
        odd = np.where(inexact & (bits & U64(1) == 0), np.where(down, bits - U64(1), bits + U64(1)), bits)
        total = odd.view(F64)
    return total.astype(F32)


def _fma64(a, b, c):
    from fractions import Fraction

    a, b, c = np.broadcast_arrays(a, b, c)
    out = a * b + c
    for i in np.ndindex(out.shape):
        if np.isfinite([a[i], b[i], c[i]]).all() and np.isfinite(out[i]):
            exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
            if exact:
                try:
                    out[i] = exact.numerator / exact.denominator
                except OverflowError:
                    out[i] = np.copysign(np.inf, out[i])
    return out


def maximum(a, b):
    """V_MAX: a NaN loses, +0 beats -0."""
    return _extreme(np.fmax, a, b, np.bitwise_and)


def minimum(a, b):
    """V_MIN: a NaN loses, -0 beats +0."""
    return _extreme(np.fmin, a, b, np.bitwise_or)


def _extreme(choose, a, b, combine):
    out = choose(a, b)
    equal = a == b
    if np.count_nonzero(equal):
        word = {2: U16, 4: U32, 8: U64}[out.dtype.itemsize]
        out = np.where(
            equal, combine(np.ascontiguousarray(a).view(word), np.ascontiguousarray(b).view(word)).view(out.dtype), out
        )
    return out


def median(a, b, c):
    """V_MED3 of floats; with a NaN the minimum of the others."""
    out = maximum(minimum(a, b), minimum(maximum(a, b), c))
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, minimum(minimum(a, b), c), out) if np.count_nonzero(nan) else out


def median_int(a, b, c):
    """V_MED3 of integers."""
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _ieee_extreme(choose):
    """V_MINIMUM3 and V_MAXIMUM3: NaN wins."""

    def run(a, b, c):
        nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
        return np.where(nan, a.dtype.type(np.nan), choose(choose(a, b), c))

    return run


def approximate(fn):
    """A transcendental of f32: float64 inside, denormals flushed on both sides."""

    def run(a):
        if a.dtype != F32:
            return fn(a.astype(F64)).astype(a.dtype)
        return flush(fn(flush(a).astype(F64)).astype(F32))

    return run


def _reciprocal_root(a):
    return np.where(a == 0, np.copysign(np.inf, a), 1 / np.sqrt(a))


def _turns(fn):
    """V_SIN and V_COS take revolutions; beyond 256 of them the result is 0 (CDNA3 ISA, V_SIN_F32)."""
    return lambda a: np.where(np.abs(a) > 256, fn(0.0), fn(2 * np.pi * (a - np.floor(a))))


def to_integer(dtype, rounding=np.trunc):
    """Float to integer: NaN gives 0, out of range saturates."""
    info = np.iinfo(dtype)

    def run(a):
        a = rounding(np.where(np.isnan(a), 0, a).astype(F64))
        return np.clip(a, float(info.min), float(info.max)).astype(I64).clip(info.min, info.max).astype(dtype)

    return run


def shift_left(n, a):
    """Reversed shifts: only as many bits of the count as the type needs."""
    bits = a.dtype.itemsize * 8
    return a << (n & n.dtype.type(bits - 1)).astype(a.dtype)


def shift_right(n, a):
    """As shift_left; arithmetic for signed types."""
    bits = a.dtype.itemsize * 8
    return a >> (n & n.dtype.type(bits - 1)).astype(a.dtype)


def _mul24(a, b):
    return (a.astype(I64 if a.dtype == I32 else U64) * b).astype(a.dtype)


def _mul24_high(a, b):
    wide = a.astype(I64 if a.dtype == I32 else U64) * b
    return (wide >> wide.dtype.type(32)).astype(a.dtype)


def bfe(a, b, c):
    """V_BFE: 5-bit offset and width; a width of 0 gives 0."""
    offset, width = (b & b.dtype.type(31)).astype(U64), (c & c.dtype.type(31)).astype(U64)
    wide = a.astype(I64).view(U64) if a.dtype == I32 else a.astype(U64)
    field = wide >> offset & ((U64(1) << width) - U64(1))
    if a.dtype == I32:
        # sign bit of the field; the field may reach above bit 31, where the source's sign repeats
        sign = (U64(1) << width) >> U64(1)
        field = (field ^ sign) - sign
    return field.astype(U32).view(a.dtype)


def _align(unit: int):
    def run(a, b, c):
        wide = a.astype(U64) << U64(32) | b
        return (wide >> ((c & U32(31 if unit == 1 else 3)) * U32(unit)).astype(U64)).astype(U32)

    return run


@functools.cache
def _permutation_plan(selector: int) -> tuple[tuple, int]:
    """A V_PERM selector as moves: ((source, shift left, mask of the result), ...) and the constant bytes."""
    moves: dict[tuple[int, int], int] = {}
    constant = 0
    for position in range(4):
        select = selector >> 8 * position & 255
        if select < 8:
            key = (select >> 2, 8 * (position - (select & 3)))
            moves[key] = moves.get(key, 0) | 255 << 8 * position
        elif select > 12:
            constant |= 255 << 8 * position
    return tuple((source, shift, U32(mask)) for (source, shift), mask in moves.items()), constant


def byte_permute(a, b, selectors):
    """V_PERM_B32: selectors 0-3 are b's bytes, 4-7 a's, 8-11 sign bytes of words, 12 zero, 13 up 0xff."""
    first = int(selectors.flat[0])
    if (selectors.size == 1 or (selectors == first).all()) and not any(
        8 <= first >> s & 255 < 12 for s in (0, 8, 16, 24)
    ):
        moves, constant = _permutation_plan(first)
        out = U32(constant)
        for source, shift, mask in moves:
            word = a if source else b
            out = out | (word << U32(shift) if shift > 0 else word >> U32(-shift) if shift else word) & mask
        return out + (a & U32(0)) if not moves else out
    wide = a.astype(U64) << U64(32) | b
    out = U32(0)
    for position in range(4):
        select = selectors >> U32(8 * position) & U32(255)
        plain = (wide >> (np.minimum(select, 7) * U32(8)).astype(U64) & U64(255)).astype(U32)
        word = np.clip(select, 8, 11) - U32(8)
        sign = (wide >> (word * U32(16) + U32(15)).astype(U64) & U64(1)).astype(U32) * U32(255)
        byte = np.where(select < 8, plain, np.where(select < 12, sign, np.where(select == 12, U32(0), U32(255))))
        out = out | byte << U32(8 * position)
    return out


def _add_carry(a, b, carry=None):
    wide = a.astype(U64) + b
    wide = wide if carry is None else wide + carry
    return wide.astype(U32), wide >> U64(32) != 0


def _sub_borrow(a, b, borrow=None):
    right = b.astype(U64) if borrow is None else b.astype(U64) + borrow
    return (a.astype(U64) - right).astype(U32), a < right


def _mad_wide(a, b, c):
    """V_MAD_U64_U32 and V_MAD_I64_I32 with the carry (or signed overflow) out."""
    product = a.astype(c.dtype) * b.astype(c.dtype)
    total = product + c
    if c.dtype == U64:
        return total, total < product
    return total, ((total ^ product) & (total ^ c)) < 0


def _exponent(a):
    return (
        (a.view(U32) >> U32(23) & U32(255)).astype(I32)
        if a.dtype == F32
        else (a.view(U64) >> U64(52) & U64(2047)).astype(I64)
    )


def div_scale(s0, s1, s2):
    """V_DIV_SCALE_F32 / F64: AMD's pseudocode."""
    wide = s0.dtype == F64
    s0, s1, s2 = (np.array(x) for x in np.broadcast_arrays(s0, s1, s2))
    tiny, up, numerator = (2.0**-1022, 128, 53) if wide else (2.0**-126, 64, 23)
    distance = 768 if wide else 96
    x1, x2 = s1.astype(F64), s2.astype(F64)
    denormal = lambda x: (np.abs(x) < tiny) & (x != 0)
    with np.errstate(all="ignore"):
        reciprocal, quotient = denormal(1 / x1), denormal((s2 / s1).astype(F64))
    zero = (x1 == 0) | (x2 == 0)
    far = _exponent(s2) - _exponent(s1) >= distance
    cases = [zero, far, denormal(x1), reciprocal & quotient, reciprocal, quotient, _exponent(s2) <= numerator]
    same_denominator, same_numerator = s0 == s1, s0 == s2
    shift = np.select(
        cases,
        [
            0,
            np.where(same_denominator, up, 0),
            up,
            np.where(same_denominator, -up, 0),
            -up,
            np.where(same_numerator, up, 0),
            up,
        ],
        0,
    )
    vcc = np.select(cases, [False, True, False, True, False, True, False], False)
    result = np.ldexp(s0, shift.astype(I32))
    return np.where(zero, s0.dtype.type(np.nan), result), vcc


def div_fmas(a, b, c, scale):
    """V_DIV_FMAS: where VCC is set, undoes the scaling of one side, by 2^64 or 2^-64 (2^128 in f64) as the exponent of the
    quotient c tells. CDNA's document prints a plain 2^32, which is not the inverse of V_DIV_SCALE; RDNA4's has this."""
    wide = a.dtype == F64
    result = fma(a, b, c)
    up, middle = (128, 1023) if wide else (64, 127)
    shift = np.where(_exponent(np.ascontiguousarray(c)) > middle, up, -up).astype(I32)
    return np.where(scale, np.ldexp(result, shift), result)


def div_fixup(s0, s1, s2):
    """V_DIV_FIXUP: quotient s0, denominator s1, numerator s2; AMD's pseudocode."""
    kind = s0.dtype.type
    negative = np.signbit(s1) ^ np.signbit(s2)
    signed = lambda x: np.where(negative, -x, x)
    cases = [
        (np.isnan(s2), s2),
        (np.isnan(s1), s1),
        (((s1 == 0) & (s2 == 0)) | (np.isinf(s1) & np.isinf(s2)), np.full(1, -np.nan, s0.dtype)),
        ((s1 == 0) | np.isinf(s2), signed(kind(np.inf))),
        (np.isinf(s1) | (s2 == 0), signed(kind(0))),
    ]
    if s0.dtype == F32:
        cases.append((_exponent(s2) - _exponent(s1) < -150, signed(kind(0))))
    return np.select(*zip(*cases, strict=True), signed(np.abs(s0))).astype(s0.dtype)


def float_class(a, mask):
    """V_CMP_CLASS: mask bits 0 sNaN, 1 qNaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, 7 +denormal, 8 +normal, 9 +inf."""
    words = {2: (U16, 1 << 9, 2.0**-14), 4: (U32, 1 << 22, 2.0**-126), 8: (U64, 1 << 51, 2.0**-1022)}
    word, quiet, tiny = words[a.dtype.itemsize]
    bits = np.ascontiguousarray(a).view(word)
    negative, magnitude = np.signbit(a), np.abs(a.astype(F64))
    kind = np.where(magnitude == 0, 6, np.where(magnitude < tiny, 7, np.where(np.isinf(magnitude), 9, 8)))
    kind = np.where(negative, 11 - kind, kind)
    kind = np.where(np.isnan(a), np.where(bits & word(quiet), 1, 0), kind)
    return mask.astype(U32) >> kind.astype(U32) & U32(1) != 0


def frexp_mantissa(a):
    """V_FREXP_MANT."""
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def frexp_exponent(a):
    """V_FREXP_EXP: 0 for zero, infinity and NaN."""
    return np.where(np.isfinite(a), np.frexp(a)[1], 0)


def _ldexp(a, n):
    return np.ldexp(a.astype(F64), np.clip(n.astype(I64), -4000, 4000).astype(I32)).astype(a.dtype)


def half_bits(a) -> np.ndarray:
    """float16 array as uint32 words."""
    return np.ascontiguousarray(a).view(U16).astype(U32)


def toward_zero_half(a):
    """f32 to f16 bits, rounded toward zero."""
    near = a.astype(F16)
    with np.errstate(all="ignore"):
        over = np.abs(near.astype(F64)) > np.abs(a.astype(F64))
    return half_bits(near) - (over & np.isfinite(a)).astype(U32)


def pack(low, high):
    """Two 16-bit values (uint32) in one word."""
    return low & U32(0xFFFF) | high << U32(16)


def bf16_bits(a):
    """f32 to bf16 bits, nearest even."""
    return formats.BF16.encode(a)


def low_bf16(word):
    """The low half of a word, a bf16, as f32."""
    return (word << U32(16)).view(F32)


def high_bf16(word):
    """The high half of a word, a bf16, as f32."""
    return (word & U32(0xFFFF0000)).view(F32)


def halves(word):
    """Both f16 of a word as f32."""
    pairs = np.ascontiguousarray(word).view(F16).astype(F32)
    return pairs[..., 0::2], pairs[..., 1::2]


def fields(word, bits: int, signed: bool) -> list:
    """The packed integers of a word, lowest first, as int64."""
    values = [(word >> U32(i) & U32((1 << bits) - 1)).astype(I64) for i in range(0, 32, bits)]
    return [np.where(v >> (bits - 1) != 0, v - (1 << bits), v) if signed else v for v in values]


def _dot(bits: int, signed: bool):
    def run(a, b, c):
        total = c.astype(I64)
        for x, y in zip(fields(a, bits, signed), fields(b, bits, signed), strict=True):
            total = total + x * y
        return total.astype(U32).view(c.dtype)

    return run


def dot2_f16(a, b, c):
    """V_DOT2(C)_F32_F16: products and sum in f32."""
    (a0, a1), (b0, b1) = halves(a), halves(b)
    return (a0 * b0 + a1 * b1) + c


def dot2_bf16(a, b, c):
    """V_DOT2(C)_F32_BF16."""
    return (low_bf16(a) * low_bf16(b) + high_bf16(a) * high_bf16(b)) + c


def _absolute_differences(bits: int, shift: int = 0, masked: bool = False):
    def run(a, b, c):
        total = c.copy() if c.shape[-1] > 1 else c + U32(0)
        for x, y in zip(fields(a, bits, False), fields(b, bits, False), strict=True):
            difference = np.abs(x - y).astype(U32)
            total = total + (np.where(y == 0, U32(0), difference) if masked else difference << U32(shift))
        return total

    return run


def _norm(dtype, scale: float):
    return lambda a: to_integer(dtype, np.rint)(
        np.clip(np.where(np.isnan(a), 0, a).astype(F64), -1 if dtype == I16 else 0, 1) * scale
    )


def _saturate_bytes(low: int, high: int):
    def run(a, b, n):
        first, second = (np.clip(shift_right(n, x), low, high).astype(U32) & U32(255) for x in (a, b))
        return first | second << U32(8)

    return run


def _clip_pair(dtype):
    info = np.iinfo(dtype)
    return lambda a, b: pack(np.clip(a, info.min, info.max).astype(U32), np.clip(b, info.min, info.max).astype(U32))


def exclusive_popcount(upper: bool):
    """V_MBCNT: bits of the mask below this lane, plus b."""
    lane = np.arange(64, dtype=U64)
    below = (U64(1) << lane) - U64(1)
    part = (below >> U64(32) if upper else below & U64(0xFFFFFFFF)).astype(U32)
    return lambda a, b: popcount(a & part) + b


# VOP2 and its VOP3 forms: 32-bit floats

entries(
    v_add_f32=np.add,
    v_sub_f32=np.subtract,
    v_subrev_f32=lambda a, b: b - a,
    v_mul_f32=np.multiply,
    v_mul_legacy_f32=lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b),
    v_min_f32=minimum,
    v_max_f32=maximum,
    v_add_f16=np.add,
    v_sub_f16=np.subtract,
    v_subrev_f16=lambda a, b: b - a,
    v_mul_f16=np.multiply,
    v_min_f16=minimum,
    v_max_f16=maximum,
    v_ldexp_f16=lambda a, n: _ldexp(a, n.view(I16)),
    v_ldexp_f32=lambda a, n: _ldexp(a, n.view(I32)),
    v_ldexp_f64=lambda a, n: _ldexp(a, n.view(I32)),
    v_add_f64=np.add,
    v_mul_f64=np.multiply,
    v_min_f64=minimum,
    v_max_f64=maximum,
    v_fma_f32=fma,
    v_fma_f16=fma,
    v_fma_f64=fma,
    v_fma_legacy_f16=fma,
    v_mad_f16=lambda a, b, c: a * b + c,
    v_mad_legacy_f16=lambda a, b, c: a * b + c,
    v_fmaak_f32=fma,
    v_fmamk_f32=lambda a, b, k: fma(a, k, b),
    v_madak_f16=lambda a, b, k: a * b + k,
    v_madmk_f16=lambda a, b, k: a * k + b,
    v_min3_f32=lambda a, b, c: minimum(minimum(a, b), c),
    v_max3_f32=lambda a, b, c: maximum(maximum(a, b), c),
    v_med3_f32=median,
    v_min3_f16=lambda a, b, c: minimum(minimum(a, b), c),
    v_max3_f16=lambda a, b, c: maximum(maximum(a, b), c),
    v_med3_f16=median,
    v_minimum3_f32=_ieee_extreme(minimum),
    v_maximum3_f32=_ieee_extreme(maximum),
    v_div_fixup_f16=div_fixup,
    v_div_fixup_legacy_f16=div_fixup,
    v_div_fixup_f32=div_fixup,
    v_div_fixup_f64=div_fixup,
)
entries("accumulates", v_fmac_f32=fma, v_fmac_f64=fma, v_mac_f16=lambda a, b, c: a * b + c)
entries("carries", v_div_scale_f32=div_scale, v_div_scale_f64=div_scale)
entries("reads_vcc", v_div_fmas_f32=div_fmas, v_div_fmas_f64=div_fmas)

# Integers

entries(
    v_add_u32=np.add,
    v_sub_u32=np.subtract,
    v_subrev_u32=lambda a, b: b - a,
    v_add_i32=np.add,
    v_sub_i32=np.subtract,
    v_add_u16=np.add,
    v_sub_u16=np.subtract,
    v_subrev_u16=lambda a, b: b - a,
    v_add_i16=np.add,
    v_sub_i16=np.subtract,
    v_mul_lo_u16=np.multiply,
    v_mul_lo_u32=np.multiply,
    v_mul_hi_u32=mul_hi,
    v_mul_hi_i32=mul_hi,
    v_mul_u32_u24=lambda a, b: _mul24(a & U32(0xFFFFFF), b & U32(0xFFFFFF)),
    v_mul_i32_i24=lambda a, b: _mul24(_signed24(a), _signed24(b)),
    v_mul_hi_u32_u24=lambda a, b: _mul24_high(a & U32(0xFFFFFF), b & U32(0xFFFFFF)),
    v_mul_hi_i32_i24=lambda a, b: _mul24_high(_signed24(a), _signed24(b)),
    v_mad_u32_u24=lambda a, b, c: a * b + c,
    v_mad_i32_i24=lambda a, b, c: a * b + c,
    v_mad_u16=lambda a, b, c: a * b + c,
    v_mad_i16=lambda a, b, c: a * b + c,
    v_mad_legacy_u16=lambda a, b, c: a * b + c,
    v_mad_legacy_i16=lambda a, b, c: a * b + c,
    v_mad_u32_u16=lambda a, b, c: a.astype(U32) * b + c,
    v_mad_i32_i16=lambda a, b, c: a.astype(I32) * b + c,
    v_lshl_add_u32=lambda a, b, c: shift_left(b, a) + c,
    v_add_lshl_u32=lambda a, b, c: shift_left(c, a + b),
    v_add3_u32=lambda a, b, c: a + b + c,
    v_xad_u32=lambda a, b, c: (a ^ b) + c,
    v_lshl_add_u64=lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c,
    v_bfe_u32=bfe,
    v_bfe_i32=bfe,
    v_bfm_b32=lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)),
    v_bcnt_u32_b32=lambda a, b: popcount(a) + b,
    v_mbcnt_lo_u32_b32=exclusive_popcount(False),
    v_mbcnt_hi_u32_b32=exclusive_popcount(True),
    v_lerp_u8=lambda a, b, c: sum(
        ((a >> U32(s) & U32(255)) + (b >> U32(s) & U32(255)) + (c >> U32(s) & U32(1))) >> U32(1) << U32(s)
        for s in (0, 8, 16, 24)
    ),
    v_sad_u8=_absolute_differences(8),
    v_sad_hi_u8=_absolute_differences(8, shift=16),
    v_sad_u16=_absolute_differences(16),
    v_sad_u32=lambda a, b, c: np.where(a > b, a - b, b - a) + c,
    v_msad_u8=_absolute_differences(8, masked=True),
    v_ffbh_u32=leading_zeros,
    v_ffbh_i32=leading_signs,
    v_ffbl_b32=find_first_one,
    v_bfrev_b32=reverse_bits,
    v_prng_b32=lambda a: a << U32(1) ^ np.where(a >> U32(31) != 0, U32(197), U32(0)),
)
for _type in ("u16", "i16", "u32", "i32"):
    entries(
        **{
            f"v_min_{_type}": np.minimum,
            f"v_max_{_type}": np.maximum,
            f"v_min3_{_type}": lambda a, b, c: np.minimum(np.minimum(a, b), c),
            f"v_max3_{_type}": lambda a, b, c: np.maximum(np.maximum(a, b), c),
            f"v_med3_{_type}": median_int,
        }
    )
entries(
    "carries", v_add_co_u32=_add_carry, v_addc_co_u32=_add_carry, v_sub_co_u32=_sub_borrow, v_subb_co_u32=_sub_borrow
)
entries(
    "carries",
    v_subrev_co_u32=lambda a, b: _sub_borrow(b, a),
    v_subbrev_co_u32=lambda a, b, borrow: _sub_borrow(b, a, borrow),
    v_mad_u64_u32=_mad_wide,
    v_mad_i64_i32=_mad_wide,
)


def _signed24(a):
    return (a.view(I32) << I32(8)) >> I32(8)


# Bit movers

entries(
    v_mov_b32=lambda a: a,
    v_mov_b64=lambda a: a,
    v_accvgpr_read=lambda a: a,
    v_accvgpr_write=lambda a: a,
    v_accvgpr_mov_b32=lambda a: a,
    v_cndmask_b32=lambda a, b, lanes: np.where(lanes, b, a),
    v_and_b32=np.bitwise_and,
    v_or_b32=np.bitwise_or,
    v_xor_b32=np.bitwise_xor,
    v_xnor_b32=lambda a, b: ~(a ^ b),
    v_not_b32=np.invert,
    v_and_or_b32=lambda a, b, c: a & b | c,
    v_or3_b32=lambda a, b, c: a | b | c,
    v_lshl_or_b32=lambda a, b, c: shift_left(b, a) | c,
    v_lshlrev_b32=shift_left,
    v_lshrrev_b32=shift_right,
    v_ashrrev_i32=shift_right,
    v_lshlrev_b16=shift_left,
    v_lshrrev_b16=shift_right,
    v_ashrrev_i16=shift_right,
    v_lshlrev_b64=shift_left,
    v_lshrrev_b64=shift_right,
    v_ashrrev_i64=shift_right,
    v_bfi_b32=lambda a, b, c: a & b | ~a & c,
    v_perm_b32=byte_permute,
    v_alignbit_b32=_align(1),
    v_alignbyte_b32=_align(8),
    v_pack_b32_f16=lambda a, b: pack(half_bits(a), half_bits(b)),
)


# VOP1: conversions, rounding, transcendentals

entries(
    v_nop=lambda: None,
    v_cvt_f32_i32=lambda a: a.astype(F32),
    v_cvt_f32_u32=lambda a: a.astype(F32),
    v_cvt_i32_f32=to_integer(I32),
    v_cvt_u32_f32=to_integer(U32),
    v_cvt_i32_f64=to_integer(I32),
    v_cvt_u32_f64=to_integer(U32),
    v_cvt_rpi_i32_f32=to_integer(I32, lambda a: np.floor(a + 0.5)),
    v_cvt_flr_i32_f32=to_integer(I32, np.floor),
    v_cvt_f16_f32=lambda a: a.astype(F16),
    v_cvt_f32_f16=lambda a: a.astype(F32),
    v_cvt_f32_bf16=lambda a: (a.astype(U32) << U32(16)).view(F32),
    v_cvt_f64_f32=lambda a: a.astype(F64),
    v_cvt_f32_f64=lambda a: a.astype(F32),
    v_cvt_f64_i32=lambda a: a.astype(F64),
    v_cvt_f64_u32=lambda a: a.astype(F64),
    v_cvt_f16_u16=lambda a: a.astype(F16),
    v_cvt_f16_i16=lambda a: a.astype(F16),
    v_cvt_u16_f16=to_integer(U16),
    v_cvt_i16_f16=to_integer(I16),
    v_cvt_norm_i16_f16=_norm(I16, 32767.0),
    v_cvt_norm_u16_f16=_norm(U16, 65535.0),
    v_cvt_off_f32_i4=lambda a: (((a & U32(15)).astype(I32) ^ I32(8)) - I32(8)).astype(F32) / F32(16),
    v_sat_pk_u8_i16=lambda a: sum(
        np.clip(v, 0, 255).astype(U32) << U32(8 * i) for i, v in enumerate(fields(a, 16, True))
    ),
    v_cvt_pkrtz_f16_f32=lambda a, b: pack(toward_zero_half(a), toward_zero_half(b)),
    v_cvt_pk_f16_f32=lambda a, b: pack(half_bits(a.astype(F16)), half_bits(b.astype(F16))),
    v_cvt_pk_bf16_f32=lambda a, b: pack(bf16_bits(a), bf16_bits(b)),
    v_cvt_pknorm_i16_f32=lambda a, b: pack(_norm(I16, 32767.0)(a).astype(U32), _norm(I16, 32767.0)(b).astype(U32)),
    v_cvt_pknorm_u16_f32=lambda a, b: pack(_norm(U16, 65535.0)(a).astype(U32), _norm(U16, 65535.0)(b).astype(U32)),
    v_cvt_pknorm_i16_f16=lambda a, b: pack(_norm(I16, 32767.0)(a).astype(U32), _norm(I16, 32767.0)(b).astype(U32)),
    v_cvt_pknorm_u16_f16=lambda a, b: pack(_norm(U16, 65535.0)(a).astype(U32), _norm(U16, 65535.0)(b).astype(U32)),
    v_cvt_pk_i16_i32=_clip_pair(I16),
    v_cvt_pk_u16_u32=_clip_pair(U16),
    v_cvt_pk_u8_f32=lambda a, n, c: (
        c & ~(U32(255) << ((n & U32(3)) * U32(8)))
        | to_integer(np.uint8, np.rint)(a).astype(U32) << ((n & U32(3)) * U32(8))
    ),
    v_frexp_exp_i32_f32=frexp_exponent,
    v_frexp_exp_i32_f64=frexp_exponent,
    v_frexp_exp_i16_f16=lambda a: frexp_exponent(a).astype(I16),
    v_exp_f32=approximate(np.exp2),
    v_log_f32=approximate(np.log2),
    v_exp_legacy_f32=approximate(np.exp2),
    v_log_legacy_f32=approximate(np.log2),
    v_rcp_f32=approximate(np.reciprocal),
    v_rcp_iflag_f32=approximate(np.reciprocal),
    v_rsq_f32=approximate(_reciprocal_root),
    v_sqrt_f32=approximate(np.sqrt),
    v_sin_f32=approximate(_turns(np.sin)),
    v_cos_f32=approximate(_turns(np.cos)),
    v_exp_f16=approximate(np.exp2),
    v_log_f16=approximate(np.log2),
    v_rcp_f16=approximate(np.reciprocal),
    v_rsq_f16=approximate(_reciprocal_root),
    v_sqrt_f16=approximate(np.sqrt),
    v_sin_f16=approximate(_turns(np.sin)),
    v_cos_f16=approximate(_turns(np.cos)),
    v_rcp_f64=np.reciprocal,
    v_rsq_f64=_reciprocal_root,
    v_sqrt_f64=np.sqrt,
)
for _type in ("f16", "f32", "f64"):
    entries(
        **{
            f"v_trunc_{_type}": np.trunc,
            f"v_ceil_{_type}": np.ceil,
            f"v_floor_{_type}": np.floor,
            f"v_rndne_{_type}": np.rint,
            # below 1 even where the subtraction rounds up (CDNA3 ISA, V_FRACT_F32)
            f"v_fract_{_type}": lambda a: np.minimum(a - np.floor(a), np.nextafter(a.dtype.type(1), a.dtype.type(0))),
            f"v_frexp_mant_{_type}": frexp_mantissa,
        }
    )
for _byte in range(4):
    VECTOR[f"v_cvt_f32_ubyte{_byte}"] = Vector(lambda a, shift=8 * _byte: (a >> U32(shift) & U32(255)).astype(F32))

# 8-bit floats; the formats follow the architecture


def _decode_float8(word: str):
    def run(program, a):
        return formats.eight_bit(word, program.arch).decode(a & U32(255))

    return run


def _decode_pair(word: str):
    def run(program, a):
        values = formats.eight_bit(word, program.arch).values
        out = np.empty((*a.shape, 2), F32)
        out[..., 0], out[..., 1] = values[a & U32(255)], values[a >> U32(8) & U32(255)]
        return out.view(U64)[..., 0]

    return run


def _encode_pair(word: str):
    def run(program, a, b):
        encode = formats.eight_bit(word, program.arch).encode
        return encode(a, saturate=program.saturate) | encode(b, saturate=program.saturate) << U32(8)

    return run


def _encode_stochastic(word: str):
    def run(program, a, random):
        a, random = np.broadcast_arrays(a, random)
        return formats.convert_stochastic(a, random, word, program.arch, saturate=program.saturate)

    return run


for _word in ("fp8", "bf8"):
    entries("arch", **{f"v_cvt_f32_{_word}": _decode_float8(_word), f"v_cvt_pk_f32_{_word}": _decode_pair(_word)})
    entries(
        "arch keeps",
        **{f"v_cvt_pk_{_word}_f32": _encode_pair(_word), f"v_cvt_sr_{_word}_f32": _encode_stochastic(_word)},
    )

# CDNA4 ISA: gfx950's additions

entries(
    "keeps",
    v_ashr_pk_i8_i32=_saturate_bytes(-128, 127),
    v_ashr_pk_u8_i32=_saturate_bytes(0, 255),
    v_cvt_sr_bf16_f32=lambda a, random: _stochastic(formats.BF16, a, random),
    v_cvt_sr_f16_f32=lambda a, random: _stochastic(formats.F16, a, random).astype(U16).view(F16),
)


def _stochastic(target, a, random):
    """The top bits of `random`, as many as the target drops from an f32 mantissa."""
    a, random = np.broadcast_arrays(a, random)
    dropped = 23 - target.mantissa
    return target.encode(np.ascontiguousarray(a), random=random >> U32(32 - dropped), random_bits=dropped)


# VOPC

_COMPARE = {
    "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": np.greater_equal,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "ne": np.not_equal,
    "t": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
    "tru": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
}
for _prefix in ("v_cmp", "v_cmpx"):
    for _type in ("f16", "f32", "f64", "i16", "u16", "i32", "u32", "i64", "u64"):
        entries(**{f"{_prefix}_{_name}_{_type}": _fn for _name, _fn in _COMPARE.items()})
    for _type in ("f16", "f32", "f64"):
        VECTOR[f"{_prefix}_class_{_type}"] = Vector(float_class)

# VOP3P

entries(
    v_dot2_f32_f16=dot2_f16,
    v_dot2_f32_bf16=dot2_bf16,
    v_dot2_i32_i16=_dot(16, True),
    v_dot2_u32_u16=_dot(16, False),
    v_dot4_i32_i8=_dot(8, True),
    v_dot4_u32_u8=_dot(8, False),
    v_dot8_i32_i4=_dot(4, True),
    v_dot8_u32_u4=_dot(4, False),
)
entries(
    "accumulates",
    v_dot2c_f32_f16=dot2_f16,
    v_dot2c_f32_bf16=dot2_bf16,
    v_dot2c_i32_i16=_dot(16, True),
    v_dot4c_i32_i8=_dot(8, True),
    v_dot8c_i32_i4=_dot(4, True),
)
# Applied to each half (16-bit) or each dword (f32) of the operands.
PACKED_OPS: dict[str, Callable] = {
    "v_pk_add_f32": np.add,
    "v_pk_mul_f32": np.multiply,
    "v_pk_fma_f32": fma,
    "v_pk_add_f16": np.add,
    "v_pk_mul_f16": np.multiply,
    "v_pk_fma_f16": fma,
    "v_pk_fmac_f16": fma,
    "v_pk_min_f16": minimum,
    "v_pk_max_f16": maximum,
    "v_pk_minimum3_f16": _ieee_extreme(minimum),
    "v_pk_maximum3_f16": _ieee_extreme(maximum),
    "v_pk_mul_lo_u16": np.multiply,
    "v_pk_lshlrev_b16": shift_left,
    "v_pk_lshrrev_b16": shift_right,
    "v_pk_ashrrev_i16": shift_right,
}
for _type in ("i16", "u16"):
    PACKED_OPS[f"v_pk_mad_{_type}"] = lambda a, b, c: a * b + c
    for _name, _fn in {"add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum}.items():
        PACKED_OPS[f"v_pk_{_name}_{_type}"] = _fn


# 64-bit results whose dwords depend on one dword of each source
HALVES = {"v_mov_b64", "v_pk_mov_b32", *(name for name in PACKED_OPS if name.endswith("f32"))}

# Binding


def bind(ins: Instruction, program) -> Callable:
    """Resolves a vector instruction to a function on waves."""
    name = ins.mnemonic
    if "gpr_idx" in ins.fields:
        return _bind_indexed_move(ins, program)
    if family := special(name):
        return family(ins, program)
    if name in PACKED_OPS:
        return _bind_packed(ins, program, PACKED_OPS[name])
    entry = VECTOR.get(name)
    if entry is None:
        raise UnsupportedInstruction(name)
    fn = entry.fn
    if "arch" in entry.flags:
        fn = lambda *args: entry.fn(program, *args)
    reads = _sources(ins, program)
    if "accumulates" in entry.flags:
        reads.append(read(ins.operands["vdst"], ins, program))
    if "reads_vcc" in entry.flags:
        reads.append(lambda w: w.lanes(VCC))
    dpp = Dpp(ins) if ins.variant == "DPP16" else None
    if dpp:
        first = reads[0]
        reads[0] = lambda w: dpp.take(w, first(w))
    compute = _call(fn, reads)
    if name.startswith("v_cmp"):
        store = write_lanes(ins.operands["sdst"], name.startswith("v_cmpx"))
        return lambda w: store(w, compute(w))
    if name == "v_nop":
        return lambda w: None
    destination = ins.operands["vdst"]
    compute = _with_output(ins, compute, dtype_of(destination), reads, fn)
    if ins.variant == "SDWA":
        store = sdwa_write(destination, ins, program)
    else:
        store = _destination(ins, destination, program, "keeps" in entry.flags)
    if "carries" in entry.flags:
        carry = write_lanes(ins.operands["sdst"], False)

        def run_carry(w):
            result, lanes = compute(w)
            active = dpp.lanes(w) if dpp else None
            store(w, result, active)
            carry(w, lanes, active)

        return run_carry
    if dpp:
        return lambda w: store(w, compute(w), dpp.lanes(w))
    return lambda w: store(w, compute(w))


def _call(fn, reads) -> Callable:
    if len(reads) == 1:
        (a,) = reads
        return lambda w: fn(a(w))
    if len(reads) == 2:
        a, b = reads
        return lambda w: fn(a(w), b(w))
    if len(reads) == 3:
        a, b, c = reads
        return lambda w: fn(a(w), b(w), c(w))
    return lambda w: fn(*(r(w) for r in reads))


def _sources(ins: Instruction, program) -> list[Callable]:
    """Readers of the sources, with their modifiers, selected by SDWA or op_sel."""
    neg, absolute = ins.fields.get("neg", 0), ins.fields.get("abs", 0)
    if ins.variant == "DPP16":
        neg = ins.fields["src0_neg"] | ins.fields["src1_neg"] << 1
        absolute = ins.fields["src0_abs"] | ins.fields["src1_abs"] << 1
    select = ins.fields.get("opsel", 0) if ins.encoding == "VOP3" else 0
    reads = []
    for position, operand in enumerate(ins.sources):
        dtype = dtype_of(operand)
        if dtype == MASK:
            reads.append(read(operand, ins, program))
        elif ins.variant == "SDWA" and f"src{position}_sel" in ins.fields:
            reads.append(sdwa_source(operand, ins, program, position, dtype))
        else:
            half = select >> position & 1
            sixteen = np.dtype(dtype).itemsize == 2
            reader = read(operand, ins, program, dtype, half if sixteen else 0)
            if half and not sixteen and operand.format in ("PK2_FP8", "PK2_BF8", "PK2_FP4", "FP8", "BF8"):
                reader = _shifted(reader, select, operand)
            reads.append(modified(reader, dtype, operand, position, neg, absolute))
    return reads


def _shifted(reader, select: int, operand: Operand):
    """op_sel of an 8-bit source: bit 0 a half (packed), bits 1:0 a byte (CDNA4 ISA, V_CVT_SCALEF32_*)."""
    shift = 16 * (select & 1) if operand.bits == 16 else 8 * (select & 3)
    return lambda w: reader(w) >> U32(shift)


def _with_output(ins: Instruction, compute, dtype, reads, fn) -> Callable:
    """Applies omod and clamp; integer clamp saturates, which needs the exact result."""
    if dtype == MASK or not (ins.fields.get("omod", 0) or ins.fields.get("clmp", 0)):
        return compute
    if np.issubdtype(dtype, np.floating):
        modify = output(ins, dtype)
        return lambda w: modify(compute(w))
    info = np.iinfo(dtype)
    return lambda w: np.clip(fn(*(r(w).astype(I64) for r in reads)), info.min, info.max).astype(dtype)


# op_sel picks the part of the destination that results of these widths go to.
def _destination(ins: Instruction, operand: Operand, program, keeps: bool) -> Callable:
    select = ins.fields.get("opsel", 0) if ins.encoding == "VOP3" else 0
    if operand.bits == 8:
        return write(operand, ins, program, (8 * (select >> 2 & 3), 8))
    if operand.bits == 16:
        high = select >> 3 & 1
        # GFX9 16-bit results clear the high half; op_sel writes one half and keeps the other
        return write(operand, ins, program, (16 * high, 16), zero=not (high or keeps))
    return write(operand, ins, program)


def _bind_packed(ins: Instruction, program, fn) -> Callable:
    """VOP3P: op_sel picks each source's half for the low result, op_sel_hi for the high one; neg and neg_hi likewise."""
    select, neg = ins.fields.get("opsel", 0), (ins.fields.get("neg", 0), ins.fields.get("neg_hi", 0))
    select_high = ins.fields.get("opsel_hi", 3) | ins.fields.get("opsel_hi2", 1) << 2
    destination = ins.operands["vdst"]
    dtype = PACKED[destination.format]
    sources = list(ins.sources)
    if ins.mnemonic == "v_pk_fmac_f16":
        sources.append(destination)
    if ins.fields.get("clmp", 0) and dtype in (U16, I16):
        info, exact = np.iinfo(dtype), fn
        fn = lambda *args: np.clip(exact(*(a.astype(I64) for a in args)), info.min, info.max).astype(dtype)

    def half_readers(high: int):
        reads = []
        for position, operand in enumerate(sources):
            chosen = (select_high if high else select) >> position & 1
            kind = PACKED.get(operand.format, dtype)
            reader = _packed_half(operand, ins, program, kind, chosen)
            reads.append(
                modified(
                    reader,
                    kind,
                    Operand(operand.code, operand.dwords, "F32" if kind == F32 else "", 32),
                    position,
                    neg[high],
                    0,
                )
            )
        return _call(fn, reads)

    low, high = half_readers(0), half_readers(1)
    modify = output(ins, dtype) if np.issubdtype(dtype, np.floating) else None
    if dtype == F32:
        halves_ = [Operand(destination.code + n, 1, "F32", 32) for n in (0, 1)]
        store_low, store_high = (write(half, ins, program) for half in halves_)

        def run(w):
            first, second = low(w), high(w)
            if modify:
                first, second = modify(first), modify(second)
            store_low(w, first)
            store_high(w, second)

        return run
    store = write(Operand(destination.code, 1, "B32", 32), ins, program)

    def run16(w):
        first, second = low(w), high(w)
        if modify:
            first, second = modify(first), modify(second)
        first, second = (x.astype(dtype, copy=False).view(U16).astype(U32) for x in (first, second))
        store(w, first | second << U32(16))

    return run16


def _packed_half(operand: Operand, ins: Instruction, program, dtype, chosen: int):
    if dtype in (F32, U32):
        if 128 <= operand.code < 256:  # a constant appears in the low dword; the high one repeats it for op_sel's sake
            return read(Operand(operand.code, 1, "F32", 32), ins, program, dtype)
        return read(Operand(operand.code + chosen, 1, "F32", 32), ins, program, dtype)
    if 128 <= operand.code < 256:
        value = reader(Operand(operand.code, 1, "", 16), ins, dtype)
        if not chosen:
            return value
        # integers are sign-extended to 32 bits, floats occupy the low half (CDNA3 ISA, VOP3P)
        word = reader(Operand(operand.code, 1, "I32", 32), ins, U32)(None)
        high = (
            (word >> U32(16)).astype(U16).view(dtype)
            if operand.code <= 208 or operand.code == 255
            else np.zeros((1, 1), dtype)
        )
        return lambda w: high
    return read(Operand(operand.code, 1, "", 16), ins, program, dtype, chosen)


# Instructions that are not a function of one lane


def _bind_indexed_move(ins, program):
    """V_MOV_B32 under S_SET_GPR_IDX_ON: M0[7:0] is added to the VGPR number of source 0 (mode bit 0) or of the result (bit 3)."""
    mode, source, destination = ins.fields["gpr_idx"], ins.sources[0], ins.operands["vdst"]
    if ins.mnemonic != "v_mov_b32" or ins.variant or mode not in (1, 8):
        raise UnsupportedInstruction(f"{ins.text} under VGPR indexing")
    value = read(source, ins, program, U32)

    def run(w):
        for n in range(w.count):
            index = int(w.S[M0][n, 0]) & 255
            at, to = source.code + index * (mode == 1), destination.code + index * (mode == 8)
            check_allocated(Operand(to if mode == 8 else at, 1, "B32", 32), program)
            values = w.U[register(at)][n] if mode == 1 else np.broadcast_to(value(w), (w.count, 64))[n]
            np.copyto(w.U[register(to)][n], values, where=w.mask[n])

    return run


def _bind_pk_mov(ins, program):
    select = ins.fields["opsel"]
    reads = [
        _packed_half(operand, ins, program, U32, select >> position & 1)
        for position, operand in enumerate(ins.sources[:2])
    ]
    code = ins.operands["vdst"].code
    stores = [write(Operand(code + n, 1, "B32", 32), ins, program) for n in (0, 1)]

    def run(w):
        values = [r(w) + U32(0) for r in reads]
        for store, value in zip(stores, values, strict=True):
            store(w, value)

    return run


def _bind_mix(ins, program):
    """V_FMA_MIX (V_MAD_MIX in the tables): op_sel_hi picks f16 sources, op_sel their half, neg_hi is ABS."""
    select, neg, absolute = ins.fields["opsel"], ins.fields["neg"], ins.fields["neg_hi"]
    wide = ins.fields["opsel_hi"] | ins.fields["opsel_hi2"] << 2
    reads = []
    for position, operand in enumerate(ins.sources):
        if wide >> position & 1:
            raw = _packed_half(operand, ins, program, F16, select >> position & 1)
            reader_ = lambda w, raw=raw: raw(w).astype(F32)
        else:
            reader_ = read(Operand(operand.code, 1, "F32", 32), ins, program, F32)
        reads.append(modified(reader_, F32, Operand(operand.code, 1, "F32", 32), position, neg, absolute))
    compute = _call(fma, reads)
    modify = output(ins, F32)
    if modify:
        exact = compute
        compute = lambda w: modify(exact(w))
    destination = ins.operands["vdst"]
    if ins.mnemonic == "v_mad_mix_f32":
        return _storing(write(Operand(destination.code, 1, "F32", 32), ins, program), compute)
    store = write(Operand(destination.code, 1, "F16", 16), ins, program, (16 if "hi_" in ins.mnemonic else 0, 16))
    return lambda w: store(w, compute(w).astype(F16))


def _storing(store, compute):
    return lambda w: store(w, compute(w))


def _bind_readlane(ins, program):
    source, destination = register(ins.sources[0].code), ins.operands["sdst"].code
    check_allocated(ins.sources[0], program)
    if ins.mnemonic == "v_readfirstlane_b32":

        def first(w):
            lane = np.argmax(w.mask, axis=1) if not w.full else 0
            w.write_scalar(destination, w.U[source][np.arange(w.count), lane][:, None])

        return first
    select = reader(ins.sources[1], ins, U32)

    def run(w):
        lane = select(w)[:, 0] & U32(63)
        w.write_scalar(destination, w.U[source][np.arange(w.count), lane][:, None])

    return run


def _bind_writelane(ins, program):
    check_allocated(ins.operands["vdst"], program)
    destination = register(ins.operands["vdst"].code)
    value, select = (reader(operand, ins, U32) for operand in ins.sources[:2])

    def run(w):
        w.U[destination][np.arange(w.count), select(w)[:, 0] & U32(63)] = value(w)[:, 0]

    return run


def _bind_swap(ins, program):
    a, b = register(ins.operands["vdst"].code), register(ins.sources[0].code)

    def run(w):
        old = w.U[a].copy()
        np.copyto(w.U[a], w.U[b], where=w.mask)
        np.copyto(w.U[b], old, where=w.mask)

    return run


def _bind_permlane_swap(ins, program):
    """V_PERMLANE16_SWAP and V_PERMLANE32_SWAP: odd rows of vdst change places with even rows of src0."""
    a, b = register(ins.operands["vdst"].code), register(ins.sources[0].code)
    size = 16 if "16" in ins.mnemonic else 32

    def run(w):
        vdst, src = (w.U[i].reshape(w.count, 64 // (2 * size), 2, size) for i in (a, b))
        upper, lower = vdst[:, :, 1].copy(), src[:, :, 0].copy()
        vdst[:, :, 1], src[:, :, 0] = lower, upper

    return run


def _bind_bitop3(ins, program):
    """V_BITOP3: the truth table stands in omod, abs and neg."""
    table = ins.fields["omod"] << 6 | ins.fields["abs"] << 3 | ins.fields["neg"]
    sixteen = ins.mnemonic.endswith("b16")
    select = ins.fields["opsel"]
    reads = [
        read(operand, ins, program, U16 if sixteen else U32, select >> i & 1 if sixteen else 0)
        for i, operand in enumerate(ins.sources)
    ]

    def fn(a, b, c):
        out = a & a.dtype.type(0)
        for row in range(8):
            if table >> row & 1:
                out = out | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return out

    return _storing(_destination(ins, ins.operands["vdst"], program, False), _call(fn, reads))


def _scale_of(word) -> np.ndarray:
    """2^(exponent - 127) of a float32's exponent field (CDNA4 ISA, V_CVT_SCALEF32_*)."""
    return formats.decode_e8m0(word.view(U32) >> U32(23) & U32(255))


_FORMATS = {
    "f32": None,
    "f16": formats.F16,
    "bf16": formats.BF16,
    "fp6": formats.E2M3,
    "bf6": formats.E3M2,
    "fp4": formats.E2M1,
}


def _format(word: str, program):
    return formats.eight_bit(word, program.arch) if word in ("fp8", "bf8") else _FORMATS[word]


def _unpack(target, words, count: int) -> np.ndarray:
    """The first `count` codes of `target` in packed words [..., n] as float32 [..., count]."""
    if target is None:
        return words.view(F32)[..., :count]
    bits = target.bits
    codes = []
    for i in range(count):
        at, shift = divmod(i * bits, 32)
        code = words[..., at] >> U32(shift)
        if shift + bits > 32:
            code = code | words[..., at + 1] << U32(32 - shift)
        codes.append(code & U32((1 << bits) - 1))
    return target.decode(np.stack(codes, axis=-1))


def _repack(target, values, dwords: int, random=None) -> np.ndarray:
    """float32 values [..., count] as packed words [..., dwords]."""
    if target is None:
        return np.ascontiguousarray(values, F32).view(U32)
    if random is None:
        codes = target.encode(values)
    else:
        dropped = 23 - target.mantissa
        codes = target.encode(values, random=random >> U32(32 - dropped), random_bits=dropped)
    out = np.zeros((*values.shape[:-1], dwords + 1), U32)
    for i in range(values.shape[-1]):
        at, shift = divmod(i * target.bits, 32)
        out[..., at] |= codes[..., i] << U32(shift)
        if shift + target.bits > 32:
            out[..., at + 1] |= codes[..., i] >> U32(32 - shift)
    return out[..., :dwords]


def _bind_scaled_convert(ins, program):
    """V_CVT_SCALEF32_*: to a narrow format the value is divided by the scale, from one it is multiplied.

    Name: v_cvt_scalef32_[sr_][2xpk16_|pk32_|pk_]<to>_<from>. Sources: value(s), [random,] scale.
    """
    parts = ins.mnemonic.removeprefix("v_cvt_scalef32_").split("_")
    stochastic = parts[0] == "sr"
    count = {"pk": 2, "pk32": 32, "2xpk16": 32}.get(parts[stochastic], 1)
    to, from_ = _format(parts[-2], program), _format(parts[-1], program)
    narrow = to is not None and to.bits <= 8
    select, neg, absolute = (ins.fields[name] for name in ("opsel", "neg", "abs"))
    sources = list(ins.sources)
    destination = ins.operands["vdst"]
    from_bits = 32 if from_ is None else from_.bits
    separate = narrow and from_ is None and count == 2 and not stochastic  # two f32 sources
    values = sources[:2] if separate or parts[0] == "2xpk16" else sources[:1]
    rest = sources[len(values) :]

    def raw(operand):
        if operand.dwords == 1:
            reader_ = read(Operand(operand.code, 1, "B32", 32), ins, program, U32)
            return lambda w: reader_(w)[..., None]
        check_allocated(operand, program)
        i = register(operand.code)
        return lambda w: np.stack(w.U[i : i + operand.dwords], axis=-1)

    reads, others = [raw(v) for v in values], [read(o, ins, program) for o in rest]
    shift = 0 if narrow or from_bits > 8 else (16 * (select & 1) if from_bits * count == 16 else 8 * (select & 3))

    def gather(w):
        words = [r(w) for r in reads]
        if separate or parts[0] == "2xpk16":
            words = np.concatenate(np.broadcast_arrays(*words), axis=-1)
        else:
            words = words[0]
        if shift:
            words = words >> U32(shift)
        out = _unpack(from_, words, count)
        if absolute & 1:
            out = np.abs(out)
        return -out if neg & 1 else out

    keeps = destination.bits < 32
    if keeps:
        half = 16 * (select >> 3 & 1) if destination.bits == 16 and parts[-2] != "f16" else 8 * (select >> 2 & 3)
        if parts[-2] == "f16":
            half = 16 * (select >> 3 & 1)
        store = write(Operand(destination.code, 1, "B32", 32), ins, program, (half, destination.bits))
    else:
        store = write(destination, ins, program)

    def run(w):
        operands = [o(w) for o in others]
        scale = _scale_of(operands[-1])[..., None]
        values = gather(w).astype(F64)
        values = (values / scale if narrow else values * scale).astype(F32)
        random = None
        if stochastic:
            seeds = [operands[0] + np.zeros(values.shape[:-1], U32)]
            while len(seeds) < count:
                seeds.append(VECTOR["v_prng_b32"].fn(seeds[-1]))
            random = np.stack(seeds, axis=-1)
        out = _repack(to, values, max(1, destination.bits // 32), random)
        if out.shape[-1] == 2:
            store(w, np.ascontiguousarray(out).view(U64)[..., 0])
        else:
            store(w, out[..., 0] if out.shape[-1] == 1 else out)

    return run


def _bind_matrix(ins, program):
    from .matrix import bind

    return bind(ins, program)


SPECIAL: dict[str, Callable] = {
    "v_pk_mov_b32": _bind_pk_mov,
    "v_mad_mix_f32": _bind_mix,
    "v_mad_mixlo_f16": _bind_mix,
    "v_mad_mixhi_f16": _bind_mix,
    "v_readlane_b32": _bind_readlane,
    "v_readfirstlane_b32": _bind_readlane,
    "v_writelane_b32": _bind_writelane,
    "v_swap_b32": _bind_swap,
    "v_permlane16_swap_b32": _bind_permlane_swap,
    "v_permlane32_swap_b32": _bind_permlane_swap,
    "v_bitop3_b32": _bind_bitop3,
    "v_bitop3_b16": _bind_bitop3,
}


def special(name: str) -> Callable | None:
    """The binder of a family that is told by its name."""
    if name.startswith("v_cvt_scalef32_"):
        return _bind_scaled_convert
    if name.startswith(("v_mfma_", "v_smfmac_")):
        return _bind_matrix
    return SPECIAL.get(name)
