// A lane's addresses in a tile of b, and the tile's block scales.
#pragma once
#include "gemm/skinny/problem.h"

// A lane's addresses in a tile of b. Lanes past the last row read the last row; their sums are not stored.
struct TileWeights {
  mem::Cursor weights[mma::kLoads];
};
DEVICE TileWeights tile_weights(const SkinnyProblem& p, int first_row, int wave_row) {
  const int lane = wave::lane(), rows = p.n - first_row;
  TileWeights tile;
#pragma unroll
  for (int l = 0; l < mma::kLoads; ++l) {
    const int inside = wave_row + mma::row(lane, l);
    const u32 row = inside < rows ? inside : rows - 1;
    const int offset = row / mma::kRows * int(p.b_tile) + row % mma::kRows * p.b_row;
    tile.weights[l] =
        mem::cursor(p.b + first_row / mma::kRows * p.b_tile, offset + mma::depth(lane) / 16 * (p.b_step / 4));
  }
  return tile;
}
// As tile_weights, for a [gate | up] weight.
DEVICE TileWeights gated_tile_weights(const SkinnyProblem& p, int first_row, int wave_row) {
  const int lane = wave::lane(), first_tile = u32(gated_column(first_row)) / mma::kRows;
  TileWeights tile;
#pragma unroll
  for (int l = 0; l < mma::kLoads; ++l) {
    const u32 row = gated_row(p, first_row + wave_row + mma::row(lane, l));
    const int offset = (row / mma::kRows - first_tile) * int(p.b_tile) + row % mma::kRows * p.b_row;
    tile.weights[l] = mem::cursor(p.b + first_tile * p.b_tile, offset + mma::depth(lane) / 16 * (p.b_step / 4));
  }
  return tile;
}

// TileWeights with the block scales of the tile.
template <class Scale>
struct ScaledTileWeights : TileWeights {
  const typename Scale::Type* scales;
};
template <class Scale, bool kGated = false>
DEVICE ScaledTileWeights<Scale> scaled_tile_weights(const SkinnyProblem& p, u32 first_row, int wave_row) {
  return {kGated ? gated_tile_weights(p, first_row, wave_row) : tile_weights(p, first_row, wave_row),
          (const typename Scale::Type*)p.scale_b + i64(first_row / kScaleBlock) * p.scale_b_row};
}
