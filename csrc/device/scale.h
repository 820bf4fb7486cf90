// Scale types in HBM: the load, and the register type. `value` converts a register to fp32, `of_word` an LDS word.
#pragma once
#include "gpu.h"

// kMx: e8m0 scales that the matrix instruction applies (amd/mx.h).
enum class ScaleGranularity { kNone, kRow, kBlock, kMx };

constexpr int kScaleBlock = 128;  // K per kBlock scale, and rows of b

struct Fp32Scale {
  using Type = float;
  using Loaded = float;
  static constexpr int kBytes = 4;
  DEVICE static Loaded load_or_zero(mem::Buffer from, int lane_offset, int offset, bool inside) {
    return mem::load_float_or_zero(from, lane_offset, offset, inside);
  }
  DEVICE static float value(Loaded scale) { return scale; }
  DEVICE static float of_word(u32 word) { return __builtin_bit_cast(float, word); }
};

// Powers of two: byte e is 2^(e - 127), 255 is NaN. Each scale has its own register: the compiler would pack four bytes
// into a word, and wait for the loads to do so.
struct E8m0Scale {
  using Type = u8;
  using Loaded = u32;
  static constexpr int kBytes = 1;
  DEVICE static Loaded load_or_zero(mem::Buffer from, int lane_offset, int offset, bool inside) {
    return mem::load_byte_or_zero(from, lane_offset, offset, inside);
  }
  DEVICE static float value(Loaded scale) {
    constexpr u32 kSmallest = 1u << 22;  // 2^-127, subnormal
    const float power = __builtin_bit_cast(float, __builtin_elementwise_max(scale << 23, kSmallest));
    return __builtin_fmaf(power, 0.0f, power);  // infinity becomes NaN
  }
  DEVICE static float of_word(u32 word) { return value(word); }
};
