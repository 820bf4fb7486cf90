// 4-bit values by arithmetic on pairs of bf16.
#pragma once
#include "buffer.h"
#include "mma.h"
#include "numerics.h"

namespace four_bit {

using Pair = __bf16 __attribute__((ext_vector_type(2)));

DEVICE Pair pair_of(u32 bits) { return __builtin_bit_cast(Pair, bits); }
DEVICE u32 bits_of(Pair pair) { return __builtin_bit_cast(u32, pair); }
// The lower, or upper, halves of two words. By hand, as ptxas would take two instructions.
template <int kBytes>
DEVICE u32 bytes_of(u32 low, u32 high) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "n"(kBytes));
  return bytes;
}
DEVICE u32 lower_halves(u32 low, u32 high) { return bytes_of<0x5410>(low, high); }
DEVICE u32 upper_halves(u32 low, u32 high) { return bytes_of<0x7632>(low, high); }
// (bits & mask) | others. By hand, too: with two constants ptxas would take two instructions.
DEVICE u32 masked_or(u32 bits, u32 mask, u32 others) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "r"(mask), "r"(others));
  return result;
}
DEVICE u32 product(u32 pair, u32 factors) { return bits_of(pair_of(pair) * pair_of(factors)); }
// A scale for pairs of values, in units that keep bf16 products in range.
template <int kExponent>
struct PairFactor {
  using Type = u32;
  static constexpr float kUnit = 1.0f / (1 << kExponent);
  DEVICE static u32 of(float scale) { return numerics::to_bf16x2({scale * kUnit, scale * kUnit}); }
};

// A word's eight values are converted as pairs of values 0 and 4, 1 and 5, 2 and 6, 3 and 7.
DEVICE u32x4 in_pairs(u32x4 values) {
  return {lower_halves(values.x, values.z), upper_halves(values.x, values.z), lower_halves(values.y, values.w),
          upper_halves(values.y, values.w)};
}
DEVICE u32x4 from_pairs(u32x4 pairs) {
  return {lower_halves(pairs.x, pairs.y), lower_halves(pairs.z, pairs.w), upper_halves(pairs.x, pairs.y),
          upper_halves(pairs.z, pairs.w)};
}

// int4: 0 to 15 for -8 to 7.
struct Int4 {
  // The numbers in bits 0 to 3 and 16 to 19: bf16's 128 and more, less 136.
  DEVICE static u32 pair(u32 bits) {
    return bits_of(pair_of(masked_or(bits, 0x000f000fu, 0x43004300u)) - pair_of(0x43084308u));
  }
  DEVICE static u32x4 to_pairs(u32 word) { return {pair(word), pair(word >> 4), pair(word >> 8), pair(word >> 12)}; }
};

// As on AMD, where another unit takes fewer instructions.
struct Int4Sixteenths : Int4 {
  static constexpr float kUnit = 1.0f;
};

// Eight int4 columns of eight rows: a word per row, and a column's eight values as bf16.
struct Int4Columns {
  const u32 (&row)[8];
  DEVICE explicit Int4Columns(const u32 (&words)[8]) : row(words) {}
  template <int kColumn>
  DEVICE u32 pair(int first) const {
    return Int4::pair(bytes_of < kColumn<4 ? 0x5410 : 0x7632>(row[first], row[first + 1]) >> kColumn % 4 * 4);
  }
};

// e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives.
struct E2m1 {
  static constexpr float kUnit = 1.0f;
  // Exponent and mantissa as bf16's lowest: numbers 2^126 times too small, which the factor kRaise corrects.
  static constexpr u32 kRaise = 0x7e807e80u;
  DEVICE static u32x4 raw_pairs(u32 word) {
    constexpr u32 kSigns = 0x80008000u, kOthers = 0x01c001c0u;
    return {masked_or(word << 12, kSigns, word << 6 & kOthers), masked_or(word << 8, kSigns, word << 2 & kOthers),
            masked_or(word << 4, kSigns, word >> 2 & kOthers), masked_or(word, kSigns, word >> 6 & kOthers)};
  }
  DEVICE static u32x4 to_pairs(u32 word) {
    const u32x4 raw = raw_pairs(word);
    return {product(raw.x, kRaise), product(raw.y, kRaise), product(raw.z, kRaise), product(raw.w, kRaise)};
  }
  DEVICE static u32x4 to_bf16(u32 word) { return from_pairs(to_pairs(word)); }

  // The values times a scale that is a power of two: exact, as the largest, 6 * 2^127, is 1.5 * 2^126 in these units.
  using Factor = PairFactor<3>;
  DEVICE static u32x4 scaled_pairs(u32 word, u32 factors) {
    const u32x4 values = to_pairs(word);
    return {product(values.x, factors), product(values.y, factors), product(values.z, factors),
            product(values.w, factors)};
  }
};

// As mma::multiply_tile. Value i belongs to token value_token and to row mma::row(lane, value_load(i)).
DEVICE f32x4 multiply_tile(f32x4 sum, const mma::Weights& weights, u32x4 tokens) {
  return mma::multiply_tile<Bf16>(sum, weights, tokens);
}
DEVICE int value_token(int lane, int i) { return mma::value_token(lane, i); }
DEVICE constexpr int value_load(int i) { return i / 2; }

// Adds products times a factor.
DEVICE void add_scaled(f32x4& sum, f32x4 product, f32x4 factor) { sum += product * factor; }

// Nothing to order: ptxas chooses where instructions are issued.
DEVICE void issue(const f32x4&) {}

// A streaming load of a word, or two, as mem::refill.
DEVICE void refill(u32& word, const mem::Cursor& from, int offset, bool inside) {
  if (inside) word = mem::load_once<u32>(from.at + offset);
}
DEVICE void refill(u32& word, u32& next, const mem::Cursor& from, int offset, bool inside) {
  if (!inside) return;
  const u32x2 words = mem::load_once<u32x2>(from.at + offset);
  word = words.x, next = words.y;
}

}  // namespace four_bit
