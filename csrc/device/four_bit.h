// 4-bit weights, as exact bf16 values, and their products by groups that share a scale. Group scales are applied to fp32
// sums: a value times its scale does not fit bf16. A word has eight values, the first in its lowest four bits. Scales
// that are powers of two are E8m0Scale (scale.h).
#pragma once
#if defined(__AMDGCN__)
#include "amd/four_bit.h"
#elif defined(__NVPTX__)
#include "nvidia/four_bit.h"
#endif

namespace four_bit {
constexpr int kTokenVecs = 4;  // vectors of 16 bytes of a token that 16 bytes of weights multiply
}

// Scales in bf16.
struct Bf16Scale {
  using Type = u16;
  using Loaded = u32;
  static constexpr int kBytes = 2;
  DEVICE static Loaded load_or_zero(mem::Buffer from, int lane_offset, int offset, bool inside) {
    return mem::load_short_or_zero(from, lane_offset, offset, inside);
  }
  DEVICE static float value(Loaded scale) { return __builtin_bit_cast(float, scale << 16); }
};
