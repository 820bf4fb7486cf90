// Few tokens times a weight that is streamed from HBM once: what all skinny products share.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a * scale_b + bias[n])
//
// Bytes: those of b, little else; flops: 2 * M * N * K. Up to 64 tokens the time is that of reading b, so all that counts is to
// keep enough loads in flight on every compute unit, from the first cycle to the last.
//
// A block has 64 rows of b at a time, with all tokens: 16 for each of mma::kWaves waves that multiply; further waves bring
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
#include "scale.h"
#include "vec.h"

enum class Scales { kNone, kRow, kBlock, kMx };  // kMx: e8m0 scales, which the matrix instruction takes (amd/mx.h)

constexpr int kScaleBlock = 128;  // of K per scale of kBlock, and rows of b

struct Product {
  const u8* a;           // [M, K], rows a_stride bytes apart
  const u8* b;           // [N, K], or in fragment order [N / 16, K bytes / 64, 4, 16 rows, 16 bytes]
  void* out;             // [M, N] of out_type
  float* partials;       // [blocks, 2, values of a thread, threads]; null if no tile is shared
  u32* counters;         // [tiles], 0; null if no tile is shared
  const float* scale_a;  // kRow: [M] or [1]; kBlock: [M, K / 128], of a type of scale.h
  const float* scale_b;  // kRow: [N] or [1]; kBlock: [N / 128, K / 128]
  const void* bias;      // [N] of out_type, or null
  i64 b_tile;            // bytes between 16 rows of b and the next 16
  int a_stride;          // bytes between tokens
  int b_row, b_step;  // bytes between rows of b, and between steps; the four 16-byte pieces of a step lie evenly in it
  int m, n, k;        // k in bytes
  int scale_a_row, scale_a_k, scale_b_row;  // elements between the scales of tokens, of K's blocks, of b's rows
  int out_type;                             // 0 bf16, 1 fp16, 2 fp32
  int steps;                                // of a tile
  int unit, units, longer;  // steps that blocks never part; of those a block has; the first `longer` one more
};

constexpr int kTileRows = mma::kWaves * mma::kRows;

struct Group {  // steps of a tile; those past the end are of no tile
  int tile, step, end;
};

// Which steps this block has.
template <int kGroup>
struct Share {
  const Product& p;
  const int block = wave::block_x(), first = first_step(block), last = first_step(block + 1);

  DEVICE int first_step(int b) const { return p.unit * (b * p.units + (b < p.longer ? b : p.longer)); }
  DEVICE int block_of(int step) const {
    const int unit = step / p.unit, in_longer = p.longer * (p.units + 1);
    return unit < in_longer ? unit / (p.units + 1) : p.longer + (unit - in_longer) / p.units;
  }
  DEVICE Group begin() const {
    const int tile = first / p.steps, step = first - tile * p.steps, end = last - tile * p.steps;
    return {tile, step, end < p.steps ? end : p.steps};
  }
  // With end <= 0 past the last.
  DEVICE Group after(const Group& now) const {
    if (now.step + kGroup < now.end) return {now.tile, now.step + kGroup, now.end};
    const int tile = now.tile + 1, end = last - tile * p.steps;
    return {tile, 0, end < p.steps ? end : p.steps};
  }
  // Bytes of a row of the group's tile that are the block's, from a step of it on.
  DEVICE int bytes_left(const Group& group, int step) const {
    const int end = group.end * mma::kDepth;
    return (end < p.k ? end : p.k) - step * mma::kDepth;
  }
  DEVICE int first_sharer(int tile) const { return block_of(tile * p.steps); }
  DEVICE int last_sharer(int tile) const { return block_of(tile * p.steps + p.steps - 1); }
};

// Where a lane reads a tile of b. Rows past the last read the last one, and their sums are dropped.
struct TileWeights {
  mem::Cursor weights[mma::kLoads];
};
DEVICE TileWeights tile_weights(const Product& p, int first_row, int wave_row) {
  const int lane = wave::lane(), rows = p.n - first_row;
  TileWeights tile;
#pragma unroll
  for (int l = 0; l < mma::kLoads; ++l) {
    int row = wave_row + mma::row(lane, l);
    if (row >= rows) row = rows - 1;
    const int offset = row / mma::kRows * int(p.b_tile) + row % mma::kRows * p.b_row;
    tile.weights[l] =
        mem::cursor(p.b + first_row / mma::kRows * p.b_tile, offset + mma::depth(lane) / 16 * (p.b_step / 4));
  }
  return tile;
}

