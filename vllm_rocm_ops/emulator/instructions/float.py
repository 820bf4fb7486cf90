"""Define vector arithmetic on floats.

Source: AMD Instinct MI300 (CDNA3) ISA, chapter 12 "Instructions", its sections on VOP1, VOP2, VOP3 and VOP3P with AMD's pseudocode.

f32 arithmetic is IEEE, rounded to nearest even. v_exp, v_log, v_rcp, v_rsq, v_sqrt, v_sin and v_cos are computed in float64 and rounded
once, where the hardware promises 1 ulp; in f32 they flush denormal inputs and results, as LLVM's lowering of exp2, log2, sqrt and
division assumes (AMDGPULegalizerInfo.cpp).
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from ..operands import F16, F32, F64, I16, I32, I64, U16, U32, U64, flush
from .convert import halves, high_bf16, low_bf16
from .table import entries


def fma(a, b, c):
    """Compute a * b + c rounded once.

    The float64 product of float32s is exact. Only sums on a float32 tie, or among its denormals, need the rounding error of the
    float64 sum to decide.
    """
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
        # round to odd: an inexact sum gets an odd last bit, so the second rounding knows its side
        inexact = (error != 0) & np.isfinite(total)
        down = (error < 0) != (total < 0)
        odd = np.where(inexact & (bits & U64(1) == 0), np.where(down, bits - U64(1), bits + U64(1)), bits)
        total = odd.view(F64)
    return total.astype(F32)


def _fma64(a, b, c):
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
    """Compute V_MAX: the other operand wins over NaN, +0 over -0."""
    return _extreme(np.fmax, a, b, np.bitwise_and)


def minimum(a, b):
    """Compute V_MIN: the other operand wins over NaN, -0 over +0."""
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
    """Compute V_MED3 of floats; with a NaN the minimum of the others."""
    out = maximum(minimum(a, b), minimum(maximum(a, b), c))
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, minimum(minimum(a, b), c), out) if np.count_nonzero(nan) else out


def ieee_extreme(choose):
    """Return V_MINIMUM3 or V_MAXIMUM3, in which NaN wins."""

    def run(a, b, c):
        nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
        return np.where(nan, a.dtype.type(np.nan), choose(choose(a, b), c))

    return run


def approximate(fn):
    """Return an f32 transcendental computed in float64, with denormals flushed on both sides."""

    def run(a):
        if a.dtype != F32:
            return fn(a.astype(F64)).astype(a.dtype)
        return flush(fn(flush(a).astype(F64)).astype(F32))

    return run


def _reciprocal_root(a):
    return np.where(a == 0, np.copysign(np.inf, a), 1 / np.sqrt(a))


def _turns(fn):
    """Return V_SIN or V_COS, which take revolutions; beyond 256 the result is 0 (CDNA3 ISA, V_SIN_F32)."""
    return lambda a: np.where(np.abs(a) > 256, fn(0.0), fn(2 * np.pi * (a - np.floor(a))))


def _exponent(a):
    return (
        (a.view(U32) >> U32(23) & U32(255)).astype(I32)
        if a.dtype == F32
        else (a.view(U64) >> U64(52) & U64(2047)).astype(I64)
    )


def div_scale(s0, s1, s2):
    """Compute V_DIV_SCALE_F32 / F64 by AMD's pseudocode."""
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
    """Compute V_DIV_FMAS, which undoes the scaling of one side where VCC is set.

    The factor is 2^64 or 2^-64 (2^128 in f64), by the exponent of the quotient c. CDNA's document prints a plain 2^32, which is not
    the inverse of V_DIV_SCALE; RDNA4's has this factor.
    """
    wide = a.dtype == F64
    result = fma(a, b, c)
    up, middle = (128, 1023) if wide else (64, 127)
    shift = np.where(_exponent(np.ascontiguousarray(c)) > middle, up, -up).astype(I32)
    return np.where(scale, np.ldexp(result, shift), result)


def div_fixup(s0, s1, s2):
    """Compute V_DIV_FIXUP by AMD's pseudocode: quotient s0, denominator s1, numerator s2."""
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


