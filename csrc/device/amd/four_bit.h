// 4-bit values by conversions and byte permutes. Static, in vector instructions per value: int4 1.75, e2m1 2.25, on gfx950
// 0.5.
#pragma once
#include "buffer.h"
#include "mma.h"

namespace four_bit {

// int4: 0 to 15 for -8 to 7, in sixteenths. V_CVT_OFF_F32_I4 converts the lower half of a selected byte, which it takes to
// be signed. The compiler would shift each byte down.
struct Int4Sixteenths {
  static constexpr float kUnit = 1.0f / 16;
  DEVICE static u32 pair(float first, float second) {
    return __builtin_amdgcn_perm(__builtin_bit_cast(u32, second), __builtin_bit_cast(u32, first), 0x07060302u);
  }
  DEVICE static u32x4 to_bf16(u32 word) {
    const u32 even = word ^ 0x88888888u, odd = even >> 4;
    float e[4], o[4];
#define CONVERT(i)                                                                \
  asm("v_cvt_off_f32_i4_sdwa %0, %1 src0_sel:BYTE_" #i : "=v"(e[i]) : "v"(even)); \
  asm("v_cvt_off_f32_i4_sdwa %0, %1 src0_sel:BYTE_" #i : "=v"(o[i]) : "v"(odd));
    CONVERT(0)
    CONVERT(1)
    CONVERT(2)
    CONVERT(3)
#undef CONVERT
    return {pair(e[0], o[0]), pair(e[1], o[1]), pair(e[2], o[2]), pair(e[3], o[3])};
  }
};

// Eight int4 columns of eight rows: a word per row, and a column's eight values as bf16, in sixteenths.
struct Int4Columns {
  const u32 (&row)[8];
  DEVICE explicit Int4Columns(const u32 (&words)[8]) : row(words) {}
  // Values `first` and the next. One block, as the compiler would wait before each use of a block's results.
  template <int kColumn>
  DEVICE u32 pair(int first) const {
    u32 low = row[first] ^ 0x88888888u, high = row[first + 1] ^ 0x88888888u, pair;
    if constexpr (kColumn % 2 == 1) low >>= 4, high >>= 4;
    u32 other;
    asm volatile(
        "v_cvt_off_f32_i4_sdwa %0, %2 src0_sel:BYTE_%4\n"
        "v_cvt_off_f32_i4_sdwa %1, %3 src0_sel:BYTE_%4\n"
        "v_perm_b32 %0, %1, %0, %5"
        : "=&v"(pair), "=&v"(other)
        : "v"(low), "v"(high), "n"(kColumn / 2), "s"(0x07060302u));
    return pair;
  }
};

// e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives. A permute looks up four bytes at once, by three bits each.
struct E2m1 {
  static constexpr float kUnit = 1.0f;
#if !defined(__gfx942__)
  template <int kByte>
  DEVICE static u32 of_byte(u32 word) {
    return __builtin_bit_cast(u32, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(word, 1.0f, kByte));
  }
#endif
  struct Halves {  // of four bf16 values: upper and lower bytes
    u32 upper, lower;
    DEVICE Halves(u32 magnitudes, u32 signs) {
      upper = __builtin_amdgcn_perm(0x40404040u, 0x3f3f3f00u, magnitudes) | (signs & 0x80808080u);
      lower = __builtin_amdgcn_perm(0xc0804000u, 0xc0800000u, magnitudes);
    }
    DEVICE u32 first_pair() const { return __builtin_amdgcn_perm(upper, lower, 0x05010400u); }
    DEVICE u32 last_pair() const { return __builtin_amdgcn_perm(upper, lower, 0x07030602u); }
  };
  DEVICE static u32x4 to_bf16(u32 word) {
#if !defined(__gfx942__)
    return {of_byte<0>(word), of_byte<1>(word), of_byte<2>(word), of_byte<3>(word)};
#else
    const Halves even(word & 0x07070707u, word << 4), odd(word >> 4 & 0x07070707u, word);
    const u32 e0 = even.first_pair(), e1 = even.last_pair(), o0 = odd.first_pair(), o1 = odd.last_pair();
    constexpr u32 kLower = 0x05040100u, kUpper = 0x07060302u;
    return {__builtin_amdgcn_perm(o0, e0, kLower), __builtin_amdgcn_perm(o0, e0, kUpper),
            __builtin_amdgcn_perm(o1, e1, kLower), __builtin_amdgcn_perm(o1, e1, kUpper)};
#endif
  }
};

// Products of 16 tokens and 16 rows by groups of 32 K. Lane l has 16 bytes of row l % 16: 32 values, the group l / 16 of
// four; and from each token l % 16 the same 32 values. The instruction, v_mfma_f32_16x16x4_4b_bf16, does not add over
// these lanes; it takes twice the matrix cycles of those that do.
struct GroupSums {
  float __attribute__((ext_vector_type(16))) value = {};
  // The sums of a group: row l % 16, tokens 4 * (l / 16) on.
  template <int kGroup>
  DEVICE f32x4 of_group() const {
    return __builtin_shufflevector(value, value, kGroup * 4, kGroup * 4 + 1, kGroup * 4 + 2, kGroup * 4 + 3);
  }
  // Adds 8 values of each group.
  DEVICE void multiply_add(u32x4 tokens, u32x4 weights) {
    using Short8 = short __attribute__((ext_vector_type(8)));
    const Short8 t = __builtin_bit_cast(Short8, tokens), w = __builtin_bit_cast(Short8, weights);
    value = __builtin_amdgcn_mfma_f32_16x16x4bf16_1k(t.lo, w.lo, value, 0, 0, 0);
    value = __builtin_amdgcn_mfma_f32_16x16x4bf16_1k(t.hi, w.hi, value, 0, 0, 0);
  }
};

// As mma::multiply_tile, with the operands swapped, so that a lane has sums of the rows whose weights it holds: value i
// belongs to token value_token and to row mma::row(lane, value_load(i)).
DEVICE f32x4 multiply_tile(f32x4 sum, const mma::Weights& weights, u32x4 tokens) {
  return mma::multiply_add<Bf16>(sum, tokens, weights.load[0]);
}
DEVICE int value_token(int lane, int i) { return lane / 16 * 4 + i; }
DEVICE constexpr int value_load(int /*i*/) { return 0; }

// Adds products times a factor, in instructions that are not packed and stay in order with `issue`.
DEVICE void add_scaled(f32x4& sum, f32x4 product, f32x4 factor) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value = __builtin_fmaf(product[i], factor[i], sum[i]);
    asm volatile("" : "+v"(value));
    sum[i] = value;
  }
}

// Instructions above, with the one of this product, are issued before those below. The compiler would move a product to
// its use, and wait for the matrix unit there.
DEVICE void issue(const f32x4& product) {
  asm volatile("" : : "v"(product));
  __builtin_amdgcn_sched_barrier(0);
}

#define HAS_INT4_TILES_OF_TOKENS 1  // w4a16_gemm has kernels for up to four tiles of tokens

// A streaming load of a word, or two, as mem::refill.
constexpr int kNonTemporal = 2;
DEVICE void refill(u32& word, const mem::Cursor& from, int offset, bool inside) {
  word = __builtin_amdgcn_raw_buffer_load_b32(from.base, inside ? from.lane_offset : -1, offset, kNonTemporal);
}
DEVICE void refill(u32& word, u32& next, const mem::Cursor& from, int offset, bool inside) {
  const u32x2 words =
      __builtin_amdgcn_raw_buffer_load_b64(from.base, inside ? from.lane_offset : -1, offset, kNonTemporal);
  word = words.x, next = words.y;
}

}  // namespace four_bit
