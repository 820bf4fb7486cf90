// Few tokens times a weight that is streamed from HBM once: what all skinny products share.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a * scale_b + bias[n])
//
// Bytes: those of b, little else; flops: 2 * M * N * K. Up to 64 tokens the time is that of reading b, so all that counts is to
// keep enough loads in flight on every compute unit, from the first cycle to the last.
//
// A block has 64 rows of b at a time, with all tokens: 16 for each of mma::kWaves waves that multiply; one wave more brings
// the tokens. A step is 64 bytes of K, a tile 64 rows over all of K. The steps of all tiles, one tile after the other, are
// divided evenly over the blocks, wherever tiles begin or end, so that every compute unit streams as much as any other. A lane
// that multiplies keeps a ring of kRing steps in registers: once a step is multiplied, the step kRing further on is loaded into
// its place, past the end of a tile the next tile's, so that kRing - 1 steps are always in flight. Tokens come through LDS, kChunk
// steps at a time, double-buffered, by a wave of their own because whoever shows LDS to the matrix units, or counts the
// loads that it waits for, would wait for the stream.
//
// A tile that one block has alone it finishes from its registers. Of a shared tile, each block leaves its sums in HBM, and the
// last to arrive adds them up in the order of K: no atomics on values, the same bits every run.
#pragma once
#include "arrive.h"
#include "vec.h"

enum class Scales { kNone, kRow, kBlock };

constexpr int kScaleBlock = 128;  // of K per scale of kBlock, and rows of b

struct Product {
  const u8* a;           // [M, K], rows a_stride bytes apart
  const u8* b;           // [N, K], or in fragment order [N / 16, K bytes / 64, 4, 16 rows, 16 bytes]
  void* out;             // [M, N] of out_type
  float* partials;       // [blocks, 2, values of a lane, threads]; null if no tile is shared
  u32* counters;         // [tiles], 0; null if no tile is shared
  const float* scale_a;  // kRow: [M] or [1]; kBlock: [M, K / 128]
  const float* scale_b;  // kRow: [N] or [1]; kBlock: [N / 128, K / 128]
  const void* bias;      // [N] of out_type, or null
  i64 b_tile;            // bytes between 16 rows of b and the next 16
  int a_stride, b_row, b_depth,
      b_step;   // bytes between tokens; between rows of b, 16 bytes of a step and the next 16, steps
  int m, n, k;  // k in bytes
  int scale_a_row, scale_a_k, scale_b_row;  // elements between the scales of tokens, of K's blocks, of b's rows
  int out_type;                             // 0 bf16, 1 fp16, 2 fp32
  int steps;                                // of a tile
  int units, longer;                        // of a block; the first `longer` blocks have one more
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

constexpr int kTileRows = mma::kWaves * mma::kRows;

struct Group {  // kRing steps of a tile; those past the end are of no tile
  int tile, step, end;
};

// Which steps this block has. kUnit steps are never parted.
template <int kUnit, int kRing>
struct Share {
  const Product& p;
  const int block = wave::block_x(), first = first_step(block), last = first_step(block + 1);

