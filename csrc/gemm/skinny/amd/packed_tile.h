// Tokens are the first operand, so that a lane's four sums are of one row: it needs the scales of this row only.
#pragma once
#include "device/four_bit.h"

namespace packed {

#if defined(__gfx942__)
template <int kGroups>
constexpr bool kExchanges = false;
#else
template <int kGroups>
constexpr bool kExchanges = kGroups == 4;
#endif

// True if a lane multiplies its weights by the scale of their group.
template <class Scale, int kGroups>
constexpr bool kScalesWeights = false;

// 16 bytes at lane_offset + further + offset, or zeros. Vectors of a token share the masked address, as `further` is an
// immediate, and a masked lane stays outside with it.
DEVICE u32x4 load_further(mem::Buffer from, int lane_offset, int further, int offset, bool inside) {
  constexpr int kOutside = -0x7fffffff - 1;
  return __builtin_amdgcn_raw_buffer_load_b128(from, (inside ? lane_offset : kOutside) + further, offset, 0);
}

// Token and row of a lane's value i in the tile.
constexpr int kValueTokens = 4, kValueRows = 1;
DEVICE int value_token(int lane, int i) { return lane / 16 * 4 + i; }
DEVICE int value_row(int lane, int /*i*/) { return lane % 16; }
// Value and lane that have this sum in the layout of mma::value_token and value_row.
DEVICE int mma_value(int lane, int /*i*/) { return lane % 4; }
DEVICE int mma_lane(int lane, int i) { return lane % 16 / 4 * 16 + value_token(lane, i); }

#if !defined(__gfx942__)
// Word q of lane 16 * i + r becomes word i of lane 16 * q + r.
DEVICE u32x4 exchanged(u32x4 w) {
  const auto a = __builtin_amdgcn_permlane32_swap(w.x, w.z, false, false),
             b = __builtin_amdgcn_permlane32_swap(w.y, w.w, false, false);
  const auto low = __builtin_amdgcn_permlane16_swap(a[0], b[0], false, false),
             high = __builtin_amdgcn_permlane16_swap(a[1], b[1], false, false);
  return {low[0], low[1], high[0], high[1]};
}
#endif

// Adds the product of a slice.
template <class Value, int kGroups>
DEVICE f32x4 multiply(f32x4 sum, const mma::Weights& weights, const u32x4 (&tokens)[four_bit::kTokenVecs],
                      const float (&scales)[kValueRows][kGroups]) {
  u32x4 words = weights.load[0];
  if constexpr (kGroups == 1) {
    f32x4 product = {};
#pragma unroll
    for (int i = 0; i < four_bit::kTokenVecs; ++i)
      product = mma::multiply_add<Bf16>(product, tokens[i], Value::to_bf16(words[i]));
    // A packed multiply-add would also read the register after the scale's, and wait for the next slice's load to it.
    const float scale = scales[0][0];
    four_bit::add_scaled(sum, product, f32x4{scale, scale, scale, scale});
    return sum;
  } else {
#if defined(__gfx942__)
    four_bit::GroupSums products;
#pragma unroll
    for (int i = 0; i < four_bit::kTokenVecs; ++i) products.multiply_add(tokens[i], Value::to_bf16(words[i]));
    sum += products.of_group<0>() * scales[0][0];
    sum += products.of_group<1>() * scales[0][1];
    sum += products.of_group<2>() * scales[0][2];
    sum += products.of_group<3>() * scales[0][3];
#else
    words = exchanged(words);
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      sum += mma::multiply_add<Bf16>(f32x4{}, tokens[g], Value::to_bf16(words[g])) * scales[0][g];
#endif
    return sum;
  }
}

}  // namespace packed
