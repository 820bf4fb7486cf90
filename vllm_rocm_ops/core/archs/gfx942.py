"""Define AMD's CDNA3: MI300X, MI325X, and MI308X with 80 compute units. These costs were never measured on an AMD GPU."""

import torch

from vllm_rocm_ops.core.arch import Arch, CollectiveCosts, Costs, DecodeCosts, ExpertsCosts, SkinnyCosts

# From the emulator's issue cycles.
SKINNY = SkinnyCosts(
    limits={
        (16, 8): (4, 45e3),
        (16, 16): (4, 45e3),
        (64, 16): (3, 84e3),
        (64, 32): (3, 56e3),
        (64, 64): (2, 35e3),
        (64, 96): (1, 23e3),  # in proportion to 64 tokens, as the next
        (64, 128): (1, 17e3),
    },
    # As the emulator counts them. Tiles of 16 rows keep 24e3 since their loads no longer drain. That alone would change 105 recorded
    # choices on the basis of constants that no AMD GPU has confirmed, so it waits for a model of the whole GPU.
    in_flight={16: 12.5e3, 64: 27e3},
    block_us=1.3,
    sharing_us=5.0,  # as kernels through registers on H200
    sum_round_us=0.85,  # see serving_benchmarks/timing_study/notes.md
    cache_bytes_per_us={64: 134e3},  # 64 bytes a cycle
    apart_bytes_per_us=34e6,  # 2 KB a cycle and XCD
    many_round_us=0.6,  # as measured on H200
)
SUMS_BYTES_PER_US = 85e3  # see serving_benchmarks/timing_study/notes.md

# Published figures with their sources, at 2100 cycles per microsecond. None was measured with these kernels.
# block_us: a tiny kernel took about 4100 cycles (traces of MI350X, tinygrad extra/sqtt@a9069c17).
# unit_gb_s: 1.53 TB/s by 32 blocks on MI350X (ROCm/gfx950-gluon-tutorials); 53 per unit with 80 units (pyhip vmem-bandwidth.md, MI308X).
# latent_gb_s: predicted by the model of timing/, built from such figures, between 512 and 1024 keys per block; it also predicts 48 for
# keys of heads. lds_gb_s, lds_block_us: fit its times of 64 to 512 keys of FP8 within 9 %, of 64 columns, without a launch and stored sums:
# 7.4, 10.2, 15.7 and 26.5 us. With 24.0 and 1.45 too many splits were chosen, whose sums cost more than their keys.
# latent_us: a store and a load of 948 cycles (rocprofiler-compute, vecCopy) and an atomic of 382 to 1937 beyond L2 take 1.1 to 1.8 us.
# counted_us: 33 KB at 44 KB in flight per unit (gluon-tutorials, tcp_bound_tile_model.md) and 1000 cycles: 94 GB/s.
# counted_splits: predicted by the model of timing/, with 4096 keys: 64 requests in 4 splits take 48.1 us, 49.0 with a second launch,
# 128 in 2 take 86.0 and 86.5. With more splits the last block's 33 KB of each cost more than a launch: 33.8 and 31.1 us for 32 in 8.
# sharing_us: `latent_us` plus 16 sums of 8 KB at this rate. added_us: a round of 1000 cycles has 32 splits, four per wave.
DECODE = DecodeCosts(
    block_us=2.0,
    unit_gb_s=48.0,
    latent_gb_s={1: 34.0, 2: 26.0},
    sharing_us=3.0,
    latent_us=1.5,
    counted_us=0.35,
    counted_splits=4,
    added_us=0.015,
    lds_block_us=1.2,
    lds_gb_s=26.0,
    even_us=0.0,  # no kernel has even splits
)

COSTS = Costs(
    skinny=SKINNY,
    # From its bytes in flight, and from predictions of down.
    experts=ExpertsCosts(tile_tokens=16, block_bytes_per_us=16.4e3, quantize_us=1.9e-4),
    decode=DECODE,
    # the rate of keys per unit; a store and a load across XCDs (`latent_us` without its sums; fleet-mi300x: 1.44 us idle)
    # 64 GB/s of a link to each of seven others, 3/4 of them used; two trips of a link's latency;
    # 979 more VALU instructions per wave with FP8 in one stage and 1,381 in two, of 4 cycles each, on each of four SIMDs
    collective=CollectiveCosts(
        unit_bytes_per_us=48e3,
        exchange_us=1.5,
        link_bytes_per_us=48e3,
        all_links_bytes_per_us=7 * 48e3,
        hop_us=2.5,
        fp8_us=1.6,
        fp8_waves=4,
    ),
    sums_bytes_per_us=SUMS_BYTES_PER_US,
    tiled_sums_bytes_per_us=SUMS_BYTES_PER_US,
    tiled_ratio=1.4,  # as predicted by the model of timing/
)

ARCH = Arch(
    name="gfx942",
    vendor="amd",
    wave_lanes=64,
    fp8_dtype=torch.float8_e4m3fnuz,
    compute_units=304,
    lds_bytes=64 * 1024,
    bandwidth_gb_s=5300.0,
    clock_ghz=2.1,
    block_scales=False,
    sum_rounding=0.0,
    products={"MI300X": 304, "MI325X": 304, "MI308X": 80},
    corrupts_graphs="7.2.",
    pci_devices={  # of GPUs and their virtual functions, from libdrm's amdgpu.ids
        **dict.fromkeys(("0x74a1", "0x74b5"), "MI300X"),
        **dict.fromkeys(("0x74a5", "0x74b9"), "MI325X"),
        **dict.fromkeys(("0x74a2", "0x74b6"), "MI308X"),
    },
    costs=COSTS,
)
