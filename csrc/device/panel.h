// Panels: rows of an operand x 128 bytes of K in LDS; how they lie there, and how they are filled.
#pragma once

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
