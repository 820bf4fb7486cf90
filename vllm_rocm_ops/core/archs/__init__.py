"""GPU architectures: what planning a launch needs to know of each. Every file in this folder is one, with its properties and costs.

A file has an `ARCH`. Costs that two share are imported from one of them, by name; nothing has a default, so that an arch without a
cost does not load. csrc/build.py compiles for the archs whose files are here. `core/arch.py` finds an `Arch` by its name.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


@dataclass(frozen=True, kw_only=True)
class SkinnyCosts:
    """Limits of the kernels of csrc/gemm/skinny.h; their model is in ops/families/skinny_gemm.py."""

    limits: Mapping[tuple[int, int], tuple[int, float]]
    """By a tile's rows of the weight and its tokens: blocks that a compute unit holds at once, for registers and LDS; and bytes of
    weight a microsecond that the kernel keeps up with."""
    in_flight: Mapping[int, float]
    """By a tile's rows: bytes that a long stream through registers keeps under way."""
    block_us: float
    """Microseconds that a compute unit issues instructions for what a block does once."""
    sharing_us: float
    """Microseconds that blocks which share tiles take longer."""
    sum_round_us: float
    """Microseconds that a block waits for the partial sums of as many further blocks as it loads at once."""


@dataclass(frozen=True, kw_only=True)
class ExpertsCosts:
    """Limits of the kernels of csrc/ops/fused_experts.hip; their model is in ops/families/experts_streamed.py."""

    tile_tokens: int
    """Tokens of an expert that a tile of its products has."""
    block_bytes_per_us: float
    """Bytes of weight a microsecond that a block of `down` gets by itself."""


@dataclass(frozen=True, kw_only=True)
class DecodeCosts:
    """Limits of flash decoding; its models are in ops/paged_attention_decode.py and ops/mla_decode.py."""

    block_us: float
    """Microseconds of a block beside its keys."""
    unit_gb_s: float | None
    """GB/s at which a compute unit reads keys of heads, however few do. None: its share of the bandwidth."""
    latent_gb_s: Mapping[int, float]
    """GB/s of latents, by a block's tiles of 16 columns."""
    sharing_us: float
    """Microseconds of a block that adds up to FAN_IN sums of heads, from the last part's store on."""
    latent_us: float
    """The same of a latent's sums, beside `counted_us`."""
    counted_us: float
    """Microseconds for each part of a latent that a block adds."""
    added_us: float
    """Microseconds for each part of a latent that a launch of its own adds, beside the launch."""
    lds_block_us: float
    """Microseconds of 16 columns of a block, beside its keys, where latents go through LDS."""
    lds_gb_s: float
    """GB/s of latents of 16 bits through LDS; one of 8 bits has as many keys."""
    even_us: float
    """Microseconds that an even division of latents through LDS takes."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCosts:
    """Limits of the kernels of csrc/collectives; their model is in collectives/launches.py."""

    unit_bytes_per_us: float
    """Bytes of an inbox a microsecond that a block reads."""
    exchange_us: float
    """Microseconds from a block's store to another block's use of it."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Constants of the models by which ops choose a configuration, where they differ between archs."""

    skinny: SkinnyCosts
    experts: ExpertsCosts
    decode: DecodeCosts
    collective: CollectiveCosts
    sums_bytes_per_us: float
    """Bytes of products' partial sums a microsecond that a block reads through registers: of skinny kernels."""
    tiled_sums_bytes_per_us: float
    """The same of tiled kernels."""


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One GPU architecture, or a product of that architecture with another number of compute units. `str` gives the name that
    `named` takes."""

    name: str
    vendor: str
    """amd or nvidia: the folder of csrc that has its part of the kernels."""
    wave_lanes: int
    fp8_dtype: torch.dtype
    compute_units: int
    lds_bytes: int
    """LDS that a block may have."""
    bandwidth_gb_s: float
    """GB/s of HBM reads."""
    clock_ghz: float
    """The peak."""
    block_scales: bool
    """Whether matrix instructions take MX formats, with an e8m0 scale per 32 of K."""
    sum_rounding: float
    """Return the relative error of matrix instructions in a sum of e4m3 products, by its absolute terms; 0 where they keep fp32."""
    products: Mapping[str, int] = field(hash=False, repr=False)
    """Compute units of GPUs that are sold, by their names."""
    costs: Costs = field(hash=False, repr=False)
    is_whole: bool = field(default=True, compare=False)
    """Whether it has all compute units of the arch."""

    def __str__(self) -> str:
        return self.name if self.is_whole else f"{self.name}:{self.compute_units}"

    @property
    def code_suffix(self) -> str:
        """The suffix of a code object: linked ELF for AMD, PTX text for NVIDIA."""
        return ".co" if self.vendor == "amd" else ".ptx"

    def of_units(self, count: int) -> Arch:
        """Return the product with these compute units."""
        return dataclasses.replace(self, compute_units=count, is_whole=count == self.compute_units)
