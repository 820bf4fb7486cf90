// Skinny FP8 matrix product: few tokens times a weight that is streamed from HBM once.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a[m] * scale_b[n] + bias[n])
//
// a and b are e4m3 with K innermost, scales are fp32, one or one per row; sums are fp32. Bytes: N * K of weight, little else;
// flops: 2 * M * N * K. Up to 64 tokens the time is that of reading the weight, so all that counts is to keep enough
// loads in flight on every compute unit until the end.
//
// The work is divided into items: kRows rows of b times a slice of K. A block takes items in turn, neighbouring blocks
// neighbouring slices. Its waves alternate along K at runs of kUnroll * 64 bytes per row: 16 bytes per lane straight from HBM
// to registers, tokens likewise out of the cache. A wave always has the next run under way, past the end of an item the
// first run of the next, so that the stream never stops for the end of an item. There the waves' sums meet in LDS. With
// one slice they are the result; else each block leaves them in HBM, and the last block of the same rows to arrive adds
// the slices up in order, so that the same inputs give the same bits.
#include "device/arrive.h"
#include "device/vec.h"

struct Product {
  const u8* a;           // [M, K] e4m3, rows a_stride bytes apart
  const u8* b;           // [N, K] e4m3, rows b_stride bytes apart
  void* out;             // [M, N] of out_type
  float* partials;       // [tiles of b's rows, slices, M, rows]; null with one slice
  u32* counters;         // [tiles of b's rows], 0; null with one slice
  const float* scale_a;  // [M] or [1]
  const float* scale_b;  // [N] or [1]
  const void* bias;      // [N] of out_type, or null
  i64 a_stride, b_stride;
  int m, n, k;
  int scale_a_step, scale_b_step;  // 1, or 0 for one scale
  int out_type;                    // 0 bf16, 1 fp16, 2 fp32
  int slices, slice;               // slices of K, and the bytes of one: a multiple of 64
  int items, blocks;               // items of work, and blocks that share them
};

DEVICE float load_output_type(const void* row, i64 column, int type) {
  if (type == 0) return load_element<Bf16>(row, column);
  if (type == 1) return load_element<F16>(row, column);
  return mem::load<float>((const float*)row + column);
}
DEVICE void store_output_type(void* row, i64 column, float x, int type) {
  if (type == 0) store_element<Bf16>(row, column, x);
  else if (type == 1) store_element<F16>(row, column, x);
  else mem::store((float*)row + column, x);
}

constexpr int kWaves = 4, kThreads = kWaves * wave::kLanes;

template <int kRows, int kMaxTokens>
DEVICE void scaled_mm_skinny(const Product& p) {
  constexpr int kTokenTiles = (kMaxTokens + mma::kTokens - 1) / mma::kTokens;
  constexpr int kRowTiles = kRows / mma::kRows, kTokens = kTokenTiles * mma::kTokens;
  constexpr int kUnroll = kRowTiles == 1 && kTokenTiles <= 2 ? 4 : kRowTiles * kTokenTiles <= 4 ? 2 : 1;
  constexpr int kRun = kUnroll * mma::kDepth, kStep = kWaves * kRun;
  constexpr int kResults = kRows * kTokens / kThreads;  // of a tile, per thread
  constexpr int kSlicesAtOnce = kResults <= 4 ? 4 : 1;  // whose sums the last block loads together
  // Of this item and of the last, which a slow wave may still read; of one item and a further barrier where LDS is short.
  constexpr int kBuffers = kTokens * kRows <= 1024 ? 2 : 1;
  LDS static float sums[kBuffers][kWaves][kTokens * kRows];
  const int lane = wave::lane(), wave_offset = wave::index() * kRun;

  const u8* token[kTokenTiles];  // tokens past the last are zero
  bool is_token[kTokenTiles];
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    const int m = t * mma::kTokens + mma::token(lane);
    is_token[t] = m < p.m;
    token[t] = p.a + i64(is_token[t] ? m : 0) * p.a_stride + mma::depth(lane);
  }
  struct Run {  // what a wave loads at a time
    mma::Weights weights[kUnroll][kRowTiles];
    u32x4 tokens[kUnroll][kTokenTiles];
  };
  struct Item {  // a tile of rows times a slice of K, and where in it this wave reads
    int index, tile, slice, at, end;
    const u8* weight[kRowTiles][mma::kWeightLoads];
  };
  // Rows past the last read the last one, and their sums are dropped.
  auto start = [&](int index) __attribute__((always_inline)) {
    Item item{index, index / p.slices, 0, 0, 0, {}};
    item.slice = index - item.tile * p.slices;
    item.at = item.slice * p.slice + wave_offset;
    item.end = (item.slice + 1) * p.slice < p.k ? (item.slice + 1) * p.slice : p.k;
#pragma unroll
    for (int i = 0; i < kRowTiles * mma::kWeightLoads; ++i) {
      const int tile = i / mma::kWeightLoads, l = i % mma::kWeightLoads;
      const int row = item.tile * kRows + tile * mma::kRows + mma::weight_row(lane, l);
      item.weight[tile][l] = p.b + i64(row < p.n ? row : p.n - 1) * p.b_stride + mma::depth(lane);
    }
    return item;
  };
  auto load = [&](Run& run, const Item& item) __attribute__((always_inline)) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = item.at + u * mma::kDepth;
      const bool inside = k + mma::depth(lane) < item.end;  // K is a multiple of 16
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int l = 0; l < mma::kWeightLoads; ++l)
          run.weights[u][r].load[l] = inside ? mem::load_once<u32x4>(item.weight[r][l] + k) : u32x4{};
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
        run.tokens[u][t] = inside && is_token[t] ? mem::load<u32x4>(token[t] + k) : u32x4{};
    }
  };

  mma::Accumulator accumulator[kRowTiles][kTokenTiles] = {};
  int parity = 0;
  auto finish = [&](const Item& item) __attribute__((always_inline)) {
    // Thread t has the results t, t + kThreads, ... of [kTokens, kRows]; n is -1 where there is none.
    int m[kResults], row[kResults], n[kResults];
    float scale_a[kResults], scale_b[kResults], bias[kResults], sum[kResults];
#pragma unroll
    for (int j = 0; j < kResults; ++j) {
      const int index = wave::thread() + j * kThreads;
      m[j] = index / kRows, row[j] = index % kRows, n[j] = item.tile * kRows + row[j];
      const bool exists = m[j] < p.m && n[j] < p.n;
      scale_a[j] = exists ? mem::load<float>(p.scale_a + m[j] * p.scale_a_step) : 0.0f;
      scale_b[j] = exists ? mem::load<float>(p.scale_b + n[j] * p.scale_b_step) : 0.0f;
      bias[j] = exists && p.bias ? load_output_type(p.bias, n[j], p.out_type) : 0.0f;
      if (!exists) n[j] = -1;
    }
    if constexpr (kBuffers == 1) block_barrier();  // hazard: sums that another wave still reads are overwritten
    float* mine = sums[parity][wave::index()];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          mine[(t * mma::kTokens + mma::Accumulator::token(lane, i)) * kRows + r * mma::kRows +
               mma::Accumulator::row(lane, i)] = accumulator[r][t].sum[i];
        accumulator[r][t] = {};
      }
    block_barrier();  // hazard: a wave's sums are read before it has written them
