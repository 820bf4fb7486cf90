// 64-row tiles streamed through registers. Each of four consumer waves multiplies 16 rows; producer waves load the
// tokens.
//
// A consumer lane holds kStages steps in registers: a multiplied step is replaced by the one kStages further on, which
// may belong to the next tile. So kStages - 1 steps are always in flight. Producer waves load tokens to LDS,
// kChunkSteps steps at a time, double-buffered. Producers are separate waves because a wave that waits for its tokens
// would also wait for its weights.
#pragma once
#include "gemm/skinny/epilogue.h"
#include "gemm/skinny/weights.h"

template <class Type, int kTokens, ScaleGranularity kScales, class Scale = Fp32Scale, bool kGated = false>
struct StreamedTile {
  using Problem = typename ProblemOf<kGated>::Type;
  static constexpr int kStages = 8, kStepBytes = kTokens * mma::kDepth, kStepVecs = kTokens * 4;
  static constexpr int kChunkSteps = kTokens > 32 ? 2 : 4;
  static constexpr int kChunks = kStages / kChunkSteps;  // even, so that the first step uses the first buffer
  static constexpr int kProducerWaves =
      (kChunkSteps * kStepVecs + mma::kMaxVecs * wave::kLanes - 1) / (mma::kMaxVecs * wave::kLanes);
  static constexpr int kThreads = (mma::kWaves + kProducerWaves) * wave::kLanes;
  static constexpr int kResident = kTokens >= 64 ? 1 : 2;  // blocks per compute unit
  static constexpr int kUnitSteps = kScales == ScaleGranularity::kBlock ? kScaleBlock / mma::kDepth : 1;
  static constexpr int kChunkScales = kScales == ScaleGranularity::kBlock ? kChunkSteps / kUnitSteps * kTokens : 0;
  using Sum = mma::Accumulator<kTokens>;
  static constexpr bool kGroups = kTokens >= kGroupTokens;
  struct Buffer {
    alignas(128) u8 tokens[kChunkSteps * kStepBytes];
    float scales_a[kChunkScales + 1];
  };

  using Epilogue = TileEpilogue<kScales, Sum::kLaneTokens, 1, Sum::kLaneRows, kStages, mma::kWaves * wave::kLanes, 16,
                                kGated, kGroups>;

  const SkinnyProblem& p;
  Buffer* buffers;  // [2] in LDS
  const StreamKSchedule<kStages> schedule{p};
  const int lane = wave::lane();
  const int first_token = kGroups ? wave::block_id_y() * kTokens : 0;

