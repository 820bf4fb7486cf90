// What a WaveSplitK lane holds of the weights in a step, and how it multiplies them.
#pragma once
#include "gemm/skinny/problem.h"

template <class Type>
struct TileOperands {
  static constexpr int kVecs = 1;  // 16-byte loads per row and lane
  struct Weights {
    mma::Weights step;
    DEVICE u32x4& load(int row, int /*vec*/) { return step.load[row]; }
  };
  struct Sums {
    f32x4 value;
    DEVICE float total(int i) const { return value[i]; }
  };
  DEVICE static Sums multiply(const Sums& sum, const Weights& weights, u32x4 tokens) {
    return {mma::multiply_tile<Type>(sum.value, weights.step, tokens)};
  }
};
