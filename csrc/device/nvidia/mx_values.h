// MX-FP8 values.
#pragma once
#include "four_bit.h"
#include "numerics.h"

namespace mx_values {

constexpr float kE4m3Unit = 1.0f;
// The lower or upper pair of a word as bf16.
template <bool kUpper>
DEVICE u32 e4m3_pair(u32 word) {
  return numerics::to_bf16x2(numerics::from_e4m3x2<kUpper>(word));
}

// Two words' eight values times a scale, as four_bit::E2m1::scaled_pairs; values 0 and 2, 1 and 3 of each word. NaN becomes
// 480. (Values whose scale is below 2^-115 are rounded to multiples of 2^-124.)
struct E4m3 {
  using Factor = four_bit::PairFactor<9>;
  static constexpr u32 kRaise = 0x7b807b80u;  // 2^120
  DEVICE static u32 raw_pair(u32 signs, u32 others) {
    return four_bit::masked_or(signs, 0x80008000u, others & 0x07f007f0u);
  }
  DEVICE static u32 scaled(u32 raw, u32 factors) { return four_bit::product(four_bit::product(raw, kRaise), factors); }
  DEVICE static u32x4 scaled_pairs(u32 first, u32 second, u32 factors) {
    return {scaled(raw_pair(first << 8, first << 4), factors), scaled(raw_pair(first, first >> 4), factors),
            scaled(raw_pair(second << 8, second << 4), factors), scaled(raw_pair(second, second >> 4), factors)};
  }
  DEVICE static u32x4 in_pairs(u32x4 values) {
    using namespace four_bit;
    return {lower_halves(values.x, values.y), upper_halves(values.x, values.y), lower_halves(values.z, values.w),
            upper_halves(values.z, values.w)};
  }
};

}  // namespace mx_values
