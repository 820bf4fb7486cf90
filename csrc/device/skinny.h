// Few tokens times a weight that is streamed from HBM once: what all skinny products share.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a * scale_b + bias[n])
//
// Bytes: those of b, little else; flops: 2 * M * N * K. Up to 64 tokens the time is that of reading b, so all that counts is to
// keep enough loads in flight on every compute unit, from the first cycle to the last.
//
// A step is 64 bytes of K, of kMx 256, a tile 64 rows of b over all of K, or 16 (Narrow). The steps of all tiles, one tile after
// the other, are divided evenly over the blocks, so that every compute unit streams as much as any other: wherever tiles begin or
// end, or, with units of a whole tile or an equal part of one, never across their borders. How a block streams tiles of 64 rows,
// with all tokens, is the vendor's: Wide of amd/wide.h keeps what is in flight in registers, that of nvidia/wide.h in LDS.
//
// A tile that one block has alone it finishes from its registers. Of a shared tile, each block leaves its sums in HBM, and the
// last to arrive adds them up in the order of K: no atomics on values, the same bits every run.
#pragma once
#include "arrive.h"
#include "divisor.h"
#include "scale.h"
#include "vec.h"

enum class Scales { kNone, kRow, kBlock, kMx };  // kMx: e8m0 scales, which the matrix instruction takes (amd/mx.h)

constexpr int kScaleBlock = 128;  // of K per scale of kBlock, and rows of b

struct Product {
  const u8* a;           // [M, K], rows a_stride bytes apart
  const u8* b;           // [N, K], or in fragment order [N / 16, K bytes / 64, 4, 16 rows, 16 bytes]
  void* out;             // [M, N] of out_type
  float* partials;       // [blocks, 2, values of a thread, threads, floats of a value]; null if no tile is shared
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
  int unit, units, longer;    // steps that blocks never part; of those a block has; the first `longer` one more
  int tile_units, in_longer;  // units of a tile, and of the first `longer` blocks
  Divisor by_tile_units, by_units, by_longer_units;  // those of a tile, of a block, and one more
};

// For all that a kernel begins with, at once.
DEVICE void wait_for_arguments(const Product& p) {
  mem::wait_for_scalars(p.b, p.b_tile, p.b_row, p.b_step, p.a, p.a_stride, p.m, p.n, p.k, p.steps, p.unit, p.units,
                        p.longer, p.by_tile_units.inverse, p.by_tile_units.shift);
}

constexpr int kTileRows = mma::kWaves * mma::kRows;

struct Group {  // steps of a tile; those past the end are of no tile
  int tile, step, end;
};

// Which steps this block has, and takes in groups of kGroup. With groups of one, units are of one.
template <int kGroup>
struct Share {
  const Product& p;
  const int block = wave::block_x(), first = first_step(block), last = first_step(block + 1);

  DEVICE int first_step(int b) const { return p.unit * first_unit(b); }
  DEVICE int first_unit(int b) const { return b * p.units + (b < p.longer ? b : p.longer); }
  DEVICE int block_of(u32 unit) const {
    const bool longer = unit < u32(p.in_longer);
    const Divisor by{longer ? p.by_longer_units.inverse : p.by_units.inverse,
                     longer ? p.by_longer_units.shift : p.by_units.shift};
    return (unit - (longer ? 0 : p.in_longer)) / by + (longer ? 0 : p.longer);
  }
  DEVICE Group begin() const {
    const int tile = u32(first_unit(block)) / p.by_tile_units, step = first - tile * p.steps,
              end = last - tile * p.steps;
    return {tile, step, end < p.steps ? end : p.steps};
  }
  // With end <= 0 past the last.
  DEVICE Group after(const Group& now) const {
    const bool same = now.step + kGroup < now.end;
    if (__builtin_expect_with_probability(same, true, wave::kLikely)) return {now.tile, now.step + kGroup, now.end};
    const int tile = now.tile + 1, end = last - tile * p.steps;
    return {tile, 0, end < p.steps ? end : p.steps};
  }
  // Bytes of a row of the group's tile that are the block's, from a step of it on.
  DEVICE int bytes_left(const Group& group, int step) const {
    const int end = group.end * mma::kDepth;
    return (end < p.k ? end : p.k) - step * mma::kDepth;
  }
  DEVICE int first_sharer(int tile) const { return block_of(tile * p.tile_units); }
  DEVICE int last_sharer(int tile) const { return block_of(tile * p.tile_units + p.tile_units - 1); }
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
    const int inside = wave_row + mma::row(lane, l);
    const u32 row = inside < rows ? inside : rows - 1;
    const int offset = row / mma::kRows * int(p.b_tile) + row % mma::kRows * p.b_row;
    tile.weights[l] =
        mem::cursor(p.b + first_row / mma::kRows * p.b_tile, offset + mma::depth(lane) / 16 * (p.b_step / 4));
  }
  return tile;
}

