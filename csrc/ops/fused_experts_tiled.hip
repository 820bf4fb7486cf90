// The experts of a mixture-of-experts layer for many tokens: the pairs of each expert in tiles, their operands through LDS.
//
//     sort:     the pairs of a token and an expert that it goes to, in the order of the experts; their tiles
//     gate_up:  act[position] = silu(gate) * up,  gate, up = w1[expert] @ hidden[token]
//     down:     results[pair] = w2[expert] @ act[position]
//     combine:  out[token] = sum over the token's pairs of weight * results[pair]
//
// Pair number token * slots + slot; slots are the topk chosen experts, then the shared ones. A position is a place among the
// sorted pairs; pairs whose expert this rank does not have have none. Flops: 6 * pairs * H * I; bytes: the weights of the
// experts hit, and of each pair some H * 5 + I * 6.
//
// Only the device knows the number of tiles: a grid has the most that are possible, and blocks without a tile return. A block of
// gate_up or down computes a tile (gemm/tiled/main_loop.h): up to kTileM pairs of one expert times kTileN of its weight rows. In
// gate_up half of the rows are gate rows and the others their up rows, so that a lane has the sums of 4 of each and computes
// activations. Positions have the order of the pairs, sums that of the slots: the same inputs give the same bits.
//
// What gemm/tiled/main_loop.h does per panel is counted in scaled_mm_tiled.hip; two scales of weights take 28 issue cycles more
// of a SIMD for 64 x 128 on gfx942, 56 for 128 x 128 (emulated). No LDS bank conflicts.
//
// sort: each block sorts the pairs of one expert by itself. It counts the ids of all experts in LDS. Then each of its waves
// reads a part of the ids and writes the block's pairs to their positions. Bytes: E * ids, out of the caches.
#include "device/expert_id.h"
#include "device/reduce.h"
#include "device/vec.h"
#include "gemm/tiled/main_loop.h"
#include "gemm/tiled/rasterize.h"

using i32x4 = int __attribute__((ext_vector_type(4)));
using tile::BlockTile, tile::Accumulators;

struct Routing {
  const u32* ids;         // [tokens, topk], id_words words each
  const int* expert_map;  // [mapped], or null
  int tokens, topk, shared, routed, mapped, id_words;
  DEVICE int slots() const { return topk + shared; }
};

// The expert of each id, or -1 if this rank does not have it.
template <int kIds>
DEVICE void load_experts(const Routing& p, const int (&at)[kIds], int end, int (&expert)[kIds]) {
#pragma unroll
  for (int i = 0; i < kIds; ++i) expert[i] = at[i] < end ? load_expert_id(p.ids, p.id_words, at[i]) : -1;
  if (p.expert_map) {
#pragma unroll
    for (int i = 0; i < kIds; ++i) {
      const bool known = expert[i] >= 0 && expert[i] < p.mapped;
      expert[i] = known ? mem::load<int>(p.expert_map + expert[i]) : -1;
    }
  }
#pragma unroll
  for (int i = 0; i < kIds; ++i)
    if (expert[i] >= p.routed) expert[i] = -1;
}

struct Sort {
  Routing routing;
  int* sorted;  // [pairs]: the pair at each position
  i32x4*
      tiles;  // [1 + tiles]: how many pairs have a position, and how many tiles there are; then of each tile its expert, its
              // first position, and the one behind the expert's last
  int experts, tile;  // and pairs of a tile
};

constexpr int kMostExperts = 1024, kSortThreads = 1024, kBatch = 4;

struct AddInt {
  DEVICE int operator()(int a, int b) const { return a + b; }
};

