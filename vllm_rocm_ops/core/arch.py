"""Define what is known of a GPU architecture: its properties and the costs of the models that choose kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class SkinnyCosts:
    """Costs of the kernels of csrc/gemm/skinny.h; the model is in ops/shared/skinny_gemm.py."""

    limits: Mapping[tuple[int, int], tuple[int, float]]
    """By a tile's weight rows and tokens: resident blocks per compute unit, and weight bytes per microsecond."""
    in_flight: Mapping[int, float]
    """By a tile's rows: bytes that a long stream through registers keeps in flight."""
    block_us: float
    """Microseconds that a compute unit issues the fixed instructions of a block."""
    sharing_us: float
    """Microseconds that sharing a tile adds to its blocks."""
    sum_round_us: float
    """Microseconds that a block waits for each further batch of partial sums."""
    cache_bytes_per_us: Mapping[int, float]
    """By a tile's rows: bytes per microsecond, of weights and tokens, that a compute unit reads from L2, or multiplies if that takes
    longer; counts above 64 tokens, as the next two do."""
    apart_bytes_per_us: float
    """The same of all compute units, if blocks are not at the same step: reads of the same tokens then do not coincide."""
    many_round_us: float
    """Microseconds that each batch of partial sums takes."""


@dataclass(frozen=True, kw_only=True)
class ExpertsCosts:
    """Costs of the kernels of csrc/ops/fused_experts.hip; the model is in ops/shared/experts_streamed.py."""

    tile_tokens: int
    """Tokens of an expert per tile."""
    block_bytes_per_us: float
    """Weight bytes per microsecond of a single block of `down`."""
    quantize_us: float
    """Microseconds per element of the activation that each block of `down` quantizes."""


@dataclass(frozen=True, kw_only=True)
class DecodeCosts:
    """Costs of split-KV decode attention; the models are in ops/paged_attention_decode.py and ops/mla_decode.py."""

    block_us: float
    """Microseconds of a block without its keys."""
    unit_gb_s: float | None
    """GB/s of keys per compute unit, however few read. None: its share of HBM bandwidth."""
    latent_gb_s: Mapping[int, float]
    """GB/s of MLA latents per compute unit, by a block's tiles of 16 columns."""
    sharing_us: float
    """Microseconds to combine up to FAN_IN splits, after the last split's store."""
    latent_us: float
    """Microseconds to combine splits of MLA, without `counted_us`."""
    counted_us: float
    """Microseconds per MLA split that a block combines."""
    counted_splits: int
    """MLA splits of 16 columns that the last block combines; more are combined by a second launch."""
    added_us: float
    """Microseconds per MLA split that a second launch combines, without the launch."""
    lds_block_us: float
    """Microseconds per 16 columns of a block, without its keys, with MLA latents through LDS."""
    lds_gb_s: float
    """GB/s of 16-bit MLA latents through LDS; 8-bit latents have the same keys per second."""
    even_us: float
    """Microseconds of an even division into splits, with MLA latents through LDS."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCosts:
    """Costs of the kernels of csrc/collectives; the models are in collectives/."""

    unit_bytes_per_us: float
    """Inbox bytes per microsecond and block."""
    exchange_us: float
    """Microseconds from a block's store to another block's use of it."""
    link_bytes_per_us: float
    """Bytes per microsecond that a GPU stores to one other, and to all others."""
    all_links_bytes_per_us: float
    hop_us: float
    """Microseconds from a payload's last store to its use on another GPU: a wait for the stores, and a flag."""
    fp8_us: float
    """Microseconds in which a block of at most `fp8_waves` waves converts a row's part to FP8 and back, per stage."""
    fp8_waves: int

    def peer_bytes_per_us(self, ranks: int) -> float:
        """Return the bytes per microsecond that a GPU stores to each of the others at once."""
        return min(self.link_bytes_per_us, self.all_links_bytes_per_us / (ranks - 1))


@dataclass(frozen=True, kw_only=True)
class BlockScaledCosts:
    """Costs of GEMMs of 65 to 256 tokens with a scale per block of K, where other scales' do not hold."""

    skinny: SkinnyCosts
    tile_rate: Mapping[int, float]
    """Share of peak of tiled kernels, by tokens of a tile; the model is in ops/shared/tiled_gemm.py, as of the next three."""
    tile_resident: Mapping[int, int]
    """Blocks of tiled kernels per compute unit, by tokens of a tile."""
    tile_latency_us: float
    tile_sharing_us: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Constants of the cost models that differ between archs."""

    skinny: SkinnyCosts
    experts: ExpertsCosts
    decode: DecodeCosts
    collective: CollectiveCosts
    sums_bytes_per_us: float
    """Bytes of partial sums per microsecond that a block of a skinny GEMM reads through registers."""
    tiled_sums_bytes_per_us: float
    """The same for tiled GEMMs."""
    tiled_ratio: float
    """Time of tiled GEMMs up to 256 tokens, as a multiple of what the model of ops/shared/tiled_gemm.py says."""
    block_scaled: BlockScaledCosts | None = None


@dataclass(frozen=True, kw_only=True)
class Arch:
    """A GPU architecture, or a product of it with other compute units. `str` gives the name that `named` accepts."""

    name: str
    vendor: str
    """amd or nvidia: its folders in csrc."""
    wave_lanes: int
    fp8_dtype: torch.dtype
    compute_units: int
    lds_bytes: int
    """LDS limit of a block."""
    bandwidth_gb_s: float
    """GB/s of HBM reads."""
    clock_ghz: float
    """Peak clock."""
    block_scales: bool
    """True if matrix instructions support MX formats, with an e8m0 scale per 32 along K."""
    sum_rounding: float
    """Error of matrix instructions in a sum of e4m3 products, relative to its absolute terms; 0 if they keep float32."""
    products: Mapping[str, int] = field(hash=False, repr=False)
    """Compute units of products, by name."""
    pci_devices: Mapping[str, str] = field(hash=False, repr=False)
    """Products by PCI device id, as the `device` file of a GPU's PCI folder has it."""
    costs: Costs = field(hash=False, repr=False)
    is_whole: bool = field(default=True, compare=False)
    """True if this is the arch with all compute units."""
    corrupts_graphs: str = field(default="", compare=False, repr=False)
    """Begin of the versions of HIP in which replayed graphs are corrupt, of some releases at least (ROCm/clr#279)."""

    def __str__(self) -> str:
        return self.name if self.is_whole else f"{self.name}:{self.compute_units}"

    @property
    def code_suffix(self) -> str:
        """Return the suffix of a code object: linked ELF for AMD, PTX text for NVIDIA."""
        return ".co" if self.vendor == "amd" else ".ptx"

    def of_units(self, count: int) -> Arch:
        """Return this architecture with `count` compute units."""
        return dataclasses.replace(self, compute_units=count, is_whole=count == self.compute_units)