// The same with where its block scales lie.
template <class Scale>
struct ScaledTileWeights : TileWeights {
  const typename Scale::Type* scales;
};
template <class Scale>
DEVICE ScaledTileWeights<Scale> scaled_tile_weights(const Product& p, u32 first_row, int wave_row) {
  return {tile_weights(p, first_row, wave_row),
          (const typename Scale::Type*)p.scale_b + i64(first_row / kScaleBlock) * p.scale_b_row};
}

// Floats of rows in a row.
template <int kRun>
using Run = float __attribute__((ext_vector_type(kRun)));

// A run of results as T, bf16 or fp16 or float, from element `at` on, if there is one.
template <class T, int kRun>
DEVICE void store_run(bool inside, void* out, u64 at, Run<kRun> x) {
  if constexpr (__is_same(T, float)) mem::store_if(inside, (float*)out + at, x);
  else if constexpr (kRun == 1) mem::store_if(inside, (u16*)out + at, u16(T::pack({x[0], x[0]})));
  else if constexpr (kRun == 2) mem::store_if(inside, (u16*)out + at, T::pack(x));
  else mem::store_if(inside, (u16*)out + at, u32x2{T::pack(x.lo), T::pack(x.hi)});
}
template <int kRun>
DEVICE Run<kRun> load_bias(const Product& p, int row) {
  Run<kRun> bias = {};
  if (p.bias)
    for (int i = 0; i < kRun; ++i)
      if (row + i < p.n) bias[i] = load_output(p.bias, row + i, p.out_type);
  return bias;
}

// The end of a tile: value [i][j] of a thread is of token token(i) and kRun rows of b, row(j) and those behind it; registers for
// kLoaded floats are free. The rings of kMx leave few, so that bias is loaded once values are summed up.
template <Scales kScales, int kLaneTokens, int kLaneRuns, int kRun, int kGroup, int kThreads, int kLoaded>
struct Finish {
  static constexpr bool kMx = kScales == Scales::kMx;
  using Value = Run<kRun>;
  static constexpr int kValues = kLaneTokens * kLaneRuns;
  const Product& p;
  const Share<kGroup>& share;
  int tile = 0, from = 0, to = 0;  // and the first and the last block that share it
  int ends_here = 0;               // 1 if the first began in an earlier tile
  int row[kLaneRuns] = {}, token[kLaneTokens] = {};
  float scale_a[kLaneTokens] = {};
  Value scale_b[kLaneRuns] = {}, bias[kLaneRuns] = {};

