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

}  // namespace mx_values
