// Fused MoE experts for many tokens: each expert's pairs in tiles, operands through LDS.
//
//     sort:     sorts the (token, expert) pairs by expert and assigns tiles
//     gate_up:  act[position] = silu(gate) * up,  gate, up = w1[expert] @ hidden[token]
//     down:     results[pair] = w2[expert] @ act[position]
//     combine:  out[token] = sum over the token's pairs of weight * results[pair]
//
// Kernels named "clamped" and "biased" add biases to both products, and have the other activations of gemm/swiglu.h.
//
// Pair index: token * slots + slot; slots are the topk routed experts, then the shared ones. A position is an index
// into the sorted pairs; pairs whose expert is not on this rank have none. Flops: 6 * pairs * H * I; bytes: the weights
// of the activated experts, plus about H * 5 + I * 6 per pair.
//
// Only the device knows the number of tiles: the grid has the maximum, and blocks without a tile return. A gate_up or
// down block computes one tile (gemm/tiled/main_loop.h), or a few of one expert: up to kTileM pairs of one expert times
// kTileN of its weight rows. In gate_up half of the rows are gate rows and the others their up rows, so a lane has the sums of 4 of each and
// computes activations. Positions follow pair order, sums follow slot order: the same inputs give the same bits.
//
// scaled_mm_tiled.hip lists the cost of gemm/tiled/main_loop.h per panel. Two weight scales add 28 issue cycles per
// SIMD for 64 x 128 on gfx942, 56 for 128 x 128 (emulated). No LDS bank conflicts.
//
// sort: each block sorts the pairs of one expert on its own. It counts the ids of all experts in LDS. Then each of its
// waves reads a share of the ids and writes the block's pairs to their positions. Bytes: E * ids, from the caches.
#include "device/expert_id.h"
#include "device/reduce.h"
#include "gemm/expert_tiles.h"

struct Routing {
  const u32* ids;         // [tokens, topk], id_words words each
  const int* expert_map;  // [mapped], or null
  int tokens, topk, shared, routed, mapped, id_words;
  DEVICE int slots() const { return topk + shared; }
};

// Loads the expert of each id, or -1 if it is not on this rank.
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
      tiles;  // [1 + tiles]: the number of pairs with a position, and of tiles; then each tile's expert, first position,
              // and the end of the expert's positions
  int experts, tile;  // tile: pairs per tile
};

constexpr int kMaxExperts = 1024, kBatch = 4;

struct AddInt {
  DEVICE int operator()(int a, int b) const { return a + b; }
};

template <int kSortThreads>
DEVICE void sort_pairs(const Sort& sort) {
  constexpr int kWaves = kSortThreads / wave::kLanes, kStep = kBatch * wave::kLanes;
  LDS static int counts[kMaxExperts], of_waves[kWaves];
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
  block_barrier();  // hazard: counters are incremented before they are zero
  int wave_count = 0;
  for_all([&](int, int found) __attribute__((always_inline)) {
    if (found >= 0) __scoped_atomic_fetch_add(counts + found, 1, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    wave_count += wave::count(found == expert);
  });
  if (wave::lane() == 0) of_waves[wave::index()] = wave_count;
  block_barrier();  // hazard: counts are read before they are complete

  int position = 0, tile = 0;  // the expert's first
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

// With fewer threads all experts' blocks run at a time; with more, each reads its ids in fewer steps.
KERNEL(256) fused_experts_tiled_sort_256(Sort sort) { sort_pairs<256>(sort); }
KERNEL(1024) fused_experts_tiled_sort_1024(Sort sort) { sort_pairs<1024>(sort); }

EXPERTS_TILES(fused_experts_tiled, block, E4m3, E4m3, kBlock)
EXPERTS_TILES(fused_experts_tiled, row, E4m3, E4m3, kRow)
EXPERTS_TILES(fused_experts_tiled, bf16, Bf16, Bf16, kNone)
EXPERTS_TILES(fused_experts_tiled, fp16, F16, F16, kNone)

// down for few panels along K: a block loads the next tile's weights while it stores a tile's results. Measured on H200,
// DeepSeek-V3 at TP8 (two panels) with 128 tokens: 124 us, with a block per tile 165 us. gate_up has more panels and
// gains nothing, but needs registers.
#define RUNS(kind, Type, scales)                                                               \
  KERNEL(256) fused_experts_tiled_down_run_##kind##_64(GroupedProblem problem) {               \
    using Tile = BlockTile<64, 128, 256>;                                                      \
    multiply_experts<Type, Type, Tile, ScaleGranularity::scales, false, false, true>(problem); \
  }
RUNS(block, E4m3, kBlock)
RUNS(row, E4m3, kRow)
RUNS(bf16, Bf16, kNone)
RUNS(fp16, F16, kNone)

// gate_up with the activations of gemm/swiglu.h.
#define CLAMPED(kind, Type, scales)                                                                    \
  KERNEL(256) fused_experts_tiled_gate_up_clamped_##kind##_64(GroupedProblem problem, SwiGlu swiglu) { \
    using Tile = BlockTile<64, 128, 256>;                                                              \
    multiply_experts<Type, Type, Tile, ScaleGranularity::scales, true, true>(problem, swiglu);         \
  }