#pragma unroll
    for (int j = 0; j < kResults; ++j) {
      sum[j] = 0.0f;
#pragma unroll
      for (int w = 0; w < kWaves; ++w) sum[j] += sums[parity][w][m[j] * kRows + row[j]];
    }
    if constexpr (kBuffers == 2) parity ^= 1;
    if (p.slices > 1) {
      const int size = p.m * kRows;
      float* partials = p.partials + i64(item.tile) * p.slices * size;  // of the tile: [slices, M, kRows]
#pragma unroll
      for (int j = 0; j < kResults; ++j)
        if (n[j] >= 0) mem::store(partials + item.slice * size + m[j] * kRows + row[j], sum[j]);
      if (!is_last_block(p.counters + item.tile, p.slices)) return;
#pragma unroll
      for (int j = 0; j < kResults; ++j) sum[j] = 0.0f;
#pragma unroll kSlicesAtOnce
      for (int s = 0; s < p.slices; ++s)
#pragma unroll
        for (int j = 0; j < kResults; ++j)
          if (n[j] >= 0) sum[j] += mem::load<float>(partials + s * size + m[j] * kRows + row[j]);
    }
#pragma unroll
    for (int j = 0; j < kResults; ++j)
      if (n[j] >= 0)
        store_output_type(p.out, i64(m[j]) * p.n + n[j], sum[j] * scale_a[j] * scale_b[j] + bias[j], p.out_type);
  };

  // One run is multiplied while the next one is under way. All waves take equally many: zeros past the slice.
  Item item = start(wave::block_x());
  auto step = [&](const Run& now, Run& next) __attribute__((always_inline)) {
    Item following = item;
    following.at += kStep;
    const bool ends = following.at - wave_offset >= (item.slice + 1) * p.slice;
    const bool more = !ends || item.index + p.blocks < p.items;
    if (ends && more) following = start(item.index + p.blocks);
    if (more) load(next, following);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) mma::multiply_add(accumulator[r][t], now.weights[u][r], now.tokens[u][t]);
    if (ends) finish(item);
    item = following;
    return more;
  };
  Run even, odd;
  load(even, item);
  while (step(even, odd) && step(odd, even)) {}
}

// clang-format off
#define INSTANCE(symbol, rows, tokens)                                                                                \
  KERNEL(kThreads) symbol(const u8* a, const u8* b, void* out, float* partials, u32* counters, const float* scale_a,  \
                          const float* scale_b, const void* bias, i64 a_stride, i64 b_stride, int m, int n, int k,    \
                          int scale_a_step, int scale_b_step, int out_type, int slices, int slice, int items,         \
                          int blocks) {                                                                               \
    scaled_mm_skinny<rows, tokens>(Product{a, b, out, partials, counters, scale_a, scale_b, bias, a_stride, b_stride, \
        m, n, k, scale_a_step, scale_b_step, out_type, slices, slice, items, blocks});                                \
  }

INSTANCE(scaled_mm_skinny_16x8, 16, 8)
INSTANCE(scaled_mm_skinny_32x16, 32, 16)
INSTANCE(scaled_mm_skinny_32x32, 32, 32)
INSTANCE(scaled_mm_skinny_16x64, 16, 64)
// clang-format on
