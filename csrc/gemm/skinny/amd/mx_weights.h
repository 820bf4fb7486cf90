// A step is one group. A lane has eight values of each of its adjacent rows, and multiplies all by the same tokens; the
// group's scale multiplies their sums. A slice's bytes of a row are loaded together, and the scales of its steps by one
// load: the rows' cache lines of all stages exceed L1, so loads of single steps would fetch lines again.
#pragma once
#include "gemm/skinny/mx_weights.h"

template <class Value, int kSteps>
struct TileOperands<Bf16Mx<Value, kSteps>> : MxOperands {
  static constexpr int kWords = Value::kWords, kStepBytes = 16 * kWords;
  template <int kTiles>
  static constexpr int kSliceSteps = kSteps;

  struct Weights {
    u32 word[mma::kLoads][kLaneRows][kWords];
    u32 scales[mma::kLoads][kLaneRows];  // a byte per step of the slice; used in its first step only
  };

  DEVICE static Tile tile(const SkinnyProblem& p, int index) {
    return tile_from(p, index, mma::depth(wave::lane()) / 16 * (4 * kWords), 0);
  }
  // inside: the lane's K are inside. Then all K of the slice are, as K is a multiple of 128.
  DEVICE static void refill(Weights& weights, const Tile& tile, const SkinnyProblem& p, int step, int in_slice,
                            bool inside, bool /*step_inside*/) {
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        u32(&word)[kWords] = weights.word[l][r];
        const int at = step * kStepBytes + r * p.b_row;
        if constexpr (kWords == 1) four_bit::refill(word[0], tile.weights[l], at, inside);
        else four_bit::refill(word[0], word[1], tile.weights[l], at, inside);
        if (in_slice > 0) continue;
        const int scales_at = tile.scales_at[l], from = r * p.scale_b_row + step;
        u32& scales = weights.scales[l][r];
        if constexpr (kSteps == 2) scales = mem::load_short_or_zero(tile.scales, scales_at, from, inside);
        else scales = __builtin_bit_cast(u32, mem::load_float_or_zero(tile.scales, scales_at, from, inside));
      }
  }

  // Adds a slice's products, scaled by group.
  template <int kTiles>
  DEVICE static void add(Sums (&sum)[kTiles], const Weights (&weights)[kSteps], const u32x4 (&tokens)[kSteps][kTiles]) {
    in_order<kSteps * kLaneRows>([&]<int i>() __attribute__((always_inline)) {
      add_row<i / kLaneRows, i % kLaneRows>(sum, weights, tokens[i / kLaneRows]);
    });
  }

  // add for one step, and row kRow of each lane.
  template <int kStep, int kRow, int kTiles>
  DEVICE static void add_row(Sums (&sum)[kTiles], const Weights (&weights)[kSteps], const u32x4 (&tokens)[kTiles]) {
    mma::Weights row;
    float scale[mma::kLoads];
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      row.load[l] = Value::to_bf16(weights[kStep].word[l][kRow]);
      scale[l] = E8m0Scale::value(weights[0].scales[l][kRow] >> 8 * kStep & 255);
    }
    const f32x4 factor = {scale[four_bit::value_load(0)], scale[four_bit::value_load(1)],
                          scale[four_bit::value_load(2)], scale[four_bit::value_load(3)]};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      // kUnit is divided out of the product and not of the scale, as 2^127 / kUnit would overflow.
      const f32x4 product = four_bit::multiply_tile(f32x4{}, row, tokens[t]) * (1.0f / Value::kUnit);
      four_bit::add_scaled(sum[t].value[kRow], product, factor);
    }
  }
};
