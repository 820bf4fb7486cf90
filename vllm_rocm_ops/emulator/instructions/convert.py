"""Define vector conversions: between floats and integers, halves and bytes, and the chip's 8-bit formats.

Source: AMD Instinct MI300 (CDNA3) ISA, chapter 12 "Instructions", its sections on VOP1, VOP2 and VOP3; CDNA4 ISA for gfx950's additions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import formats
from ..decode import Operand
from ..operands import F16, F32, F64, I16, I32, I64, U16, U32, U64, check_allocated, read, register, write
from .integer import fields, prng
from .table import VECTOR, Vector, entries


def to_integer(dtype, rounding=np.trunc):
    """Return a float-to-integer conversion: NaN gives 0, out of range saturates."""
    info = np.iinfo(dtype)

    def run(a):
        a = rounding(np.where(np.isnan(a), 0, a).astype(F64))
        return np.clip(a, float(info.min), float(info.max)).astype(I64).clip(info.min, info.max).astype(dtype)

    return run


def half_bits(a) -> np.ndarray:
    """Return a float16 array as uint32 words."""
    return np.ascontiguousarray(a).view(U16).astype(U32)


def toward_zero_half(a):
    """Convert f32 to f16 bits, rounded toward zero."""
    near = a.astype(F16)
    with np.errstate(all="ignore"):
        over = np.abs(near.astype(F64)) > np.abs(a.astype(F64))
    return half_bits(near) - (over & np.isfinite(a)).astype(U32)


def pack(low, high):
    """Pack two 16-bit values (uint32) into one word."""
    return low & U32(0xFFFF) | high << U32(16)


def bf16_bits(a):
    """Convert f32 to bf16 bits, nearest even."""
    return formats.BF16.encode(a)


def low_bf16(word):
    """Return the low half of a word, a bf16, as f32."""
    return (word << U32(16)).view(F32)


def high_bf16(word):
    """Return the high half of a word, a bf16, as f32."""
    return (word & U32(0xFFFF0000)).view(F32)


def halves(word):
    """Return both f16 of a word as f32."""
    pairs = np.ascontiguousarray(word).view(F16).astype(F32)
    return pairs[..., 0::2], pairs[..., 1::2]


def _normalized(dtype, scale: float):
    return lambda a: to_integer(dtype, np.rint)(
        np.clip(np.where(np.isnan(a), 0, a).astype(F64), -1 if dtype == I16 else 0, 1) * scale
    )


def _clip_pair(dtype):
    info = np.iinfo(dtype)
    return lambda a, b: pack(np.clip(a, info.min, info.max).astype(U32), np.clip(b, info.min, info.max).astype(U32))


entries(
    v_cvt_i32_f32=to_integer(I32),
    v_cvt_u32_f32=to_integer(U32),
    v_cvt_i32_f64=to_integer(I32),
    v_cvt_u32_f64=to_integer(U32),
    v_cvt_rpi_i32_f32=to_integer(I32, lambda a: np.floor(a + 0.5)),
    v_cvt_flr_i32_f32=to_integer(I32, np.floor),
    v_cvt_f32_bf16=lambda a: (a.astype(U32) << U32(16)).view(F32),
    v_cvt_u16_f16=to_integer(U16),
    v_cvt_i16_f16=to_integer(I16),
    v_cvt_off_f32_i4=lambda a: (((a & U32(15)).astype(I32) ^ I32(8)) - I32(8)).astype(F32) / F32(16),
    v_sat_pk_u8_i16=lambda a: sum(
        np.clip(v, 0, 255).astype(U32) << U32(8 * i) for i, v in enumerate(fields(a, 16, True))
    ),
    v_cvt_pkrtz_f16_f32=lambda a, b: pack(toward_zero_half(a), toward_zero_half(b)),
    v_cvt_pk_f16_f32=lambda a, b: pack(half_bits(a.astype(F16)), half_bits(b.astype(F16))),
    v_cvt_pk_bf16_f32=lambda a, b: pack(bf16_bits(a), bf16_bits(b)),
    v_cvt_pk_i16_i32=_clip_pair(I16),
    v_cvt_pk_u16_u32=_clip_pair(U16),
    v_cvt_pk_u8_f32=lambda a, n, c: (
        c & ~(U32(255) << ((n & U32(3)) * U32(8)))
        | to_integer(np.uint8, np.rint)(a).astype(U32) << ((n & U32(3)) * U32(8))
    ),
    v_pack_b32_f16=lambda a, b: pack(half_bits(a), half_bits(b)),
)
for _word, _dtype, _sources in (
    ("f16", F16, "f32 u16 i16"),
    ("f32", F32, "f16 f64 i32 u32"),
    ("f64", F64, "f32 i32 u32"),
):
    entries(**{f"v_cvt_{_word}_{_source}": lambda a, to=_dtype: a.astype(to) for _source in _sources.split()})
for _word, _norm in (("i16", _normalized(I16, 32767.0)), ("u16", _normalized(U16, 65535.0))):
    _pair = lambda a, b, norm=_norm: pack(norm(a).astype(U32), norm(b).astype(U32))
    entries(
        **{f"v_cvt_norm_{_word}_f16": _norm, f"v_cvt_pknorm_{_word}_f16": _pair, f"v_cvt_pknorm_{_word}_f32": _pair}
    )
for _byte in range(4):
    VECTOR[f"v_cvt_f32_ubyte{_byte}"] = Vector(lambda a, shift=8 * _byte: (a >> U32(shift) & U32(255)).astype(F32))

# 8-bit floats, whose formats depend on the architecture


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

# gfx950's additions: CDNA4 ISA


def _stochastic(target, a, random):
    """Return the top bits of `random`, the number that the target drops from an f32 mantissa."""
    a, random = np.broadcast_arrays(a, random)
    dropped = 23 - target.mantissa
    return target.encode(np.ascontiguousarray(a), random=random >> U32(32 - dropped), random_bits=dropped)


entries(
    "keeps",
    v_cvt_sr_bf16_f32=lambda a, random: _stochastic(formats.BF16, a, random),
    v_cvt_sr_f16_f32=lambda a, random: _stochastic(formats.F16, a, random).astype(U16).view(F16),
)


def _scale_of(word) -> np.ndarray:
    """Return 2^(exponent - 127) from a float32's exponent field (CDNA4 ISA, V_CVT_SCALEF32_*)."""
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
    """Unpack the first `count` codes of `target` from words [..., n] to float32 [..., count]."""
    if target is None:
        return words.view(F32)[..., :count]
    bits = target.bits
    codes = []
    for i in range(count):
        dword, shift = divmod(i * bits, 32)
        code = words[..., dword] >> U32(shift)
        if shift + bits > 32:
            code = code | words[..., dword + 1] << U32(32 - shift)
        codes.append(code & U32((1 << bits) - 1))
    return target.decode(np.stack(codes, axis=-1))


