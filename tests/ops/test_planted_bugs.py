"""The op tests can fail: each bug planted below in a copy of the kernels is caught by the case named with it, as gfx942 or
gfx950 code in the emulator, by a wrong result or by the emulator's own checks. mutants.py has more of the kind."""

from __future__ import annotations

import functools

import pytest
import test_far_apart as far_apart
import test_large_tensors as large
from bugs.mutants import CSRC, MUTANTS, KernelCopy, SeamMutant
from marks import few_of

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.correctness import generator_of, run_and_check
from vllm_rocm_ops.core.stats import stats
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.errors import EmulatorError

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
        "device/norm_row.h",
        "in_bounds[i] = chunks.index[i] * kChunk < row.hidden;",
        "in_bounds[i] = (chunks.index[i] + 1) * kChunk < row.hidden;",
        ops.rms_norm_static_fp8_quant,
        "hidden2040-tail",
        "gfx942",
        "output 0",
    ),
    "variance in one pass": (
        "ops/layer_norm.hip",
        """      pair -= its_mean;
      square = __builtin_elementwise_fma(pair, pair, square);
    }
  }
  const float factor = row.inverse_deviation(""",
        """      square = __builtin_elementwise_fma(pair, pair, square);
      pair -= its_mean;
    }
  }
  const float factor = row.inverse_deviation(-mean * mean * row.hidden + """,
        ops.layer_norm,
        "bf16-far-from-zero",
        "gfx942",
        "output 0",
    ),
    "variance in one pass, per element": (
        "ops/layer_norm.hip",
        """load_element<T>(row.input, column) - mean;
    square = __builtin_fmaf(d, d, square);
  }
  const float factor = row.inverse_deviation(""",
        """load_element<T>(row.input, column);
    square = __builtin_fmaf(d, d, square);
  }
  const float factor = row.inverse_deviation(-mean * mean * row.hidden + """,
        ops.layer_norm_per_block_quant,
        "fp16-far-from-zero-general",
        "gfx950",
        "output 0",
    ),
    "epsilon forgotten": (
        "ops/layer_norm.hip",
        "mean(sum_of_squares) + epsilon",
        "mean(sum_of_squares)",
        ops.layer_norm,
        "fp16-tiny-variance",
        "gfx950",
        "output 0",
    ),
    "epsilon of another norm forgotten": (
        "device/norm_row.h",
        "row.inverse_hidden) + row.epsilon",
        "row.inverse_hidden)",
        ops.fused_add_rms_norm_static_fp8_quant,
        "bf16-tiny-variance",
        "gfx942",
        "output 0",
    ),
    "bias forgotten": (
        "ops/layer_norm.hip",
        "y = unpack<T>(bias[i])",
        "y = unpack<T>(u32x4{})",
        ops.layer_norm_static_fp8_quant,
        "bf16",
        "gfx942",
        "output 0",
    ),
    "bias forgotten, per element": (
        "ops/layer_norm.hip",
        "row.bias ? load_element<T>(row.bias, column) : 0.0f",
        "0.0f",
        ops.layer_norm,
        "bf16-general",
        "gfx942",
        "output 0",
    ),
    "tail in the variance": (
        "ops/layer_norm.hip",
        "chunks.in_bounds[i] ? mean : 0.0f",
        "mean",
        ops.layer_norm,
        "bf16-far-from-zero",
        "gfx942",
        "output 0",
    ),
    "last columns dropped": (
        "ops/layer_norm.hip",
        "in_bounds[i] = chunks.index[i] * kChunk < row.hidden;",
        "in_bounds[i] = (chunks.index[i] + 1) * kChunk < row.hidden;",
        ops.layer_norm_dynamic_per_token_quant,
        "hidden2040-tail",
        "gfx950",
        "output 0",
    ),
    "inner stride ignored": (
        "ops/rms_norm.hip",
        "i64(inner) * inner_stride",
        "i64(inner) * hidden * 0",
        ops.rms_norm,
        "3x8-heads",
        "gfx942",
        "output 0",
    ),
    "rows of heads counted as one": (
        "ops/rms_norm.hip",
        "inner = int(row) - outer * inner_count;",
        "inner = int(row);",
        ops.rms_norm_per_block_quant,
        "3x8-heads",
        "gfx950",
        "argument input",
    ),
    "one forgotten": (
        "device/norm_row.h",
        "n * (1.0f + weight)",
        "n * weight",
        ops.fused_add_rms_norm,
        "fp16-one-plus",
        "gfx950",
        "output 0",
    ),
    "one plus the weight rounded": (
        "device/norm_row.h",
        "n * (1.0f + weight)",
        "n * round_to<T>(1.0f + weight)",
        ops.rms_norm_per_block_quant,
        "bf16-one-plus-heads",
        "gfx942",
        "output 0",
    ),
    "one chunk too many": (
        "device/gated_row.h",
        "in_bounds[i] = chunks.index[i] * kChunk < row.hidden;",
        "in_bounds[i] = chunks.index[i] * kChunk <= row.hidden;",
        ops.silu_and_mul_quant,
        "hidden2040-tail",
        "gfx942",
        "argument",
    ),
    "last column dropped": (
        "device/row_output.h",
        "for (int column = thread; column < columns; column += threads) store_divided(column, divisor);",
        "for (int column = thread; column < columns - 1; column += threads) store_divided(column, divisor);",
        ops.rms_norm_dynamic_per_token_quant,
        "bf16-general",
        "gfx942",
        "leaves another residual",
    ),
    "residual not stored": (
        "device/norm_row.h",
        "mem::store((u32x4*)row.residual + chunks.index[i], rounded);",
        "",
        ops.fused_add_rms_norm,
        "fp16",
        "gfx950",
        "leaves another residual",
    ),
    "scales of neighbouring groups": (
        "device/row_output.h",
        "(index >> log2_lanes) * scale_stride",
        "(index >> log2_lanes)",
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
        "gemm/skinny/epilogue.h",
        "b + other <= last_block) sum",
        "b + other < last_block) sum",
        ops.scaled_mm,
        "long-k",
        "gfx950",
        WRONG,
    ),
    "tokens without a barrier": (
        "gemm/skinny/amd/streamed_tile.h",
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
        "gemm/tiled/main_loop.h",
        "b_at[j], block * (b_k * Scale::kBytes)",
        "b_at[j], (block ^ 1) * (b_k * Scale::kBytes)",
        ops.block_scaled_mm,
        "e8m0-tiles-long",
        "gfx950",
        "error|argument",
    ),
    "e8m0 scales widened in the other order": (
        "ops/block_scaled_mm.hip",
        "(at - row * blocks) * block_stride",
        "at - row * blocks",
        ops.block_scaled_mm,
        "e8m0-a",
        "gfx942",
        WRONG,
    ),
    "the neighbouring block's scale": (
        "gemm/skinny/amd/streamed_tile.h",
        "0, u32(step) / kUnitSteps * Scale::kBytes, 0 < bytes",
        "0, (step / kUnitSteps ^ 1) * Scale::kBytes, 0 < bytes",
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
        "PanelVec{first_token + row, vec}",
        "PanelVec{first_token + (row ^ 1), vec}",
        ops.scaled_mm,
        "tiles",
        "gfx942",
        WRONG,
    ),
    "last slice of a tile missing": (
        "gemm/tiled/split_k.h",
        "for (int s = 1; s < p.split_k; ++s)",
        "for (int s = 1; s < p.split_k - 1; ++s)",
        ops.scaled_mm,
        "tiles-long",
        "gfx942",
        WRONG,
    ),
    "weight scale of another block": (
        "gemm/tiled/main_loop.h",
        "b_at[j], block * (b_k * Scale::kBytes), true",
        "b_at[j], block / 2 * (b_k * Scale::kBytes), true",
        ops.block_scaled_mm,
        "tiles",
        "gfx950",
        WRONG,
    ),
    "panel read before it is filled": (
        "gemm/tiled/main_loop.h",
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
    "sums left in the die's cache": (
        "device/amd/buffer.h",
        "to, at, 0, kDeviceScope",
        "to, at, 0, 0",
        ops.scaled_mm,
        "long-k",
        "gfx942",
        "was stored by .*it has no sc1",
    ),
    "sums read from the die's cache": (
        "device/amd/buffer.h",
        "at, offset, kDeviceScope",
        "at, offset, 0",
        ops.scaled_mm,
        "long-k",
        "gfx950",
        "was stored by .*this access has no sc1",
    ),
    "counted before sums are complete": (
        "device/amd/sync.h",
        "__builtin_amdgcn_s_waitcnt(0x0f70);",
        "",
        ops.scaled_mm,
        "long-k",
        "gfx942",
        "was stored by .*no s_waitcnt",
    ),
    "slices counted before they are complete": (
        "device/amd/sync.h",
        "__builtin_amdgcn_s_waitcnt(0x0f70);",
        "",
        ops.scaled_mm,
        "tiles-long",
        "gfx950",
        "was stored by .*no s_waitcnt",
    ),
    "slices left in the die's cache": (
        "device/amd/buffer.h",
        "to, at, 0, kDeviceScope",
        "to, at, 0, 0",
        ops.scaled_mm,
        "tiles-long",
        "gfx950",
        "was stored by .*it has no sc1",
    ),
    "a block's losses counted before they are complete": (
        "device/amd/sync.h",
        "__builtin_amdgcn_s_waitcnt(0x0f70);",
        "",
        ops.load_balancing_loss,
        "bf16",
        "gfx942",
        "was stored by .*no s_waitcnt",
    ),
    "losses read from the die's cache": (
        "device/amd/buffer.h",
        "at, offset, kDeviceScope",
        "at, offset, 0",
        ops.router_z_loss,
        "bf16",
        "gfx950",
        "was stored by .*this access has no sc1",
    ),
    "shared units counted before they are complete": (
        "device/amd/sync.h",
        "__builtin_amdgcn_s_waitcnt(0x0f70);",
        "",
        ops.mxfp8_scaled_mm,
        "long-k",
        "gfx950",
        "was stored by .*no s_waitcnt",
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
    "blocks of shared tiles by the share of others": (
        "gemm/skinny/schedule.h",
        "p.longer_block_divisor.inverse : p.units_per_block_divisor.inverse",
        "p.longer_block_divisor.inverse : p.longer_block_divisor.inverse",
        ops.scaled_mm,
        "long-k",
        "gfx942",
        ".",
    ),
    "the last group of tiles as wide as the others": (
        "gemm/tiled/rasterize.h",
        "u32(in_group) / last_group_divisor",
        "in_group / kGroupM",
        ops.scaled_mm,
        "tiles-padded",
        "gfx942",
        ".",
    ),
    "slices of one panel fewer": (
        "ops/scaled_mm_tiled.hip",
        "(k_slice < p.remainder ? k_slice : p.remainder)",
        "0",
        ops.scaled_mm,
        "tiles-long",
        "gfx950",
        WRONG,
    ),
    "shared sums of the last token missing": (
        "gemm/skinny/epilogue.h",
        "token[v / kLaneVecs] < p.m;",
        "token[v / kLaneVecs] < p.m - 1;",
        ops.mxfp8_scaled_mm,
        "long-k",
        "gfx950",
        WRONG,
    ),
    "a run of results where fewer are left": (
        "gemm/skinny/epilogue.h",
        "if (p.n % kVec) store_odd(value...);",
        "if (false) store_odd(value...);",
        ops.mxfp8_scaled_mm,
        "bias-fp16",
        "gfx950",
        "must be a multiple of",
    ),
    "a run of results where fewer are left, of wide tiles": (
        "gemm/skinny/epilogue.h",
        "else if (p.n % kVec) store(store_odd);",
        "else if (false) store(store_odd);",
        ops.scaled_mm,
        "bias-fp16",
        "gfx942",
        "must be a multiple of",
    ),
    "the scales of a run's first row only": (
        "gemm/skinny/epilogue.h",
        "p.scale_b + u64(row[j] + i) * u32(p.scale_b_row)",
        "p.scale_b + u64(row[j]) * u32(p.scale_b_row)",
        ops.scaled_mm,
        "m16",
        "gfx950",
        WRONG,
    ),
    "a narrow tile's scales of the next block": (
        "gemm/skinny/wave_split_k.h",
        "mem::buffer(scales_b), 0, block * Scale::kBytes",
        "mem::buffer(scales_b), 0, (block + 1) * Scale::kBytes",
        ops.block_scaled_mm,
        "m5",
        "gfx942",
        "bytes at byte .* of argument",
    ),
    "a narrow tile's scales of another token": (
        "gemm/skinny/wave_split_k.h",
        "k_slice.scale_a[t][v] = Scale::load_or_zero(mem::buffer(p.scale_a), token *",
        "k_slice.scale_a[t][v] = Scale::load_or_zero(mem::buffer(p.scale_a), (token ^ 1) *",
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
        "gemm/expert_tiles.h",
        "p.b + expert_tile.expert * p.b_expert",
        "p.b + (expert_tile.expert ^ 1) * p.b_expert",
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
        "gemm/expert_tiles.h",
        "block_of(rows_n + wave_n + j",
        "block_of(wave_n + j",
        ops.fused_experts,
        "block-m65",
        "gfx950",
        WRONG,
    ),
    "the largest of half a group": (
        "device/row_output.h",
        "wave::reduce_group<kGroupSize / kChunk>",
        "wave::reduce_group<kGroupSize / kChunk / 2>",
        ops.fused_experts,
        "block-m65",
        "gfx942",
        WRONG,
    ),
    "weight before the rounding": (
        "device/norm_row.h",
        "normalize<T, !kRounded, kFactor>(exact[i]",
        "normalize<T, kRounded, kFactor>(exact[i]",
        ops.rms_norm,
        "bf16",
        "gfx950",
        "are off",
    ),
    "of equal experts the last": (
        "ops/moe_routing.hip",
        "best[i + step].key > best[i].key",
        "best[i + step].key >= best[i].key",
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
        "groups_before(choice, p, own.group) < p.topk_group",
        "groups_before(choice, p, own.group) <= p.topk_group",
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
        "i >= own.count || x[i] != x[i]",
        "i >= own.count",
        ops.topk_softmax,
        "not-finite",
        "gfx942",
        "output",
    ),
    "fp16 biases taken for bf16": (
        "ops/moe_routing.hip",
        "else if (type == kBf16) add_as<Bf16>",
        "else if (type != kFp32) add_as<Bf16>",
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
        "gemm/group_pairs.h",
        "lists.items[items] = pairs;",
        "lists.items[items] = pairs - 1;",
        ops.fused_experts,
        "block-m17-one-expert",
        "gfx950",
        WRONG,
    ),
    "tokens past a tile forgotten": (
        "gemm/group_pairs.h",
        "rank % mma::kTileTokens == 0;",
        "rank == 0;",
        ops.fused_experts,
        "block-m17-one-expert",
        "gfx942",
        WRONG,
    ),
    "places of an expert's pairs all the same": (
        "gemm/group_pairs.h",
        "place += others[i] < pair;",
        "place += 0;",
        ops.fused_experts,
        "block-m40",
        "gfx942",
        "two waves write it",
    ),
    "experts of the lanes below not counted": (
        "gemm/group_pairs.h",
        "if (lane >= step) sum += below;",
        "if (lane > step) sum += below;",
        ops.fused_experts,
        "block-m40",
        "gfx950",
        "two waves write it",
    ),
    "router weight on input and output": (
        "ops/fused_experts.hip",
        "const float weight = p.apply_weights ? lists.router[pair] : 1.0f;",
        "const float weight = lists.router[pair];",
        ops.fused_experts,
        "block-input-weight",
        "gfx950",
        WRONG,
    ),
    "repeated expert as a pair of its own": (
        "gemm/group_pairs.h",
        "if (other < slot) expert = kNoExpert;",
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
        "k_slice.scale_b[0], k_slice.tokens[0], k_slice.tokens[1],\n                                 k_slice.scale_a[0]",
        "k_slice.scale_a[0], k_slice.tokens[0], k_slice.tokens[1], k_slice.scale_b[0]",
        ops.fused_experts,
        "mx-quantized",
        "gfx950",
        WRONG,
    ),
    "repeats add to each other's weights": (
        "gemm/group_pairs.h",
        "else if (expert != kNoExpert) lists.router",
        "else lists.router",
        ops.fused_experts,
        "bf16-repeated-m22",
        "gfx942",
        "wave",
    ),
    "ids by their lower words": (
        "device/expert_id.h",
        "words == 1 || ",
        "words > 0 || ",
        ops.fused_experts,
        "block-map",
        "gfx950",
        WRONG,
    ),
    "a part of a tile's sums missing": (
        "ops/fused_experts.hip",
        "for (int i = 0; i < p.count; ++i) {",
        "for (int i = 1; i < p.count; ++i) {",
        ops.fused_experts,
        "block",
        "gfx942",
        WRONG,
    ),
    "units of a tile's first block in all": (
        "ops/fused_experts.hip",
        "wave::block_id_y() * mma::kWaves + wave::index()}",
        "wave::index()}",
        ops.fused_experts,
        "block",
        "gfx950",
        WRONG,
    ),
    "order of the pairs read before it is there": (
        "ops/fused_experts.hip",
        "block_barrier();  // hazard: lists are read",
        "// lists are read",
        ops.fused_experts,
        "bf16",
        "gfx942",
        "read here",
    ),
    "loads behind the ring": (
        "ops/fused_experts.hip",
        "load_next(stages[(i + kStages - 1) % kStages]);",
        "load_next(stages[(i + kStages - 2) % kStages]);",
        ops.fused_experts,
        "block-long",
        "gfx950",
        WRONG,
    ),
    "block scale too small": (
        "device/float8.h",
        "return exponent > 8 ? exponent - 8 : 0;",
        "return exponent > 8 ? exponent - 9 : 0;",
        ops.fused_experts,
        "mx",
        "gfx950",
        WRONG,
    ),
}


# name: (file, text, what replaces it, arch, test of test_large_tensors.py, its arguments): an offset in 32 bits
OVERFLOWS = {
    "tiles of a streamed weight": (
        "gemm/skinny/weights.h",
        "first_row / mma::kRows * p.b_tile",
        "first_row / mma::kRows * int(p.b_tile)",
        "gfx942",
        large.test_skinny_products,
        (ops.unquantized_gemm, 5),
    ),
    "tiles of tokens": (
        "ops/scaled_mm_tiled.hip",
        "p.a + first_m * p.a_stride",
        "p.a + first_m * int(p.a_stride)",
        "gfx950",
        large.test_tiled_products,
        (ops.block_scaled_mm, 521, 130),
    ),
    "tiles of a weight": (
        "ops/scaled_mm_tiled.hip",
        "p.b + first_n / 16 * p.b_tile",
        "p.b + first_n / 16 * int(p.b_tile)",
        "gfx942",
        large.test_tiled_products,
        (ops.scaled_mm, 65, 521),
    ),
    "tiles of an MX weight": (
        "ops/mxfp8_scaled_mm.hip",
        "p.b + i64(n) * p.b_row",
        "p.b + n * p.b_row",
        "gfx950",
        large.test_mx_products,
        (5, 265),
    ),
    "scales of an MX weight": (
        "ops/mxfp8_scaled_mm.hip",
        "p.scale_b + i64(n0 >> p.scale_b_shift) * p.scale_b_row",
        "p.scale_b + (n0 >> p.scale_b_shift) * p.scale_b_row",
        "gfx950",
        large.test_mx_products,
        (66, 265),
    ),
    "experts that are streamed": (
        "ops/fused_experts.hip",
        "p.weights + item.expert * p.expert_bytes",
        "p.weights + item.expert * int(p.expert_bytes)",
        "gfx942",
        large.test_experts,
        ("bf16",),
    ),
    "experts in tiles": (
        "gemm/expert_tiles.h",
        "p.b + expert_tile.expert * p.b_expert",
        "p.b + expert_tile.expert * u32(p.b_expert)",
        "gfx950",
        large.test_experts,
        ("block-m65",),
    ),
    "tokens that are quantised": (
        "ops/fused_experts_quantize.hip",
        "(const u16*)p.x + row * p.stride",
        "(const u16*)p.x + row * int(p.stride)",
        "gfx942",
        large.test_experts,
        ("channel",),
    ),
    "rows of the residual": (
        "ops/rms_norm.hip",
        "(u16*)residual + index * residual_stride",
        "(u16*)residual + int(u32(index) * u32(residual_stride))",
        "gfx942",
        far_apart.test_every_argument_that_may_be_large,
        (ops.fused_add_rms_norm,),
    ),
    "rows of heads": (
        "ops/rms_norm.hip",
        "outer * outer_stride +",
        "int(outer * u32(outer_stride)) +",
        "gfx942",
        large.test_heads,
        (ops.rms_norm,),
    ),
    "rows of gate and up": (
        "device/gated_row.h",
        "i64(u32(wave::block_id_x())) * input_stride",
        "int(u32(wave::block_id_x()) * u32(input_stride))",
        "gfx950",
        far_apart.test_every_argument_that_may_be_large,
        (ops.silu_and_mul,),
    ),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return KernelCopy(tmp_path_factory.mktemp("planted"))


class PlantedEmulator(Emulator):
    """Runs kernels as they are with a bug in their sources; those that are launched are compiled then."""

    def __init__(self, kernels: KernelCopy, arch: str, *bug: str):
        super().__init__(arch)
        self.compile = functools.cache(lambda module, symbol: kernels.compile(*bug, module, symbol, arch))

    def launch(self, launch, uninitialised: tuple = ()) -> None:
        self.run(self.compile(launch.module, launch.symbol), launch, uninitialised)


@pytest.fixture
def plant(kernels):
    """A function that makes a PlantedEmulator."""
    return functools.partial(PlantedEmulator, kernels)


def few_of_bugs(bugs: dict[str, tuple]) -> list:
    """A parameter for each bug: one in each file, or op where bugs begin with it, is planted by default."""
    return few_of(bugs, lambda name: frozenset({bugs[name][0]}))


@pytest.mark.parametrize("bug", few_of_bugs(BUGS))
def test_planted_bug_is_caught(bug, plant, monkeypatch):
    require_caught(BUGS[bug], plant, monkeypatch)


def require_caught(bug: tuple, plant, monkeypatch, the_op=None, said: str = "") -> None:
    """A line of BUGS; or of those of one op, which leave out the op and, where it is the same for all, what must be said."""
    if the_op is not None:
        bug = (*bug[:3], the_op, *bug[3:], *filter(None, [said]))
    file, text, replacement, the_op, case_name, arch, said = bug
    case = next(c for c in the_op.cases() if c.name == case_name)
    emulator = plant(arch, file, text, replacement)
    arguments = case.make("cpu", generator_of(case.name), emulator.arch.fp8_dtype)
    the_op.forget()
    try:
        with launch.executor(emulator), pytest.raises((AssertionError, EmulatorError), match=said):
            for config in the_op.configs(the_op.Arguments(*arguments), emulator.arch):  # not all come by the bug
                monkeypatch.setattr(the_op, "default", lambda *_, config=config: config)
                the_op.forget()
                for _ in range(2):  # what a call leaves behind shows in the next
                    run_and_check(the_op, arguments, "cpu")
    finally:
        the_op.forget()
    assert stats()[the_op.name]


@pytest.mark.parametrize("bug", OVERFLOWS)
def test_planted_overflow_is_caught(bug, plant):
    file, text, replacement, arch, test, arguments = OVERFLOWS[bug]
    emulator = plant(arch, file, text, replacement)
    with launch.executor(emulator), pytest.raises((AssertionError, EmulatorError)) as caught:
        test(*arguments, ("cpu", emulator.arch))
    assert "fallback" not in str(caught.value)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fits(name):
    """Those of mutants.py, which takes long, are mended where sources change."""
    mutant = MUTANTS[name]
    path = mutant.path if isinstance(mutant, SeamMutant) else CSRC / mutant.file
    assert mutant.text in path.read_text(), mutant.file