def frexp_mantissa(a):
    """Compute V_FREXP_MANT."""
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def frexp_exponent(a):
    """Compute V_FREXP_EXP: 0 for zero, infinity and NaN."""
    return np.where(np.isfinite(a), np.frexp(a)[1], 0)


def _ldexp(a, n):
    exponent = n.view(I16 if n.dtype.itemsize == 2 else I32)
    return np.ldexp(a.astype(F64), np.clip(exponent.astype(I64), -4000, 4000).astype(I32)).astype(a.dtype)


def dot2_f16(a, b, c):
    """Compute V_DOT2(C)_F32_F16, products and sum in f32."""
    (a0, a1), (b0, b1) = halves(a), halves(b)
    return (a0 * b0 + a1 * b1) + c


def dot2_bf16(a, b, c):
    """Compute V_DOT2(C)_F32_BF16."""
    return (low_bf16(a) * low_bf16(b) + high_bf16(a) * high_bf16(b)) + c


_OF_EVERY_WIDTH = {
    "add": np.add,
    "mul": np.multiply,
    "min": minimum,
    "max": maximum,
    "ldexp": _ldexp,
    "fma": fma,
    "div_fixup": div_fixup,
    "rcp": approximate(np.reciprocal),
    "rsq": approximate(_reciprocal_root),
    "sqrt": approximate(np.sqrt),
    "trunc": np.trunc,
    "ceil": np.ceil,
    "floor": np.floor,
    "rndne": np.rint,
    # below 1 even where the subtraction rounds up (CDNA3 ISA, V_FRACT_F32)
    "fract": lambda a: np.minimum(a - np.floor(a), np.nextafter(a.dtype.type(1), a.dtype.type(0))),
    "frexp_mant": frexp_mantissa,
}
_NOT_OF_F64 = {
    "sub": np.subtract,
    "subrev": lambda a, b: b - a,
    "min3": lambda a, b, c: minimum(minimum(a, b), c),
    "max3": lambda a, b, c: maximum(maximum(a, b), c),
    "med3": median,
    "exp": approximate(np.exp2),
    "log": approximate(np.log2),
    "sin": approximate(_turns(np.sin)),
    "cos": approximate(_turns(np.cos)),
}
for _type in ("f16", "f32", "f64"):
    entries(**{f"v_{_name}_{_type}": _fn for _name, _fn in _OF_EVERY_WIDTH.items()})
for _type in ("f16", "f32"):
    entries(**{f"v_{_name}_{_type}": _fn for _name, _fn in _NOT_OF_F64.items()})
entries(
    v_mul_legacy_f32=lambda a, b: np.where((a == 0) | (b == 0), F32(0), a * b),
    v_fma_legacy_f16=fma,
    v_mad_f16=lambda a, b, c: a * b + c,
    v_mad_legacy_f16=lambda a, b, c: a * b + c,
    v_fmaak_f32=fma,
    v_fmamk_f32=lambda a, b, k: fma(a, k, b),
    v_madak_f16=lambda a, b, k: a * b + k,
    v_madmk_f16=lambda a, b, k: a * k + b,
    v_minimum3_f32=ieee_extreme(minimum),
    v_maximum3_f32=ieee_extreme(maximum),
    v_div_fixup_legacy_f16=div_fixup,
    v_exp_legacy_f32=approximate(np.exp2),
    v_log_legacy_f32=approximate(np.log2),
    v_rcp_iflag_f32=approximate(np.reciprocal),
    v_frexp_exp_i32_f32=frexp_exponent,
    v_frexp_exp_i32_f64=frexp_exponent,
    v_frexp_exp_i16_f16=lambda a: frexp_exponent(a).astype(I16),
)
entries("accumulates", v_fmac_f32=fma, v_fmac_f64=fma, v_mac_f16=lambda a, b, c: a * b + c)
entries("carries", v_div_scale_f32=div_scale, v_div_scale_f64=div_scale)
entries("reads_vcc", v_div_fmas_f32=div_fmas, v_div_fmas_f64=div_fmas)

# VOP3P

entries(v_dot2_f32_f16=dot2_f16, v_dot2_f32_bf16=dot2_bf16)
entries("accumulates", v_dot2c_f32_f16=dot2_f16, v_dot2c_f32_bf16=dot2_bf16)
