// How panels are filled: copies of rows of an operand from HBM to LDS.
#pragma once
#include "device/swizzle.h"

namespace tile {

constexpr int kNoRow = -1;  // the lane offset of zeros

// The copies of kRows rows by the kThreads threads of a block.
template <int kRows, int kThreads>
struct Filler {
  static constexpr int kCopies = kRows * kPieces / kThreads;  // per thread
  static_assert(kThreads % (kPieces * 16) == 0, "all pieces of a thread have the same place in their rows");
  mem::Buffer from;
  int offset[kCopies];  // of the thread's pieces at K = 0, or kNoRow
  int column;           // of its pieces in a panel's rows, in bytes
  int step;             // bytes from a panel to the next
  int part;             // of a panel, in bytes: where the wave's first pieces go
  lds::Copy copy[kCopies];

  // Row r of the panel is row row_of(r), from `first` on; zeros for kNoRow, so that nobody reads the same row many times over.
  template <class RowOf>
  DEVICE void init(const u8* first, const Layout& layout, RowOf row_of) {
    const int among = wave::index() * wave::kLanes;
    from = mem::buffer(first);
    step = 2 * layout.step;
    part = among * kPiece;
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      const Place place = Place::of(j * kThreads + among + wave::lane(), layout.by_piece());
      const int row = row_of(place.row);
      const int in_row = place.piece % 4 * layout.piece + place.piece / 4 * layout.step;
      offset[j] = row == kNoRow ? kNoRow : row / 16 * int(layout.tile) + row % 16 * layout.row + in_row;
      column = place.piece * kPiece;
    }
  }
  // Panel number `panel` along K, of which bytes from k on are zeros.
  DEVICE void start(int panel, int k, lds::Local<u8>* to) {
    const int at = panel * step, bytes = k - panel * kDepth;
#pragma unroll
    for (int j = 0; j < kCopies; ++j)
      copy[j] = lds::start_copy(from, offset[j], at, column < bytes, to + part + j * kThreads * kPiece);
  }
  DEVICE void finish(lds::Local<u8>* to) {
#pragma unroll
    for (int j = 0; j < kCopies; ++j) lds::finish_copy(copy[j], to + part + j * kThreads * kPiece);
  }
};

}  // namespace tile
