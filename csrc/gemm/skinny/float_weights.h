// bf16 tokens times float32 weights. A weight is the exact sum of three bf16 values of its sign, by truncation: 24 bits
// are 8 + 8 + 8. So bf16 instructions compute products of all bits, in three times the matrix cycles of bf16 weights;
// fp32 instructions would take eight times on AMD, and NVIDIA's truncate to tf32.
//
// Rejected: two values, whose products lack the last 8 bits of a weight.
#pragma once
#include "gemm/skinny/tile_operands.h"

struct Bf16Fp32;  // tokens and weights, in this order

template <>
struct TileOperands<Bf16Fp32> : TileOperandsBase {
  static constexpr int kVecs = 2;
  struct Weights {
    u32x4 vec[mma::kLoads][kVecs];
    DEVICE u32x4& load(int row, int i) { return vec[row][i]; }
  };
  // Sums of the upper parts' products, and of the two lower parts'. If the former is infinite or NaN it is the result:
  // the latter may be NaN, from 0 * infinity or infinity - infinity.
  struct Sums {
    f32x4 upper, rest;
    DEVICE float total(int i) const {
      return __builtin_fabsf(upper[i]) < __builtin_inff() ? upper[i] + rest[i] : upper[i];
    }
  };
  struct Split {
    mma::Weights part[3];
  };

  // The upper halves of two words as a pair of bf16 values.
  DEVICE static u32 upper_halves(u32 low, u32 high) { return low >> 16 | (high & 0xffff0000u); }
  DEVICE static u32 rest_of(u32 bits) {
    return __builtin_bit_cast(u32, __builtin_bit_cast(float, bits) - __builtin_bit_cast(float, bits & 0xffff0000u));
  }
  DEVICE static Split split(const Weights& weights) {
    Split result;
#pragma unroll
    for (int row = 0; row < mma::kLoads; ++row)
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const u32x4 vec = weights.vec[row][pair / 2];
        u32 low = vec[pair % 2 * 2], high = vec[pair % 2 * 2 + 1];
#pragma unroll
        for (mma::Weights& part : result.part) {
          part.load[row][pair] = upper_halves(low, high);
          low = rest_of(low), high = rest_of(high);
        }
      }
    return result;
  }
  DEVICE static Sums multiply(const Sums& sums, const Weights& weights, u32x4 tokens) {
    const Split of = split(weights);  // once for all tokens, by the compiler
    const f32x4 upper = mma::multiply_tile<Bf16>(sums.upper, of.part[0], tokens);
    f32x4 rest = mma::multiply_tile<Bf16>(sums.rest, of.part[1], tokens);
    rest = mma::multiply_tile<Bf16>(rest, of.part[2], tokens);
    return {upper, rest};
  }
};
