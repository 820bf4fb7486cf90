"""GPU architectures: the properties that planning a launch needs."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arch:
    """One GPU architecture, or a product of that architecture with another number of compute units. `str` gives the name that
    `named` takes."""

    name: str
    wave_lanes: int
    fp8_dtype: torch.dtype
    compute_units: int
    lds_bytes: int
    bandwidth_gb_s: float  # HBM reads
    block_scales: bool  # matrix instructions take MX formats, with an e8m0 scale per 32 of K
    code_suffix: str

    def __str__(self) -> str:
        usual = self.compute_units == ARCHS[self.name].compute_units
        return self.name if usual else f"{self.name}:{self.compute_units}"


ARCHS = {
    arch.name: arch
    for arch in (
        Arch("gfx942", 64, torch.float8_e4m3fnuz, 304, 64 * 1024, 5300.0, False, ".co"),
        Arch("gfx950", 64, torch.float8_e4m3fn, 256, 160 * 1024, 8000.0, True, ".co"),
        Arch("sm_90", 32, torch.float8_e4m3fn, 132, 227 * 1024, 4200.0, False, ".ptx"),  # development only
    )
}
PRODUCTS = {"MI300X": "gfx942", "MI325X": "gfx942", "MI308X": "gfx942:80", "MI355X": "gfx950"}


def named(name: str) -> Arch:
    """The architecture of a name: one of `ARCHS`, such a name with a number of compute units (gfx942:80), or one of `PRODUCTS`.
    Case does not matter. Raises ValueError."""
    match = re.fullmatch(r"(\w+)(?::([1-9]\d{0,3}))?", PRODUCTS.get(name.upper(), name.lower()))
    if match is None or match[1] not in ARCHS:
        raise ValueError(f"arch must be one of {', '.join((*ARCHS, *PRODUCTS))} or like gfx942:80, got {name}")
    arch = ARCHS[match[1]]
    return dataclasses.replace(arch, compute_units=int(match[2] or arch.compute_units))


@functools.cache
def of_device(index: int) -> Arch | None:
    """The architecture of GPU `index` of this process, with its number of compute units. None if there are no kernels for it."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    arch = ARCHS.get(name)
    if arch is None:
        return None
    return dataclasses.replace(arch, compute_units=properties.multi_processor_count)
