// Block-scaled MMA for MX formats. An instruction multiplies 16 weight rows x 16 tokens x 128 K, e4m3fn with one e8m0
// scale per 32 K for both operands, fp32 accumulation (v_mfma_scale_f32_16x16x128_f8f6f4; CDNA4 ISA, section 7.2 "Block
// scaling").
//
// The unit is an instruction pair, 256 K bytes. Lane l holds row (or token) l % 16 as four 16-byte vectors: from every
// 64 bytes the 16 at 16 * (l / 16), so the four lanes of a row load 64 contiguous bytes. An instruction reads two
// vectors, its lower and upper 64 K (section 7.1.5.1), and from lane l the scale of its block l / 16 of 32 K (section
// 7.2.1). Instruction i of a pair reads vectors i and i + 2. Its blocks are then 2i, 2i + 1, 2i + 4 and 2i + 5 of the
// pair's eight, and lane l's scales for both instructions share one word, two bytes apart, where op_sel selects.
//
// A single instruction, 128 K bytes, reads vectors 0 and 1. Its blocks are then 0 to 3, and lane l supplies one byte.
#pragma once
#include "buffer.h"

#if defined(__gfx950__)
#define HAS_BLOCK_SCALED_MMA 1

namespace mx {

constexpr int kRows = 16;      // weight rows, or tokens, per instruction
constexpr int kPair = 256;     // K bytes per pair
constexpr int kVecs = 4;       // vectors per lane and pair
constexpr int kSpacing = 64;   // K bytes between vectors
constexpr int kLog2Block = 5;  // 32 K per scale

DEVICE int row(int lane) { return lane % 16; }
DEVICE int depth(int lane) { return lane / 16 * 16; }

// A lane's scales for a pair, as loaded: one word, or two bytes if words are not aligned.
template <bool kWords>
struct PairScales {
  u32 loaded[kWords ? 1 : 2];

  // Loads the scales at lane_offset + offset; `offset` is uniform. Scales past the row's next `count` are zero. With
  // words, `count` is a multiple of 4.
  DEVICE static PairScales load(mem::Buffer from, int lane, int lane_offset, int offset, int count) {
    const int word = lane / 32 * 4, first = word + lane / 16 % 2;
    auto at = [&](int scale) __attribute__((always_inline)) { return scale < count ? lane_offset + scale : -1; };
    if constexpr (kWords) return {__builtin_amdgcn_raw_buffer_load_b32(from, at(word), offset, 0)};
    else
      return {__builtin_amdgcn_raw_buffer_load_b8(from, at(first), offset, 0),
              __builtin_amdgcn_raw_buffer_load_b8(from, at(first + 2), offset, 0)};
  }
  // The scale operand of multiply_add: instruction 0 in byte 0, instruction 1 in byte 2.
  DEVICE u32 aligned(int lane) const {
    if constexpr (kWords) return loaded[0] >> (lane / 16 % 2 * 8);
    else return loaded[0] | loaded[1] << 16;
  }
};

// A lane's scale for a single instruction: block lane / 16 of its row or token. It stays a byte until its use, because
// the compiler would widen it, and so wait for it, wherever paths join.
DEVICE u8 load_scale_or_zero(mem::Buffer from, int lane_offset, int offset, bool inside) {
  return __builtin_amdgcn_raw_buffer_load_b8(from, inside ? lane_offset : -1, offset, 0);
}

// Adds the product of the pair's instruction kIndex. Lane l accumulates token l % 16, weight rows 4 * (l / 16) to + 3.
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
// Forces the sums to be computed here.
template <int kCount>
DEVICE void compute_now(f32x4 (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+v"(sum[i]));
}
// No instruction moves across.
DEVICE void schedule_fence() { __builtin_amdgcn_sched_barrier(0); }
DEVICE void wait_for_loads() { __builtin_amdgcn_s_waitcnt(0x0f70); }  // vmcnt(0)

DEVICE int sum_token(int lane) { return lane % 16; }
DEVICE int sum_row(int lane) { return lane / 16 * 4; }

}  // namespace mx
#endif
