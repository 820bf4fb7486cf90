// Tiles of 64 rows, streamed through LDS. A block has two consumer groups of four waves. Each group copies and multiplies
// panels of its own: 128 bytes of K of the tile's rows and of all tokens. A stage is one or two panels; the groups take the
// stages of a tile in turn. Registers hold enough loads for some 86 % of HBM's bandwidth, LDS for 96 % (measured on H200, 13312
// x 16384). Past the end of a tile the next tile's panels follow, so that all stages but one are always in flight. A block that
// is alone on a compute unit gets more stages: its size of dynamic LDS says so. Block scales come with their panel.
//
// Eight waves hide little latency: each instruction before the first copy, per panel and after the last panel costs time, a
// cold one some two cycles. So a copy needs one offset per thread, a barrier serves two panels, and the epilogue has no
// branches.
//
// Tried on H200 (scaled_mm, microseconds) and not kept:
// - Sums that meet in the LDS of a cluster of blocks: 0.2 to 0.9 less where tiles are shared, 0.3 more where they are not.
// - Kernels that start while the one before runs (griddepcontrol), with their first panels in flight: up to 16 tokens 1.26 to 1.30
//   times as fast as the best peer in place of 1.06 to 1.10; but AMD's GPUs have nothing like it, and it is only right where that
//   kernel does not write the weight. With panels on their way to the L2 cache only, which is always right, the largest
//   products take 5 % longer.
// - Tiles of 8 to 56 rows, one for each compute unit, in place of stream-K: at best 4 % less, 12.7 for 13.3 (1 x 2304 x 16384).
// - Tiles of 128 rows, which halve the reads of tokens: 57.1 for 58.4 (64 x 13312 x 16384), more elsewhere.
// - Four consumer groups: 10.4 for 10.9 (1 x 4608 x 7168), as two panels a barrier give, but 3 to 8 % more for less than 20 MB.
#pragma once
#include "device/swizzle.h"
#include "gemm/skinny/epilogue.h"

extern LDS __attribute__((aligned(1024))) u8 dynamic_lds[];  // [consumer groups][panels][weight rows, then tokens]

template <class Type, int kTokens, ScaleGranularity kScales, class Scale = Fp32Scale, bool kGated = false>
struct StreamedTile {
  using Problem = typename ProblemOf<kGated>::Type;
  static constexpr int kTileColumns = kGated ? kTileRows / 2 : kTileRows;
  static constexpr int kConsumerGroups = 2, kConsumerThreads = mma::kWaves * wave::kLanes,
                       kThreads = kConsumerGroups * kConsumerThreads;
  static constexpr int kWeightBytes = kTileRows * tile::kDepth, kPanelBytes = kWeightBytes + kTokens * tile::kDepth;
  static constexpr int kResident = 2;  // blocks, if LDS suffices
  // Panels that a consumer group has in LDS if the block is alone on a compute unit, and otherwise; skinny_gemm.py knows both.
  static constexpr int kDeep = kTokens == 16 ? 10 : kTokens == 32 ? 8 : 6, kShallow = kTokens == 64 ? 3 : 4;
  static constexpr bool kScaled = kScales == ScaleGranularity::kBlock;
  // Words that hold the scales of the tokens and of the weight.
  using Scaling = u32[kConsumerGroups][kDeep][kTokens + 2];

  template <int kStages, int kPanels>
  struct MainLoop;

  DEVICE static void run(const SkinnyProblem& problem) {
    LDS alignas(8) static Scaling scaling;
    u32 bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    if (bytes == kConsumerGroups * kDeep * kPanelBytes) MainLoop<kDeep / 2, 2>{problem, scaling}.multiply();
    else if constexpr (kShallow % 2 == 0) MainLoop<kShallow / 2, 2>{problem, scaling}.multiply();
    else MainLoop<kShallow, 1>{problem, scaling}.multiply();
  }
};

