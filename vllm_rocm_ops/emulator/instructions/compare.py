"""Define vector comparisons (VOPC), whose results are one bit per lane."""

from __future__ import annotations

import numpy as np

from ..operands import F64, U16, U32, U64
from .table import VECTOR, Vector, entries


def float_class(a, mask):
    """Compute V_CMP_CLASS: mask bits 0 sNaN, 1 qNaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, 7 +denormal, 8 +normal, 9 +inf."""
    words = {2: (U16, 1 << 9, 2.0**-14), 4: (U32, 1 << 22, 2.0**-126), 8: (U64, 1 << 51, 2.0**-1022)}
    word, quiet, tiny = words[a.dtype.itemsize]
    bits = np.ascontiguousarray(a).view(word)
    negative, magnitude = np.signbit(a), np.abs(a.astype(F64))
    kind = np.where(magnitude == 0, 6, np.where(magnitude < tiny, 7, np.where(np.isinf(magnitude), 9, 8)))
    kind = np.where(negative, 11 - kind, kind)
    kind = np.where(np.isnan(a), np.where(bits & word(quiet), 1, 0), kind)
    return mask.astype(U32) >> kind.astype(U32) & U32(1) != 0


COMPARE = {
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
        entries(**{f"{_prefix}_{_name}_{_type}": _fn for _name, _fn in COMPARE.items()})
    for _type in ("f16", "f32", "f64"):
        VECTOR[f"{_prefix}_class_{_type}"] = Vector(float_class)
