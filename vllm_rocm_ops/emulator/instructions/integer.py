"""Define vector instructions on integers and bits, and functions shared with scalar ones.

Source: AMD Instinct MI300 (CDNA3) ISA, chapter 12 "Instructions", its sections on VOP1, VOP2, VOP3 and VOP3P with AMD's pseudocode; CDNA4 ISA
for gfx950's additions.
"""

from __future__ import annotations

import functools

import numpy as np

from ..operands import I32, I64, U32, U64
from .table import entries


def popcount(a):
    """Count set bits."""
    return np.bitwise_count(a).astype(U32)


def find_first_one(a):
    """Return the position of the lowest set bit, -1 if none (S_FF1, V_FFBL)."""
    lowest = a & (~a + a.dtype.type(1))
    return np.where(a == 0, -1, np.bitwise_count(lowest - a.dtype.type(1)).astype(I32)).astype(I32)


def leading_zeros(a):
    """Count leading zeros, -1 for zero (S_FLBIT, V_FFBH_U32)."""
    x, bits = a.copy(), 8 * a.dtype.itemsize
    for step in (1, 2, 4, 8, 16, 32)[: bits.bit_length() - 1]:
        x |= x >> x.dtype.type(step)
    return np.where(a == 0, -1, bits - np.bitwise_count(x).astype(I32)).astype(I32)


def leading_signs(a):
    """Count leading bits equal to the sign, -1 if all are (S_FLBIT_I32, V_FFBH_I32)."""
    unsigned = a.view(U32) if a.dtype.itemsize == 4 else a.view(U64)
    return leading_zeros(np.where(a < 0, ~unsigned, unsigned))


def reverse_bits(a):
    """Reverse the bits."""
    x, bits = a, 8 * a.dtype.itemsize
    step = bits // 2
    mask = (1 << bits) - 1
    while step:
        mask ^= mask << step & ((1 << bits) - 1)
        low = a.dtype.type(mask)
        x = (x >> a.dtype.type(step) & low) | (x & low) << a.dtype.type(step)
        step //= 2
    return x


def mul_hi(a, b):
    """Return the high 32 bits of the product."""
    return ((a.astype(I64) * b) >> 32).astype(I32) if a.dtype == I32 else ((a.astype(U64) * b) >> U64(32)).astype(U32)


def median_int(a, b, c):
    """Compute V_MED3 of integers."""
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def shift_left(n, a):
    """Shift a left by n (reversed operands), using only the count bits that the type needs."""
    bits = a.dtype.itemsize * 8
    return a << (n & n.dtype.type(bits - 1)).astype(a.dtype)


def shift_right(n, a):
    """Shift a right by n as in shift_left; arithmetic for signed types."""
    bits = a.dtype.itemsize * 8
    return a >> (n & n.dtype.type(bits - 1)).astype(a.dtype)


def _mul24(a, b):
    return (a.astype(I64 if a.dtype == I32 else U64) * b).astype(a.dtype)


def _mul24_high(a, b):
    wide = a.astype(I64 if a.dtype == I32 else U64) * b
    return (wide >> wide.dtype.type(32)).astype(a.dtype)


def bfe(a, b, c):
    """Compute V_BFE: 5-bit offset and width; a width of 0 gives 0."""
    offset, width = (b & b.dtype.type(31)).astype(U64), (c & c.dtype.type(31)).astype(U64)
    wide = a.astype(I64).view(U64) if a.dtype == I32 else a.astype(U64)
    field = wide >> offset & ((U64(1) << width) - U64(1))
    if a.dtype == I32:
        # the field's sign bit; the field may extend above bit 31, where the source's sign repeats
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
    """Return a V_PERM selector as moves ((source, shift left, mask of the result), ...) and the constant bytes."""
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
    """Compute V_PERM_B32: selectors 0-3 are b's bytes, 4-7 a's, 8-11 sign bytes of words, 12 zero, 13 and above 0xff."""
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
    """Compute V_MAD_U64_U32 and V_MAD_I64_I32 with the carry (or signed overflow) out."""
    product = a.astype(c.dtype) * b.astype(c.dtype)
    total = product + c
    if c.dtype == U64:
        return total, total < product
    return total, ((total ^ product) & (total ^ c)) < 0


def fields(word, bits: int, signed: bool) -> list:
    """Return the packed integers of a word, lowest first, as int64."""
    values = [(word >> U32(i) & U32((1 << bits) - 1)).astype(I64) for i in range(0, 32, bits)]
    return [np.where(v >> (bits - 1) != 0, v - (1 << bits), v) if signed else v for v in values]


def _dot(bits: int, signed: bool):
    def run(a, b, c):
        total = c.astype(I64)
        for x, y in zip(fields(a, bits, signed), fields(b, bits, signed), strict=True):
            total = total + x * y
        return total.astype(U32).view(c.dtype)

    return run


