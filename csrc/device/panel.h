// A panel: operand rows x 128 K bytes in LDS.
#pragma once
#include "types.h"

namespace tile {

constexpr int kVecBytes = 16;                 // copied per lane at a time
constexpr int kRowVecs = 8;                   // per panel row
constexpr int kDepth = kRowVecs * kVecBytes;  // K bytes

// Byte strides in HBM: between groups of 16 rows (tile), between rows (row), between 16-byte vectors within 64 bytes of
// a row (vec), and between those 64 bytes and the next (step).
struct Layout {
  i64 tile;
  int row, vec, step;
  // In fragment order, 16 rows are interleaved, 16 bytes each.
  DEVICE bool is_fragment_order() const { return vec != kVecBytes; }
};

}  // namespace tile