// The main loop with so many stages. The panels of a stage have one barrier, and a thread computes their offsets once.
template <class Type, int kTokens, ScaleGranularity kScales, class Scale, bool kGated>
template <int kStages, int kPanels>
struct StreamedTile<Type, kTokens, kScales, Scale, kGated>::MainLoop {
  static constexpr int kPanelSteps = tile::kDepth / mma::kDepth, kStageSteps = kPanels * kPanelSteps;
  static constexpr int kGroupSteps = kConsumerGroups * kStageSteps;
  static constexpr int kSums = kTokens / 2;
  static constexpr int kProducts = kTokens == 64 ? 1 : kPanels;  // at once, as many as registers suffice for
  using Epilogue = TileEpilogue<kScales, kTokens / 8, 1, 2, kGroupSteps, kThreads, 64, kGated>;

  // The copies of a panel's rows, one after the other, by a consumer group, 16 at a time. In pairs, row 2 * i of 16 is in place
  // i and the next one in i + 8, so that a lane's sums are of two rows in a row. In fragment order rows stay as they lie
  // together, at half the time that copies of every other row take, and sums are exchanged at the end.
  template <int kRows, bool kPairs>
  struct RowLoader {
    int offset;      // of the thread's 16 bytes of the first 16 rows, at K = 0
    int row;         // of these
    int column;      // of its bytes in a row of a panel
    const u8* from;  // its first 16 bytes
    int rows;        // that there are from its first one on

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
    // The panel `at` bytes further on, of which only the first `bytes` of K are there, to where the wave's first 16 bytes go.
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
  const int thread = wave::thread_id() % kConsumerThreads;  // of the consumer group

  // Where the scales of a token lie, or, of the one past the last, those of a tile of the weight.
  DEVICE const u8* scales_from(int token, int tile) const {
    if (token < kTokens) return (const u8*)p.scale_a + token * p.scale_a_row * Scale::kBytes;
    return (const u8*)p.scale_b + i64(tile * kTileRows / kScaleBlock) * p.scale_b_row * Scale::kBytes;
  }
  DEVICE int scale_step(int token) const { return (token < kTokens ? p.scale_a_k : 1) * Scale::kBytes; }
  // The scale of the consumer group's panel number `panel` of a stage.
  DEVICE float scale(int stage, int panel, int token) const {
    return Scale::of_word(scaling[group][stage * kPanels + panel][token]);
  }
  // The same for a token and the next.
  DEVICE f32x2 scales_of_tokens(int stage, int panel, int token) const {
    return {scale(stage, panel, token), scale(stage, panel, token + 1)};
  }
  // A word of LDS gets a scale, or zeros. An asynchronous copy has 4 bytes at least.
  DEVICE static void start_scale(const u8* from, bool inside, u32* to) {
    if constexpr (Scale::kBytes == 4) lds::start_word(from, inside, to);
    else *to = mem::load_byte_or_zero(from, 0, 0, inside);
  }