// The end of a tile: value [i][j] of a thread is of token token(i) and row row(j) of b.
template <Scales kScales, int kLaneTokens, int kLaneRows, int kGroup>
struct Finish {
  static constexpr int kValues = kLaneTokens * kLaneRows, kThreads = mma::kWaves * wave::kLanes;
  const Product& p;
  const Share<kGroup>& share;
  int tile = 0, from = 0, to = 0;  // and the first and the last block that share it
  int ends_here = 0;               // 1 if the first began in an earlier tile
  int row[kLaneRows] = {}, token[kLaneTokens] = {};
  float scale_a[kLaneTokens] = {}, scale_b[kLaneRows] = {}, bias[kLaneRows] = {};

  // When a tile begins, so that what is loaded and divided here is there when it ends.
  template <class Row, class Token>
  DEVICE void begin(int tile_, Token token_of, Row row_of) {
    tile = tile_, from = share.first_sharer(tile), to = share.last_sharer(tile);
    ends_here = share.first_step(from) < tile * p.steps;
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      token[i] = token_of(i);
      if (kScales == Scales::kRow)
        scale_a[i] = mem::load_float_or_zero(mem::buffer(p.scale_a), token[i] * p.scale_a_row * 4, 0, token[i] < p.m);
    }
#pragma unroll
    for (int j = 0; j < kLaneRows; ++j) {
      row[j] = row_of(j), scale_b[j] = 0.0f, bias[j] = 0.0f;
      if (row[j] >= p.n) continue;
      if (kScales == Scales::kRow) scale_b[j] = mem::load<float>(p.scale_b + i64(row[j]) * p.scale_b_row);
      if (p.bias) bias[j] = load_output(p.bias, row[j], p.out_type);
    }
  }

  // By all threads of the block: false if a later block finishes the tile.
  DEVICE static bool is_last(const Product& p, int tile, int from, int to) {
    return from == to || is_last_block(p.counters + tile, to - from + 1);
  }

  // Where block b leaves its sums. It shares at most two tiles: the one that it starts in, and the one that it ends in.
  DEVICE float* sums_of(int b) const {
    return p.partials + i64(b * 2 + (b == from ? ends_here : 0)) * kValues * kThreads + wave::thread();
  }

  DEVICE void end(float (&sum)[kLaneTokens][kLaneRows]) const {
    if (from != to) {
      float* mine = sums_of(share.block);
#pragma unroll
      for (int v = 0; v < kValues; ++v) mem::store(mine + v * kThreads, sum[v / kLaneRows][v % kLaneRows]);
      if (!is_last(p, tile, from, to)) return;
#pragma unroll
      for (int v = 0; v < kValues; ++v) sum[v / kLaneRows][v % kLaneRows] = 0.0f;
      constexpr int kAtOnce = kValues < 4 ? 8 / kValues : 2;  // blocks whose sums are loaded together
#pragma unroll 1
      for (int b = from; b <= to; b += kAtOnce) {
        float theirs[kAtOnce][kValues];
#pragma unroll
        for (int other = 0; other < kAtOnce; ++other) {
          const float* of_other = sums_of(b + other <= to ? b + other : to);
#pragma unroll
          for (int v = 0; v < kValues; ++v) theirs[other][v] = mem::load<float>(of_other + v * kThreads);
        }
#pragma unroll
        for (int other = 0; other < kAtOnce; ++other)
#pragma unroll
          for (int v = 0; v < kValues; ++v)
            if (b + other <= to) sum[v / kLaneRows][v % kLaneRows] += theirs[other][v];
      }
    }
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
      for (int j = 0; j < kLaneRows; ++j) {
        float x = sum[i][j];
        if constexpr (kScales == Scales::kRow) x *= scale_a[i] * scale_b[j];
        if (token[i] < p.m && row[j] < p.n) store_output(p.out, i64(token[i]) * p.n + row[j], x + bias[j], p.out_type);
      }
  }
};