  DEVICE int first_step(int b) const { return kUnit * (b * p.units + (b < p.longer ? b : p.longer)); }
  DEVICE int block_of(int step) const {
    const int unit = step / kUnit, in_longer = p.longer * (p.units + 1);
    return unit < in_longer ? unit / (p.units + 1) : p.longer + (unit - in_longer) / p.units;
  }
  DEVICE Group begin() const {
    const int tile = first / p.steps, step = first - tile * p.steps, end = last - tile * p.steps;
    return {tile, step, end < p.steps ? end : p.steps};
  }
  // With end <= 0 past the last.
  DEVICE Group after(const Group& now) const {
    if (now.step + kRing < now.end) return {now.tile, now.step + kRing, now.end};
    const int tile = now.tile + 1, end = last - tile * p.steps;
    return {tile, 0, end < p.steps ? end : p.steps};
  }
  DEVICE int first_sharer(int tile) const { return block_of(tile * p.steps); }
  DEVICE int last_sharer(int tile) const { return block_of(tile * p.steps + p.steps - 1); }
  // Where block b leaves its sums of a tile: it shares at most two, the one that it starts in and the one that it ends in.
  DEVICE int place(int b, int tile) const { return b * 2 + (first_step(b) < tile * p.steps); }
};

template <class Type, int kTokens, Scales kScales>
struct Skinny {
  static constexpr int kRing = 8, kStepBytes = kTokens * mma::kDepth, kStepPieces = kTokens * 4;
  static constexpr int kChunk = mma::kChunkBytes / kStepBytes < 4 ? mma::kChunkBytes / kStepBytes : 4;
  static constexpr int kChunks = kRing / kChunk;  // even, so that a group starts in the first buffer
  static constexpr int kBringers =
      (kChunk * kStepPieces + mma::kMaxPieces * wave::kLanes - 1) / (mma::kMaxPieces * wave::kLanes);
  static constexpr int kThreads = (mma::kWaves + kBringers) * wave::kLanes;
  static constexpr int kUnit = kScales == Scales::kBlock ? kScaleBlock / mma::kDepth : 1;
  static constexpr int kChunkScales = kScales == Scales::kBlock ? kChunk / kUnit * kTokens : 0;
  using Sum = mma::Accumulator<kTokens>;
  struct Buffer {
    alignas(128) u8 tokens[kChunk * kStepBytes];
    float scales_a[kChunkScales + 1];
  };

  const Product& p;
  Buffer* buffers;  // [2] in LDS
  const Share<kUnit, kRing> share{p};
  const int lane = wave::lane();

