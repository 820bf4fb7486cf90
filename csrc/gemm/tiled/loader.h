// Copies of rows of an operand from HBM to panels in LDS.
#pragma once
#include "device/swizzle.h"

namespace tile {

constexpr int kNoRow = -1;  // the lane offset of zeros

// The copies of kRows rows by the kThreads threads of a block.
template <int kRows, int kThreads>
struct TileLoader {
  static constexpr int kCopies = kRows * kRowVecs / kThreads;  // per thread
  static_assert(kThreads % (kRowVecs * 16) == 0, "all copies of a thread have the same column");
  mem::Buffer from;
  int offset[kCopies];  // of the thread's copies at K = 0, or kNoRow
  int column;           // of its copies in a row of a panel, in bytes
  int step;             // bytes from a panel to the next
  int wave_offset;      // of the wave's first copy in a panel, in bytes
  lds::Copy copy[kCopies];

  // Row r of the panel is row row_of(r), counted from `first`. kNoRow gives zeros without a read.
  template <class RowOf>
  DEVICE void init(const u8* first, const Layout& layout, RowOf row_of) {
    const int first_lane = wave::index() * wave::kLanes;
    from = mem::buffer(first);
    step = 2 * layout.step;
    wave_offset = first_lane * kVecBytes;
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      const PanelVec place = PanelVec::at(j * kThreads + first_lane + wave::lane(), layout.is_fragment_order());
      const int row = row_of(place.row);
      const int in_row = place.vec % 4 * layout.vec + place.vec / 4 * layout.step;
      offset[j] = row == kNoRow ? kNoRow : row / 16 * int(layout.tile) + row % 16 * layout.row + in_row;
      column = place.vec * kVecBytes;
    }
  }
  // Panel number `panel` along K, of which bytes from k on are zeros.
  DEVICE void start(int panel, int k, lds::Local<u8>* to) {
    const int at = panel * step, bytes = k - panel * kDepth;
#pragma unroll
    for (int j = 0; j < kCopies; ++j)
      copy[j] = lds::start_copy(from, offset[j], at, column < bytes, to + wave_offset + j * kThreads * kVecBytes);
  }
  DEVICE void finish(lds::Local<u8>* to) {
#pragma unroll
    for (int j = 0; j < kCopies; ++j) lds::finish_copy(copy[j], to + wave_offset + j * kThreads * kVecBytes);
  }
};

// Of a Loader that copies through registers: load(panel, k) fills them, and store(to) writes them to a panel in LDS. One panel at a
// time is in flight: in registers until it is needed, or, where LDS has room for it, stored at once.
template <class Loader>
struct RegisterLoader {
  static constexpr bool kHeld = lds::kBuffers < 3;
  // Panel number `panel` along K, of which bytes of what is multiplied from k on are zeros.
  DEVICE void start(int panel, int k, lds::Local<u8>* to) {
    loader().load(panel, k);
    if (kHeld) return;
    loader().store(to);
    lds::publish();
  }
  DEVICE void finish(lds::Local<u8>* to) {
    if (kHeld) loader().store(to);
  }

 private:
  DEVICE Loader& loader() { return static_cast<Loader&>(*this); }
};

}  // namespace tile