template <class Type, int kTokens, Scales kScales, class Scale = Fp32Scale>
struct Skinny {
  static constexpr int kRing = 8, kStepBytes = kTokens * mma::kDepth, kStepPieces = kTokens * 4;
  static constexpr int kChunk = mma::kChunkBytes / kStepBytes < 4 ? mma::kChunkBytes / kStepBytes : 4;
  static constexpr int kChunks = kRing / kChunk;  // even, so that a group starts in the first buffer
  static constexpr int kBringers =
      (kChunk * kStepPieces + mma::kMaxPieces * wave::kLanes - 1) / (mma::kMaxPieces * wave::kLanes);
  static constexpr int kThreads = (mma::kWaves + kBringers) * wave::kLanes;
  static constexpr int kResident = kTokens == 64 ? 1 : 2;  // blocks
  static constexpr int kUnit = kScales == Scales::kBlock ? kScaleBlock / mma::kDepth : 1;
  static constexpr int kChunkScales = kScales == Scales::kBlock ? kChunk / kUnit * kTokens : 0;
  using Sum = mma::Accumulator<kTokens>;
  struct Buffer {
    alignas(128) u8 tokens[kChunk * kStepBytes];
    float scales_a[kChunkScales + 1];
  };

  using Tile = Finish<kScales, Sum::kLaneTokens, Sum::kLaneRows, kRing>;

  const Product& p;
  Buffer* buffers;  // [2] in LDS
  const Share<kRing> share{p};
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
      typename Scale::Loaded scale_a[kLaneScales + 1];
    };
    const int bringer = wave::thread() - mma::kWaves * wave::kLanes;
    const mem::Buffer a = mem::buffer(p.a), scales = mem::buffer(p.scale_a);
    auto load = [&](Chunk& chunk, const Group& group, int u) __attribute__((always_inline)) {
      const int step = group.step + u, bytes = share.bytes_left(group, step);
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
        const int at = (token * p.scale_a_row + block_k * p.scale_a_k) * Scale::kBytes;
        chunk.scale_a[j] = Scale::load_or_zero(scales, at, step / kUnit * p.scale_a_k * Scale::kBytes, inside);
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
        if (bringer + j * kLanes < kChunkScales) buffer.scales_a[bringer + j * kLanes] = Scale::value(chunk.scale_a[j]);
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
      if (next.tile != now.tile) Tile::is_last(p, now.tile, share.first_sharer(now.tile), share.last_sharer(now.tile));
      if (next.end <= 0) return;
      now = next;
    }
  }

  struct Stream : TileWeights {
    const typename Scale::Type* scales_b;
  };
  DEVICE Stream stream(int tile) const {
    const auto* scales_b = (const typename Scale::Type*)p.scale_b + i64(tile * kTileRows / kScaleBlock) * p.scale_b_row;
    return {tile_weights(p, tile * kTileRows, wave::index() * mma::kRows), scales_b};
  }

  struct Slot {
    mma::Weights weights = {};
    typename Scale::Loaded scale_b = 0;  // of a unit, in its first slot
  };
  DEVICE void load(Slot& slot, const Stream& stream, const Group& group, int u) const {
    const int step = group.step + u, bytes = share.bytes_left(group, step);
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
      mem::refill(slot.weights.load[l], stream.weights[l], step * p.b_step, mma::depth(lane) < bytes);
    if (kScales == Scales::kBlock && u % kUnit == 0)
      slot.scale_b = Scale::load_or_zero(mem::buffer(stream.scales_b), 0, step / kUnit * Scale::kBytes, 0 < bytes);
  }

  DEVICE void multiply() const {
    Group now = share.begin();
    Stream ahead = stream(now.tile);
    Slot ring[kRing];
#pragma unroll
    for (int u = 0; u < kRing; ++u) load(ring[u], ahead, now, u);
    Sum sum = {}, unit_sum = {};
    Tile tile{p, share};
    begin_tile(tile, now.tile);
    while (true) {
      const Group next = share.after(now);
      if (next.tile != now.tile) ahead = stream(next.tile);
#pragma unroll
      for (int u = 0; u < kRing; ++u) {
        if (u % kChunk == 0) block_barrier();  // hazard: tokens are read before they are written
        const Buffer& buffer = buffers[u / kChunk % 2];
        const u8* tokens = buffer.tokens + u % kChunk * kStepBytes;
        mma::multiply_add<Type>(kScales == Scales::kBlock ? unit_sum : sum, ring[u].weights, tokens);
        if (u % kUnit != kUnit - 1) continue;
        if constexpr (kScales == Scales::kBlock) {
          const float scale_b = Scale::value(ring[u + 1 - kUnit].scale_b);
          sum.add_scaled(unit_sum, buffer.scales_a + u % kChunk / kUnit * kTokens, scale_b);
          unit_sum = {};
        }
#pragma unroll
        for (int done = u + 1 - kUnit; done <= u; ++done) load(ring[done], ahead, next, done);
      }
      if (next.tile != now.tile) {
        end_tile(tile, sum);
        sum = {};
        if (next.end > 0) begin_tile(tile, next.tile);
      }
      if (next.end <= 0) return;
      now = next;
    }
  }

  DEVICE void begin_tile(Tile& tile, int index) const {
    const int first_row = index * kTileRows + wave::index() * mma::kRows;
    tile.begin(
        index, [&](int i) __attribute__((always_inline)) { return Sum::token(lane, i); },
        [&](int j) __attribute__((always_inline)) { return first_row + Sum::row(lane, j); });
  }
  DEVICE void end_tile(const Tile& tile, const Sum& sum) const {
    float values[Sum::kLaneTokens][Sum::kLaneRows];
#pragma unroll
    for (int i = 0; i < Sum::kLaneTokens; ++i)
#pragma unroll
      for (int j = 0; j < Sum::kLaneRows; ++j) values[i][j] = sum.at(i, j);
    tile.end(values);
  }
};

