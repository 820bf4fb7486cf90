"""Read published decode times of MI300X, of which half may be fitted.

The half is chosen by a hash of what a row measured, without its time, so that nobody chose it by the times. `read`
returns the times of the other half only on request.
"""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import NamedTuple

FILE = "peer_measurements.csv"
PRODUCT = "MI300X"
CLASSES = {
    "skinny GEMM": ("fp8_gemm_per_tensor", ("hfrk_skinny_gemm",)),
    "add RMSNorm": ("add_rmsnorm_static_fp8", ("torch", "vllm_mid2025", "hfrk_residual_rms")),
    "SwiGLU": ("swiglu_static_fp8", ("hfrk_swiglu", "vllm_mid2025")),
    "gemv": ("gemv", ("wvSpltK (hipBLASLt)", "hipBLASLt")),
    "MLA": ("mla_decode", ("aiter asm", "hipkittens")),
}
"""By class: the op and the kernels, as the file names them."""

_KEY = ("source", "gpu", "op", "kernel", "dtype", "M", "N", "K", "extra", "timing")


class Point(NamedTuple):
    """One measured time.

    `us` is None if it is held out and was not requested.
    """

    kind: str
    kernel: str
    m: int
    n: int
    k: int
    held_out: bool
    us: float | None


def digest(row: dict[str, str]) -> str:
    """Return the hash of what a row measured, without its time."""
    return hashlib.sha256("|".join(row[name] for name in _KEY).encode()).hexdigest()


def read(folder: Path, held_out: bool = False) -> list[Point]:
    """Return the decode points in `folder`.

    Of each kernel, the half with the smaller hashes may be fitted; the times of the others are read if `held_out`.
    Raises ValueError without the file, or if it lacks a class.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{folder} must hold {FILE}")
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == PRODUCT]
    found = []
    for kind, (op, kernels) in CLASSES.items():
        for kernel in kernels:
            chosen = sorted((row for row in rows if (row["op"], row["kernel"]) == (op, kernel)), key=digest)
            if not chosen:
                raise ValueError(f"{path} must have rows of {op} by {kernel}")
            for place, row in enumerate(chosen):
                hidden = place >= (len(chosen) + 1) // 2
                sizes = (int(row[name] or 0) for name in ("M", "N", "K"))
                us = None if hidden and not held_out else float(row["us"])
                found.append(Point(kind, kernel, *sizes, hidden, us))
    return found
