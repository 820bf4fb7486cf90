// A lane has 16 adjacent bytes of each of its rows in a slice: 16 K of e4m3 or 32 of e2m1, all of one group. They are
// multiplied by its scale before the matrix instruction, which then adds over groups: scales are powers of two, so that
// these products are bf16 values, in units that keep the largest in range.
#pragma once
#include "gemm/skinny/mx_weights.h"

// Eight values of a lane's words, for vector kVec of a token, times their scale, and the tokens in the same order.
template <class Value>
struct ScaledMx;
template <>
struct ScaledMx<MxE4m3> : mx_values::E4m3 {
  template <int kVec>
  DEVICE static u32x4 values(u32x4 words, u32 factors) {
    return scaled_pairs(words[2 * kVec], words[2 * kVec + 1], factors);
  }
};
template <>
struct ScaledMx<MxE2m1> : four_bit::E2m1 {
  template <int kVec>
  DEVICE static u32x4 values(u32x4 words, u32 factors) {
    return scaled_pairs(words[kVec], factors);
  }
  DEVICE static u32x4 in_pairs(u32x4 tokens) { return four_bit::in_pairs(tokens); }
};

template <class Value, int kSteps>
struct TileOperands<Bf16Mx<Value, kSteps>> : MxOperands {
  using Scaled = ScaledMx<Value>;
  static constexpr int kStepBytes = 16 * Value::kWords;
  static_assert(kSteps * kStepBytes == mma::kDepth);
  static constexpr bool kAdjacentSteps = true;
  static constexpr float kUnit = Scaled::Factor::kUnit;
  template <int kTiles>
  static constexpr int kSliceSteps = kSteps;
  template <int kTiles>
  static constexpr int kResident = kTiles == 1 ? 3 : 2;

  struct Weights {  // of a slice, in its first step
    u32x4 words[mma::kLoads][kLaneRows];
    u32 scales[mma::kLoads][kLaneRows];
  };

  DEVICE static Tile tile(const SkinnyProblem& p, int index) {
    return tile_from(p, index, mma::depth(wave::lane()), mma::depth(wave::lane()) * kSteps / mma::kDepth);
  }
  // inside: the lane's K are inside. Then all K of the slice are, as K is a multiple of 128.
  DEVICE static void refill(Weights& weights, const Tile& tile, const SkinnyProblem& p, int step, int in_slice,
                            bool inside, bool /*step_inside*/) {
    if (in_slice > 0) return;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      mem::Cursor row{tile.weights[l].at + step * kStepBytes};
      mem::Buffer scale = tile.scales + tile.scales_at[l] + step;
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        mem::refill(weights.words[l][r], row, 0, inside);
        weights.scales[l][r] = mem::load_byte_or_zero(scale, 0, 0, inside);
        row.at += u32(p.b_row), scale += u32(p.scale_b_row);
      }
    }
  }

  // Adds a slice's products.
  template <int kTiles>
  DEVICE static void add(Sums (&sum)[kTiles], const Weights (&weights)[kSteps], const u32x4 (&tokens)[kSteps][kTiles]) {
    u32 factors[mma::kLoads][kLaneRows];
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) factors[l][r] = Scaled::Factor::of(E8m0Scale::value(weights[0].scales[l][r]));
    in_order<kSteps>([&]<int v>() __attribute__((always_inline)) {
      u32x4 in_pairs[kTiles];
#pragma unroll
      for (int t = 0; t < kTiles; ++t) in_pairs[t] = Scaled::in_pairs(tokens[v][t]);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        mma::Weights row;
#pragma unroll
        for (int l = 0; l < mma::kLoads; ++l)
          row.load[l] = Scaled::template values<v>(weights[0].words[l][r], factors[l][r]);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) sum[t].value[r] = four_bit::multiply_tile(sum[t].value[r], row, in_pairs[t]);
      }
    });
  }
};