// For few tokens and small weights: a tile has 16 rows of b and is shared by fewer blocks. The waves take K in turns of
// kTurn steps, each lane with weights and tokens of kRing turns in registers, and meet in LDS at the end of a tile.
//
// Up to 8 tokens the sparse instruction (v_smfmac_f32_16x16x64_fp8_fp8, a token over two rows, each with two of every four
// bytes) does what two dense ones do. Built and emulated on gfx942, 8 x 64 x 2048, it halves matrix cycles per byte of weight from
// 0.031 to 0.016 and adds 0.7 % to issue cycles, 0.304 to 0.306. HBM at its full rate leaves 0.48 cycles per byte: what it
// saves nobody waits for, so the dense one stays.
template <class Type, int kTokens, Scales kScales>
struct Narrow {
  static constexpr int kTiles = (kTokens + mma::kTileTokens - 1) / mma::kTileTokens, kTurn = 2, kRing = mma::kRing;
  static constexpr int kThreads = mma::kWaves * wave::kLanes, kUnit = kTurn * mma::kWaves;
  using Tile = Finish<kScales, kTiles, 1, kUnit>;
  struct Buffer {
    float sum[2][mma::kWaves][kTiles][4]
             [wave::kLanes];  // of this tile and of the last, which a slow wave may still read
  };

  const Product& p;
  Buffer& buffer;  // in LDS
  const Share<kUnit> share{p};
  const int lane = wave::lane();

  DEVICE TileWeights stream(int tile) const { return tile_weights(p, tile * mma::kRows, 0); }