  // Producer waves load tokens two chunks ahead into registers. They store to one buffer while consumers read the
  // other, and the barrier publishes it: a wave at the barrier has finished reading the buffer that the next store
  // overwrites. Tokens are zero past the end of K, and past the block's end of a tile.
  DEVICE void produce_tokens() const {
    constexpr int kLanes = kProducerWaves * wave::kLanes, kLaneVecs = kChunkSteps * kStepVecs / kLanes;
    constexpr int kLaneScales = (kChunkScales + kLanes - 1) / kLanes;
    static_assert(kLaneVecs * kLanes == kChunkSteps * kStepVecs && kChunks % 2 == 0);
    struct TokenChunk {
      u32x4 vec[kLaneVecs];
      typename Scale::Loaded scale_a[kLaneScales + 1];
    };
    const int producer = wave::thread_id() - mma::kWaves * wave::kLanes;
    const mem::Buffer a = mem::buffer(p.a + i64(first_token) * p.a_stride),
                      scales = mem::buffer((const u8*)p.scale_a + i64(first_token) * p.scale_a_row * Scale::kBytes);
    const int m = p.m - first_token;
    auto load = [&](TokenChunk& chunk, const TileWork& work, int u) __attribute__((always_inline)) {
      const int step = work.step + u, bytes = schedule.bytes_left(work, step);
#pragma unroll
      for (int j = 0; j < kLaneVecs; ++j) {
        const u32 index = producer + j * kLanes;
        const mma::TokenVec vec = mma::token_vec(index % kStepVecs);
        const int k = index / kStepVecs * mma::kDepth + vec.depth;
        const bool inside = vec.token < m && k < bytes;
        chunk.vec[j] = mem::load_or_zero(a, vec.token * p.a_stride + k, step * mma::kDepth, inside);
      }
#pragma unroll
      for (int j = 0; j < kLaneScales; ++j) {
        const u32 index = producer + j * kLanes;
        const int token = index % kTokens, block_k = index / kTokens;
        const bool inside = token < m && index < kChunkScales && block_k * kScaleBlock < bytes;
        const int at = (token * p.scale_a_row + block_k * p.scale_a_k) * Scale::kBytes;
        chunk.scale_a[j] =
            Scale::load_or_zero(scales, at, u32(step) / kUnitSteps * p.scale_a_k * Scale::kBytes, inside);
      }
    };
    auto store = [&](const TokenChunk& chunk, Buffer& buffer) __attribute__((always_inline)) {
#pragma unroll
      for (int j = 0; j < kLaneVecs; ++j) {
        const u32 index = producer + j * kLanes;
        u8* step = buffer.tokens + index / kStepVecs * kStepBytes;
        mma::store_vec<kTokens>(step, index % kStepVecs, chunk.vec[j]);
      }
#pragma unroll
      for (int j = 0; j < kLaneScales; ++j)
        if (producer + j * kLanes < kChunkScales)
          buffer.scales_a[producer + j * kLanes] = Scale::value(chunk.scale_a[j]);
    };

    TileWork current = schedule.begin();
    TokenChunk chunks[2];
    load(chunks[0], current, 0);
    load(chunks[1], current, kChunkSteps);
    while (true) {
      const TileWork next = schedule.after(current);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        store(chunks[c % 2], buffers[c % 2]);
        block_barrier();  // hazard: tokens are read before they are written
        load(chunks[c % 2], c + 2 < kChunks ? current : next, (c + 2) % kChunks * kChunkSteps);
      }
      if (next.tile != current.tile && p.partials)
        Epilogue::is_last(p, current.tile, schedule.first_block(current.tile), schedule.last_block(current.tile),
                          /*stored=*/false);
      if (next.end <= 0) return;
      current = next;
    }
  }

  using WeightTile = ScaledTileWeights<Scale>;
  DEVICE WeightTile weight_tile(int tile) const {
    return scaled_tile_weights<Scale, kGated>(p, tile * kTileRows, wave::index() * mma::kRows);
  }

  struct Stage {
    mma::Weights weights = {};
    typename Scale::Loaded scale_b = 0;  // a unit's scale, in its first stage
  };
  DEVICE void load(Stage& stage, const WeightTile& tile, const TileWork& work, int u) const {
    const int step = work.step + u, bytes = schedule.bytes_left(work, step);
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
      mem::refill(stage.weights.load[l], tile.weights[l], step * p.b_step, mma::depth(lane) < bytes);
    if (kScales == ScaleGranularity::kBlock && u % kUnitSteps == 0)
      stage.scale_b =
          Scale::load_or_zero(mem::buffer(tile.scales), 0, u32(step) / kUnitSteps * Scale::kBytes, 0 < bytes);
    // A unit's loads and their uses stay in order: a wait for one unit then does not wait for later ones.
    constexpr int kScalarAndLds = 0x84;  // what the compiler may still move across
    if (kScales == ScaleGranularity::kBlock && u % kUnitSteps == kUnitSteps - 1)
      __builtin_amdgcn_sched_barrier(kScalarAndLds);
  }

  DEVICE void multiply() const {
    TileWork current = schedule.begin();
    WeightTile tile_weights = weight_tile(current.tile);
    Stage stages[kStages];
#pragma unroll
    for (int u = 0; u < kStages; ++u) load(stages[u], tile_weights, current, u);
    Sum sum = {}, unit_sum = {};
    mma::TokenQueue<kTokens> queue;
    Epilogue epilogue{p, schedule};
    begin_tile(epilogue, current.tile);
    while (true) {
      const TileWork next = schedule.after(current);
      if (next.tile != current.tile) tile_weights = weight_tile(next.tile);
#pragma unroll
      for (int u = 0; u < kStages; ++u) {
        if (u % kChunkSteps == 0) block_barrier();  // hazard: tokens are read before they are written
        const Buffer& buffer = buffers[u / kChunkSteps % 2];
        const u8* tokens = buffer.tokens + u % kChunkSteps * kStepBytes;
        if (u % kChunkSteps == 0) queue.begin(tokens);
        queue.template multiply_add<Type>(kScales == ScaleGranularity::kBlock ? unit_sum : sum, stages[u].weights,
                                          tokens, u % kChunkSteps != kChunkSteps - 1);
        if (u % kUnitSteps != kUnitSteps - 1) continue;
        if constexpr (kScales == ScaleGranularity::kBlock) {
          const float scale_b = Scale::value(stages[u + 1 - kUnitSteps].scale_b);
          sum.add_scaled(unit_sum, buffer.scales_a + u % kChunkSteps / kUnitSteps * kTokens, scale_b);
          unit_sum = {};
        }
#pragma unroll
        for (int done = u + 1 - kUnitSteps; done <= u; ++done) load(stages[done], tile_weights, next, done);
      }
      if (next.tile != current.tile) {
        end_tile(epilogue, sum);
        sum = {};
        if (next.end > 0) begin_tile(epilogue, next.tile);
      }
      if (next.end <= 0) return;
      current = next;
    }
  }

  DEVICE void begin_tile(Epilogue& epilogue, int index) const {
    const int row = index * kTileRows + wave::index() * mma::kRows + Sum::row(lane);
    epilogue.begin(
        index, [&](int i) __attribute__((always_inline)) { return first_token + Sum::token(lane, i); },
        [&](int) __attribute__((always_inline)) { return row; });
  }
  DEVICE void end_tile(const Epilogue& epilogue, const Sum& sum) const {
    f32x4 values[Sum::kLaneTokens][1];
#pragma unroll
    for (int i = 0; i < Sum::kLaneTokens; ++i) values[i][0] = sum.sum[i];
    epilogue.end(values);
  }

  DEVICE static void run(const SkinnyProblem& problem) {
    LDS static Buffer buffers[2];
    const StreamedTile kernel{problem, buffers};
    if (wave::index() < mma::kWaves) kernel.multiply();
    else kernel.produce_tokens();
  }
};

// No tiles of 128 rows: reads of tokens from L2 limit no kernel.
#define WIDE_TILES(symbol, type, ...)
