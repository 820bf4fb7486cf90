// 64-row tiles streamed through LDS. A block has two consumer groups of four waves. Each group copies and multiplies
// its own panels: 128 K bytes of the tile's rows and of all tokens. A stage is one or two panels; the groups alternate
// over a tile's stages. Loads in flight in registers reach about 86 % of HBM bandwidth, in LDS 96 % (measured on H200,
// 13312 x 16384). At the end of a tile the next tile's panels follow, so all stages but one are always in flight. A
// block that is alone on an SM gets more stages; its dynamic LDS size tells. Block scales are copied with their panel.
//
// Above 64 tokens a block is always alone, and reads the tokens of each panel from L2. So tiles can be wide: 128 rows,
// half for each consumer group, which share panels. Blocks at the same K then read the same tokens at the same time;
// with stream-K they do not, and all SMs together took 5.5 TB/s. With block scales the bytes are not the limit: 72
// blocks of 128 x 128 (256 x 4608 x 7168) take 44.7 microseconds with own waits for each stage, 38.4 without copies,
// 32.6 also without scales, 21.0 if sums are not added either, and 22.9 with the copies alone. The times add up: each
// wave starts copies, multiplies and adds in turn, and the instructions that start a panel's copies take as long as its
// products. Two tiled blocks on an SM overlap them better, so the cost model prefers those.
//
// Eight waves hide little latency: each instruction before the first copy, per panel and after the last panel costs
// time, a cold one about two cycles. So a copy needs one offset per thread, a barrier serves two panels, and the
// epilogue is branch-free.
//
// Rejected after measurement on H200 (scaled_mm, microseconds):
// - Reducing sums in the LDS of a block cluster: 0.2 to 0.9 less where tiles are shared, 0.3 more where they are not.
// - Starting kernels while the previous one runs (griddepcontrol), with their first panels in flight: up to 16 tokens
//   1.26 to 1.30 times the speed of the best baseline, instead of 1.06 to 1.10. AMD GPUs have no equivalent, and it is
//   only correct if the previous kernel does not write the weight. Prefetching panels only to the L2 cache is always
//   correct, but slows the largest products by 5 %.
// - Tiles of 8 to 56 rows, one per SM, instead of stream-K: at best 4 % less, 12.7 versus 13.3 (1 x 2304 x 16384).
// - Tiles of 128 rows up to 64 tokens: 57.1 versus 58.4 (64 x 13312 x 16384), more elsewhere.
// - Wide tiles whose products are halved along the tokens, one half added while the other is multiplied: 64.5 versus
//   58.8 (96 x 13312 x 16384), as the tensor cores then read the weights twice; two panels at once: 60.1.
// - Wide tiles with block scales (256 x 4608 x 7168, 41.6; vLLM's CUTLASS kernel 24.6): waves that wait for a stage,
//   not for the block: 44.7. All 256 tokens, multiplied in two halves: 78.7; with K in 2 or 3 slices, summed in a block
//   cluster: 43.7, 34.5. A third group that copies panels and multiplies the scales: 48.0, as it waits for scales one
//   panel ahead; with consumer groups that take turns: 45.3.
// - Four consumer groups: 10.4 versus 10.9 (1 x 4608 x 7168), the same as two panels per barrier, but 3 to 8 % more
//   below 20 MB.
#pragma once
#include "device/swizzle.h"
#include "gemm/skinny/epilogue.h"

extern LDS __attribute__((aligned(1024))) u8 dynamic_lds[];  // [consumer groups][panels][weight rows, then tokens]

template <class Type, int kTokens, ScaleGranularity kScales, class Scale = Fp32Scale, bool kGated = false,
          bool kWide = false>
struct StreamedTile {
  using Problem = typename ProblemOf<kGated>::Type;
  static constexpr int kConsumerGroups = 2, kRows = kWide ? kConsumerGroups * kTileRows : kTileRows;  // of a tile
  static constexpr int kTileColumns = kGated ? kRows / 2 : kRows;
  static constexpr int kConsumerThreads = mma::kWaves * wave::kLanes, kThreads = kConsumerGroups * kConsumerThreads;
  static constexpr int kWeightBytes = kRows * tile::kDepth, kPanelBytes = kWeightBytes + kTokens * tile::kDepth;
  static constexpr bool kGroups = kTokens >= kGroupTokens;
  static constexpr bool kAlone = kTokens > 64;      // on an SM: registers and LDS fit one block
  static constexpr int kResident = kAlone ? 1 : 2;  // blocks per SM, if LDS suffices
  // Panels per consumer group in LDS if the block is alone on an SM, and otherwise; skinny_gemm.py knows both.
  static constexpr int kDeep = kWide           ? (kTokens == 96 ? 7 : 6)
                               : kTokens == 16 ? 10
                               : kTokens == 32 ? 8
                               : kTokens == 64 ? 6
                               : kTokens == 96 ? 5
                                               : 4,
                       kShallow = kTokens == 64 ? 3 : 4;
  static constexpr bool kScaled = kScales == ScaleGranularity::kBlock;
  // Words that hold the token scales and the weight scale.
  using Scaling = u32[kConsumerGroups][kDeep][kTokens + 2];

