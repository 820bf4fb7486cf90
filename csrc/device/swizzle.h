// Where the rows of a panel lie in LDS.
#pragma once
#include "gpu.h"
#include "panel.h"

namespace tile {

// Where a piece of a row lies in a panel: row by row, each swizzled; or, for what is in fragment order, piece by piece of the
// rows that are read together. Either way reads meet no bank conflicts, and neighbouring lanes fill what is together in HBM.
struct Place {
  int row, piece;
  DEVICE int index(bool by_piece) const {
    if (!by_piece) return row * kPieces + (piece ^ lds::swizzle(row));
    return (row / lds::kTogether * kPieces + piece) * lds::kTogether + row % lds::kTogether;
  }
  DEVICE static Place of(int index, bool by_piece) {
    const int row = index / kPieces;
    if (!by_piece) return {row, index % kPieces ^ lds::swizzle(row)};
    return {row / lds::kTogether * lds::kTogether + index % lds::kTogether, index / lds::kTogether % kPieces};
  }
};

}  // namespace tile
