// The matrix instruction of MX formats: 16 weight rows x 16 tokens x 128 of K, e4m3fn with an e8m0 scale per 32 of K on both
// sides, fp32 accumulation (v_mfma_scale_f32_16x16x128_f8f6f4; CDNA4 ISA, section 7.2 "Block scaling").
//
// The unit is a pair of instructions, 256 bytes of K. Lane l holds row (or token) l % 16 as four vectors of 16 bytes: of every
// 64 bytes those at 16 * (l / 16), so that the four lanes of a row load 64 bytes in a row. An instruction takes two vectors, its
// lower and its upper 64 of K (section 7.1.5.1), and from lane l the scale of the (l / 16)-th of its blocks of 32 (section
// 7.2.1). Instruction i of a pair gets vectors i and i + 2: then its blocks are 2i, 2i + 1, 2i + 4 and 2i + 5 of the pair's
// eight, and what lane l has to supply for both instructions lies in one word, two bytes apart, where op_sel chooses.
//
// One instruction alone, 128 bytes of K, takes vectors 0 and 1: then its blocks are 0 to 3, and what lane l has to supply is one
// byte.
#pragma once
#include "buffer.h"

#if defined(__gfx950__)
#define HAS_BLOCK_SCALED_MMA 1

namespace mx {

constexpr int kRows = 16;      // weight rows, or tokens, of an instruction
constexpr int kPair = 256;     // bytes of K of a pair
constexpr int kVecs = 4;       // of a lane and a pair
constexpr int kSpacing = 64;   // bytes of K from a vector to the next
constexpr int kLog2Block = 5;  // 32 of K per scale

DEVICE int row(int lane) { return lane % 16; }
DEVICE int depth(int lane) { return lane / 16 * 16; }

// The scales of a lane and a pair, as loaded: one word, or two bytes where words are not aligned.
template <bool kWords>
struct PairScales {
  u32 loaded[kWords ? 1 : 2];

  // Loads them from lane_offset + offset on, `offset` the same in all lanes. Those past the row's next `count`, with words a
  // multiple of 4, are zero.
  DEVICE static PairScales load(mem::Buffer from, int lane, int lane_offset, int offset, int count) {
    const int word = lane / 32 * 4, first = word + lane / 16 % 2;
    auto at = [&](int scale) __attribute__((always_inline)) { return scale < count ? lane_offset + scale : -1; };
    if constexpr (kWords) return {__builtin_amdgcn_raw_buffer_load_b32(from, at(word), offset, 0)};
    else
      return {__builtin_amdgcn_raw_buffer_load_b8(from, at(first), offset, 0),
              __builtin_amdgcn_raw_buffer_load_b8(from, at(first + 2), offset, 0)};
  }
  // What multiply_add takes: in bytes 0 and 2 those for instructions 0 and 1.
  DEVICE u32 aligned(int lane) const {
    if constexpr (kWords) return loaded[0] >> (lane / 16 % 2 * 8);
    else return loaded[0] | loaded[1] << 16;
  }
};

// The scale of a lane for one instruction alone: of block lane / 16 of its row, or token. It stays a byte until its use: the
// compiler would widen it, and so wait for it, wherever paths join.
DEVICE u8 load_scale_or_zero(mem::Buffer from, int lane_offset, int offset, bool inside) {
  return __builtin_amdgcn_raw_buffer_load_b8(from, inside ? lane_offset : -1, offset, 0);
}

// Adds the product of instruction kIndex of a pair. Of the sum, lane l has token l % 16, weight rows 4 * (l / 16) to + 3.
template <int kIndex>
DEVICE f32x4 multiply_add(f32x4 sum, u32x4 low_weights, u32x4 high_weights, u32 weight_scales, u32x4 low_tokens,
                          u32x4 high_tokens, u32 token_scales) {
  using Operand = int __attribute__((ext_vector_type(8)));
  constexpr int kE4m3 = 0, kByte = 2 * kIndex;
  Operand weights =
      __builtin_bit_cast(Operand, __builtin_shufflevector(low_weights, high_weights, 0, 1, 2, 3, 4, 5, 6, 7));
  Operand tokens =
      __builtin_bit_cast(Operand, __builtin_shufflevector(low_tokens, high_tokens, 0, 1, 2, 3, 4, 5, 6, 7));
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(weights, tokens, sum, kE4m3, kE4m3, kByte, weight_scales,
                                                          kByte, token_scales);
}
// The compiler computes the sums before what follows.
template <int kCount>
DEVICE void compute_now(f32x4 (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+v"(sum[i]));
}
// The compiler moves no instruction over it.
DEVICE void schedule_fence() { __builtin_amdgcn_sched_barrier(0); }
DEVICE void wait_for_loads() { __builtin_amdgcn_s_waitcnt(0x0f70); }  // vmcnt(0)

DEVICE int sum_token(int lane) { return lane % 16; }
DEVICE int sum_row(int lane) { return lane / 16 * 4; }

}  // namespace mx
#endif
