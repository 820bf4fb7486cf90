// Few tokens times a weight that is streamed from HBM once: what all skinny products share.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a * scale_b + bias[n])
//
// Bytes: those of b, little else; flops: 2 * M * N * K. Up to 64 tokens the time is that of reading b, so all that counts is to
// keep enough loads in flight on every compute unit, from the first cycle to the last.
//
// A block of mma::kWaves waves multiplies 64 rows of b, 16 per wave, with all tokens. A step is 64 bytes of K, a tile 64 rows
// over all of K. The steps of all tiles, one tile after the other, are divided evenly over the blocks, wherever tiles begin
// or end, so that every compute unit streams as much as any other. Each lane keeps a ring of kRing steps in registers: once a step is
// multiplied, the step kRing further on is loaded into its place, past the end of a tile the next tile's, so that kRing - 1
// steps are always in flight. Tokens come through LDS, kChunk steps at a time, double-buffered.
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

template <class Type, int kTokens, Scales kScales>
DEVICE void multiply_skinny(const Product& p) {
  constexpr int kRing = 8, kRows = mma::kWaves * mma::kRows, kThreads = mma::kWaves * wave::kLanes;
  constexpr int kChunk = kRing * 16 / kTokens;
  constexpr int kPieces = kChunk * kTokens * 4 / kThreads;  // 16-byte pieces of a chunk per thread
  constexpr int kStepBytes = kTokens * mma::kDepth, kChunkScales = kChunk * mma::kDepth / kScaleBlock * kTokens;
  constexpr int kUnit = kScales == Scales::kBlock ? kScaleBlock / mma::kDepth : 1;  // steps that blocks never part
  static_assert(kChunkScales <= kThreads, "a thread brings at most one scale");
  using Sum = mma::Accumulator<kTokens>;
  LDS alignas(128) static u8 tokens[2][kChunk * kStepBytes];
  LDS static float scales_a[2][kScales == Scales::kBlock ? kChunkScales : 1];
  const int lane = wave::lane(), thread = wave::thread(), block = wave::block_x();

  auto first_step = [&](int b) __attribute__((always_inline)) {
    return kUnit * (b * p.units + (b < p.longer ? b : p.longer));
  };
  auto block_of = [&](int step) __attribute__((always_inline)) {
    const int unit = step / kUnit, in_longer = p.longer * (p.units + 1);
    return unit < in_longer ? unit / (p.units + 1) : p.longer + (unit - in_longer) / p.units;
  };
  const int first = first_step(block), last = first_step(block + 1);

  struct Group {  // kRing steps of a tile; those past the end are of no tile
    int tile, step, end;
  };
  auto following = [&](const Group& now) __attribute__((always_inline)) {
    Group next{now.tile, now.step + kRing, now.end};
    if (next.step < next.end) return next;
    next.tile += 1, next.step = 0, next.end = last - next.tile * p.steps;
    if (next.end > p.steps) next.end = p.steps;
    return next;  // with end <= 0 past the last
  };

  struct Slot {
    mma::Weights weights;
    float scale_b;  // of the slot's kScaleBlock of K, in every other slot
  };
  Slot ring[kRing];
  // Rows past the last read the last one, and their sums are dropped.
  auto load = [&](Slot& slot, const Group& group, int u) __attribute__((always_inline)) {
    const int step = group.step + u, rows = p.n - group.tile * kRows;
    const int bytes = (group.end * mma::kDepth < p.k ? group.end * mma::kDepth : p.k) - step * mma::kDepth;
    const mem::Buffer weights = mem::buffer(p.b + group.tile * mma::kWaves * p.b_tile);
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      int row = wave::index() * mma::kRows + mma::row(lane, l);
      if (row >= rows) row = rows - 1;
      const int at = row / mma::kRows * int(p.b_tile) + row % mma::kRows * p.b_row + mma::depth(lane) / 16 * p.b_depth;
      slot.weights.load[l] = mem::load_once_or_zero(weights, at, step * p.b_step, mma::depth(lane) < bytes);
    }
    if constexpr (kScales == Scales::kBlock) {
      const float* scales = p.scale_b + i64(group.tile * kRows / kScaleBlock) * p.scale_b_row;
      const int block_k = step * mma::kDepth / kScaleBlock;
      if (u % kUnit == 0) slot.scale_b = mem::load_float_or_zero(mem::buffer(scales), 0, block_k * 4, 0 < bytes);
    }
  };

  struct Chunk {  // of the tokens, on its way to LDS
    u32x4 piece[kPieces];
    float scale_a;
  };
  Chunk chunk;
  auto load_chunk = [&](const Group& group, int u) __attribute__((always_inline)) {
    const int step = group.step + u, bytes = step < group.end ? p.k - step * mma::kDepth : 0;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int index = thread + j * kThreads, in_chunk = index / (kTokens * 4);
      const mma::Piece piece = mma::piece(index % (kTokens * 4));
      const int k = in_chunk * mma::kDepth + piece.depth;
      chunk.piece[j] = mem::load_or_zero(mem::buffer(p.a), piece.token * p.a_stride + k, step * mma::kDepth,
                                         piece.token < p.m && k < bytes);
    }
    if constexpr (kScales == Scales::kBlock) {
      const int token = thread % kTokens, block_k = thread / kTokens;
      const bool inside = token < p.m && thread < kChunkScales && block_k * kScaleBlock < bytes;
      chunk.scale_a =
          mem::load_float_or_zero(mem::buffer(p.scale_a), (token * p.scale_a_row + block_k * p.scale_a_k) * 4,
                                  step * mma::kDepth / kScaleBlock * p.scale_a_k * 4, inside);
    }
  };
  auto store_chunk = [&](int buffer) __attribute__((always_inline)) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int index = thread + j * kThreads, in_chunk = index / (kTokens * 4);
      mma::store_piece<kTokens>(tokens[buffer] + in_chunk * kStepBytes, index % (kTokens * 4), chunk.piece[j]);
    }
    if (kScales == Scales::kBlock && thread < kChunkScales) scales_a[buffer][thread] = chunk.scale_a;
  };

  // What the block has of a tile is summed up: it is finished here, or with the other blocks' sums by the last to arrive.
  auto finish = [&](Sum& sum, int tile) __attribute__((always_inline)) {
    const int begin = tile * p.steps, from = block_of(begin), to = block_of(begin + p.steps - 1);
    if (from != to) {
      // A block has sums of at most two tiles that it shares: the one it starts in, and the one it ends in.
      auto values = [&](int b) __attribute__((always_inline)) {
        const int place = b * 2 + (first_step(b) < begin);
        return p.partials + i64(place) * Sum::kValues * kThreads + thread;
      };
      float* mine = values(block);
#pragma unroll
      for (int v = 0; v < Sum::kValues; ++v) mem::store(mine + v * kThreads, sum[v]);
      if (!is_last_block(p.counters + tile, to - from + 1)) return;
#pragma unroll
      for (int v = 0; v < Sum::kValues; ++v) sum[v] = 0.0f;
#pragma unroll 4
      for (int b = from; b <= to; ++b) {
        const float* theirs = values(b);
#pragma unroll
        for (int v = 0; v < Sum::kValues; ++v) sum[v] += mem::load<float>(theirs + v * kThreads);
      }
    }
#pragma unroll
    for (int v = 0; v < Sum::kValues; ++v) {
      const int m = Sum::token(lane, v), n = tile * kRows + wave::index() * mma::kRows + Sum::row(lane, v);
      if (m >= p.m || n >= p.n) continue;
      float x = sum[v];
      if constexpr (kScales == Scales::kRow)
        x *= mem::load<float>(p.scale_a + m * p.scale_a_row) * mem::load<float>(p.scale_b + i64(n) * p.scale_b_row);
      if (p.bias) x += load_output_type(p.bias, n, p.out_type);
      store_output_type(p.out, i64(m) * p.n + n, x, p.out_type);
    }
  };

  Group now{first / p.steps, 0, 0};
  now.step = first - now.tile * p.steps;
  now.end = last - now.tile * p.steps < p.steps ? last - now.tile * p.steps : p.steps;
  load_chunk(now, 0);
