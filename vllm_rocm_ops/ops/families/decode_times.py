"""What flash decoding takes, in microseconds, by which its ops choose into how many parts they divide keys.

Those of AMD are figures of others, each with its source, at 2100 cycles per microsecond. None was measured with these kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_rocm_ops.core.arch import Arch


@dataclass(frozen=True)
class Times:
    """`block`: of a block beside its keys. `unit_gb_s`: what a compute unit reads keys of heads at, however few do; None is its share.
    `latent_gb_s`: the same of latents, by a block's tiles of 16 columns. `sharing`: of a block that adds up to FAN_IN sums of heads,
    from the last part's store on. Of a latent's sums the same is `latent` and `counted` for each part, or `added` for each part,
    beside the launch, where a launch adds them. Of a latent through LDS: `lds_block` for 16 columns, `lds_gb_s` of a cache of 16 bits
    (one of 8 bits has as many keys), and what an even division takes, `even`."""

    block: float
    unit_gb_s: float | None
    latent_gb_s: dict[int, float]
    sharing: float
    latent: float
    counted: float
    added: float
    lds_block: float = 0.0
    lds_gb_s: float | None = None
    even: float = 0.0


def rate(most_gb_s: float | None, arch: Arch, blocks: int) -> float:
    """Bytes per microsecond of a compute unit that reads at this rate at most, while so many blocks run."""
    if most_gb_s is None:
        return arch.bandwidth_gb_s * 1e3 / arch.compute_units
    return 1e3 * min(most_gb_s, arch.bandwidth_gb_s / max(min(blocks, arch.compute_units), 1))


# block: a whole tiny kernel took some 4100 cycles (traces of MI350X, tinygrad extra/sqtt@a9069c17).
# unit_gb_s: 1.53 TB/s by 32 blocks of MI350X (ROCm/gfx950-gluon-tutorials); 53 for each of 80 units (pyhip vmem-bandwidth.md, MI308X).
# latent_gb_s, lds_gb_s: predicted by the model of timing/, which is made of such figures, between 512 and 1024 keys of a block; of keys of
# heads it says 48 too. lds_block: so that a block's first keys take as much more than those of 16 columns as predicted.
# latent: a store and a load of 948 cycles (rocprofiler-compute, vecCopy) and an atomic of 382 to 1937 beyond L2 are 1.1 to 1.8 us.
# counted: 33 KB, of which a unit has 44 KB in flight (gluon-tutorials, tcp_bound_tile_model.md) for 1000 cycles: 94 GB/s.
# sharing: what `latent` is, and 16 sums of 8 KB at this rate. added: a round of 1000 cycles has 32 parts, four of each wave.
AMD = Times(
    block=2.0,
    unit_gb_s=48.0,
    latent_gb_s={1: 34.0, 2: 26.0},
    sharing=3.0,
    latent=1.5,
    counted=0.35,
    added=0.015,
    lds_block=1.45,
    lds_gb_s=24.0,
)
# For development. Those of latents were measured on an H200 with all configurations of 42 shapes; the others are guesses.
# lds_block and even as well: by them the chosen configuration takes 1.006 times the best of four of each of 39 shapes.
NVIDIA = Times(
    block=2.0,
    unit_gb_s=None,
    latent_gb_s=dict.fromkeys((1, 2), 20.6),
    sharing=3.0,
    latent=4.0,
    counted=0.07,
    added=0.05,
    lds_block=2.9,
    lds_gb_s=47.0,
    even=8.0,
)


def of(arch: Arch) -> Times:
    return AMD if arch.wave_lanes == 64 else NVIDIA