  // When a tile begins, so that what is loaded and divided here is there when it ends.
  template <class RowOf, class TokenOf>
  DEVICE void begin(int tile_, TokenOf token_of, RowOf row_of) {
    tile = tile_, from = to = share.block;
    if (p.partials) {
      from = share.first_sharer(tile), to = share.last_sharer(tile);
      ends_here = share.first_step(from) < tile * p.steps;
    }
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      token[i] = token_of(i);
      if (kScales == Scales::kRow)
        scale_a[i] = mem::load_float_or_zero(mem::buffer(p.scale_a), token[i] * p.scale_a_row * 4, 0, token[i] < p.m);
    }
#pragma unroll
    for (int j = 0; j < kLaneRuns; ++j) {
      row[j] = row_of(j);
      if (kScales == Scales::kRow)
        for (int i = 0; i < kRun; ++i)
          scale_b[j][i] = row[j] + i < p.n ? mem::load<float>(p.scale_b + u64(row[j] + i) * u32(p.scale_b_row)) : 0.0f;
      if (!kMx) bias[j] = load_bias<kRun>(p, row[j]);
    }
  }

  // By all threads of the block, those that stored sums and those that did not: false if a later block finishes the tile.
  DEVICE static bool is_last(const Product& p, int tile, int from, int to, bool stored) {
    return from == to || is_last_block(p.counters + tile, to - from + 1, stored);
  }

  // Where value v of block b's sums lies, in bytes. It shares at most two tiles: the one that it starts in, and the one that it
  // ends in.
  DEVICE int place(int b, int v) const {
    return ((b * 2 + (b == from ? ends_here : 0)) * kValues + v) * kThreads * int(sizeof(Value));
  }

  // Whether value v goes to HBM. Kernels for more tokens than a few have at least half of them, and need no predicates for
  // each, of which there are few.
  DEVICE bool is_shared(int v) const { return kLaneTokens > 2 || token[v / kLaneRuns] < p.m; }

  DEVICE void end(Value (&sum)[kLaneTokens][kLaneRuns]) const {
    if (from != to) {
      const mem::Buffer partials = mem::buffer(p.partials);
      const int at = wave::thread() * int(sizeof(Value));
#pragma unroll
      for (int v = 0; v < kValues; ++v)
        if (is_shared(v)) mem::store_device(partials, at, place(share.block, v), sum[v / kLaneRuns][v % kLaneRuns]);
      if (!is_last(p, tile, from, to, /*stored=*/true)) return;
#pragma unroll
      for (int v = 0; v < kValues; ++v) sum[v / kLaneRuns][v % kLaneRuns] = Value{};
      constexpr int kFit = kLoaded / (kValues * kRun), kLeast = kMx ? 1 : 2;
      constexpr int kAtOnce = kFit > 8 ? 8 : kFit > kLeast ? kFit : kLeast;  // blocks whose sums are loaded together
#pragma unroll 1
      for (int b = from; b <= to; b += kAtOnce) {
        Value theirs[kAtOnce][kValues];
#pragma unroll
        for (int other = 0; other < kAtOnce; ++other)
#pragma unroll
          for (int v = 0; v < kValues; ++v) {
            const bool there = b + other <= to;
            theirs[other][v] =
                mem::load_device_or_zero<Value>(partials, at, place(there || mem::kPredicates ? b + other : to, v),
                                                (there || !mem::kPredicates) && is_shared(v));
          }
#pragma unroll
        for (int other = 0; other < kAtOnce; ++other)
#pragma unroll
          for (int v = 0; v < kValues; ++v)
            if (mem::kPredicates || b + other <= to) sum[v / kLaneRuns][v % kLaneRuns] += theirs[other][v];
      }
    }
#pragma unroll
    for (int j = 0; j < kLaneRuns; ++j) {
      const Value added = kMx ? load_bias<kRun>(p, row[j]) : bias[j];
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        if constexpr (kScales == Scales::kRow) sum[i][j] *= scale_a[i] * scale_b[j];
        sum[i][j] += added;
      }
    }
    auto store = [&](auto store_value) __attribute__((always_inline)) {
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
        for (int j = 0; j < kLaneRuns; ++j)
          store_value(token[i] < p.m, u64(u32(token[i])) * u32(p.n) + u32(row[j]), row[j], sum[i][j]);
    };
    auto store_one = [&]<class T>(T*, bool inside, u64 at, int row, Value x)
                         __attribute__((always_inline)) { store_run<T, kRun>(inside && row < p.n, p.out, at, x); };
    auto store_odd = [&](bool inside, u64 at, int row, Value x) __attribute__((always_inline)) {
      for (int r = 0; r < kRun; ++r)
        if (inside && row + r < p.n) store_output(p.out, at + r, x[r], p.out_type);
    };
    // The type is asked for once, so that a block ends with few instructions; but with branches, and for many values, that
    // takes registers.
    if constexpr (!mem::kPredicates && kValues * kRun > 8)
      store([&](auto... value) __attribute__((always_inline)) {
        if (p.n % kRun) store_odd(value...);
        else
          with_output_type(p.out_type, [&](auto* type) __attribute__((always_inline)) { store_one(type, value...); });
      });
    else if (p.n % kRun) store(store_odd);
    else
      with_output_type(p.out_type, [&](auto* type) __attribute__((always_inline)) {
        store([&](auto... value) __attribute__((always_inline)) { store_one(type, value...); });
      });
  }
};

#include WIDE_HEADER  // Wide

// For few tokens and small weights: a tile has 16 rows of b and is shared by fewer blocks. The waves take K in turns of
// kTurn steps, each lane with weights and tokens of kRing turns in registers, and meet in LDS at the end of a tile.
//
// Up to 8 tokens the sparse instruction (v_smfmac_f32_16x16x64_fp8_fp8, a token over two rows, each with two of every four
// bytes) does what two dense ones do. Built and emulated on gfx942, 8 x 64 x 2048, it halves matrix cycles per byte of weight from
// 0.031 to 0.016 and adds 0.7 % to issue cycles, 0.304 to 0.306. HBM at its full rate leaves 0.48 cycles per byte: what it
// saves nobody waits for, so the dense one stays.
template <class Type, int kTokens, Scales kScales, class Scale = Fp32Scale>
struct Narrow {
  static constexpr int kTiles = (kTokens + mma::kTileTokens - 1) / mma::kTileTokens, kTurn = 2, kRing = mma::kRing;
  static constexpr int kThreads = mma::kWaves * wave::kLanes, kUnit = kTurn * mma::kWaves;
  static constexpr bool kScaled = kScales == Scales::kBlock;
  static_assert(!kScaled || kTurn * mma::kDepth == kScaleBlock);
  using Tile = Finish<kScales, kTiles, 1, 1, kUnit, kThreads, 8>;
  struct Buffer {
    float sum[2][mma::kWaves][kTiles][4]
             [wave::kLanes];  // of this tile and of the last, which a slow wave may still read
  };