#pragma unroll
  for (int u = 0; u < kRing; ++u) load(ring[u], now, u);
  Sum sum = {}, block_sum = {};
  int buffer = 0;
  while (true) {
    const Group next = following(now);
#pragma unroll
    for (int u = 0; u < kRing; ++u) {
      if (u % kChunk == 0) {
        buffer ^= 1;
        store_chunk(buffer);
        // Hazard: tokens are read before they are written. Those of the last chunk but one, which these overwrite, have
        // been read by all waves that came to the last barrier.
        mma::tokens_barrier();
        if (u + kChunk < kRing) load_chunk(now, u + kChunk);
        else load_chunk(next, 0);
      }
      if (now.step + u < now.end) {
        Sum& of_step = kScales == Scales::kBlock ? block_sum : sum;
        mma::multiply_add<Type>(of_step, ring[u].weights, tokens[buffer] + u % kChunk * kStepBytes);
        if (kScales == Scales::kBlock && u % kUnit == kUnit - 1) {
          const float* scales = scales_a[buffer] + u % kChunk / kUnit * kTokens;
#pragma unroll
          for (int v = 0; v < Sum::kValues; ++v)
            sum[v] += block_sum[v] * (scales[Sum::token(lane, v)] * ring[u / kUnit * kUnit].scale_b);
          block_sum = {};
        }
      }
      if (u % kUnit != kUnit - 1) continue;
#pragma unroll
      for (int done = u + 1 - kUnit; done <= u; ++done) load(ring[done], next, done);
    }
    if (next.tile != now.tile) {
      finish(sum, now.tile);
      sum = {};
    }
    if (next.end <= 0) return;
    now = next;
  }
}
