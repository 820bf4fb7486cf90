// Copies operand rows from HBM to LDS panels.
#pragma once
#include "device/swizzle.h"

namespace tile {

constexpr int kNoRow = -1;  // lane offset of a zero row

// Copies kRows rows with a block's kThreads threads.
template <int kRows, int kThreads>
struct TileLoader {
  static constexpr int kCopies = kRows * kRowVecs / kThreads;  // per thread
  static_assert(kThreads % (kRowVecs * 16) == 0, "all copies of a thread have the same column");
  mem::Buffer from;
  int offset[kCopies];  // of the thread's copies at K = 0, or kNoRow
  int column;           // byte column of the thread's copies in a panel row
  int step;             // bytes between panels
  int wave_offset;      // byte offset of the wave's first copy in a panel; a loop may keep it in a vector register
  lds::Copy copy[kCopies];

  // Panel row r is row row_of(r), relative to `first`. kNoRow gives zeros without a read.
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
  // Starts copying panel `panel` along K; bytes from k on are zeros.
  DEVICE void start(int panel, int k, lds::Local<u8>* to) {
    const int at = panel * step, bytes = k - panel * kDepth;
#pragma unroll
    for (int j = 0; j < kCopies; ++j)
      copy[j] = lds::start_copy(from, offset[j], at, column < bytes,
                                to + wave::uniform(wave_offset) + j * kThreads * kVecBytes);
  }
  DEVICE void finish(lds::Local<u8>* to) {
#pragma unroll
    for (int j = 0; j < kCopies; ++j) lds::finish_copy(copy[j], to + wave_offset + j * kThreads * kVecBytes);
  }
};

// Base of loaders that copy through registers: load(panel, k) fills them, store(to) writes them to an LDS panel. One
// panel at a time is in flight: held in registers until needed or, where LDS has room, stored at once.
template <class Loader>
struct RegisterLoader {
  static constexpr bool kHeld = lds::kBuffers < 3;
  // Starts copying panel `panel` along K; bytes of the multiplied type from k on are zeros.
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