  template <int kStages, int kPanels>
  struct MainLoop;

  DEVICE static void run(const SkinnyProblem& problem) {
    LDS alignas(8) static Scaling scaling;
    if constexpr (kAlone) MainLoop<kDeep, 1>{problem, scaling}.multiply();
    else {
      u32 bytes;
      asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
      if (bytes == kConsumerGroups * kDeep * kPanelBytes) MainLoop<kDeep / 2, 2>{problem, scaling}.multiply();
      else if constexpr (kShallow % 2 == 0) MainLoop<kShallow / 2, 2>{problem, scaling}.multiply();
      else MainLoop<kShallow, 1>{problem, scaling}.multiply();
    }
  }
};

// The main loop for a given stage count. A stage's panels share one barrier, and a thread computes their offsets once.
template <class Type, int kTokens, ScaleGranularity kScales, class Scale, bool kGated, bool kWide>
template <int kStages, int kPanels>
struct StreamedTile<Type, kTokens, kScales, Scale, kGated, kWide>::MainLoop {
  static constexpr int kPanelSteps = tile::kDepth / mma::kDepth, kStageSteps = kPanels * kPanelSteps;
  static constexpr int kGroupSteps = kWide ? kStageSteps : kConsumerGroups * kStageSteps;
  static constexpr int kSums = kTokens / 2;
  static constexpr int kProducts = kTokens >= 64 ? 1 : kPanels;  // in flight at once, as registers allow
  using Epilogue = TileEpilogue<kScales, kTokens / (kWide ? 4 : 8), 1, 2, kGroupSteps, kThreads, 64, kGated, kGroups>;

  // Copies a panel's rows one after the other, 16 at a time, by a consumer group. With kPairs, row 2 * i of 16 is
  // stored at i and the next one at i + 8, so a lane's sums are for two consecutive rows. In fragment order rows keep
  // their order, in half the time that copying every other row takes, and sums are exchanged at the end.
  template <int kRows, bool kPairs>
  struct RowLoader {
    int offset;      // of the thread's 16 bytes in the first 16 rows, at K = 0
    int row;         // the first row the thread copies
    int column;      // byte column in a panel row
    const u8* from;  // the thread's first 16 bytes
    int rows;        // valid rows from the thread's first one on

    DEVICE RowLoader(const tile::Layout& layout, int thread, int gated_columns = 0) {
      const tile::PanelVec place = tile::PanelVec::at(thread, layout.is_fragment_order());
      const u32 at = place.row, vec = place.vec;
      row = kPairs && !layout.is_fragment_order() ? at % 8 * 2 + at / 8 : at;
      int from_row = row;
      if constexpr (kPairs && kGated) {
        from_row = gated_column(row) + (is_up(row) ? gated_columns : 0);
        row = 2 * gated_column(row);
      }
      offset = from_row * layout.row + vec % 4 * layout.vec + vec / 4 * layout.step;
      column = vec * tile::kVecBytes;
    }
    DEVICE void begin(const u8* first, int count) { from = first + offset, rows = count - row; }
    // Copies the panel `at` bytes further on to the wave's first 16 bytes at `to`. Only the first `bytes` of K are
    // valid.
    DEVICE void start(int at, i64 next, int bytes, lds::Local<u8>* to) const {
      const u8* vec = from + at;
      const bool inside = column < bytes;
#pragma unroll
      for (int i = 0; i < kRows; i += 16, vec += next) lds::start_copy(vec, inside && i < rows, to + i * tile::kDepth);
    }
  };

  const SkinnyProblem& p;
  Scaling& scaling;  // in LDS
  const StreamKSchedule<kGroupSteps> schedule{p};
  const int lane = wave::lane(), group = wave::index() / mma::kWaves, consumer_wave = wave::index() % mma::kWaves;
  const int thread = wave::thread_id() % kConsumerThreads;  // in the consumer group
  const int group_token = kGroups ? wave::block_id_y() * kTokens : 0;
  // Where the consumer group's rows and the tokens that it copies begin.
  const int first_row = kWide ? group * kTileRows : 0, first_token = kWide ? group * (kTokens / 2) : 0;