KERNEL(kSortThreads) fused_experts_tiled_sort(Sort sort) {
  constexpr int kWaves = kSortThreads / wave::kLanes, kStep = kBatch * wave::kLanes;
  LDS static int counts[kMostExperts], of_waves[kWaves];
  const Routing& routing = sort.routing;
  const int expert = wave::block_id_x(), tokens = routing.tokens, topk = routing.topk, shared = expert - routing.routed;
  const int ids = tokens * topk, of_wave = (ids + kWaves * kStep - 1) / (kWaves * kStep) * kStep;
  const int first = wave::index() * of_wave, end = first + of_wave < ids ? first + of_wave : ids;
  auto for_all = [&](auto what) __attribute__((always_inline)) {
    for (int base = first; base < end; base += kStep) {
      int at[kBatch], found[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) at[i] = base + i * wave::kLanes + wave::lane();
      load_experts(routing, at, end, found);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) what(at[i], found[i]);
    }
  };

  for (int i = wave::thread_id(); i < routing.routed; i += kSortThreads) counts[i] = 0;
  block_barrier();  // hazard: counted on before they are zero
  int wave_count = 0;
  for_all([&](int, int found) __attribute__((always_inline)) {
    if (found >= 0) __scoped_atomic_fetch_add(counts + found, 1, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    wave_count += wave::count(found == expert);
  });
  if (wave::lane() == 0) of_waves[wave::index()] = wave_count;
  block_barrier();  // hazard: counts are read before all are there

  int position = 0, tile = 0;  // the first of this expert
  for (int i = wave::lane(); i < routing.routed && i < expert; i += wave::kLanes)
    position += counts[i], tile += (counts[i] + sort.tile - 1) / sort.tile;
  position = wave::reduce(position, 0, AddInt{}), tile = wave::reduce(tile, 0, AddInt{});
  const bool is_shared = shared >= 0;
  if (is_shared) position += shared * tokens, tile += shared * ((tokens + sort.tile - 1) / sort.tile);
  const int count = is_shared ? tokens : counts[expert], tiles = (count + sort.tile - 1) / sort.tile;
  for (int i = wave::thread_id(); i < tiles; i += kSortThreads)
    mem::store(sort.tiles + 1 + tile + i, i32x4{expert, position + i * sort.tile, position + count, 0});
  if (expert == sort.experts - 1 && wave::thread_id() == 0)
    mem::store(sort.tiles, i32x4{position + count, tile + tiles, 0, 0});

  if (is_shared) {
    for (int i = wave::thread_id(); i < tokens; i += kSortThreads)
      mem::store(sort.sorted + position + i, i * routing.slots() + topk + shared);
  } else {
    const int before = wave::lane() < wave::index() ? of_waves[wave::lane()] : 0;
    position += wave::reduce(before, 0, AddInt{});
    for_all([&](int at, int found) __attribute__((always_inline)) {
      const bool is_found = found == expert;
      const int to = position + wave::count_below(is_found);
      if (is_found) mem::store(sort.sorted + to, int(u32(at) / topk * routing.slots() + u32(at) % topk));
      position += wave::count(is_found);
    });
  }
}

struct GroupedProblem {
  const u8* a;        // gate_up: [tokens, K], rows a_stride bytes apart; down: [positions, K]
  const u8* b;        // [experts, N, K], b_expert bytes apart; an expert's at b_tile, b_row and b_vec: see tile::Layout
  void* out;          // gate_up: [positions, N / 2] of out_type; down: [pairs, N] fp32
  const int* sorted;  // [positions]
  const i32x4* tiles;    // [1 + tiles]: as in Sort
  const float* scale_a;  // row: [rows of a] or [1]; block: [rows of a, ceil(K / 128)]; null without
  const float* scale_b;  // row: [experts, N] or [experts]; block: [experts, ceil(N / 128), ceil(K / 128)]; null without
  const float* router;   // gate_up: [tokens, topk], what sums are multiplied with; null for ones
  i64 a_stride, b_expert, b_tile, scale_b_expert;
  int b_row, b_vec, n, k;
  int scale_a_row, scale_a_k,
      scale_b_row;            // elements from scale to scale: of rows or blocks of rows, and of a's blocks of K
  int slots, topk, out_type;  // 0 bf16, 1 fp16
  int tiles_n;                // of weight rows
};

// A tile: pairs of one expert, from position `first` on.
struct ExpertTile {
  int expert, first, count;
};

