// Split-K: several blocks compute one tile, each over a slice of K.
#pragma once
#include "device/arrive.h"
#include "gemm/tiled/main_loop.h"

namespace tile {

struct AddFloats {
  DEVICE f32x4 operator()(f32x4 a, f32x4 b) const { return a + b; }
};

// Stores a K slice's partial sums to HBM. The tile's last block to arrive adds those from all slices, in K order, and
// returns true.
template <class Tile, class Add = AddFloats, class Problem>
DEVICE bool reduce_split_k(Accumulators<Tile>& sums, const Problem& p, int tile_index, int k_slice) {
  constexpr int kVectors = sizeof(AccumulatorTile) / sizeof(f32x4);
  auto partials = [&](int of_slice) __attribute__((always_inline)) {
    return mem::buffer(p.partials + (i64(tile_index) * p.split_k + of_slice) * (Tile::kTileM * Tile::kTileN));
  };
  const int lane_offset = wave::thread_id() * int(sizeof(f32x4));
  auto offset = [](int i, int j, int v) {
    return ((i * Tile::kAccumulatorsN + j) * kVectors + v) * Tile::kThreads * int(sizeof(f32x4));
  };
  auto for_all = [&](auto what) __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < Tile::kAccumulatorsM; ++i)
#pragma unroll
      for (int j = 0; j < Tile::kAccumulatorsN; ++j)
#pragma unroll
        for (int v = 0; v < kVectors; ++v) what(sums[i][j].sum[v], i, j, v);
  };
  auto load = [&](mem::Buffer from, int i, int j, int v) __attribute__((always_inline)) {
    return mem::load_device_or_zero<f32x4>(from, lane_offset, offset(i, j, v), true);
  };
  const mem::Buffer own = partials(k_slice);
  for_all([&](f32x4& sum, int i, int j, int v)
              __attribute__((always_inline)) { mem::store_device(own, lane_offset, offset(i, j, v), sum); });
  if (!is_last_block(p.counters + tile_index, p.split_k, *(u32*)dynamic_lds)) return false;
  const mem::Buffer first = partials(0);
  for_all([&](f32x4& sum, int i, int j, int v) __attribute__((always_inline)) { sum = load(first, i, j, v); });
  for (int s = 1; s < p.split_k; ++s) {
    const mem::Buffer next = partials(s);
    for_all([&](f32x4& sum, int i, int j, int v)
                __attribute__((always_inline)) { sum = Add{}(load(next, i, j, v), sum); });
  }
  return true;
}

}  // namespace tile
