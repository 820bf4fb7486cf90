// The arguments of a skinny GEMM, and how its work is divided.
#pragma once
#include "device/divisor.h"
#include "device/scale.h"

struct SkinnyProblem {
  const u8* a;      // [M, K], rows a_stride bytes apart
  const u8* b;      // [N, K], or in fragment order [N / 16, K bytes / 64, 4, 16 rows, 16 bytes]
  void* out;        // [M, N] of out_type
  float* partials;  // [blocks, 2, values of a thread, threads, floats of a value]; null if every tile has one block
  u32* counters;    // [tiles], 0; null if every tile has one block
  const float* scale_a;  // kRow: [M] or [1]; kBlock: [M, K / 128], of a type of scale.h
  const float* scale_b;  // kRow: [N] or [1]; kBlock: [N / 128, K / 128]
  const void* bias;      // [N] of out_type, or null
  i64 b_tile;            // bytes between 16 rows of b and the next 16
  int a_stride;          // bytes between tokens
  int b_row, b_step;  // bytes between rows of b, and between steps; the four times 16 bytes of a step lie evenly in it
  int m, n, k;        // k in bytes
  int scale_a_row, scale_a_k, scale_b_row;  // elements between the scales of tokens, of K's blocks, of b's rows
  int out_type;                             // 0 bf16, 1 fp16, 2 fp32
  int steps_per_tile;
  int steps_per_unit;                   // steps that one block has together
  int units_per_block, remainder;       // the first `remainder` blocks have one unit more
  int units_per_tile, remainder_units;  // units of the first `remainder` blocks
  Divisor units_per_tile_divisor, units_per_block_divisor, longer_block_divisor;  // longer: units_per_block + 1
};

// One wait for all arguments that a kernel begins with.
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
// A tile of it has rows of gate and of up in turn, four of each. So a column's two rows are four apart, in one wave.
constexpr int kGatedRows = 4;
DEVICE int gated_column(int row) { return row / (2 * kGatedRows) * kGatedRows + row % kGatedRows; }
DEVICE bool is_up(int row) { return row / kGatedRows % 2; }
// The row of b that a row of the tiles is. Past the last column it is a row of the last one.
DEVICE int gated_row(const SkinnyProblem& p, int row) {
  const int columns = p.n / 2, column = gated_column(row);
  return (column < columns ? column : columns - 1) + (is_up(row) ? columns : 0);
}
