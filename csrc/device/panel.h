// A panel: rows of an operand x 128 bytes of K in LDS.
#pragma once
#include "types.h"

namespace tile {

constexpr int kVecBytes = 16;                 // that a lane copies at a time
constexpr int kRowVecs = 8;                   // of a row of a panel
constexpr int kDepth = kRowVecs * kVecBytes;  // bytes of K

// Strides in HBM, in bytes: from 16 rows to the next 16 (tile), from row to row, from 16 bytes of a row to the next 16 of its 64
// (vec), and from these 64 to the next 64 (step).
struct Layout {
  i64 tile;
  int row, vec, step;
  // In fragment order 16 rows lie side by side, 16 bytes of each.
  DEVICE bool is_fragment_order() const { return vec != kVecBytes; }
};

}  // namespace tile
