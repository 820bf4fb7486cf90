// Where each 16 bytes of a panel lie in LDS.
#pragma once
#include "gpu.h"
#include "panel.h"

namespace tile {

// 16 bytes of a row of a panel. Panels of plain operands have rows one after the other, swizzled. Panels of operands in fragment
// order have the first 16 bytes of the rows that are read together, then their next 16. Both orders are free of bank conflicts,
// and neighbouring lanes copy neighbouring bytes of HBM.
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
