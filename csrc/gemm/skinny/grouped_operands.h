// Base of the TileOperands for bf16 tokens and packed weights with a scale per group of K: a lane has kLaneRows adjacent
// rows, and scales their sums.
#pragma once
#include "device/four_bit.h"
#include "gemm/skinny/tile_operands.h"

template <int kLaneRowsOf>
struct GroupedOperands : TileOperandsBase {
  static constexpr bool kGrouped = true;
  static constexpr float kUnit = 1;  // of the sums
  static constexpr int kLaneRows = kLaneRowsOf, kRows = kLaneRows * mma::kRows, kVec = mem::kPredicates ? 2 : 4;

  struct Tile {
    mem::Cursor weights[mma::kLoads];
    mem::Buffer scales;
    int scales_at[mma::kLoads];  // bytes
  };
  struct Sums {
    f32x4 value[kLaneRows];
  };

  DEVICE static void assume(const SkinnyProblem& p) {
    __builtin_assume(p.out_type == 0);
    __builtin_assume(p.n % kLaneRows == 0);
  }
  DEVICE static int value_token(int lane, int i) { return four_bit::value_token(lane, i); }
  DEVICE static int value_row(int lane, int i) { return mma::row(lane, four_bit::value_load(i)); }
};
