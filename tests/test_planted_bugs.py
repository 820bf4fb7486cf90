"""The op tests can fail: each bug planted below in a copy of the kernels is caught by the case named with it, as gfx942 or
gfx950 code in the emulator, by a wrong result or by the emulator's own checks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import test_large_tensors as large
from emulator import Emulator
from emulator.errors import EmulatorError
from test_build import load_build

from vllm_rocm_ops import launch, op, ops
from vllm_rocm_ops.correctness import generator_of, run_and_check

CSRC = Path(__file__).parent.parent / "csrc"

WRONG = "error|NaNs differ"  # what a case says of values; those that nobody wrote are NaN

# name: (file, text, what replaces it, op, case, arch, what must be said)
BUGS = {
    "barrier removed": (
        "device/reduce.h",
        "block_barrier();  // hazard: a wave",
        "// a wave",
        ops.rms_norm,
        "bf16",
        "gfx942",
        "barrier",
    ),
    "lanes not combined": (
        "device/amd/wave.h",
        "dpp<0xB1>",
        "dpp<0xE4>",
        ops.rms_norm_dynamic_per_token_quant,
        "bf16",
        "gfx950",
        "output",
    ),
    "two lanes swapped": (
        "device/amd/numerics.h",
        "0x07060302",
        "0x03020706",
        ops.silu_and_mul,
        "bf16",
        "gfx942",
        "output 0: element",
    ),
    "last chunk dropped": (
        "ops/rms_norm.hip",
        "mine[i] = chunk[i] * kChunk < row.hidden;",
        "mine[i] = (chunk[i] + 1) * kChunk < row.hidden;",
        ops.rms_norm_static_fp8_quant,
        "hidden2040-tail",
        "gfx942",
        "output 0",
    ),
    "one chunk too many": (
        "ops/silu_and_mul.hip",
        "mine[i] = chunk[i] * kChunk < row.hidden;",
        "mine[i] = chunk[i] * kChunk <= row.hidden;",
        ops.silu_and_mul_quant,
        "hidden2040-tail",
        "gfx942",
        "argument",
    ),
    "last column dropped": (
        "ops/rms_norm.hip",
        "for (int column = wave::thread(); column < row.hidden; column += row.threads) finish(column, divisor);",
        "for (int column = wave::thread(); column < row.hidden - 1; column += row.threads) finish(column, divisor);",
        ops.rms_norm_dynamic_per_token_quant,
        "bf16-general",
        "gfx942",
        "leaves another residual",
    ),
    "residual not stored": (
        "ops/rms_norm.hip",
        "if (mine[i]) mem::store((u32x4*)row.residual + chunk[i], rounded);",
        "",
        ops.fused_add_rms_norm,
        "fp16",
        "gfx950",
        "leaves another residual",
    ),
    "scales of neighbouring groups": (
        "ops/rms_norm.hip",
        "(chunk[i] >> log2_lanes) * row.scale_stride",
        "(chunk[i] >> log2_lanes)",
        ops.rms_norm_per_block_quant,
        "transposed",
        "gfx942",
        "is also written by",
    ),
    "no clamp": (
        "device/amd/numerics.h",
        "return __builtin_fmaxf(__builtin_fminf(x, kE4m3Max), -kE4m3Max);",
        "return x;",
        ops.rms_norm_static_fp8_quant,
        "bf16-corners",
        "gfx942",
        "output 0",
    ),
    "limit of the other format": (
        "device/amd/numerics.h",
        "kE4m3Max = 224.0f",
        "kE4m3Max = 240.0f",
        ops.silu_and_mul_per_block_quant,
        "bf16",
        "gfx942",
        "output",
    ),
    "rows swapped": (
        "device/amd/mma.h",
        "DEVICE int row(int lane, int /*load*/) { return lane % 16; }",
        "DEVICE int row(int lane, int /*load*/) { return (lane ^ 1) % 16; }",
        ops.scaled_mm,
        "m16",
        "gfx942",
        WRONG,
    ),
    "last partial missing": (
        "device/skinny.h",
        "b + other <= to) sum",
        "b + other < to) sum",
        ops.scaled_mm,
        "long-k",
        "gfx950",
        WRONG,
    ),
    "tokens without a barrier": (
        "device/amd/wide.h",
        "block_barrier();  // hazard: tokens are read before they are written",
        "{}",
        ops.scaled_mm,
        "m33",
        "gfx950",
        "read here|written here",
    ),
    "e8m0 scale shifted too little": (
        "device/scale.h",
        "scale << 23",
        "scale << 22",
        ops.block_scaled_mm,
        "e8m0",
        "gfx942",
        WRONG,
    ),
    "the neighbouring panel's e8m0 scale": (
        "device/tiled.h",
        "b_at[j], panel * Scale::kBytes",
        "b_at[j], (panel ^ 1) * Scale::kBytes",
        ops.block_scaled_mm,
        "e8m0-tiles-long",
        "gfx950",
        "error|argument",
    ),
    "e8m0 scales widened in the other order": (
        "ops/block_scaled_mm.hip",
        "at % blocks * block_stride",
        "at % blocks",
        ops.block_scaled_mm,
        "e8m0-a",
        "gfx942",
        WRONG,
    ),
    "the neighbouring block's scale": (
        "device/amd/wide.h",
        "0, u32(step) / kUnit * Scale::kBytes, 0 < bytes",
        "0, (step / kUnit ^ 1) * Scale::kBytes, 0 < bytes",
        ops.block_scaled_mm,
        "m5",
        "gfx942",
        WRONG,
    ),
    "bf16 halves swapped": (
        "device/amd/mma.h",
        "bf16_1k(w.hi, t.hi",
        "bf16_1k(w.hi, t.lo",
        ops.unquantized_gemm,
        "bf16-m17",
        "gfx942",
        WRONG,
    ),
    "token rows of two lanes swapped": (
        "device/amd/tile_mma.h",
        "Place{first_token + row, piece}",
        "Place{first_token + (row ^ 1), piece}",
        ops.scaled_mm,
        "tiles",
        "gfx942",
        WRONG,
    ),
    "last slice of a tile missing": (
        "ops/scaled_mm_tiled.hip",
        "for (int s = 1; s < p.slices; ++s)",
        "for (int s = 1; s < p.slices - 1; ++s)",
        ops.scaled_mm,
        "tiles-long",
        "gfx942",
        WRONG,
    ),
    "weight scale of another block": (
        "device/tiled.h",
        "b_at[j], panel * Scale::kBytes, true",
        "b_at[j], panel / 2 * Scale::kBytes, true",
        ops.block_scaled_mm,
        "tiles",
        "gfx950",
        WRONG,
    ),
    "panel read before it is filled": (
        "device/tiled.h",
        "block_barrier();  // hazard: read before",
        "// read before",
        ops.scaled_mm,
        "tiles",
        "gfx942",
        "read here, written",
    ),
    "copies not waited for": (
        "device/amd/lds_async.h",
        "__builtin_amdgcn_s_waitcnt(0x0f70);",
        "",
        ops.scaled_mm,
        "tiles",
        "gfx950",
        "may still be under way",
    ),
    "counter left behind": (
        "device/amd/sync.h",
        "blocks - 1, __ATOMIC_RELAXED",
        "blocks, __ATOMIC_RELAXED",
        ops.scaled_mm,
        "long-k",
        "gfx942",
        WRONG,
    ),
    "block scales of the neighbour": (
        "device/amd/mx.h",
        "loaded[0] >> (lane / 16 % 2 * 8)",
        "loaded[0] >> ((lane / 16 + 1) % 2 * 8)",
        ops.mxfp8_scaled_mm,
        "m16",
        "gfx950",
        WRONG,
    ),
    "block scales one on": (
        "device/amd/mx.h",
        "first = word + lane / 16 % 2;",
        "first = word + lane / 16 % 2 + 1;",
        ops.mxfp8_scaled_mm,
        "k352",
        "gfx950",
        WRONG,
    ),
    "block scales of the other instruction": (
        "device/amd/mx.h",
        "kByte = 2 * kIndex;",
        "kByte = 2 - 2 * kIndex;",
        ops.mxfp8_scaled_mm,
        "m130",
        "gfx950",
        WRONG,
    ),
    "rows of two lanes swapped": (
        "device/amd/mx.h",
        "DEVICE int row(int lane) { return lane % 16; }",
        "DEVICE int row(int lane) { return (lane ^ 1) % 16; }",
        ops.mxfp8_scaled_mm,
        "m7",
        "gfx950",
        WRONG,
    ),
    "shared sums of the last token missing": (
        "device/skinny.h",
        "token[v / kLaneRuns] < p.m;",
        "token[v / kLaneRuns] < p.m - 1;",
        ops.mxfp8_scaled_mm,
        "long-k",
        "gfx950",
        WRONG,
    ),
    "a run of results where fewer are left": (
        "device/skinny.h",
        "if (p.n % kRun) store_odd(value...);",
        "if (false) store_odd(value...);",
        ops.mxfp8_scaled_mm,
        "bias-fp16",
        "gfx950",
        "must be a multiple of",
    ),
    "a run of results where fewer are left, of wide tiles": (
        "device/skinny.h",
        "else if (p.n % kRun) store(store_odd);",
        "else if (false) store(store_odd);",
        ops.scaled_mm,
        "bias-fp16",
        "gfx942",
        "must be a multiple of",
    ),
    "the scales of a run's first row only": (
        "device/skinny.h",
        "p.scale_b + u64(row[j] + i) * u32(p.scale_b_row)",
        "p.scale_b + u64(row[j]) * u32(p.scale_b_row)",
        ops.scaled_mm,
        "m16",
        "gfx950",
        WRONG,
    ),
    "a narrow tile's scales of the next block": (
        "device/skinny.h",
        "mem::buffer(scales_b), 0, block * Scale::kBytes",
        "mem::buffer(scales_b), 0, (block + 1) * Scale::kBytes",
        ops.block_scaled_mm,
        "m5",
        "gfx942",
        "bytes at byte .* of argument",
    ),
    "a narrow tile's scales of another token": (
        "device/skinny.h",
        "turn.scale_a[t][v] = Scale::load_or_zero(mem::buffer(p.scale_a), token *",
        "turn.scale_a[t][v] = Scale::load_or_zero(mem::buffer(p.scale_a), (token ^ 1) *",
        ops.block_scaled_mm,
        "e8m0",
        "gfx950",
        "bytes at byte .* of argument",
    ),
    "tokens stored without a barrier": (
        "ops/mxfp8_scaled_mm.hip",
        "block_barrier();  // hazard: tokens are read before they are written",
        "// hazard: tokens are read before they are written",
        ops.mxfp8_scaled_mm,
        "m17",
        "gfx950",
        "barrier",
    ),
    "half a unit overwritten early": (
        "ops/mxfp8_scaled_mm.hip",
        "block_barrier();  // hazard: as above",
        "// hazard: as above",
        ops.mxfp8_scaled_mm,
        "m65",
        "gfx950",
        "barrier",
    ),
    "weights of another expert": (
        "ops/fused_experts_tiled.hip",
        "p.b + run.expert * p.b_expert",
        "p.b + (run.expert ^ 1) * p.b_expert",
        ops.fused_experts,
        "bf16-m70",
        "gfx942",
        WRONG,
    ),
    "last pair dropped": (
        "ops/fused_experts_tiled.hip",
        "first + of_wave : ids;",
        "first + of_wave : ids - 1;",
        ops.fused_experts,
        "bf16-m70",
        "gfx950",
        WRONG,
    ),
    "weight applied twice": (
        "ops/fused_experts_tiled.hip",
        "high += __builtin_bit_cast(f32x4, second) * weight;",
        "high += __builtin_bit_cast(f32x4, second) * weight * weight;",
        ops.fused_experts,
        "bf16-m70",
        "gfx942",
        WRONG,
    ),
    "tiles of the last expert not counted": (
        "ops/fused_experts_tiled.hip",
        "i32x4{position + count, tile + tiles, 0, 0}",
        "i32x4{position + count, tile, 0, 0}",
        ops.fused_experts,
        "bf16-m70",
        "gfx942",
        WRONG,
    ),
    "counts read before they are there": (
        "ops/fused_experts_tiled.hip",
        "block_barrier();  // hazard: counts are read",
        "// counts are read",
        ops.fused_experts,
        "bf16-m70",
        "gfx942",
        "barrier",
    ),
    "gate scales for up rows": (
        "ops/fused_experts_tiled.hip",
        "block_of(rows_n + wave_n + j",
        "block_of(wave_n + j",
        ops.fused_experts,
        "block-m65",
        "gfx950",
        WRONG,
    ),
    "scale of the next run": (
        "ops/fused_experts_quantize.hip",
        "i64(row) * runs + first / kLanes",
        "i64(row) * runs + (first / kLanes + 1) % runs",
        ops.fused_experts,
        "block-m65",
        "gfx942",
        WRONG,
    ),
    "weight before the rounding": (
        "ops/rms_norm.hip",
        "normalize<T, !kRounded>(exact[i]",
        "normalize<T, kRounded>(exact[i]",
        ops.rms_norm,
        "bf16",
        "gfx950",
        "are off",
    ),
    "of equal experts the last": (
        "ops/moe_routing.hip",
        "const bool larger = key[i] > largest;",
        "const bool larger = key[i] >= largest;",
        ops.topk_softmax,
        "equal",
        "gfx942",
        "output 1",
    ),
    "of equal groups the last": (
        "ops/moe_routing.hip",
        "(other == score && g < group)",
        "(other == score && g > group)",
        ops.grouped_topk,
        "equal",
        "gfx950",
        "output 1",
    ),
    "zeros of two signs": (
        "ops/moe_routing.hip",
        "kLowest) + 0.0f",
        "kLowest)",
        ops.topk_sigmoid,
        "equal",
        "gfx942",
        "output 1",
    ),
    "the last expert dropped": (
        "ops/moe_routing.hip",
        "left = group_size - begin;",
        "left = group_size - begin - 1;",
        ops.topk_softmax,
        "fp16-experts60",
        "gfx950",
        "output",
    ),
    "a group too many": (
        "ops/moe_routing.hip",
        "groups_before(choice, p, mine.group) < p.topk_group",
        "groups_before(choice, p, mine.group) <= p.topk_group",
        ops.grouped_topk,
        "deepseek-v3",
        "gfx942",
        "output",
    ),
    "second best of another lane forgotten": (
        "ops/moe_routing.hip",
        "second = __builtin_fmaxf(second, other_second);",
        "",
        ops.grouped_topk,
        "deepseek-v3",
        "gfx950",
        "output",
    ),
    "NaN as it is": (
        "ops/moe_routing.hip",
        "i >= mine.count || x[i] != x[i]",
        "i >= mine.count",
        ops.topk_softmax,
        "not-finite",
        "gfx942",
        "output",
    ),
    "fp16 biases taken for bf16": (
        "ops/moe_routing.hip",
        "type == kBf16 ? Element<Bf16>",
        "type != kFp32 ? Element<Bf16>",
        ops.grouped_topk,
        "bf16-bias-fp16",
        "gfx950",
        "output",
    ),
    "bf16 biases read as wide as fp32 ones": (
        "ops/moe_routing.hip",
        "load_as<Bf16>(biases",
        "load_as<float>(biases",
        ops.topk_sigmoid,
        "fp16-bias-bf16",
        "gfx942",
        "which has",
    ),
    "losses without a barrier": (
        "ops/moe_routing.hip",
        "block_barrier();  // hazard: sums and counts",
        "// sums and counts",
        ops.load_balancing_loss,
        "bf16",
        "gfx950",
        "read here|written here",
    ),
    "the last block's tokens missing": (
        "ops/moe_routing.hip",
        "block < p.blocks; ++block",
        "block < p.blocks - 1; ++block",
        ops.load_balancing_loss,
        "bf16",
        "gfx942",
        WRONG,
    ),
    "a block's share missing": (
        "ops/moe_routing.hip",
        "total += mem::load_device_or_zero<float>(sums, block * 4, 0, true);",
        "total = mem::load_device_or_zero<float>(sums, 0, 0, true);",
        ops.router_z_loss,
        "bf16",
        "gfx942",
        WRONG,
    ),
    "expert of the neighbour": (
        "ops/fused_experts.hip",
        "p.weights + item.expert * p.expert_bytes",
        "p.weights + (item.expert ^ 1) * p.expert_bytes",
        ops.fused_experts,
        "block",
        "gfx942",
        WRONG,
    ),
    "last pair not among the items": (
        "ops/fused_experts.hip",
        "lists.items[items] = pairs;",
        "lists.items[items] = pairs - 1;",
        ops.fused_experts,
        "block-m1",
        "gfx950",
        WRONG,
    ),
    "tokens past a tile forgotten": (
        "ops/fused_experts.hip",
        "rank % mma::kTileTokens == 0;",
        "rank == 0;",
        ops.fused_experts,
        "block-m17-one-expert",
        "gfx942",
        WRONG,
    ),
    "places of an expert's pairs all the same": (
        "ops/fused_experts.hip",
        "place += others[i] < pair;",
        "place += 0;",
        ops.fused_experts,
        "block-m40",
        "gfx942",
        "two waves write it",
    ),
    "experts of the lanes below not counted": (
        "ops/fused_experts.hip",
        "if (lane >= step) sum += below;",
        "if (lane > step) sum += below;",
        ops.fused_experts,
        "block-m40",
        "gfx950",
        "two waves write it",
    ),
    "router weight on input and output": (
        "ops/fused_experts.hip",
        "const float weight = p.weigh ? lists.router[pair] : 1.0f;",
        "const float weight = lists.router[pair];",
        ops.fused_experts,
        "block-input-weight",
        "gfx950",
        WRONG,
    ),
    "repeated expert as a pair of its own": (
        "ops/fused_experts.hip",
        "if (other < slot) expert = kNone;",
        "if (other < slot) continue;",
        ops.fused_experts,
        "block-repeated",
        "gfx942",
        WRONG,
    ),
    "gate and up sums without a barrier": (
        "ops/fused_experts.hip",
        "block_barrier();  // hazard: the waves' sums are read before they are written\n    // Each",
        "// Each",
        ops.fused_experts,
        "bf16",
        "gfx942",
        "read here",
    ),
    "sums of a wave missing": (
        "ops/fused_experts.hip",
        "for (int w = 0; w < mma::kWaves; ++w) total",
        "for (int w = 1; w < mma::kWaves; ++w) total",
        ops.fused_experts,
        "fp16",
        "gfx950",
        WRONG,
    ),
    "block scales of the neighbouring lanes": (
        "ops/fused_experts.hip",
        "return kMx ? mma::depth(lane) / 16 : 0;",
        "return kMx ? (mma::depth(lane) / 16 + 1) % 4 : 0;",
        ops.fused_experts,
        "mx",
        "gfx950",
        WRONG,
    ),
    "block scales of the first rows": (
        "ops/fused_experts.hip",
        "kMx ? mma::row(lane, i) :",
        "kMx ? mma::value_row(lane, i) :",
        ops.fused_experts,
        "mx-m1",
        "gfx950",
        WRONG,
    ),
    "block scales of tokens for those of weights": (
        "ops/fused_experts.hip",
        "group.scale_b[0], group.tokens[0], group.tokens[1], group.scale_a[0]",
        "group.scale_a[0], group.tokens[0], group.tokens[1], group.scale_b[0]",
        ops.fused_experts,
        "mx-quantized",
        "gfx950",
        WRONG,
    ),
    "block scale too small": (
        "ops/fused_experts_quantize.hip",
        "return exponent > 8 ? exponent - 8 : 0;",
        "return exponent > 8 ? exponent - 9 : 0;",
        ops.fused_experts,
        "mx",
        "gfx950",
        WRONG,
    ),
}


# name: (file, text, what replaces it, arch, test of test_large_tensors.py, its arguments, modules): an offset in 32 bits
OVERFLOWS = {
    "tiles of a streamed weight": (
        "device/skinny.h",
        "first_row / mma::kRows * p.b_tile",
        "first_row / mma::kRows * int(p.b_tile)",
        "gfx942",
        large.test_skinny_products,
        (ops.unquantized_gemm, 5),
        {"unquantized_gemm"},
    ),
    "tiles of tokens": (
        "ops/scaled_mm_tiled.hip",
        "p.a + first_m * p.a_stride",
        "p.a + first_m * int(p.a_stride)",
        "gfx950",
        large.test_tiled_products,
        (ops.block_scaled_mm, 521, 130),
        {"scaled_mm_tiled"},
    ),
    "tiles of a weight": (
        "ops/scaled_mm_tiled.hip",
        "p.b + first_n / 16 * p.b_tile",
        "p.b + first_n / 16 * int(p.b_tile)",
        "gfx942",
        large.test_tiled_products,
        (ops.scaled_mm, 65, 521),
        {"scaled_mm_tiled"},
    ),
    "tiles of an MX weight": (
        "ops/mxfp8_scaled_mm.hip",
        "p.b + i64(n) * p.b_row",
        "p.b + n * p.b_row",
        "gfx950",
        large.test_mx_products,
        (5, 265),
        {"mxfp8_scaled_mm"},
    ),
    "scales of an MX weight": (
        "ops/mxfp8_scaled_mm.hip",
        "p.scale_b + i64(n0 >> p.scale_b_shift) * p.scale_b_row",
        "p.scale_b + (n0 >> p.scale_b_shift) * p.scale_b_row",
        "gfx950",
        large.test_mx_products,
        (66, 265),
        {"mxfp8_scaled_mm"},
    ),
    "experts that are streamed": (
        "ops/fused_experts.hip",
        "p.weights + item.expert * p.expert_bytes",
        "p.weights + item.expert * int(p.expert_bytes)",
        "gfx942",
        large.test_experts,
        ("bf16",),
        {"fused_experts"},
    ),
    "experts in tiles": (
        "ops/fused_experts_tiled.hip",
        "p.b + run.expert * p.b_expert",
        "p.b + run.expert * u32(p.b_expert)",
        "gfx950",
        large.test_experts,
        ("block-m65",),
        {"fused_experts_tiled", "fused_experts_quantize"},
    ),
    "tokens that are quantised": (
        "ops/fused_experts_quantize.hip",
        "(const u16*)p.x + row * p.stride",
        "(const u16*)p.x + row * int(p.stride)",
        "gfx942",
        large.test_experts,
        ("channel",),
        {"fused_experts", "fused_experts_quantize"},
    ),
    "rows of the residual": (
        "ops/rms_norm.hip",
        "(u16*)residual + index * residual_stride",
        "(u16*)residual + int(u32(index) * u32(residual_stride))",
        "gfx942",
        large.test_rows,
        (ops.fused_add_rms_norm,),
        {"rms_norm"},
    ),
    "rows of gate and up": (
        "ops/silu_and_mul.hip",
        "(const u16*)input + index * input_stride",
        "(const u16*)input + int(u32(index) * u32(input_stride))",
        "gfx950",
        large.test_rows,
        (ops.silu_and_mul,),
        {"silu_and_mul"},
    ),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """csrc/build.py of a copy of the kernels."""
    root = tmp_path_factory.mktemp("planted")
    shutil.copytree(CSRC, root / "csrc")
    return load_build(root / "csrc")


@pytest.fixture
def plant(build, monkeypatch):
    """A function that builds the copy's modules with a bug in them and has ops run that code."""

    def plant(file: str, text: str, replacement: str, arch: str, modules: set[str]) -> None:
        path = build.CSRC / file
        original = path.read_text()
        assert text in original, f"the bug no longer fits {file}"
        try:
            path.write_text(original.replace(text, replacement))
            build.build(sorted(modules), [arch])
        finally:
            path.write_text(original)
        monkeypatch.setattr(launch, "CODE", build.CODE)

    return plant


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught(bug, plant, monkeypatch):
    file, text, replacement, the_op, case_name, arch, said = BUGS[bug]
    case = next(c for c in the_op.cases() if c.name == case_name)
    emulator = Emulator(arch)
    arguments = case.make("cpu", generator_of(case.name), emulator.arch.fp8_dtype)
    plant(file, text, replacement, arch, {l.module for l in the_op.explain(*arguments, arch=arch).launches})
    the_op._executions.clear()
    try:
        with launch.executor(emulator), pytest.raises((AssertionError, EmulatorError), match=said):
            for config in the_op.configs(the_op.Arguments(*arguments), emulator.arch):  # not all come by the bug
                monkeypatch.setattr(the_op, "default", lambda *_, config=config: config)
                the_op._executions.clear()
                for _ in range(2):  # what a call leaves behind shows in the next
                    run_and_check(the_op, arguments, "cpu")
    finally:
        the_op._executions.clear()
    assert op.stats()[the_op.name]


@pytest.mark.parametrize("bug", OVERFLOWS)
def test_planted_overflow_is_caught(bug, plant):
    file, text, replacement, arch, test, arguments, modules = OVERFLOWS[bug]
    plant(file, text, replacement, arch, modules)
    emulator = Emulator(arch)
    with launch.executor(emulator), pytest.raises((AssertionError, EmulatorError)) as caught:
        test(*arguments, ("cpu", emulator.arch))
    assert "fallback" not in str(caught.value)
