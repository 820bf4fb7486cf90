"""Define AMD's CDNA4: MI355X, and MI350X with a lower clock. Its costs equal gfx942's: no known figure distinguishes them."""

import torch

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.archs.gfx942 import COSTS

ARCH = Arch(
    name="gfx950",
    vendor="amd",
    wave_lanes=64,
    fp8_dtype=torch.float8_e4m3fn,
    compute_units=256,
    lds_bytes=160 * 1024,
    bandwidth_gb_s=8000.0,
    clock_ghz=2.4,
    block_scales=True,
    sum_rounding=0.0,
    products={"MI350X": 256, "MI355X": 256},
    pci_devices={  # as gfx942's
        **dict.fromkeys(("0x75a0", "0x75b0"), "MI350X"),
        **dict.fromkeys(("0x75a3", "0x75b3"), "MI355X"),
    },
    costs=COSTS,
)
