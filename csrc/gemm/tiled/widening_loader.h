// Copies 8-bit operand rows from HBM to bf16 or fp16 LDS panels. The conversion is exact.
#pragma once
#include "gemm/element.h"
#include "gemm/tiled/loader.h"

namespace tile {

// The ElementType of an 8-bit type.
template <class From>
constexpr ElementType kElementType = __is_same(From, I8)     ? kI8
                                     : __is_same(From, E5m2) ? kE5m2
                                                             : kE4m3;

// Copies kRows rows with a block's kThreads threads, like TileLoader. A copy is 16 elements, a panel 64 per row: one
// step of a weight in fragment order.
template <class To, class From, int kRows, int kThreads>
struct WideningLoader : RegisterLoader<WideningLoader<To, From, kRows, kThreads>> {
  static constexpr int kRowCopies = kRowVecs / 2, kCopies = kRows * kRowCopies / kThreads;
  mem::Buffer from;
  int offset[kCopies];  // of the thread's copies at K = 0, or kNoRow
  int place[kCopies];   // their panel rows
  int depth;            // bytes before them in a panel row
  int step;             // bytes between panels
  u32x4 copy[kCopies];

  // Panel row r is row row_of(r), relative to `first`. kNoRow gives zeros without a read.
  template <class RowOf>
  DEVICE void init(const u8* first, const Layout& layout, RowOf row_of) {
    from = mem::buffer(first);
    step = layout.step;
    const int vec = wave::thread_id() % kRowCopies;
    depth = 2 * vec * kVecBytes;
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      const int at = (j * kThreads + wave::thread_id()) / kRowCopies, row = row_of(at);
      offset[j] = row == kNoRow ? kNoRow : row / 16 * int(layout.tile) + row % 16 * layout.row + vec * layout.vec;
      place[j] = at;
    }
  }
  DEVICE void load(int panel, int k) {
    const bool inside = depth < k - panel * kDepth;
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      const bool has_row = !mem::kPredicates || offset[j] != kNoRow;  // else the address encodes the missing row
      copy[j] = mem::load_or_zero(from, offset[j], panel * step, inside && has_row);
    }
  }
  DEVICE void store(lds::Local<u8>* to) const {
#pragma unroll
    for (int j = 0; j < kCopies; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PanelVec vec{place[j], depth / kVecBytes + half};
        const u32 low = copy[j][2 * half], high = copy[j][2 * half + 1];
        *(lds::Local<u32x4>*)(to + vec.swizzled_index(false) * kVecBytes) =
            u32x4{widen<false>(low), widen<true>(low), widen<false>(high), widen<true>(high)};
      }
  }

 private:
  template <bool kUpper>
  DEVICE static u32 widen(u32 word) {
    return To::pack(unpack_bytes<kUpper>(word, kElementType<From>));
  }
};

}  // namespace tile
