// Skinny GEMM arguments and work partition.
#pragma once
#include "device/divisor.h"
#include "device/scale.h"

struct SkinnyProblem {
  const u8* a;           // [M, K], rows a_stride bytes apart
  const u8* b;           // [N, K], or in fragment order [N / 16, K bytes / 64, 4, 16 rows, 16 bytes]
  void* out;             // [M, N], out_type
  float* partials;       // [groups, blocks, 2, values per thread, threads, floats per value]; null as counters
  u32* counters;         // [groups, tiles], zeros; null if every tile has one block
  const float* scale_a;  // kRow: [M] or [1]; kBlock: [M, K / 128], a scale.h type
  const float* scale_b;  // kRow: [N] or [1]; kBlock: [N / 128, K / 128]
  const void* bias;      // [N], out_type, or null
  i64 b_tile;            // byte stride between groups of 16 rows of b
  int a_stride;          // bytes between tokens
  int b_row, b_step;     // byte strides between rows of b, and between steps; a step has four evenly spaced vectors
  int m, n, k;           // k in bytes
  int scale_a_row, scale_a_k, scale_b_row;  // element strides of scales: between tokens, K blocks, rows of b
  int out_type;                             // 0 bf16, 1 fp16, 2 fp32
  int steps_per_tile;
  int steps_per_unit;                   // steps that stay in one block
  int units_per_block, remainder;       // the first `remainder` blocks have one extra unit
  int units_per_tile, remainder_units;  // units of the first `remainder` blocks
  int group_partials, group_tiles;      // floats of `partials`, and `counters`, of each group of tokens (block_id_y)
  Divisor units_per_tile_divisor, units_per_block_divisor, longer_block_divisor;  // longer: units_per_block + 1
};

// Waits once for all arguments that a kernel reads first.
template <class... More>
DEVICE void wait_for_arguments(const SkinnyProblem& p, const More&... more) {
  mem::wait_for_scalars(p.b, p.b_tile, p.b_row, p.b_step, p.a, p.a_stride, p.m, p.n, p.k, p.steps_per_tile,
                        p.steps_per_unit, p.units_per_block, p.remainder, p.units_per_tile_divisor.inverse,
                        p.units_per_tile_divisor.shift, more...);
}

constexpr int kTileRows = mma::kWaves * mma::kRows;

// b is [gate | up], and the epilogue stores silu(gate) * up, quantized: out is [M, N / 2] e4m3.
struct GatedProblem : SkinnyProblem {
  const float* out_scale;  // [1]
};
DEVICE void wait_for_arguments(const GatedProblem& p) {
  wait_for_arguments(static_cast<const SkinnyProblem&>(p), p.bias, p.out_scale);  // bias: for one wide load
}
template <bool kGated>
struct ProblemOf {
  using Type = SkinnyProblem;
};
template <>
struct ProblemOf<true> {
  using Type = GatedProblem;
};
// A gated tile interleaves gate and up rows, four of each, so a column's two rows are four apart in one wave.
constexpr int kGatedRows = 4;
DEVICE int gated_column(int row) { return row / (2 * kGatedRows) * kGatedRows + row % kGatedRows; }
DEVICE bool is_up(int row) { return row / kGatedRows % 2; }
// The row of b for a tile row. Rows past the last column repeat it.
DEVICE int gated_row(const SkinnyProblem& p, int row) {
  const int columns = p.n / 2, column = gated_column(row);
  return (column < columns ? column : columns - 1) + (is_up(row) ? columns : 0);
}
