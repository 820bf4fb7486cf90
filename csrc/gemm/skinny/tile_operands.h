// The weights of a WaveSplitK lane in a step, and their products.
#pragma once
#include "gemm/skinny/problem.h"

// Calls use.operator()<i>() for i from 0 to kCount - 1.
template <class T, T... kIndex>
struct Indices {
  template <class Use>
  DEVICE static void each(Use use) {
    (use.template operator()<kIndex>(), ...);
  }
};
template <int kCount, class Use>
DEVICE void in_order(Use use) {
  __make_integer_seq<Indices, int, kCount>::each(use);
}

// Traits that WaveSplitK reads: sizes of a tile and of the pipeline, types of arguments and addresses.
struct TileOperandsBase {
  static constexpr bool kGrouped = false;        // true if groups of K have scales, which `add` applies
  static constexpr bool kAdjacentSteps = false;  // true if a lane's K are adjacent in a slice, not in a step
  static constexpr int kRows = mma::kRows, kVec = 1;
  template <int kTiles>
  static constexpr int kSliceSteps = 2;
  template <int kTiles>
  static constexpr int kStages = mma::kStages;
  template <int kTiles>
  static constexpr int kResident = kTiles == 1 ? 4 : 3;  // blocks per SM on NVIDIA
  using Problem = void;                                  // the kernel's arguments, void for ProblemOf
  using Tile = void;                                     // a lane's addresses of weights, void for ScaledTileWeights
  // Assumptions about the arguments, for the compiler.
  DEVICE static void assume(const SkinnyProblem&) {}
  // Token, and row or word of rows, of a lane's value i.
  DEVICE static int value_token(int lane, int i) { return mma::value_token(lane, i); }
  DEVICE static int value_row(int lane, int i) { return mma::value_row(lane, i); }
};

template <class Type>
struct TileOperands : TileOperandsBase {
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
