// 4-bit values by arithmetic on pairs of bf16.
#pragma once
#include "buffer.h"
#include "mma.h"

namespace four_bit {

using Pair = __bf16 __attribute__((ext_vector_type(2)));

DEVICE Pair pair_of(u32 bits) { return __builtin_bit_cast(Pair, bits); }
DEVICE u32 bits_of(Pair pair) { return __builtin_bit_cast(u32, pair); }
// The lower, or upper, halves of two words.
DEVICE u32 lower_halves(u32 low, u32 high) { return (low & 0xffffu) | high << 16; }
DEVICE u32 upper_halves(u32 low, u32 high) { return low >> 16 | (high & 0xffff0000u); }

// int4: 0 to 15 for -8 to 7.
struct Int4 {
  // The numbers in bits 0 to 3 and 16 to 19: bf16's 128 and more, less 136.
  DEVICE static u32 pair(u32 bits) { return lowered((bits & 0x000f000fu) | 0x43004300u); }
  DEVICE static u32 lowered(u32 raised) { return bits_of(pair_of(raised) - pair_of(0x43084308u)); }
  DEVICE static u32x4 to_bf16(u32 word) {
    const u32 a = pair(word), b = pair(word >> 4), c = pair(word >> 8), d = pair(word >> 12);
    return {lower_halves(a, b), lower_halves(c, d), upper_halves(a, b), upper_halves(c, d)};
  }
};

// As on AMD, where another unit takes fewer instructions.
struct Int4Sixteenths : Int4 {
  static constexpr float kUnit = 1.0f;
};

// Eight int4 columns of eight rows: a word per row, and a column's eight values as bf16. By hand, as ptxas would take two
// instructions for each LOP3, and extract each value.
struct Int4Columns {
  const u32 (&row)[8];
  DEVICE explicit Int4Columns(const u32 (&words)[8]) : row(words) {}
  template <int kColumn>
  DEVICE u32 pair(int first) const {
    u32 halves, raised;
    asm("prmt.b32 %0, %1, %2, %3;"
        : "=r"(halves)
        : "r"(row[first]), "r"(row[first + 1]), "n"(kColumn < 4 ? 0x5410 : 0x7632));
    asm("lop3.b32 %0, %1, %2, %3, 0xea;"
        : "=r"(raised)
        : "r"(halves >> kColumn % 4 * 4), "r"(0x000f000fu), "r"(0x43004300u));
    return Int4::lowered(raised);
  }
};

// e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives.
struct E2m1 {
  static constexpr float kUnit = 1.0f;
  // The numbers in bits 0 to 3 and 16 to 19. Their exponent and mantissa, as bf16's lowest, are 2^126 times too small.
  DEVICE static u32 pair(u32 bits) {
    return bits_of(pair_of((bits & 0x00070007u) << 6 | (bits & 0x00080008u) << 12) * pair_of(0x7e807e80u));
  }
  DEVICE static u32x4 to_bf16(u32 word) {
    const u32 a = pair(word), b = pair(word >> 4), c = pair(word >> 8), d = pair(word >> 12);
    return {lower_halves(a, b), lower_halves(c, d), upper_halves(a, b), upper_halves(c, d)};
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
