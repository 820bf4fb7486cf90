// A tile whose K is divided among several blocks.
#pragma once
#include "device/arrive.h"
#include "gemm/tiled/main_loop.h"

namespace tile {

// Leaves a slice's sums in HBM. In the last block of the tile to arrive, makes them the sums of all slices and returns true.
template <class D, class Problem>
DEVICE bool add_slices(Sums<D>& sums, const Problem& p, int tile_index, int slice) {
  constexpr int kVectors = sizeof(Patch) / sizeof(f32x4);
  auto partials = [&](int of_slice) __attribute__((always_inline)) {
    return mem::buffer(p.partials + (i64(tile_index) * p.slices + of_slice) * (D::kTileM * D::kTileN));
  };
  const int lane_offset = wave::thread() * int(sizeof(f32x4));
  auto offset = [](int i, int j, int v) {
    return ((i * D::kPatchesN + j) * kVectors + v) * D::kThreads * int(sizeof(f32x4));
  };
  auto for_all = [&](auto what) __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < D::kPatchesM; ++i)
#pragma unroll
      for (int j = 0; j < D::kPatchesN; ++j)
#pragma unroll
        for (int v = 0; v < kVectors; ++v) what(sums[i][j].sum[v], i, j, v);
  };
  auto load = [&](mem::Buffer from, int i, int j, int v) __attribute__((always_inline)) {
    return mem::load_device_or_zero<f32x4>(from, lane_offset, offset(i, j, v), true);
  };
  const mem::Buffer mine = partials(slice);
  for_all([&](f32x4& sum, int i, int j, int v)
              __attribute__((always_inline)) { mem::store_device(mine, lane_offset, offset(i, j, v), sum); });
  if (!is_last_block(p.counters + tile_index, p.slices, *(u32*)dynamic_lds)) return false;
  const mem::Buffer first = partials(0);
  for_all([&](f32x4& sum, int i, int j, int v) __attribute__((always_inline)) { sum = load(first, i, j, v); });
  for (int s = 1; s < p.slices; ++s) {
    const mem::Buffer next = partials(s);
    for_all([&](f32x4& sum, int i, int j, int v) __attribute__((always_inline)) { sum += load(next, i, j, v); });
  }
  return true;
}

}  // namespace tile
