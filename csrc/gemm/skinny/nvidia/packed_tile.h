// Sums have the layout of mma::multiply_tile: a lane has two rows.
#pragma once
#include "device/four_bit.h"
#include "device/scale.h"

namespace packed {

template <int kGroups>
constexpr bool kExchanges = kGroups == 4;

// 16 bytes at lane_offset + further + offset, or zeros.
DEVICE u32x4 load_further(mem::Buffer from, int lane_offset, int further, int offset, bool inside) {
  return mem::load_or_zero(from, lane_offset + further, offset, inside);
}

// Token and row of a lane's value i in the tile.
constexpr int kValueTokens = mma::kValueTokens, kValueRows = 2;
DEVICE int value_token(int lane, int i) { return mma::value_token(lane, i); }
DEVICE int value_row(int lane, int i) { return mma::value_row(lane, i); }
DEVICE int mma_value(int /*lane*/, int i) { return i; }
DEVICE int mma_lane(int lane, int /*i*/) { return lane; }

// Word q of lane 4 * r + i becomes word i of lane 4 * r + q.
DEVICE u32x4 exchanged(u32x4 w) {
  const bool odd = wave::lane() & 1, high = wave::lane() & 2;
  const u32 x = wave::other_half<2>(high ? w.x : w.z), y = wave::other_half<2>(high ? w.y : w.w);
  const u32x4 pairs = high ? u32x4{x, y, w.z, w.w} : u32x4{w.x, w.y, x, y};
  const u32 even_pair = wave::other_half<1>(odd ? pairs.x : pairs.y),
            odd_pair = wave::other_half<1>(odd ? pairs.z : pairs.w);
  return odd ? u32x4{even_pair, pairs.y, odd_pair, pairs.w} : u32x4{pairs.x, even_pair, pairs.z, odd_pair};
}

// True if a lane multiplies its weights by the scale of their group, the only one that it then needs: powers of two leave
// them in bf16.
template <class Scale, int kGroups>
constexpr bool kScalesWeights = __is_same(Scale, E8m0Scale) && kGroups == 4;

// Adds the product of a slice.
template <class Value, int kGroups>
DEVICE f32x4 multiply(f32x4 sum, const mma::Weights& weights, const u32x4 (&tokens)[four_bit::kTokenVecs],
                      const float (&scales)[kValueRows][kGroups]) {
  mma::Weights words = weights;
  if constexpr (kExchanges<kGroups>)
#pragma unroll
    for (u32x4& row : words.load) row = exchanged(row);
  f32x4 product = {};
#pragma unroll
  for (int i = 0; i < four_bit::kTokenVecs; ++i) {
    mma::Weights values;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) values.load[l] = Value::to_pairs(words.load[l][i]);
    product = mma::multiply_tile<Bf16>(kGroups == 1 ? product : f32x4{}, values, four_bit::in_pairs(tokens[i]));
    if (kGroups == 1 && i < four_bit::kTokenVecs - 1) continue;
    const int group = kGroups == 1 ? 0 : i;
#pragma unroll
    for (int v = 0; v < 4; ++v) sum[v] += product[v] * scales[v / 2][group];
  }
  return sum;
}
// The same with kScalesWeights, and factors for pairs.
template <class Value>
DEVICE f32x4 multiply(f32x4 sum, const mma::Weights& weights, const u32x4 (&tokens)[four_bit::kTokenVecs],
                      const u32 (&factors)[kValueRows][1]) {
  static_assert(kValueRows == mma::kLoads);
#pragma unroll
  for (int i = 0; i < four_bit::kTokenVecs; ++i) {
    mma::Weights values;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) values.load[l] = Value::scaled_pairs(weights.load[l][i], factors[l][0]);
    sum = mma::multiply_tile<Bf16>(sum, values, four_bit::in_pairs(tokens[i]));
  }
  return sum;
}

}  // namespace packed