  const Product& p;
  Buffer& buffer;  // in LDS
  const Share<kUnit> share{p};
  const int lane = wave::lane();

  using Stream = ScaledTileWeights<Scale>;
  DEVICE Stream stream(int tile) const { return scaled_tile_weights<Scale>(p, tile * mma::kRows, 0); }

  struct Turn {
    mma::Weights weights[kTurn] = {};
    u32x4 tokens[kTurn][kTiles];
    typename Scale::Loaded scale_a[kTiles][mma::kValueTokens] = {}, scale_b = 0;  // of kBlock
  };
  DEVICE void load(Turn& turn, const Stream& stream, const Group& group) const {
    const int first = group.step + wave::index() * kTurn, bytes = share.bytes_left(group, first) - mma::depth(lane);
    if constexpr (kScaled) load_scales(turn, stream.scales, u32(first) / kTurn, share.bytes_left(group, first) > 0);
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

  DEVICE void load_scales(Turn& turn, const typename Scale::Type* scales_b, int block, bool inside) const {
    turn.scale_b = Scale::load_or_zero(mem::buffer(scales_b), 0, block * Scale::kBytes, inside);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v) {
        const int token = t * mma::kTileTokens + mma::value_token(lane, v);
        turn.scale_a[t][v] = Scale::load_or_zero(mem::buffer(p.scale_a), token * p.scale_a_row * Scale::kBytes,
                                                 block * p.scale_a_k * Scale::kBytes, inside && token < p.m);
      }
  }

  // A turn is multiplied while the next kRing - 1 are under way. All turns of a round load, past the block's last one zeros: were
  // a path with fewer loads in flight to join the others, the compiler would wait for more than it must on all of them. Where
  // loads take predicates, hardware counts them itself, and the others are left out.
  DEVICE void multiply() const {
    Group now = share.begin(), ahead = now;
    Stream streaming = stream(ahead.tile);
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
    auto multiply_turn = [&](const Turn& turn) __attribute__((always_inline)) {
      const float scale_b = kScaled ? Scale::value(turn.scale_b) : 1.0f;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        f32x4 product = kScaled ? f32x4{} : sum[t];
#pragma unroll
        for (int u = 0; u < kTurn; ++u) product = mma::multiply_tile<Type>(product, turn.weights[u], turn.tokens[u][t]);
        if constexpr (!kScaled) sum[t] = product;
        else
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sum[t][i] += product[i] * (Scale::value(turn.scale_a[t][i % mma::kValueTokens]) * scale_b);
      }
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
      for (int i = 0; i < kRing; ++i) {
        if (mem::kPredicates && !more) continue;
        load_next(ring[(i + kRing - 1) % kRing]);
        if (more) more = multiply_turn(ring[i]);
      }
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
    Run<1> values[kTiles][1] = {};
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int w = 0; w < mma::kWaves; ++w) values[t][0] += buffer.sum[parity][w][t][wave::index()][lane];
    tile.end(values);
  }
};

// A kernel of that name; `...` are its Scales and, of kBlock, their type.
#define SKINNY(symbol, type, tokens, ...)                                                           \
  KERNEL((Wide<type, tokens, __VA_ARGS__>::kThreads), (Wide<type, tokens, __VA_ARGS__>::kResident)) \
  symbol(Product product) {                                                                         \
    wait_for_arguments(product);                                                                    \
    Wide<type, tokens, __VA_ARGS__>::run(product);                                                  \
  }
#define NARROW(symbol, type, tokens, ...)                                                              \
  KERNEL((Narrow<type, tokens, __VA_ARGS__>::kThreads), tokens == 8 ? 4 : 3) symbol(Product product) { \
    LDS static Narrow<type, tokens, __VA_ARGS__>::Buffer buffer;                                       \
    const Narrow<type, tokens, __VA_ARGS__> kernel{product, buffer};                                   \
    kernel.multiply();                                                                                 \
  }
