"""Convert the number formats of CDNA3 and CDNA4 to and from float32, bit-exact and vectorized over numpy arrays.

Formats: CDNA4 ISA, section 7.3, tables 30 and 31; gfx942's FNUZ variants as torch.float8_e4m3fnuz and e5m2fnuz. The same mnemonic words
mean different formats on the two chips: `eight_bit("fp8", "gfx942")` is e4m3fnuz, on gfx950 it is e4m3fn.

Rounding is to nearest even. The stochastic conversions add random bits below the last kept bit, then truncate (CDNA4 ISA, section 7.3,
"Convert instructions come in two types").

Overflow (CDNA4 ISA, section 7.3, "FP16_OVFL rule"): a value that rounds beyond the largest finite number, or an infinity, becomes
infinity if the format has one, else NaN; with FP16_OVFL set in MODE it becomes the largest finite number. NaN stays NaN. fp6 and fp4
have neither infinity nor NaN and always saturate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np


@dataclass(frozen=True)
class Format:
    """A sign, exponent and mantissa format.

    `special` tells which codes are not finite numbers. `ieee`: the largest exponent holds infinity and NaN. `fn`: only the all-ones code of either sign is NaN.
    `fnuz`: only the code of -0 is NaN. `finite`: none.
    """

    name: str
    exponent: int
    mantissa: int
    bias: int
    special: str

    @property
    def bits(self) -> int:
        """Return the width of a code."""
        return 1 + self.exponent + self.mantissa

    @cached_property
    def values(self) -> np.ndarray:
        """Return the float32 value of every code, indexed by code."""
        codes = np.arange(1 << self.bits)
        fraction = codes & ((1 << self.mantissa) - 1)
        exponent = (codes >> self.mantissa) & ((1 << self.exponent) - 1)
        sign = np.where(codes >> (self.bits - 1), -1.0, 1.0)
        significand = fraction + np.where(exponent > 0, 1 << self.mantissa, 0)
        values = sign * np.ldexp(significand, np.maximum(exponent, 1) - self.bias - self.mantissa)
        values[self._nan_codes] = np.nan
        if self.special == "ieee":
            infinity = ((1 << self.exponent) - 1) << self.mantissa
            values[[infinity, infinity | self._sign]] = np.inf, -np.inf
        return values.astype(np.float32)

    @property
    def _sign(self) -> int:
        return 1 << (self.bits - 1)

    @cached_property
    def _nan_codes(self) -> np.ndarray:
        top = self._sign - 1
        codes = {
            "ieee": range(top - (1 << self.mantissa) + 2, top + 1),
            "fn": [top],
            "fnuz": [],
            "finite": [],
        }[self.special]
        signed = [code | sign for sign in (0, self._sign) for code in codes]
        return np.array(signed + [self._sign] * (self.special == "fnuz"), dtype=np.int64)

    @cached_property
    def _largest_code(self) -> int:
        """Return the code of the largest finite number."""
        taken = {"ieee": 1 << self.mantissa, "fn": 1, "fnuz": 0, "finite": 0}[self.special]
        return self._sign - 1 - taken

    @property
    def largest(self) -> float:
        """Return the largest finite number."""
        return float(self.values[self._largest_code])

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Return the float32 values of integer codes."""
        return self.values[codes]

    def encode(
        self, values: np.ndarray, *, saturate: bool = False, random: np.ndarray | None = None, random_bits: int = 0
    ) -> np.ndarray:
        """Return the codes of float32 values, as uint32.

        `saturate` is FP16_OVFL. `random` holds unsigned integers of `random_bits` bits, one per value, for stochastic rounding: the
        fraction of one unit in the last kept place that is added before truncation.
        """
        word = np.asarray(values, dtype=np.float32).view(np.uint32)
        if random is None and self.bits <= 8:
            # Rounding boundaries never separate a float32 from its upper half with "lower half is nonzero" or-ed in.
            return self._codes[bool(saturate)][word >> np.uint32(16) | (word & np.uint32(0xFFFF) != 0)]
        return self._encode(word, saturate, random, random_bits)

    @cached_property
    def _codes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes of all upper halves of a float32, without and with saturation."""
        word = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
        return self._encode(word, False, None, 0), self._encode(word, True, None, 0)

    def _encode(self, word: np.ndarray, saturate: bool, random: np.ndarray | None, random_bits: int) -> np.ndarray:
        magnitude = word & np.uint32(0x7FFFFFFF)
        negative = word >> np.uint32(31) << np.uint32(self.bits - 1)
        if random is None:
            codes = self._nearest_even(magnitude)
        else:
            codes = self._stochastic(magnitude, random, random_bits)
        codes = np.where(codes > self._largest_code, np.uint32(self._overflow_code(saturate)), codes)
        codes = np.where(magnitude > np.uint32(0x7F800000), np.uint32(self._nan_code), codes)
        if self.special == "fnuz":
            return np.where(codes == 0, codes, codes | negative)
        return codes | negative

    @property
    def _lowest(self) -> int:
        """Return the exponent of the smallest normal number, and of the subnormal ones."""
        return 1 - self.bias

    def _nearest_even(self, magnitude: np.ndarray) -> np.ndarray:
        dropped = 23 - self.mantissa
        # Adding half a unit, minus one if the kept part is even, carries into the exponent.
        odd = magnitude >> np.uint32(dropped) & np.uint32(1)
        normal = (magnitude + odd + np.uint32((1 << (dropped - 1)) - 1)) >> np.uint32(dropped)
        normal -= np.uint32((127 - self.bias) << self.mantissa)
        # A float32 whose last place is the format's smallest step: the addition rounds.
        step = np.ldexp(np.float32(1), self._lowest - self.mantissa + 23)
        with np.errstate(all="ignore"):
            subnormal = (magnitude.view(np.float32) + step).view(np.uint32) - step.view(np.uint32)
        return np.where(magnitude < np.uint32((self._lowest + 127) << 23), subnormal, normal)

    def _stochastic(self, magnitude: np.ndarray, random: np.ndarray, random_bits: int) -> np.ndarray:
        finite = magnitude < np.uint32(0x7F800000)
        exact = np.where(finite, magnitude, np.uint32(0)).view(np.float32).astype(np.float64)
        exponent = np.maximum((magnitude >> np.uint32(23)).astype(np.int64) - 127, self._lowest)
        units = np.ldexp(exact, self.mantissa - exponent) + np.ldexp(random.astype(np.float64), -random_bits)
        codes = units.astype(np.uint32) + ((exponent - self._lowest).astype(np.uint32) << np.uint32(self.mantissa))
        return np.where(finite, codes, magnitude)

    @property
    def _nan_code(self) -> int:
        if self.special == "ieee":
            return self._sign - 1 if self.bits == 8 else self._largest_code + 1 + (1 << (self.mantissa - 1))
        return {"fn": self._sign - 1, "fnuz": self._sign, "finite": self._largest_code}[self.special]

    def _overflow_code(self, saturate: bool) -> int:
        if saturate or self.special == "finite":
            return self._largest_code
        return self._largest_code + 1 if self.special == "ieee" else self._nan_code


E4M3FNUZ = Format("e4m3fnuz", exponent=4, mantissa=3, bias=8, special="fnuz")
E5M2FNUZ = Format("e5m2fnuz", exponent=5, mantissa=2, bias=16, special="fnuz")
E4M3FN = Format("e4m3fn", exponent=4, mantissa=3, bias=7, special="fn")
E5M2 = Format("e5m2", exponent=5, mantissa=2, bias=15, special="ieee")
E2M3 = Format("e2m3", exponent=2, mantissa=3, bias=1, special="finite")
E3M2 = Format("e3m2", exponent=3, mantissa=2, bias=3, special="finite")
E2M1 = Format("e2m1", exponent=2, mantissa=1, bias=1, special="finite")
F16 = Format("f16", exponent=5, mantissa=10, bias=15, special="ieee")
BF16 = Format("bf16", exponent=8, mantissa=7, bias=127, special="ieee")

_EIGHT_BIT = {
    "gfx942": {"fp8": E4M3FNUZ, "bf8": E5M2FNUZ},
    "gfx950": {"fp8": E4M3FN, "bf8": E5M2},
}


def eight_bit(word: str, arch: str) -> Format:
    """Return the format of `fp8` or `bf8` in a mnemonic on `arch`."""
    return _EIGHT_BIT[arch][word]


def convert_stochastic(values: np.ndarray, random: np.ndarray, word: str, arch: str, *, saturate: bool) -> np.ndarray:
    """Convert as v_cvt_sr_fp8_f32 and v_cvt_sr_bf8_f32; `random` holds the 32-bit words of the second source.

    The top 20 (fp8) or 21 (bf8) bits of a word are used, the number of bits that a normal number drops (CDNA pseudocode of both
    instructions). Subnormal results use the same fraction of their own last place, as HIP's software conversion does; AMD documents
    no bits for it.
    """
    target = eight_bit(word, arch)
    dropped = 23 - target.mantissa
    random = np.asarray(random, dtype=np.uint32) >> np.uint32(32 - dropped)
    return target.encode(values, saturate=saturate, random=random, random_bits=dropped)


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """Return scale factors 2^(code - 127) as float64; code 255 is NaN (CDNA4 ISA, section 7.2)."""
    codes = np.asarray(codes)
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))


@lru_cache
def _float64_values(format: Format) -> np.ndarray:
    return format.values.astype(np.float64)


def decode_registers(registers: np.ndarray, format: Format | str) -> np.ndarray:
    """Return float64 [..., 64, items] from uint32 [..., 64, dwords]; numpy views count a register's bytes from the lowest."""
    if format == "f64":
        return registers.view(np.float64)
    if format == "f32":
        return registers.view(np.float32).astype(np.float64)
    if format == "xf32":  # ten fraction bits; the others are truncated, according to MMA-Sim
        return (registers & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if format == "i8":
        return registers.view(np.int8).astype(np.float64)
    if format == "f16":
        return registers.view(np.float16).astype(np.float64)
    if format == "bf16":
        return (registers.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    codes = registers.view(np.uint8)
    if format.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    elif format.bits == 6:  # three bytes hold four codes
        triples = codes.reshape(*codes.shape[:-1], -1, 3).astype(np.uint32)
        words = triples @ np.array([1, 1 << 8, 1 << 16], dtype=np.uint32)
        codes = (words[..., None] >> np.array([0, 6, 12, 18], dtype=np.uint32) & 63).reshape(*codes.shape[:-1], -1)
    return _float64_values(format).take(codes)