def _absolute_differences(bits: int, shift: int = 0, masked: bool = False):
    def run(a, b, c):
        total = c.copy() if c.shape[-1] > 1 else c + U32(0)
        for x, y in zip(fields(a, bits, False), fields(b, bits, False), strict=True):
            difference = np.abs(x - y).astype(U32)
            total = total + (np.where(y == 0, U32(0), difference) if masked else difference << U32(shift))
        return total

    return run


def _saturate_bytes(low: int, high: int):
    def run(a, b, n):
        first, second = (np.clip(shift_right(n, x), low, high).astype(U32) & U32(255) for x in (a, b))
        return first | second << U32(8)

    return run


def exclusive_popcount(upper: bool):
    """Return V_MBCNT: bits of the mask below this lane, plus b."""
    lane = np.arange(64, dtype=U64)
    below = (U64(1) << lane) - U64(1)
    part = (below >> U64(32) if upper else below & U64(0xFFFFFFFF)).astype(U32)
    return lambda a, b: popcount(a & part) + b


def prng(a):
    """Compute V_PRNG_B32, the next state of a shift register."""
    return a << U32(1) ^ np.where(a >> U32(31) != 0, U32(197), U32(0))


def _signed24(a):
    return (a.view(I32) << I32(8)) >> I32(8)


entries(
    v_subrev_u32=lambda a, b: b - a,
    v_subrev_u16=lambda a, b: b - a,
    v_mul_lo_u16=np.multiply,
    v_mul_lo_u32=np.multiply,
    v_mul_hi_u32=mul_hi,
    v_mul_hi_i32=mul_hi,
    v_mul_u32_u24=lambda a, b: _mul24(a & U32(0xFFFFFF), b & U32(0xFFFFFF)),
    v_mul_i32_i24=lambda a, b: _mul24(_signed24(a), _signed24(b)),
    v_mul_hi_u32_u24=lambda a, b: _mul24_high(a & U32(0xFFFFFF), b & U32(0xFFFFFF)),
    v_mul_hi_i32_i24=lambda a, b: _mul24_high(_signed24(a), _signed24(b)),
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
    v_prng_b32=prng,
)
for _type in ("u16", "i16", "u32", "i32"):
    entries(
        **{
            f"v_add_{_type}": np.add,
            f"v_sub_{_type}": np.subtract,
            f"v_min_{_type}": np.minimum,
            f"v_max_{_type}": np.maximum,
            f"v_min3_{_type}": lambda a, b, c: np.minimum(np.minimum(a, b), c),
            f"v_max3_{_type}": lambda a, b, c: np.maximum(np.maximum(a, b), c),
            f"v_med3_{_type}": median_int,
        }
    )
for _type in ("u32_u24", "i32_i24", "u16", "i16", "legacy_u16", "legacy_i16"):
    entries(**{f"v_mad_{_type}": lambda a, b, c: a * b + c})
for _bits in (16, 32, 64):
    entries(**{f"v_{_name}_b{_bits}": _fn for _name, _fn in (("lshlrev", shift_left), ("lshrrev", shift_right))})
    entries(**{f"v_ashrrev_i{_bits}": shift_right})
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

# Bits

entries(
    **dict.fromkeys(("v_mov_b32", "v_mov_b64", "v_accvgpr_read", "v_accvgpr_write", "v_accvgpr_mov_b32"), lambda a: a),
    v_cndmask_b32=lambda a, b, lanes: np.where(lanes, b, a),
    v_and_b32=np.bitwise_and,
    v_or_b32=np.bitwise_or,
    v_xor_b32=np.bitwise_xor,
    v_xnor_b32=lambda a, b: ~(a ^ b),
    v_not_b32=np.invert,
    v_and_or_b32=lambda a, b, c: a & b | c,
    v_or3_b32=lambda a, b, c: a | b | c,
    v_lshl_or_b32=lambda a, b, c: shift_left(b, a) | c,
    v_bfi_b32=lambda a, b, c: a & b | ~a & c,
    v_perm_b32=byte_permute,
    v_alignbit_b32=_align(1),
    v_alignbyte_b32=_align(8),
)

# gfx950's additions: CDNA4 ISA

entries("keeps", v_ashr_pk_i8_i32=_saturate_bytes(-128, 127), v_ashr_pk_u8_i32=_saturate_bytes(0, 255))

# VOP3P

entries(
    v_dot2_i32_i16=_dot(16, True),
    v_dot2_u32_u16=_dot(16, False),
    v_dot4_i32_i8=_dot(8, True),
    v_dot4_u32_u8=_dot(8, False),
    v_dot8_i32_i4=_dot(4, True),
    v_dot8_u32_u4=_dot(4, False),
)
entries(
    "accumulates",
    v_dot2c_i32_i16=_dot(16, True),
    v_dot4c_i32_i8=_dot(8, True),
    v_dot8c_i32_i4=_dot(4, True),
)