CLAMPED(block, E4m3, kBlock)
CLAMPED(row, E4m3, kRow)
CLAMPED(bf16, Bf16, kNone)
CLAMPED(fp16, F16, kNone)

struct Combine {
  Routing routing;
  const float* results;  // [pairs, columns]
  const float* router;   // [tokens, topk], or null for ones
  void* out;             // [tokens, columns], out_type
  int columns, out_type;
};

constexpr int kCombineThreads = 256;

template <bool kBiased>
DEVICE void combine_pairs(const Combine& combine, const void* bias) {
  const Routing& routing = combine.routing;
  const i64 token = wave::block_id_x();
  const int column = (wave::block_id_y() * kCombineThreads + wave::thread_id()) * kChunk;
  if (column >= combine.columns) return;
  const mem::Buffer results = mem::buffer(combine.results + token * routing.slots() * combine.columns);
  f32x4 low = {}, high = {};
  auto add = [&](int slot, bool present, float weight, int expert) __attribute__((always_inline)) {
    const int row = slot * combine.columns * 4;
    const u32x4 first = mem::load_or_zero(results, column * 4, row, present);
    const u32x4 second = mem::load_or_zero(results, column * 4 + 16, row, present);
    f32x4 at_low = __builtin_bit_cast(f32x4, first), at_high = __builtin_bit_cast(f32x4, second);
    if constexpr (kBiased) {
      const int at = (expert * combine.columns + column) * 2;
      const u32x4 loaded = mem::load_or_zero(mem::buffer(bias), at, 0, present);
      const Chunk biases = combine.out_type == 0 ? unpack<Bf16>(loaded) : unpack<F16>(loaded);
      at_low += f32x4{biases.pair[0].x, biases.pair[0].y, biases.pair[1].x, biases.pair[1].y};
      at_high += f32x4{biases.pair[2].x, biases.pair[2].y, biases.pair[3].x, biases.pair[3].y};
    }
    low += at_low * weight;
    high += at_high * weight;
  };
#pragma unroll 8
  for (int slot = 0; slot < routing.topk; ++slot) {
    const int at[1] = {int(token) * routing.topk + slot};
    int expert[1];
    load_experts(routing, at, at[0] + 1, expert);
    const bool present = expert[0] >= 0;
    add(slot, present, !present ? 0.0f : combine.router ? mem::load<float>(combine.router + at[0]) : 1.0f, expert[0]);
  }
  for (int slot = routing.topk; slot < routing.slots(); ++slot)
    add(slot, true, 1.0f, routing.routed + slot - routing.topk);
  const Chunk sum = {{low.lo, low.hi, high.lo, high.hi}};
  mem::store((u16*)combine.out + token * combine.columns + column,
             combine.out_type == 0 ? pack<Bf16>(sum) : pack<F16>(sum));
}

KERNEL(kCombineThreads) fused_experts_tiled_combine(Combine combine) { combine_pairs<false>(combine, nullptr); }
// bias: [experts, columns], out_type, less than 2 GB
KERNEL(kCombineThreads) fused_experts_tiled_combine_biased(Combine combine, const void* bias) {
  combine_pairs<true>(combine, bias);
}