  struct Turn {
    mma::Weights weights[kTurn] = {};
    u32x4 tokens[kTurn][kTiles];
  };
  DEVICE void load(Turn& turn, const TileWeights& stream, const Group& group) const {
    const int first = group.step + wave::index() * kTurn, bytes = share.bytes_left(group, first) - mma::depth(lane);
#pragma unroll
    for (int u = 0; u < kTurn; ++u) {
      const int step = first + u;
      const bool inside = u * mma::kDepth < bytes;
#pragma unroll
      for (int l = 0; l < mma::kLoads; ++l)
        mem::refill(turn.weights[u].load[l], stream.weights[l], step * p.b_step, inside);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int token = t * mma::kTileTokens + mma::tile_token(lane);
        turn.tokens[u][t] = mem::load_or_zero(mem::buffer(p.a), token * p.a_stride + mma::depth(lane) + u * mma::kDepth,
                                              first * mma::kDepth, inside && token < p.m);
      }
    }
  }

  // A turn is multiplied while the next kRing - 1 are under way.
  DEVICE void multiply() const {
    Group now = share.begin(), ahead = now;
    TileWeights streaming = stream(ahead.tile);
    Turn ring[kRing];
    auto load_next = [&](Turn& turn) __attribute__((always_inline)) {
      load(turn, streaming, ahead);
      const int tile = ahead.tile;
      ahead = share.after(ahead);
      if (ahead.tile != tile) streaming = stream(ahead.tile);
    };
#pragma unroll
    for (int i = 0; i < kRing - 1; ++i) load_next(ring[i]);
    f32x4 sum[kTiles] = {};
    int parity = 0;
    Tile tile{p, share};
    begin_tile(tile, now.tile);
    auto step = [&](const Turn& turn, Turn& free) __attribute__((always_inline)) {
      load_next(free);
#pragma unroll
      for (int u = 0; u < kTurn; ++u)
#pragma unroll
        for (int t = 0; t < kTiles; ++t) sum[t] = mma::multiply_tile<Type>(sum[t], turn.weights[u], turn.tokens[u][t]);
      const Group next = share.after(now);
      if (next.tile != now.tile) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int value = 0; value < 4; ++value) buffer.sum[parity][wave::index()][t][value][lane] = sum[t][value];
          sum[t] = f32x4{};
        }
        block_barrier();  // hazard: the waves' sums are read before they are written
        end_tile(tile, parity);
        parity ^= 1;
        if (next.end > 0) begin_tile(tile, next.tile);
      }
      now = next;
      return next.end > 0;
    };
    for (bool more = true; more;)
#pragma unroll
      for (int i = 0; i < kRing; ++i)
        if (more) more = step(ring[i], ring[(i + kRing - 1) % kRing]);
  }

  // Each wave ends with one of the four values that the lanes of all waves have of a tile.
  DEVICE void begin_tile(Tile& tile, int index) const {
    const int value = wave::index();
    tile.begin(
        index,
        [&](int t) __attribute__((always_inline)) { return t * mma::kTileTokens + mma::value_token(lane, value); },
        [&](int) __attribute__((always_inline)) { return index * mma::kRows + mma::value_row(lane, value); });
  }
  DEVICE void end_tile(const Tile& tile, int parity) const {
    float values[kTiles][1];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      values[t][0] = 0.0f;
#pragma unroll
      for (int w = 0; w < mma::kWaves; ++w) values[t][0] += buffer.sum[parity][w][t][wave::index()][lane];
    }
    tile.end(values);
  }
};

// A kernel of that name; `...` are its Scales and, of kBlock, their type.
#define SKINNY(symbol, type, tokens, ...)                                                               \
  KERNEL((Skinny<type, tokens, __VA_ARGS__>::kThreads), (Skinny<type, tokens, __VA_ARGS__>::kResident)) \
  symbol(Product product) {                                                                             \
    LDS static Skinny<type, tokens, __VA_ARGS__>::Buffer buffers[2];                                    \
    const Skinny<type, tokens, __VA_ARGS__> kernel{product, buffers};                                   \
    if (wave::index() < mma::kWaves) kernel.multiply();                                                 \
    else kernel.bring_tokens();                                                                         \
  }
#define NARROW(symbol, type, tokens, scales)                                                      \
  KERNEL((Narrow<type, tokens, scales>::kThreads), tokens == 8 ? 4 : 3) symbol(Product product) { \
    LDS static Narrow<type, tokens, scales>::Buffer buffer;                                       \
    const Narrow<type, tokens, scales> kernel{product, buffer};                                   \
    kernel.multiply();                                                                            \
  }
