// The epilogue of a kernel whose last block adds the sums of all tiles: a block only stores its own.
#pragma once
#include "gemm/skinny/epilogue.h"

// Epilogue of kernels in which a block has one K slice of a tile: stores its sums to partials [K slices, M, rows of all
// tiles], even if a tile has a single slice. A thread has one row, and kLaneTokens tokens.
template <int kLaneTokens, int kGroupSteps>
struct SliceSums {
  const SkinnyProblem& p;
  const StreamKSchedule<kGroupSteps>& schedule;
  int slice = 0, row = 0, token[kLaneTokens] = {};

  // Floats of a token's sums in a slice.
  DEVICE static int row_floats(const SkinnyProblem& p) { return (p.n + mma::kRows - 1) / mma::kRows * mma::kRows; }

  template <class RowOf, class TokenOf>
  DEVICE void begin(int tile, TokenOf token_of, RowOf row_of) {
    slice = schedule.block - tile * p.units_per_tile, row = row_of(0);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) token[i] = token_of(i);
  }
  DEVICE void end(const FloatVec<1> (&sum)[kLaneTokens][1]) const {
    const int floats = row_floats(p), first = slice * p.m * floats;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i)
      if (token[i] < p.m)
        mem::store_device(mem::buffer(p.partials), (token[i] * floats + row) * 4, first * 4, float(sum[i][0][0]));
  }
};