  DEVICE void multiply() const {
    auto* lds = (lds::Local<u8>*)dynamic_lds + group * kStages * kPanels * kPanelBytes;
    const int wave_offset =
        consumer_wave * wave::kLanes * tile::kVecBytes;  // of a panel: where the wave's first bytes go
    TileWork current = schedule.begin(), prefetch = current;
    RowLoader<kTileRows, true> weights({p.b_tile, p.b_row, int(u32(p.b_step) / 4), p.b_step}, thread, p.n / 2);
    RowLoader<kTokens, false> tokens({16 * i64(p.a_stride), p.a_stride, tile::kVecBytes, 4 * tile::kVecBytes}, thread);
    auto begin_copies = [&] {
      weights.begin(p.b + prefetch.tile * (kTileColumns / mma::kRows) * p.b_tile, p.n - prefetch.tile * kTileRows);
    };
    begin_copies();
    tokens.begin(p.a, p.m);
    const u8* scales = scales_from(thread, prefetch.tile);  // of the thread's token
    const int step_of_scales = scale_step(thread);
    auto start_next = [&](int stage) __attribute__((always_inline)) {
      if (prefetch.end > 0) {
        const int first = prefetch.step + group * kStageSteps, bytes = schedule.bytes_left(prefetch, first),
                  tile = prefetch.tile;
#pragma unroll
        for (int i = 0; i < kPanels; ++i) {
          const int step = first + i * kPanelSteps, left = bytes - i * tile::kDepth;
          auto* to = lds + (stage * kPanels + i) * kPanelBytes + wave_offset;
          weights.start(step * p.b_step, kGated ? p.b_tile / 2 : p.b_tile, left, to);
          tokens.start(step * mma::kDepth, i64(16) * p.a_stride, left, to + kWeightBytes);
          if (kScaled && thread <= kTokens)
            start_scale(scales + step / kPanelSteps * step_of_scales, left > 0 && (thread < p.m || thread == kTokens),
                        &scaling[group][stage * kPanels + i][thread]);
        }
        prefetch = schedule.after(prefetch);
        if (prefetch.tile != tile && prefetch.end > 0) {
          begin_copies();
          scales = scales_from(thread, prefetch.tile);
        }
      }
      lds::end_group();
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) start_next(stage);

    const mma::Panel weights_at(0, p.b_step != mma::kDepth), tokens_at(0, false);
    float sum[kSums] = {};
    Epilogue epilogue{p, schedule};
    begin_tile(epilogue, current.tile);
    for (int stage = 0;;) {
      const TileWork next = schedule.after(current);
      lds::wait_for_copies<kStages - 2>();
      // Hazards: read before all filled it; the last stage filled while it is read.
      consumer_barrier<kConsumerThreads>(group);
      // The matrix units sum up e4m3 with some 14 bits, so that their sums are of one panel only.
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

  // Of a thread's sums, [kTokens / 8][2 rows][2 tokens], each consumer group ends with those of its half of the tokens.
  DEVICE void begin_tile(Epilogue& epilogue, int index) const {
    const int row = index * kTileRows + consumer_wave * mma::kRows + lane / 4 * 2;
    epilogue.begin(
        index,
        [&](int i) __attribute__((always_inline)) { return group * (kTokens / 2) + i / 2 * 8 + lane % 4 * 2 + i % 2; },
        [&](int) __attribute__((always_inline)) { return row; });
  }
  // From rows l / 4 and l / 4 + 8 of a wave to rows l / 4 * 2 and the next one.
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
  // The other half goes to the other consumer group, through the stage that both have read.
  DEVICE void end_tile(const Epilogue& epilogue, const float (&sum)[kSums], int stage) const {
    constexpr int kHalf = kSums / kConsumerGroups, kStage = kPanels * kPanelBytes / 4;
    auto* lds = (lds::Local<float>*)dynamic_lds;
    lds::Local<float>* sent = lds + (group * kStages + stage) * kStage + thread;
    const lds::Local<float>* received = lds + ((1 - group) * kStages + stage) * kStage + thread;
    consumer_barrier<kConsumerThreads>(group);  // hazard: written while other waves' products still read there
#pragma unroll
    for (int i = 0; i < kHalf; ++i) sent[i * kConsumerThreads] = group == 0 ? sum[kHalf + i] : sum[i];
    block_barrier();  // hazard: read before it is written
    float half[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i)
      half[i] = group == 0 ? sum[i] + received[i * kConsumerThreads] : received[i * kConsumerThreads] + sum[kHalf + i];
    block_barrier();  // hazard: filled while it is still read
    f32x2 values[kTokens / 8][1];
#pragma unroll
    for (int i = 0; i < kTokens / 8; ++i) values[i][0] = f32x2{half[i / 2 * 4 + i % 2], half[i / 2 * 4 + 2 + i % 2]};
    epilogue.end(values);
  }
};
