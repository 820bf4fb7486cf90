// MMA of token panels and weight panels, 128 K bytes. Accumulation is fp32, in accumulator tiles of 16 tokens x 32
// weight rows. Types are bf16 and fp16 as in mma.h, and fp8 (v_mfma_f32_16x16x32_fp8_fp8, CDNA3 ISA, section 7;
// v_mfma_f32_16x16x128_f8f6f4 with unit scales, CDNA4 ISA, section 7, at twice the rate).
#pragma once
#include "../swizzle.h"
#include "lds_async.h"
#include "mma.h"

namespace tile {

constexpr int kXcds = 8;                // the hardware assigns blocks to XCDs round-robin
constexpr int kWaveTokens = 64;         // tile tokens per wave
constexpr int kAccumulatorTokens = 16;  // AccumulatorTile
constexpr int kAccumulatorRows = 32;
constexpr int kLaneTokens = 1;  // accumulated per lane

// Lane l accumulates token l % 16 and 8 weight rows, from 8 * (l / 16) on.
struct AccumulatorTile {
  f32x4 sum[2];
  DEVICE float get(int /*token*/, int row) const { return sum[row / 4][row % 4]; }
};
DEVICE int accumulator_token(int lane, int /*token*/) { return lane % 16; }
DEVICE int accumulator_row(int lane) { return lane / 16 * 8; }
// The weight row stored as row `row` of each 32 panel rows. An instruction gives lane l the sums for 4 of its 16 rows,
// from 4 * (l / 16) on; this permutation makes a lane's 8 rows consecutive.
DEVICE int weight_row(int row) { return row % 16 / 4 * 8 + row / 16 * 4 + row % 4; }

// A lane's operand registers for 16 rows: row l % 16, 16-byte vector l / 16 of each K half. Any K permutation is
// correct if tokens and weights share it.
struct Fragment {
  u32x4 half[2];
};

#if defined(__gfx942__)
constexpr int kAccumulatorInstructions = 8;  // per multiply_add<E4m3>
#else
#define HAS_LARGE_TILES 1  // LDS holds two buffers of 256 x 256
constexpr int kAccumulatorInstructions = 2;
#endif
template <class Type>
DEVICE void multiply_add(AccumulatorTile& accumulator, const Fragment& tokens, const Fragment (&weights)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int row = 0; row < 2; ++row)
      accumulator.sum[row] = mma::multiply_add<Type>(accumulator.sum[row], weights[row].half[half], tokens.half[half]);
}
template <>
DEVICE void multiply_add<E4m3>(AccumulatorTile& accumulator, const Fragment& tokens, const Fragment (&weights)[2]) {
#if defined(__gfx942__)
  using Words = i64 __attribute__((ext_vector_type(2)));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Words t = __builtin_bit_cast(Words, tokens.half[i / 2]);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const Words w = __builtin_bit_cast(Words, weights[row].half[i / 2]);
      accumulator.sum[row] =
          __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(w[i % 2], t[i % 2], accumulator.sum[row], 0, 0, 0);
    }
  }
#else
  using Operand = int __attribute__((ext_vector_type(8)));
  constexpr int kE4m3 = 0, kUnitScale = 0;
#pragma unroll
  for (int row = 0; row < 2; ++row)
    accumulator.sum[row] = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(
        __builtin_bit_cast(Operand, weights[row]), __builtin_bit_cast(Operand, tokens), accumulator.sum[row], kE4m3,
        kE4m3, 0, kUnitScale, 0, kUnitScale);
#endif
}

// A wave's share of a tile: kM x kN accumulator tiles. With kPingPong, a block's two waves per SIMD alternate: one
// reads fragments while the other multiplies.
template <class Type, int kM, int kN, bool kPingPong>
struct Multiplier {
  int tokens_at[2], weights_at[2];  // where the lane reads its K halves of a panel's rows

  DEVICE Multiplier(int first_token, int first_row, bool weights_in_fragment_order) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = wave::lane() % 16, vec = wave::lane() / 16 + half * kRowVecs / 2;
      tokens_at[half] = PanelVec{first_token + row, vec}.swizzled_index(false) * kVecBytes;
      weights_at[half] = PanelVec{first_row + row, vec}.swizzled_index(weights_in_fragment_order) * kVecBytes;
    }
  }
  DEVICE static Fragment read(const lds::Local<u8>* panel, const int (&at)[2], int rows) {
    Fragment fragment;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      fragment.half[half] = *(const lds::Local<u32x4>*)(panel + at[half] + rows * kDepth);
    return fragment;
  }
  // Hazards. The first half reads a panel before the other half's copies have landed: so each wave waits for its own
  // copies before it reads the last fragments of the previous panel, and then arrives at this barrier. The first half
  // also refills a panel that the other half still reads: so its refill starts after a barrier that follows the other
  // half's last reads.
  DEVICE static void ping_pong_barrier() {
    if constexpr (kPingPong) {
      __builtin_amdgcn_sched_barrier(0);
      block_barrier();
      __builtin_amdgcn_sched_barrier(0);
    }
  }
  // Adds the product of two panels, times factors if kScaled: one factor for a lane's first 4 weight rows of an
  // accumulator tile, one for its last 4.
  template <bool kScaled>
  DEVICE void multiply_add(AccumulatorTile (&sums)[kM][kN], const lds::Local<u8>* tokens, const lds::Local<u8>* weights,
                           const float (&factor)[kN][2][kM][kLaneTokens]) const {
    Fragment token[kM];
#pragma unroll
    for (int i = 0; i < kM; ++i) token[i] = read(tokens, tokens_at, i * 16);
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      const Fragment weight[2] = {read(weights, weights_at, j * 32), read(weights, weights_at, j * 32 + 16)};
      if (kPingPong && j == kN - 1) lds::wait_for_copies<0>();
      ping_pong_barrier();
      if constexpr (!kScaled) {
#pragma unroll
        for (int i = 0; i < kM; ++i) tile::multiply_add<Type>(sums[i][j], token[i], weight);
        ping_pong_barrier();
      } else {
        // One accumulator tile is scaled while the matrix core computes the next.
        AccumulatorTile product[2];
        constexpr int kMatrix = 8, kVector = 2;
        auto add_scaled = [&](int i) __attribute__((always_inline)) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            sums[i][j].sum[half] += float_sums<Type>(product[i % 2].sum[half]) * factor[j][half][i][0];
        };
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          product[i % 2] = {};
          tile::multiply_add<Type>(product[i % 2], token[i], weight);
          __builtin_amdgcn_sched_group_barrier(kMatrix, kAccumulatorInstructions, 0);
          if (i == 0) continue;
          add_scaled(i - 1);
          __builtin_amdgcn_sched_group_barrier(kVector, 4, 0);
        }
        ping_pong_barrier();
        add_scaled(kM - 1);
      }
    }
  }
};

}  // namespace tile
