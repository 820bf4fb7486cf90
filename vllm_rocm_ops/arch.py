"""GPU architectures: what planning a launch needs to know of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arch:
    """One GPU architecture, or one product of it where `compute_units` differs from the usual."""

    name: str
    wave_lanes: int
    fp8_dtype: torch.dtype
    compute_units: int
    lds_bytes: int
    code_suffix: str


ARCHS = {
    arch.name: arch
    for arch in (
        Arch("gfx942", 64, torch.float8_e4m3fnuz, 304, 64 * 1024, ".co"),  # MI300X, MI325X
        Arch("gfx950", 64, torch.float8_e4m3fn, 256, 160 * 1024, ".co"),  # MI355X
        Arch("sm_90", 32, torch.float8_e4m3fn, 132, 227 * 1024, ".ptx"),  # development only
    )
}


@functools.cache
def of_device(index: int) -> Arch | None:
    """The architecture of GPU `index` of this process, with its own count of compute units; None if it is not ours."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    arch = ARCHS.get(name)
    if arch is None:
        return None
    return Arch(**{**vars(arch), "compute_units": properties.multi_processor_count})