  // The scales of a token or, for token kTokens, the weight tile's scales.
  DEVICE const u8* scales_from(int token, int tile) const {
    if (token < kTokens) return (const u8*)p.scale_a + (group_token + token) * p.scale_a_row * Scale::kBytes;
    return (const u8*)p.scale_b + i64(tile * kRows / kScaleBlock) * p.scale_b_row * Scale::kBytes;
  }
  DEVICE int scale_step(int token) const { return (token < kTokens ? p.scale_a_k : 1) * Scale::kBytes; }
  // The scale of the consumer group's panel `panel` in a stage.
  DEVICE float scale(int stage, int panel, int token) const {
    return Scale::of_word(scaling[kWide ? 0 : group][stage * kPanels + panel][token]);
  }
  // The scales of two consecutive tokens.
  DEVICE f32x2 scales_of_tokens(int stage, int panel, int token) const {
    return {scale(stage, panel, token), scale(stage, panel, token + 1)};
  }
  // Copies a scale to an LDS word, or zeros it. An asynchronous copy has at least 4 bytes.
  DEVICE static void start_scale(const u8* from, bool inside, u32* to) {
    if constexpr (Scale::kBytes == 4) lds::start_word(from, inside, to);
    else *to = mem::load_byte_or_zero(from, 0, 0, inside);
  }

