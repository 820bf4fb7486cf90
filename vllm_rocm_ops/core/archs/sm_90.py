"""Define NVIDIA's Hopper, H100 and H200, for development. Costs were measured on an H200 unless a comment says otherwise."""

import dataclasses

import torch

from vllm_rocm_ops.core.arch import (
    Arch,
    BlockScaledCosts,
    CollectiveCosts,
    Costs,
    DecodeCosts,
    ExpertsCosts,
    SkinnyCosts,
)

SKINNY = SkinnyCosts(
    limits={
        (16, 8): (4, 15e3),
        (16, 16): (3, 8e3),
        (64, 16): (2, 58e3),
        (64, 32): (2, 52e3),
        (64, 64): (2, 38e3),
        # Guesses: above 64 tokens, `cache_bytes_per_us` decides.
        (64, 96): (1, 23e3),
        (64, 128): (1, 17e3),
        (128, 96): (1, 35e3),
        (128, 128): (1, 30e3),
    },
    in_flight={16: 12e3},  # with 64 rows blocks stream through LDS
    block_us=0.0,  # included in `limits`
    sharing_us=3.0,
    sum_round_us=0.0,  # included in `sums_bytes_per_us`
    cache_bytes_per_us={64: 48e3, 128: 48e3},
    apart_bytes_per_us=5e6,
    many_round_us=0.6,
)

# Fitted to all configurations of eleven weights at 72 to 256 tokens: the chosen one takes 1.004 times the best one, 1.001 times with four
# other weights. A wave of a skinny kernel copies, multiplies and adds in turn, and cache_bytes_per_us says how fast; of tiled kernels with
# 128 tokens, registers fit one block.
BLOCK_SCALED = BlockScaledCosts(
    skinny=dataclasses.replace(
        SKINNY, cache_bytes_per_us={64: 65e3, 128: 54e3}, apart_bytes_per_us=7.7e6, sharing_us=0.3, many_round_us=0.1
    ),
    tile_rate={64: 0.5, 128: 0.36},
    tile_resident={64: 2, 128: 1},
    tile_latency_us=1.3,
    tile_sharing_us=3.9,
)

# MLA costs were measured with all configurations of 42 shapes, the others are guesses. With lds_block_us and even_us, measured too,
# the chosen configuration takes 1.006 times the best of four over 39 shapes.
DECODE = DecodeCosts(
    block_us=2.0,
    unit_gb_s=None,
    latent_gb_s=dict.fromkeys((1, 2), 20.6),
    sharing_us=3.0,
    latent_us=4.0,
    counted_us=0.07,
    counted_splits=8,
    added_us=0.05,
    lds_block_us=2.9,
    lds_gb_s=47.0,
    even_us=8.0,
)

ARCH = Arch(
    name="sm_90",
    vendor="nvidia",
    wave_lanes=32,
    fp8_dtype=torch.float8_e4m3fn,
    compute_units=132,
    lds_bytes=227 * 1024,
    bandwidth_gb_s=4200.0,
    clock_ghz=1.98,
    block_scales=False,
    sum_rounding=2.0**-11,  # wgmma keeps 14 bits
    products={},
    pci_devices={},
    costs=Costs(
        skinny=SKINNY,
        experts=ExpertsCosts(tile_tokens=8, block_bytes_per_us=17.2e3, quantize_us=4.3e-4),
        decode=DECODE,
        collective=CollectiveCosts(
            unit_bytes_per_us=48e3,  # a guess, as the next
            exchange_us=1.5,
            link_bytes_per_us=340e3,  # measured between two H200, as the hop
            all_links_bytes_per_us=340e3,
            hop_us=2.3,
            fp8_us=4.2,  # measured, as the links: per round of blocks, whether a row has one block or two
            fp8_waves=16,
        ),
        sums_bytes_per_us=150e3,
        tiled_sums_bytes_per_us=100e3,
        tiled_ratio=1.3,
        block_scaled=BLOCK_SCALED,
    ),
)
