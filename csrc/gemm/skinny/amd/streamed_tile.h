// Tiles of 64 rows, streamed through registers: a wave has 16 rows; further waves bring the tokens.
//
// A lane that multiplies keeps a ring of kRing steps in registers: once a step is multiplied, the step kRing further on is
// loaded into its place, past the end of a tile the next tile's, so that kRing - 1 steps are always in flight. Tokens come
// through LDS, kChunk steps at a time, double-buffered, by a wave of their own because whoever counts the loads that it waits for
// would wait for the stream.
#pragma once
#include "gemm/skinny/epilogue.h"
#include "gemm/skinny/weights.h"

template <class Type, int kTokens, Scales kScales, class Scale = Fp32Scale>
struct Wide {
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

  using Tile = Finish<kScales, Sum::kLaneTokens, 1, Sum::kLaneRows, kRing, mma::kWaves * wave::kLanes, 16>;

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
        const u32 index = bringer + j * kLanes;
        const mma::Piece piece = mma::piece(index % kStepPieces);
        const int k = index / kStepPieces * mma::kDepth + piece.depth;
        const bool inside = piece.token < p.m && k < bytes;
        chunk.piece[j] = mem::load_or_zero(a, piece.token * p.a_stride + k, step * mma::kDepth, inside);
      }
#pragma unroll
      for (int j = 0; j < kLaneScales; ++j) {
        const u32 index = bringer + j * kLanes;
        const int token = index % kTokens, block_k = index / kTokens;
        const bool inside = token < p.m && index < kChunkScales && block_k * kScaleBlock < bytes;
        const int at = (token * p.scale_a_row + block_k * p.scale_a_k) * Scale::kBytes;
        chunk.scale_a[j] = Scale::load_or_zero(scales, at, u32(step) / kUnit * p.scale_a_k * Scale::kBytes, inside);
      }
    };
    auto store = [&](const Chunk& chunk, Buffer& buffer) __attribute__((always_inline)) {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const u32 index = bringer + j * kLanes;
        u8* step = buffer.tokens + index / kStepPieces * kStepBytes;
        mma::store_piece<kTokens>(step, index % kStepPieces, chunk.piece[j]);
      }
#pragma unroll
      for (int j = 0; j < kLaneScales; ++j)
        if (bringer + j * kLanes < kChunkScales) buffer.scales_a[bringer + j * kLanes] = Scale::value(chunk.scale_a[j]);
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
      if (next.tile != now.tile && p.partials)
        Tile::is_last(p, now.tile, share.first_sharer(now.tile), share.last_sharer(now.tile), /*stored=*/false);
      if (next.end <= 0) return;
      now = next;
    }
  }

  using Stream = ScaledTileWeights<Scale>;
  DEVICE Stream stream(int tile) const {
    return scaled_tile_weights<Scale>(p, tile * kTileRows, wave::index() * mma::kRows);
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
      slot.scale_b = Scale::load_or_zero(mem::buffer(stream.scales), 0, u32(step) / kUnit * Scale::kBytes, 0 < bytes);
    // Units' loads and what is computed of them stay in order, so that waiting for one is not waiting for later ones.
    constexpr int kScalarAndLds = 0x84;  // what the compiler may still move over it
    if (kScales == Scales::kBlock && u % kUnit == kUnit - 1) __builtin_amdgcn_sched_barrier(kScalarAndLds);
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
    const int row = index * kTileRows + wave::index() * mma::kRows + Sum::row(lane);
    tile.begin(
        index, [&](int i) __attribute__((always_inline)) { return Sum::token(lane, i); },
        [&](int) __attribute__((always_inline)) { return row; });
  }
  DEVICE void end_tile(const Tile& tile, const Sum& sum) const {
    f32x4 values[Sum::kLaneTokens][1];
#pragma unroll
    for (int i = 0; i < Sum::kLaneTokens; ++i) values[i][0] = sum.sum[i];
    tile.end(values);
  }

  DEVICE static void run(const Product& product) {
    LDS static Buffer buffers[2];
    const Wide kernel{product, buffers};
    if (wave::index() < mma::kWaves) kernel.multiply();
    else kernel.bring_tokens();
  }
};