// A wave's sums; n is the first gate row of these.
template <class Tile, ScaleGranularity kScales>
DEVICE void store_activations(const Accumulators<Tile>& sums, const GroupedProblem& p, const ExpertTile& expert_tile,
                              int first_n) {
  constexpr int kRows = kChunk / 2;
  const int inner = p.n / 2;
  const float* scales_b = p.scale_b + expert_tile.expert * p.scale_b_expert;
#pragma unroll
  for (int j = 0; j < Tile::kAccumulatorsN; ++j) {
    const int n = first_n + (j * tile::kAccumulatorRows + tile::accumulator_row(wave::lane())) / 2;
    if (n >= inner) continue;
    float of_gate[kRows], of_up[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kScales != ScaleGranularity::kRow) continue;
      of_gate[r] = mem::load<float>(scales_b + (n + r) * p.scale_b_row);
      of_up[r] = mem::load<float>(scales_b + (inner + n + r) * p.scale_b_row);
    }
#pragma unroll
    for (int i = 0; i < Tile::kAccumulatorsM * tile::kLaneTokens; ++i) {
      const int m = Tile::wave_m() + Tile::token(i);
      if (m >= expert_tile.count) continue;
      const int pair = mem::load<int>(p.sorted + expert_tile.first + m), token = u32(pair) / p.slots,
                slot = pair - token * p.slots;
      const float scale_a =
          kScales == ScaleGranularity::kRow ? mem::load<float>(p.scale_a + i64(token) * p.scale_a_row) : 1.0f;
      const float weight = p.router && slot < p.topk ? mem::load<float>(p.router + i64(token) * p.topk + slot) : 1.0f;
      float y[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const tile::AccumulatorTile& accumulator = sums[i / tile::kLaneTokens][j];
        float gate = accumulator.get(i % tile::kLaneTokens, r), up = accumulator.get(i % tile::kLaneTokens, kRows + r);
        if constexpr (kScales == ScaleGranularity::kRow)
          gate = gate * scale_a * of_gate[r], up = up * scale_a * of_up[r];
        y[r] = silu(gate * weight) * (up * weight);
      }
      const f32x2 low = {y[0], y[1]}, high = {y[2], y[3]};
      const u32x2 packed =
          p.out_type == 0 ? u32x2{Bf16::pack(low), Bf16::pack(high)} : u32x2{F16::pack(low), F16::pack(high)};
      mem::store((u16*)p.out + i64(expert_tile.first + m) * inner + n, packed);
    }
  }
}

// A wave's sums, whose first weight row is first_n.
template <class Tile, ScaleGranularity kScales>
DEVICE void store_results(const Accumulators<Tile>& sums, const GroupedProblem& p, const ExpertTile& expert_tile,
                          int first_n) {
  const float* scales_b = p.scale_b + expert_tile.expert * p.scale_b_expert;
#pragma unroll
  for (int j = 0; j < Tile::kAccumulatorsN; ++j) {
    const int n = first_n + j * tile::kAccumulatorRows + tile::accumulator_row(wave::lane());
    if (n >= p.n) continue;
    float scale_b[kChunk];
#pragma unroll
    for (int r = 0; r < kChunk; ++r)
      scale_b[r] = kScales == ScaleGranularity::kRow ? mem::load<float>(scales_b + (n + r) * p.scale_b_row) : 1.0f;
#pragma unroll
    for (int i = 0; i < Tile::kAccumulatorsM * tile::kLaneTokens; ++i) {
      const int m = Tile::wave_m() + Tile::token(i);
      if (m >= expert_tile.count) continue;
      const i64 pair = mem::load<int>(p.sorted + expert_tile.first + m), row = expert_tile.first + m;
      const float scale_a =
          kScales == ScaleGranularity::kRow ? mem::load<float>(p.scale_a + row * p.scale_a_row) : 1.0f;
#pragma unroll
      for (int v = 0; v < kChunk / 4; ++v) {
        f32x4 x;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          x[r] = sums[i / tile::kLaneTokens][j].get(i % tile::kLaneTokens, v * 4 + r);
          if constexpr (kScales == ScaleGranularity::kRow) x[r] = x[r] * scale_a * scale_b[v * 4 + r];
        }
        mem::store((float*)p.out + pair * p.n + n + v * 4, x);
      }
    }
  }
}