  DEVICE void multiply() const {
    auto* lds = (lds::Local<u8>*)dynamic_lds + (kWide ? 0 : group * kStages * kPanels * kPanelBytes);
    const int wave_offset =
        consumer_wave * wave::kLanes * tile::kVecBytes;  // in a panel: where the wave's first bytes go
    TileWork current = schedule.begin(), prefetch = current;
    RowLoader<kTileRows, true> weights({p.b_tile, p.b_row, int(u32(p.b_step) / 4), p.b_step}, thread, p.n / 2);
    RowLoader<kWide ? kTokens / 2 : kTokens, false> tokens(
        {16 * i64(p.a_stride), p.a_stride, tile::kVecBytes, 4 * tile::kVecBytes}, thread);
    auto begin_copies = [&] {
      const int first = prefetch.tile * kRows + first_row;
      weights.begin(p.b + (kGated ? first / 2 : first) / mma::kRows * p.b_tile, p.n - first);
    };
    begin_copies();
    tokens.begin(p.a + i64(group_token + first_token) * p.a_stride, p.m - group_token - first_token);
    const int scale_index = kWide ? wave::thread_id() : thread;
    const u8* scales = scales_from(scale_index, prefetch.tile);  // of the thread's token
    const int step_of_scales = scale_step(scale_index);
    auto start_next = [&](int stage) __attribute__((always_inline)) {
      if (prefetch.end > 0) {
        const int first = prefetch.step + (kWide ? 0 : group * kStageSteps),
                  bytes = schedule.bytes_left(prefetch, first), tile = prefetch.tile;
#pragma unroll
        for (int i = 0; i < kPanels; ++i) {
          const int step = first + i * kPanelSteps, left = bytes - i * tile::kDepth;
          auto* to = lds + (stage * kPanels + i) * kPanelBytes + wave_offset;
          weights.start(step * p.b_step, kGated ? p.b_tile / 2 : p.b_tile, left, to + first_row * tile::kDepth);
          tokens.start(step * mma::kDepth, i64(16) * p.a_stride, left, to + kWeightBytes + first_token * tile::kDepth);
          if (kScaled && scale_index <= kTokens)
            start_scale(scales + step / kPanelSteps * step_of_scales,
                        left > 0 && (scale_index < p.m - group_token || scale_index == kTokens),
                        &scaling[kWide ? 0 : group][stage * kPanels + i][scale_index]);
          if (kScaled && !kWide && kTokens == kConsumerThreads && thread == 0)
            start_scale(scales_from(kTokens, prefetch.tile) + step / kPanelSteps * scale_step(kTokens), left > 0,
                        &scaling[group][stage * kPanels + i][kTokens]);
        }
        prefetch = schedule.after(prefetch);
        if (prefetch.tile != tile && prefetch.end > 0) {
          begin_copies();
          scales = scales_from(scale_index, prefetch.tile);
        }
      }
      lds::end_group();
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) start_next(stage);

    const mma::Panel weights_at(first_row, p.b_step != mma::kDepth), tokens_at(0, false);
    float sum[kSums] = {};
    Epilogue epilogue{p, schedule};
    begin_tile(epilogue, current.tile);
    for (int stage = 0;;) {
      const TileWork next = schedule.after(current);
      lds::wait_for_copies<kStages - 2>();
      // Hazards: read before all waves have filled it; the previous stage filled while it is read.
      if constexpr (kWide) block_barrier();
      else consumer_barrier<kConsumerThreads>(group);
      // The tensor cores accumulate e4m3 products with about 14 bits, so their sums span only one panel.
      float product[kProducts][kSums];
#pragma unroll
      for (int first = 0; first < kPanels; first += kProducts) {
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
          auto* here = lds + (stage * kPanels + first + i) * kPanelBytes;
          mma::start_product<Type>(product[i], weights_at, here, tokens_at, here + kWeightBytes);
        }
        if (first == 0) start_next(stage == 0 ? kStages - 1 : stage - 1);
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
          mma::wait_for_sums(product[i]);
          const float scale_b = kScaled ? scale(stage, first + i, kTokens) : 1.0f;
#pragma unroll
          for (int j = 0; j < kSums / 4; ++j) {
            const int token = j * 8 + lane % 4 * 2;
            const f32x2 scale_a = kScaled ? scales_of_tokens(stage, first + i, token) : f32x2{1.0f, 1.0f};
#pragma unroll
            for (int v = 0; v < 4; ++v) sum[j * 4 + v] += product[i][j * 4 + v] * (scale_a[v % 2] * scale_b);
          }
        }
      }
      if (next.tile != current.tile) {
        if (p.b_step != mma::kDepth) pair_rows(sum);
        end_tile(epilogue, sum, stage);
        for (float& value : sum) value = 0.0f;
        if (next.end > 0) begin_tile(epilogue, next.tile);
      }
      if (next.end <= 0) return;
      current = next;
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
  }

  // A thread's sums are [kTokens / 8][2 rows][2 tokens]. Each consumer group ends with the sums for its half of the
  // tokens.
  DEVICE void begin_tile(Epilogue& epilogue, int index) const {
    const int row = index * kRows + first_row + consumer_wave * mma::kRows + lane / 4 * 2;
    const int first = group_token + (kWide ? 0 : group * (kTokens / 2));
    epilogue.begin(
        index, [&](int i) __attribute__((always_inline)) { return first + i / 2 * 8 + lane % 4 * 2 + i % 2; },
        [&](int) __attribute__((always_inline)) { return row; });
  }
  // Moves sums from a wave's rows l / 4 and l / 4 + 8 to rows l / 4 * 2 and the next one.
  DEVICE void pair_rows(float (&sum)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      if (i / 2 % 2) continue;
      float rows[2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const int from = (lane / 4 * 2 + odd) % 8 * 4 + lane % 4;
        const float low = wave::from_lane(sum[i], from), high = wave::from_lane(sum[i + 2], from);
        rows[odd] = lane < 16 ? low : high;
      }
      sum[i] = rows[0], sum[i + 2] = rows[1];
    }
  }
  // Sends the other half to the other consumer group, through the stage that both have read.
  DEVICE void end_tile(const Epilogue& epilogue, const float (&sum)[kSums], int stage) const {
    if constexpr (kWide) {
      f32x2 values[kTokens / 4][1];
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) values[i][0] = f32x2{sum[i / 2 * 4 + i % 2], sum[i / 2 * 4 + 2 + i % 2]};
      epilogue.end(values);
    } else {
      constexpr int kHalf = kSums / kConsumerGroups, kStage = kPanels * kPanelBytes / 4;
      auto* lds = (lds::Local<float>*)dynamic_lds;
      lds::Local<float>* sent = lds + (group * kStages + stage) * kStage + thread;
      const lds::Local<float>* received = lds + ((1 - group) * kStages + stage) * kStage + thread;
      consumer_barrier<kConsumerThreads>(group);  // hazard: written while other waves' products still read it
#pragma unroll
      for (int i = 0; i < kHalf; ++i) sent[i * kConsumerThreads] = group == 0 ? sum[kHalf + i] : sum[i];
      block_barrier();  // hazard: read before it is written
      float half[kHalf];
#pragma unroll
      for (int i = 0; i < kHalf; ++i)
        half[i] =
            group == 0 ? sum[i] + received[i * kConsumerThreads] : received[i * kConsumerThreads] + sum[kHalf + i];
      block_barrier();  // hazard: filled while it is still read
      f32x2 values[kTokens / 8][1];
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) values[i][0] = f32x2{half[i / 2 * 4 + i % 2], half[i / 2 * 4 + 2 + i % 2]};
      epilogue.end(values);
    }
  }
};

// Kernels symbol_<tokens> with wide tiles.
#define WIDE_TILE(symbol, type, tokens, ...) STREAMED_TILE(symbol, type, tokens, __VA_ARGS__, false, true)
#define WIDE_TILES(symbol, type, ...)           \
  WIDE_TILE(symbol##_96, type, 96, __VA_ARGS__) \
  WIDE_TILE(symbol##_128, type, 128, __VA_ARGS__)
