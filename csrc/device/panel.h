// Panels: rows of an operand x 128 bytes of K in LDS; how they lie there, and how they are filled.
#pragma once
#include "types.h"

namespace tile {

constexpr int kPiece = 16;                // bytes that a lane moves at a time
constexpr int kPieces = 8;                // of a row of a panel
constexpr int kDepth = kPieces * kPiece;  // bytes of K

// Where rows lie in HBM, in bytes: from 16 rows to the next 16, from row to row, from 16 bytes of a row to the next 16 of 64,
// and from these 64 to the next.
struct Layout {
  i64 tile;
  int row, piece, step;
  // In fragment order 16 rows lie side by side, 16 bytes of each.
  DEVICE bool by_piece() const { return piece != kPiece; }
};

}  // namespace tile
