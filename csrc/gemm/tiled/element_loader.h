// Copies rows of an operand with any strides to LDS panels, element by element, converted to the multiplied type.
#pragma once
#include "gemm/element.h"
#include "gemm/tiled/loader.h"

namespace tile {

// Copies kRows rows with a block's kThreads threads, like TileLoader. To: Bf16, F16, or any 8-bit type, whose elements
// are copied unchanged.
template <class To, int kRows, int kThreads>
struct ElementLoader : RegisterLoader<ElementLoader<To, kRows, kThreads>> {
  static constexpr bool kHalves = __is_same(To, Bf16) || __is_same(To, F16);
  static constexpr int kElements = kVecBytes / (1 + kHalves), kPanel = kDepth / (1 + kHalves);  // per copy, per panel
  static constexpr int kCopies = kRows * kRowVecs / kThreads;
  const u8* first;
  i64 panel_step;
  int step, type;
  int vectors;
  int offset[kCopies];  // byte offsets of the thread's copies, or -1 for zeros
  int depth[kCopies];   // K elements before each copy in a panel
  int place[kCopies];   // in LDS
  u32x4 copy[kCopies];

  template <class RowOf>
  DEVICE void init(const Elements& from, i64 first_row, RowOf row_of) {
    first = from.data + first_row * from.row;
    panel_step = kPanel * from.step, step = int(from.step), type = from.type, vectors = from.vectors;
    // Adjacent lanes copy adjacent elements: along K, or in adjacent rows.
    const bool along_k = from.step <= 2;
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      const int index = j * kThreads + wave::thread_id();
      const PanelVec at =
          along_k ? PanelVec{index / kRowVecs, index % kRowVecs} : PanelVec{index % kRows, index / kRows};
      const int row = row_of(at.row);
      depth[j] = at.vec * kElements;
      place[j] = at.swizzled_index(false) * kVecBytes;
      offset[j] = row == kNoRow ? -1 : int(row * from.row + depth[j] * from.step);
    }
  }
  DEVICE void load(int panel, int k) {
    const mem::Buffer from = mem::buffer(first + panel * panel_step);
    const int left = (k - panel * kDepth) / (1 + kHalves);
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      const int count = offset[j] < 0 ? 0 : left - depth[j];
      copy[j] = vectors ? mem::load_or_zero(from, offset[j], 0, count > 0) : gather(from, offset[j], count);
    }
  }
  DEVICE void store(lds::Local<u8>* to) const {
#pragma unroll
    for (int j = 0; j < kCopies; ++j) *(lds::Local<u32x4>*)(to + place[j]) = copy[j];
  }

 private:
  DEVICE u32x4 gather(mem::Buffer from, int at, int count) const {
    u32 bits[kElements];
    const bool halves = kHalves && type >= kBf16;
#pragma unroll
    for (int e = 0; e < kElements; ++e)
      bits[e] = halves ? mem::load_short_or_zero(from, at + e * step, 0, e < count)
                       : mem::load_byte_or_zero(from, at + e * step, 0, e < count);
    u32x4 packed;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kHalves) {
        const u32 low = bits[2 * w], high = bits[2 * w + 1];
        packed[w] = halves ? low | high << 16 : To::pack(unpack_bytes<false>(low | high << 8, type));
      } else packed[w] = bits[4 * w] | bits[4 * w + 1] << 8 | bits[4 * w + 2] << 16 | bits[4 * w + 3] << 24;
    }
    return packed;
  }
};

}  // namespace tile