template <class Type, class Tile, ScaleGranularity kScales, bool kGated>
DEVICE void multiply_experts(const GroupedProblem& p) {
  const int tiles = mem::load<i32x4>(p.tiles).y, blocks = tiles * p.tiles_n;
  if (wave::block_id_x() >= blocks) return;
  const tile::TileCoord position =
      tile::rasterize(tile::remap_to_xcd(wave::block_id_x(), blocks), tiles, p.tiles_n, tile::kGroupM);
  const i32x4 found = mem::load<i32x4>(p.tiles + 1 + position.m);
  const int count = found.z - found.y < Tile::kTileM ? found.z - found.y : Tile::kTileM;
  const ExpertTile expert_tile = {wave::uniform(found.x), wave::uniform(found.y), wave::uniform(count)};
  constexpr int kRowsN = kGated ? Tile::kTileN / 2 : Tile::kTileN;  // of gate, in gate_up
  const int rows_n = kGated ? p.n / 2 : p.n, first_n = position.n * kRowsN;
  const int wave_n = first_n + (kGated ? Tile::wave_n() / 2 : Tile::wave_n());

  // The row of a, from a's or from the tile's first one on, that token m of the tile has; past the last that of the last.
  auto row_of_a = [&](int m) __attribute__((always_inline)) {
    const int inside = m < expert_tile.count ? m : expert_tile.count - 1;
    return kGated ? int(u32(mem::load<int>(p.sorted + expert_tile.first + inside)) / p.slots) : inside;
  };
  const i64 first_a = kGated ? 0 : expert_tile.first;
  tile::TileLoader<Tile::kTileM, Tile::kThreads> loader_a;
  tile::TileLoader<Tile::kTileN, Tile::kThreads> loader_b;
  const tile::Layout a_layout{16 * p.a_stride, int(p.a_stride), tile::kVecBytes, 4 * tile::kVecBytes};
  const int b_vec = mem::kExpertFragments ? p.b_vec : tile::kVecBytes;
  const tile::Layout b_layout{mem::kExpertFragments ? p.b_tile : 16 * i64(p.b_row), p.b_row, b_vec, 4 * b_vec};
  loader_a.init(p.a + first_a * p.a_stride, a_layout,
                [&](int m) { return m < expert_tile.count ? row_of_a(m) : tile::kNoRow; });
  loader_b.init(p.b + expert_tile.expert * p.b_expert, b_layout, [&](int row) {
    const int in_tile =
        row / tile::kAccumulatorRows * tile::kAccumulatorRows + tile::weight_row(row % tile::kAccumulatorRows);
    constexpr int kHalf = kChunk / 2;
    const int n = first_n + (kGated ? in_tile / kChunk * kHalf + in_tile % kHalf : in_tile);
    return n >= rows_n ? tile::kNoRow : n + (kGated && in_tile % kChunk >= kHalf ? rows_n : 0);
  });

  Accumulators<Tile> sums = {};
  auto multiply = [&](const auto& scaling) __attribute__((always_inline)) {
    const int panels = (p.k + tile::kDepth - 1) / tile::kDepth;
    tile::multiply_panels<Tile, Type>(sums, loader_a, loader_b, b_layout.is_fragment_order(), scaling, 0, panels, p.k);
  };
  if constexpr (kScales == ScaleGranularity::kBlock) {
    auto block_of = [&](int n) { return (n < p.n ? n : p.n - 1) / kScaleBlock * p.scale_b_row; };
    const float* scales_b = p.scale_b + expert_tile.expert * p.scale_b_expert;
    tile::BlockScales<Tile, kGated> scales;
    if constexpr (kGated) {
      scales.init(p.scale_a, p.scale_a_row, p.scale_a_k, scales_b, row_of_a);
      scales.b_at[0] = block_of(wave_n < rows_n ? wave_n : rows_n - 1) * 4;
#pragma unroll
      for (int j = 0; j < Tile::kAccumulatorsN; ++j)
        scales.b_at[1 + j] = block_of(rows_n + wave_n + j * tile::kAccumulatorRows / 2) * 4;
    } else {
      scales.init(p.scale_a + first_a * p.scale_a_row, p.scale_a_row, p.scale_a_k, scales_b + block_of(wave_n),
                  row_of_a);
    }
    multiply(scales);
  } else {
    multiply(tile::Unscaled{});
  }
  if constexpr (kGated) store_activations<Tile, kScales>(sums, p, expert_tile, wave_n);
  else store_results<Tile, kScales>(sums, p, expert_tile, wave_n);
}

