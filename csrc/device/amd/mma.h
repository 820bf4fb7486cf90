// MMA: weight rows streamed through registers times tokens in LDS, 16 rows per wave, fp32 accumulation.
// v_mfma_f32_16x16x32_fp8_fp8, v_mfma_f32_16x16x16_bf16, _f16 (CDNA3 ISA, section 7.4 "Dense matrix
// fused-multiply-add"), v_mfma_f32_16x16x32_bf16, _f16 on gfx950; v_mfma_i32_16x16x32_i8, on gfx950
// v_mfma_i32_16x16x64_i8.
#pragma once
#include "sync.h"
#include "wave.h"

namespace mma {

constexpr int kRows = 16;    // weight rows per wave
constexpr int kWaves = 4;    // MMA waves per block, each with its own rows
constexpr int kDepth = 64;   // K bytes per step: 16 per row and lane
constexpr int kLoads = 1;    // 16-byte weight loads per lane and step
constexpr int kMaxVecs = 8;  // 16-byte loads per producer lane and token chunk
constexpr int kStages = 4;   // K slices that a WaveSplitK wave holds in registers

// Lane l holds row (or token) l % 16, bytes 16 * (l / 16) on. Any K permutation is correct if weights and tokens share
// it.
DEVICE int row(int lane, int /*load*/) { return lane % 16; }
DEVICE int depth(int lane) { return lane / 16 * 16; }

struct Weights {
  u32x4 load[kLoads];
};

// One step's tokens in LDS: kTokens * 64 bytes, in lane read order: [kTokens / 16][depth / 16][16 tokens][16].
struct TokenVec {  // 16 bytes of one token
  int token, depth;
};
DEVICE TokenVec token_vec(int index) { return {index / 64 * 16 + index % 16, index / 16 % 4 * 16}; }
template <int kTokens>
DEVICE void store_vec(u8* step, int index, u32x4 bytes) {
  *(u32x4*)(step + index * 16) = bytes;
}

template <int kTokens>
struct Accumulator {
  static constexpr int kLaneTokens = kTokens / 16, kLaneRows = 4;
  f32x4 sum[kLaneTokens];  // for four consecutive rows
  // Adds a unit's sums times the token scale, read from LDS, and the weight scale.
  DEVICE void add_scaled(const Accumulator& unit, const float* scales, float scale) {
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) sum[i] += unit.sum[i] * (scales[token(wave::lane(), i)] * scale);
    compute_now();
  }
  // Keeps later loads after the last use of the registers they overwrite. Otherwise the compiler loads into other
  // registers, and the copy from there waits for the loads.
  DEVICE void compute_now() {
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) asm volatile("" : "+v"(sum[i])::"memory");
  }
  DEVICE static int token(int lane, int i) { return i * 16 + lane % 16; }
  DEVICE static int row(int lane) { return lane / 16 * kLaneRows; }
};

// Adds the products of 64 K bytes, by kInstructions instructions.
template <class Type>
DEVICE f32x4 multiply_add(f32x4 sum, u32x4 weights, u32x4 tokens);
#if defined(__gfx942__)
template <class Type>
constexpr int kInstructions = 2;
#else
template <class Type>
constexpr int kInstructions = __is_same(Type, E4m3) ? 2 : 1;
#endif

using Halves = i64 __attribute__((ext_vector_type(2)));  // of 16 bytes

template <>
DEVICE f32x4 multiply_add<E4m3>(f32x4 sum, u32x4 weights, u32x4 tokens) {
  Halves w = __builtin_bit_cast(Halves, weights), t = __builtin_bit_cast(Halves, tokens);
  i64 w0 = w.x, w1 = w.y, t0 = t.x, t1 = t.y;
  sum = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(w0, t0, sum, 0, 0, 0);
  return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(w1, t1, sum, 0, 0, 0);
}
template <>
DEVICE f32x4 multiply_add<Bf16>(f32x4 sum, u32x4 weights, u32x4 tokens) {
#if defined(__gfx942__)
  using Short8 = short __attribute__((ext_vector_type(8)));
  Short8 w = __builtin_bit_cast(Short8, weights), t = __builtin_bit_cast(Short8, tokens);
  sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(w.lo, t.lo, sum, 0, 0, 0);
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(w.hi, t.hi, sum, 0, 0, 0);
#else
  using BFloat8 = __bf16 __attribute__((ext_vector_type(8)));
  BFloat8 w = __builtin_bit_cast(BFloat8, weights), t = __builtin_bit_cast(BFloat8, tokens);
  return __builtin_amdgcn_mfma_f32_16x16x32_bf16(w, t, sum, 0, 0, 0);
#endif
}
template <>
DEVICE f32x4 multiply_add<F16>(f32x4 sum, u32x4 weights, u32x4 tokens) {
  using Half8 = _Float16 __attribute__((ext_vector_type(8)));
  Half8 w = __builtin_bit_cast(Half8, weights), t = __builtin_bit_cast(Half8, tokens);
#if defined(__gfx942__)
  sum = __builtin_amdgcn_mfma_f32_16x16x16f16(w.lo, t.lo, sum, 0, 0, 0);
  return __builtin_amdgcn_mfma_f32_16x16x16f16(w.hi, t.hi, sum, 0, 0, 0);
#else
  return __builtin_amdgcn_mfma_f32_16x16x32_f16(w, t, sum, 0, 0, 0);
#endif
}

