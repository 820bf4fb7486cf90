// LDS layout of a panel's 16-byte vectors.
#pragma once
#include "gpu.h"
#include "panel.h"

namespace tile {

// A 16-byte vector of a panel row. Plain operands are stored row by row, swizzled. Operands in fragment order store the
// first 16 bytes of the rows that one read covers, then their next 16. Both layouts are free of bank conflicts, and
// adjacent lanes copy adjacent HBM bytes.
struct PanelVec {
  int row, vec;
  DEVICE int swizzled_index(bool fragment_order) const {
    if (!fragment_order) return row * kRowVecs + (vec ^ lds::swizzle(row));
    return (row / lds::kFragmentRows * kRowVecs + vec) * lds::kFragmentRows + row % lds::kFragmentRows;
  }
  DEVICE static PanelVec at(int index, bool fragment_order) {
    const int row = index / kRowVecs;
    if (!fragment_order) return {row, index % kRowVecs ^ lds::swizzle(row)};
    return {row / lds::kFragmentRows * lds::kFragmentRows + index % lds::kFragmentRows,
            index / lds::kFragmentRows % kRowVecs};
  }
};

}  // namespace tile