def _repack(target, values, dwords: int, random=None) -> np.ndarray:
    """Pack float32 values [..., count] into words [..., dwords]."""
    if target is None:
        return np.ascontiguousarray(values, F32).view(U32)
    if random is None:
        codes = target.encode(values)
    else:
        dropped = 23 - target.mantissa
        codes = target.encode(values, random=random >> U32(32 - dropped), random_bits=dropped)
    out = np.zeros((*values.shape[:-1], dwords + 1), U32)
    for i in range(values.shape[-1]):
        dword, shift = divmod(i * target.bits, 32)
        out[..., dword] |= codes[..., i] << U32(shift)
        if shift + target.bits > 32:
            out[..., dword + 1] |= codes[..., i] >> U32(32 - shift)
    return out[..., :dwords]


def bind_scaled(ins, program) -> Callable:
    """Bind V_CVT_SCALEF32_*: values are divided by the scale to a narrow format, and multiplied from one.

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
                seeds.append(prng(seeds[-1]))
            random = np.stack(seeds, axis=-1)
        out = _repack(to, values, max(1, destination.bits // 32), random)
        if out.shape[-1] == 2:
            store(w, np.ascontiguousarray(out).view(U64)[..., 0])
        else:
            store(w, out[..., 0] if out.shape[-1] == 1 else out)

    return run