// Exact int32 sums of int8 products.
DEVICE i32x4 multiply_add_whole(i32x4 sum, u32x4 weights, u32x4 tokens) {
#if defined(__gfx942__)
  Halves w = __builtin_bit_cast(Halves, weights), t = __builtin_bit_cast(Halves, tokens);
  i64 w0 = w.x, w1 = w.y, t0 = t.x, t1 = t.y;
  sum = __builtin_amdgcn_mfma_i32_16x16x32_i8(w0, t0, sum, 0, 0, 0);
  return __builtin_amdgcn_mfma_i32_16x16x32_i8(w1, t1, sum, 0, 0, 0);
#else
  return __builtin_amdgcn_mfma_i32_16x16x64_i8(__builtin_bit_cast(i32x4, weights), __builtin_bit_cast(i32x4, tokens),
                                               sum, 0, 0, 0);
#endif
}
// A step's product is exact; the addition rounds.
template <>
DEVICE f32x4 multiply_add<I8>(f32x4 sum, u32x4 weights, u32x4 tokens) {
  return sum + __builtin_convertvector(multiply_add_whole(i32x4{}, weights, tokens), f32x4);
}
#define HAS_INT8_STREAMS 1  // StreamedTile supports int8

// The same for one wave with tokens in registers: lane l holds token l % 16 of a tile, bytes 16 * (l / 16) on.
constexpr int kTileTokens = 16;
DEVICE int tile_token(int lane) { return lane % 16; }
template <class Type>
DEVICE f32x4 multiply_tile(f32x4 sum, const Weights& weights, u32x4 tokens) {
  return multiply_add<Type>(sum, weights.load[0], tokens);
}
// Token and row of a lane's value i in the tile.
DEVICE int value_token(int lane, int /*i*/) { return lane % 16; }
DEVICE int value_row(int lane, int i) { return lane / 16 * 4 + i; }
constexpr int kValueTokens = 1;  // tokens per lane; value i belongs to token i % kValueTokens
// A lane's values 0 and 1 are in rows of one half of a tile, values 2 and 3 at the same position in the other half.
DEVICE int half(int row) { return row / 2 % 2; }
DEVICE int half_row(int row) { return row / 4 * 2 + row % 2; }

// Adds products of the wave's rows and the tokens in LDS, step by step, with the next kAhead fragments of tokens on
// their way from LDS. The compiler alone would read a fragment, and wait for it.
template <int kTokens>
struct TokenQueue {
  static constexpr int kFragments = kTokens / 16, kAhead = kFragments % 4 ? kFragments : 4;
  static_assert(kFragments % kAhead == 0, "a fragment has the same place in every step");
  static constexpr int kMatrix = 8, kLdsRead = 0x100;  // of __builtin_amdgcn_sched_group_barrier
  u32x4 fragment[kAhead];

  DEVICE static u32x4 read(const u8* step, int i) { return ((const u32x4*)step)[wave::lane() + i * 64]; }
  DEVICE void begin(const u8* step) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) fragment[i] = read(step, i);
    __builtin_amdgcn_sched_group_barrier(kLdsRead, kAhead, 0);
  }
  // Adds one step's product. If there are `more`, the next step's tokens follow in LDS.
  template <class Type>
  DEVICE void multiply_add(Accumulator<kTokens>& sum, const Weights& weights, const u8* step, bool more) {
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      sum.sum[i] = mma::multiply_add<Type>(sum.sum[i], weights.load[0], fragment[i % kAhead]);
      __builtin_amdgcn_sched_group_barrier(kMatrix, kInstructions<Type>, 0);
      if (!more && i + kAhead >= kFragments) continue;
      fragment[i % kAhead] = read(step, i + kAhead);
      __builtin_amdgcn_sched_group_barrier(kLdsRead, 1, 0);
    }
    sum.compute_now();
  }
};

}  // namespace mma