  // The waves that bring the tokens, two chunks ahead in registers. What they store into a buffer while the others still
  // read the other one, all see after the barrier; who came to that has read what the next store overwrites. Tokens are zero
  // past the end of K, and past the block's end of a tile.
  DEVICE void bring_tokens() const {
    constexpr int kLanes = kBringers * wave::kLanes, kPieces = kChunk * kStepPieces / kLanes;
    constexpr int kLaneScales = (kChunkScales + kLanes - 1) / kLanes;
    static_assert(kPieces * kLanes == kChunk * kStepPieces && kChunks % 2 == 0);
    struct Chunk {
      u32x4 piece[kPieces];
      float scale_a[kLaneScales + 1];
    };
    const int bringer = wave::thread() - mma::kWaves * wave::kLanes;
    const mem::Buffer a = mem::buffer(p.a), scales = mem::buffer(p.scale_a);
    auto load = [&](Chunk& chunk, const Group& group, int u) __attribute__((always_inline)) {
      const int step = group.step + u, bytes = bytes_left(group, u);
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int index = bringer + j * kLanes;
        const mma::Piece piece = mma::piece(index % kStepPieces);
        const int k = index / kStepPieces * mma::kDepth + piece.depth;
        const bool inside = piece.token < p.m && k < bytes;
        chunk.piece[j] = mem::load_or_zero(a, piece.token * p.a_stride + k, step * mma::kDepth, inside);
      }
#pragma unroll
      for (int j = 0; j < kLaneScales; ++j) {
        const int index = bringer + j * kLanes, token = index % kTokens, block_k = index / kTokens;
        const bool inside = token < p.m && index < kChunkScales && block_k * kScaleBlock < bytes;
        const int at = (token * p.scale_a_row + block_k * p.scale_a_k) * 4;
        chunk.scale_a[j] = mem::load_float_or_zero(scales, at, step / kUnit * p.scale_a_k * 4, inside);
      }
    };
    auto store = [&](const Chunk& chunk, Buffer& buffer) __attribute__((always_inline)) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int index = bringer + j * kLanes;
        u8* step = buffer.tokens + index / kStepPieces * kStepBytes;
        mma::store_piece<kTokens>(step, index % kStepPieces, chunk.piece[j]);
      }
#pragma unroll
      for (int j = 0; j < kLaneScales; ++j)
        if (bringer + j * kLanes < kChunkScales) buffer.scales_a[bringer + j * kLanes] = chunk.scale_a[j];
      mma::show_pieces();
    };

    Group now = share.begin();
    Chunk chunks[2];
    load(chunks[0], now, 0);
    load(chunks[1], now, kChunk);
    while (true) {
      const Group next = share.after(now);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        store(chunks[c % 2], buffers[c % 2]);
        block_barrier();  // hazard: tokens are read before they are written
        load(chunks[c % 2], c + 2 < kChunks ? now : next, (c + 2) % kChunks * kChunk);
      }
      if (next.tile != now.tile) is_last_sharer(now.tile);
      if (next.end <= 0) return;
      now = next;
    }
  }

  // Of the block's part of a row of the group's tile, from step u on.
  DEVICE int bytes_left(const Group& group, int u) const {
    const int end = group.end * mma::kDepth;
    return (end < p.k ? end : p.k) - (group.step + u) * mma::kDepth;
  }

  // By all threads of the block: false if a later block finishes the tile.
  DEVICE bool is_last_sharer(int tile) const {
    const int sharers = share.last_sharer(tile) - share.first_sharer(tile) + 1;
    return sharers == 1 || is_last_block(p.counters + tile, sharers);
  }

  // Where a lane reads a group. Rows past the last read the last one, and their sums are dropped.
  struct Place {
    mem::Cursor weights[mma::kLoads];
    const float* scales_b;
    int bytes;  // from the lane's place on
  };
  DEVICE Place place(const Group& group) const {
    const int rows = p.n - group.tile * kTileRows;
    const u8* base = p.b + group.tile * mma::kWaves * p.b_tile + i64(group.step) * p.b_step;
    Place place;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      int row = wave::index() * mma::kRows + mma::row(lane, l);
      if (row >= rows) row = rows - 1;
      const int offset = row / mma::kRows * int(p.b_tile) + row % mma::kRows * p.b_row;
      place.weights[l] = mem::cursor(base, offset + mma::depth(lane) / 16 * p.b_depth);
    }
    place.scales_b = p.scale_b + i64(group.tile * kTileRows / kScaleBlock) * p.scale_b_row + group.step / kUnit;
    place.bytes = bytes_left(group, 0) - mma::depth(lane);
    return place;
  }

  struct Slot {
    mma::Weights weights = {};
    float scale_b = 0.0f;  // of a unit, in its first slot
  };
  DEVICE void load(Slot& slot, const Place& place, int u) const {
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
      mem::refill(slot.weights.load[l], place.weights[l], u * p.b_step, u * mma::kDepth < place.bytes);
    if (kScales == Scales::kBlock && u % kUnit == 0) {
      const bool inside = u * mma::kDepth < place.bytes + mma::depth(lane);
      slot.scale_b = mem::load_float_or_zero(mem::buffer(place.scales_b), 0, u / kUnit * 4, inside);
    }
  }

  DEVICE void multiply() const {
    Group now = share.begin();
    Slot ring[kRing];
    {
      const Place first = place(now);
#pragma unroll
      for (int u = 0; u < kRing; ++u) load(ring[u], first, u);
    }
    Sum sum = {}, unit_sum = {};
    while (true) {
      const Group next = share.after(now);
      const Place ahead = place(next);
#pragma unroll
      for (int u = 0; u < kRing; ++u) {
        if (u % kChunk == 0) block_barrier();  // hazard: tokens are read before they are written
        const Buffer& buffer = buffers[u / kChunk % 2];
        const u8* tokens = buffer.tokens + u % kChunk * kStepBytes;
        mma::multiply_add<Type>(kScales == Scales::kBlock ? unit_sum : sum, ring[u].weights, tokens);
        if (u % kUnit != kUnit - 1) continue;
        if constexpr (kScales == Scales::kBlock) {
          sum.add_scaled(unit_sum, buffer.scales_a + u % kChunk / kUnit * kTokens, ring[u + 1 - kUnit].scale_b);
          unit_sum = {};
        }
#pragma unroll
        for (int done = u + 1 - kUnit; done <= u; ++done) load(ring[done], ahead, done);
      }
      if (next.tile != now.tile) {
        finish(sum, now.tile);
        sum = {};
      }
      if (next.end <= 0) return;
      now = next;
    }
  }

  // What the block has of a tile is summed up.
  DEVICE void finish(Sum& sum, int tile) const {
    constexpr int kSums = sizeof(Sum) / sizeof(f32x4), kSummers = mma::kWaves * wave::kLanes;
    const int row = tile * kTileRows + wave::index() * mma::kRows;
    // All at once and first: they arrive while the blocks meet.
    float scale_a[Sum::kLaneTokens], scale_b[Sum::kLaneRows], bias[Sum::kLaneRows] = {};
#pragma unroll
    for (int i = 0; i < Sum::kLaneTokens; ++i) {
      const int m = Sum::token(lane, i);
      if (kScales == Scales::kRow)
        scale_a[i] = mem::load_float_or_zero(mem::buffer(p.scale_a), m * p.scale_a_row * 4, 0, m < p.m);
    }
#pragma unroll
    for (int j = 0; j < Sum::kLaneRows; ++j) {
      const int in_tile = Sum::row(lane, j);
      const float* scales = p.scale_b + i64(row) * p.scale_b_row;
      if (kScales == Scales::kRow)
        scale_b[j] = mem::load_float_or_zero(mem::buffer(scales), in_tile * p.scale_b_row * 4, 0, row + in_tile < p.n);
      if (p.bias && row + in_tile < p.n) bias[j] = load_output_type(p.bias, row + in_tile, p.out_type);
    }
    const int from = share.first_sharer(tile), to = share.last_sharer(tile);
    if (from != to) {
      auto sums_of = [&](int b) __attribute__((always_inline)) {
        return (f32x4*)p.partials + i64(share.place(b, tile)) * kSums * kSummers + wave::thread();
      };
      f32x4* mine = sums_of(share.block);
#pragma unroll
      for (int i = 0; i < kSums; ++i) mem::store(mine + i * kSummers, sum.sum[i]);
      if (!is_last_sharer(tile)) return;
      sum = {};
      constexpr int kAtOnce = kSums < 4 ? 8 / kSums : 2;  // blocks whose sums are loaded together
#pragma unroll 1
      for (int b = from; b <= to; b += kAtOnce) {
        f32x4 theirs[kAtOnce][kSums];
#pragma unroll
        for (int other = 0; other < kAtOnce; ++other)
#pragma unroll
          for (int i = 0; i < kSums; ++i)
            theirs[other][i] = mem::load<f32x4>(sums_of(b + other <= to ? b + other : to) + i * kSummers);
#pragma unroll
        for (int other = 0; other < kAtOnce; ++other)
#pragma unroll
          for (int i = 0; i < kSums; ++i)
            if (b + other <= to) sum.sum[i] += theirs[other][i];
      }
    }
#pragma unroll
    for (int i = 0; i < Sum::kLaneTokens; ++i)
#pragma unroll
      for (int j = 0; j < Sum::kLaneRows; ++j) {
        const int m = Sum::token(lane, i), n = row + Sum::row(lane, j);
        float x = sum.at(i, j);
        if constexpr (kScales == Scales::kRow) x *= scale_a[i] * scale_b[j];
        if (m < p.m && n < p.n) store_output_type(p.out, i64(m) * p.n + n, x + bias[j], p.out_type);
      }
  }
};

// A kernel of that name.
#define SKINNY(symbol, type, tokens, scales)                                 \
  KERNEL((Skinny<type, tokens, scales>::kThreads)) symbol(Product product) { \
    LDS static Skinny<type, tokens, scales>::Buffer buffers[2];              \
    const Skinny<type, tokens, scales> kernel{product, buffers};             \
    if (wave::index() < mma::kWaves) kernel.multiply();                      \
    else kernel.bring_tokens();                                              \
  }
