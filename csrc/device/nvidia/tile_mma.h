// Warpgroup MMA of token panels and weight panels in LDS, 128 K bytes. Types are fp8, bf16 and fp16, accumulation is
// fp32 (wgmma.mma_async.m64nN; PTX ISA, section 9.7.15 "Asynchronous warpgroup level matrix instructions").
#pragma once
#include "mma.h"

namespace tile {

constexpr int kXcds = 1;                // one L2 cache: no block remapping
constexpr int kWaveTokens = 16;         // tile tokens per wave, a quarter of the warpgroup's
constexpr int kAccumulatorTokens = 16;  // AccumulatorTile
constexpr int kAccumulatorRows = 32;
constexpr int kLaneTokens = 2;  // accumulated per lane

// Lane l accumulates tokens l / 4 and l / 4 + 8 and 8 weight rows, from 8 * (l % 4) on.
struct AccumulatorTile {
  f32x4 sum[4];
  DEVICE float get(int token, int row) const { return sum[row / 2][token * 2 + row % 2]; }
};
DEVICE int accumulator_token(int lane, int token) { return lane / 4 + token * 8; }
DEVICE int accumulator_row(int lane) { return lane % 4 * 8; }
// The weight row stored as row `row` of each 32 panel rows. An instruction gives lane l the sums for 2 of each 8 rows,
// from 2 * (l % 4) on; this permutation makes a lane's 8 rows consecutive.
DEVICE int weight_row(int row) { return row % 8 / 2 * 8 + row / 8 * 2 + row % 2; }

// A wave's share of a tile: kM x kN accumulator tiles.
template <class Type, int kM, int kN, bool kPingPong>
struct Multiplier {
  static_assert(kM == 1 && !kPingPong);
  mma::Panel tokens_at, weights_at;

  DEVICE Multiplier(int first_token, int first_row, bool weights_in_fragment_order)
      : tokens_at(first_token / 64 * 64, false), weights_at(first_row, weights_in_fragment_order) {}
  DEVICE static void ping_pong_barrier() {}
  // Adds the product of two panels, times factors if kScaled: one factor for a lane's first 4 weight rows of an
  // accumulator tile, one for its last 4. The tensor cores accumulate e4m3 products with about 14 bits, so their sums
  // span only 128 K (DeepSeek-V3 Technical Report, section 3.3.2).
  template <bool kScaled>
  DEVICE void multiply_add(AccumulatorTile (&sums)[kM][kN], const lds::Local<u8>* tokens, const lds::Local<u8>* weights,
                           const float (&factor)[kN][2][kM][kLaneTokens]) const {
    mma::Sum<Type> product[kN * 16];
    mma::multiply_panels<Type>(product, tokens_at, tokens, weights_at, weights);
#pragma unroll
    for (int i = 0; i < kN * 4; ++i) {
      const mma::SumVec<Type> values = {product[i * 4], product[i * 4 + 1], product[i * 4 + 2], product[i * 4 + 3]};
      const f32x4 sum = __builtin_bit_cast(f32x4, values);
      if constexpr (__is_same(Type, I8) && !kScaled) {
        sums[0][i / 4].sum[i % 4] = add_whole(sums[0][i / 4].sum[i % 4], sum);
      } else {
        const f32x4 p = float_sums<Type>(sum);
        const auto& of = factor[i / 4][i % 4 / 2][0];
        sums[0][i / 4].sum[i % 4] += kScaled ? p * f32x4{of[0], of[0], of[1], of[1]} : p;
      }
    }
  }
};

}  // namespace tile
