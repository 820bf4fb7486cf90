// Values of MX formats as exact bf16, eight at a time, for a group's scale to multiply the fp32 sums of their products
// (E8m0Scale in scale.h). kUnit is the factor that the products lack.
#pragma once
#include "four_bit.h"
#include "scale.h"

struct MxE2m1 {
  static constexpr int kWords = 1;
  static constexpr float kUnit = four_bit::E2m1::kUnit;
  DEVICE static u32x4 to_bf16(const u32 (&word)[kWords]) { return four_bit::E2m1::to_bf16(word[0]); }
};

// e4m3 of OCP. Where the GPU's e4m3 is FNUZ, the same bits are half the number, -0 is NaN, and NaN is 240: magnitudes
// are converted, and signs added. So NaN becomes 480 there; elsewhere it stays NaN.
struct MxE4m3 {
  static constexpr int kWords = 2;
#if defined(__gfx942__)
  static constexpr float kUnit = 2.0f;
  template <bool kUpper>
  DEVICE static u32 pair(u32 word) {
    const u32 signs = __builtin_amdgcn_perm(word, word, kUpper ? 0x030c020cu : 0x010c000cu) & 0x80008000u;
    return upper_halves(numerics::from_e4m3x2<kUpper>(word & 0x7f7f7f7fu)) | signs;
  }
#else
  static constexpr float kUnit = 1.0f;
  template <bool kUpper>
  DEVICE static u32 pair(u32 word) {
    return upper_halves(numerics::from_e4m3x2<kUpper>(word));
  }
#endif
  DEVICE static u32 upper_halves(f32x2 x) {
    const u32x2 bits = __builtin_bit_cast(u32x2, x);
    return bits.x >> 16 | (bits.y & 0xffff0000u);
  }
  DEVICE static u32x4 to_bf16(const u32 (&word)[kWords]) {
    return {pair<false>(word[0]), pair<true>(word[0]), pair<false>(word[1]), pair<true>(word[1])};
  }
};
