// Types of the scales in HBM: how a lane loads one, holds it, and what it is worth; of a word that holds it, too.
#pragma once
#include "gpu.h"

enum class Scales { kNone, kRow, kBlock, kMx };  // kMx: e8m0 scales, which the matrix instruction takes (amd/mx.h)

constexpr int kScaleBlock = 128;  // of K per scale of kBlock, and rows of b

struct Fp32Scale {
  using Type = float;
  using Loaded = float;
  static constexpr int kBytes = 4;
  DEVICE static Loaded load_or_zero(mem::Buffer from, int lane_offset, int offset, bool inside) {
    return mem::load_float_or_zero(from, lane_offset, offset, inside);
  }
  DEVICE static float value(Loaded scale) { return scale; }
  DEVICE static float of_word(u32 word, u32 /*address*/) { return __builtin_bit_cast(float, word); }
};

// Powers of two: byte e is 2^(e - 127), 255 is NaN. Held as words: of bytes the compiler would make words of four, and wait for
// the loads to do so.
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
  DEVICE static float of_word(u32 word, u32 address) { return value(word >> address % 4 * 8 & 0xff); }
};