// clang-format off
#define INSTANCE(symbol, Type, tile_m, scales, gated)                                       \
  KERNEL(256) symbol(GroupedProblem problem) {                                                     \
    multiply_experts<Type, BlockTile<tile_m, 128, 256>, ScaleGranularity::scales, gated>(problem);     \
  }

INSTANCE(fused_experts_tiled_gate_up_block_64,  E4m3, 64,  kBlock, true)
INSTANCE(fused_experts_tiled_gate_up_block_128, E4m3, 128, kBlock, true)
INSTANCE(fused_experts_tiled_gate_up_row_64,    E4m3, 64,  kRow,   true)
INSTANCE(fused_experts_tiled_gate_up_row_128,   E4m3, 128, kRow,   true)
INSTANCE(fused_experts_tiled_gate_up_bf16_64,   Bf16, 64,  kNone,  true)
INSTANCE(fused_experts_tiled_gate_up_bf16_128,  Bf16, 128, kNone,  true)
INSTANCE(fused_experts_tiled_gate_up_fp16_64,   F16,  64,  kNone,  true)
INSTANCE(fused_experts_tiled_gate_up_fp16_128,  F16,  128, kNone,  true)
INSTANCE(fused_experts_tiled_down_block_64,     E4m3, 64,  kBlock, false)
INSTANCE(fused_experts_tiled_down_block_128,    E4m3, 128, kBlock, false)
INSTANCE(fused_experts_tiled_down_row_64,       E4m3, 64,  kRow,   false)
INSTANCE(fused_experts_tiled_down_row_128,      E4m3, 128, kRow,   false)
INSTANCE(fused_experts_tiled_down_bf16_64,      Bf16, 64,  kNone,  false)
INSTANCE(fused_experts_tiled_down_bf16_128,     Bf16, 128, kNone,  false)
INSTANCE(fused_experts_tiled_down_fp16_64,      F16,  64,  kNone,  false)
INSTANCE(fused_experts_tiled_down_fp16_128,     F16,  128, kNone,  false)
// clang-format on

struct Combine {
  Routing routing;
  const float* results;  // [pairs, columns]
  const float* router;   // [tokens, topk], or null for ones
  void* out;             // [tokens, columns] of out_type
  int columns, out_type;
};

constexpr int kCombineThreads = 256;

KERNEL(kCombineThreads) fused_experts_tiled_combine(Combine combine) {
  const Routing& routing = combine.routing;
  const i64 token = wave::block_id_x();
  const int column = (wave::block_id_y() * kCombineThreads + wave::thread_id()) * kChunk;
  if (column >= combine.columns) return;
  const mem::Buffer results = mem::buffer(combine.results + token * routing.slots() * combine.columns);
  f32x4 low = {}, high = {};
  auto add = [&](int slot, bool present, float weight) __attribute__((always_inline)) {
    const int row = slot * combine.columns * 4;
    const u32x4 first = mem::load_or_zero(results, column * 4, row, present);
    const u32x4 second = mem::load_or_zero(results, column * 4 + 16, row, present);
    low += __builtin_bit_cast(f32x4, first) * weight;
    high += __builtin_bit_cast(f32x4, second) * weight;
  };
#pragma unroll 4
  for (int slot = 0; slot < routing.topk; ++slot) {
    const int at[1] = {int(token) * routing.topk + slot};
    int expert[1];
    load_experts(routing, at, at[0] + 1, expert);
    const bool present = expert[0] >= 0;
    add(slot, present, !present ? 0.0f : combine.router ? mem::load<float>(combine.router + at[0]) : 1.0f);
  }
  for (int slot = routing.topk; slot < routing.slots(); ++slot) add(slot, true, 1.0f);
  const Chunk sum = {{low.lo, low.hi, high.lo, high.hi}};
  mem::store((u16*)combine.out + token * combine.columns + column,
             combine.out_type == 0 ? pack<Bf16>(sum) : pack<F16>(sum));
}
