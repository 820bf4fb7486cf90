// MX-FP8 values. gfx942's e4m3 is FNUZ: the same bits are half the number, -0 is NaN, and NaN is 240. So magnitudes are
// converted, and signs added; NaN becomes 480.
#pragma once
#include "four_bit.h"
#include "numerics.h"

namespace mx_values {

// The upper halves of two floats as a pair of bf16 values.
DEVICE u32 upper_halves(f32x2 x) {
  const u32x2 bits = __builtin_bit_cast(u32x2, x);
  return __builtin_amdgcn_perm(bits.y, bits.x, 0x07060302u);
}

#if defined(__gfx942__)
constexpr float kE4m3Unit = 0.5f;
template <bool kUpper>
DEVICE u32 e4m3_pair(u32 word) {
  const u32 signs = __builtin_amdgcn_perm(word, word, kUpper ? 0x030c020cu : 0x010c000cu) & 0x80008000u;
  return upper_halves(numerics::from_e4m3x2<kUpper>(word & 0x7f7f7f7fu)) | signs;
}
#else
constexpr float kE4m3Unit = 1.0f;
template <bool kUpper>
DEVICE u32 e4m3_pair(u32 word) {
  return upper_halves(numerics::from_e4m3x2<kUpper>(word));
}
#endif

}  // namespace mx_values
