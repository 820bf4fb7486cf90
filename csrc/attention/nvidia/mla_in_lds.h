// MLA split-KV decode with 16-bit latents through LDS. Both products (wgmma) read the keys' panels of 64 x 64 elements
// from there, the PV product as its transposed operand.
//
//     scores^T = K q^T,   out^T = latent^T p^T
//
// A consumer, four or eight waves, processes 64 keys at a time. Up to 32 columns, two consumers have their own keys,
// and their sums are added at the end. With 64 columns there is one consumer, whose groups of four waves divide the
// score columns and the latent elements. A panel is refilled as soon as it has been multiplied: LDS holds 128 keys.
#pragma once
#include "attention/nvidia/even_steps.h"

extern LDS __attribute__((aligned(1024))) u8 dynamic_lds[];  // offsets of MlaDecodeInLds

template <class T, int kPackedRowTiles>
using MlaSplitInLds = DecodeSplit<DecodeOutput<T, kLatent, 16 * kPackedRowTiles, kMlaWaves, kMlaFanIn, 4>,
                                  kPackedRowTiles == 4 ? 64 : 128, kPackedRowTiles == 4 ? 8 : 16, 32>;

template <class T, int kPackedRowTiles>
struct MlaDecodeInLds : MlaSplitInLds<T, kPackedRowTiles> {
  using Split = MlaSplitInLds<T, kPackedRowTiles>;
  using Split::kThreads, Split::kWaveKeys, Split::kWaves, Split::lane, Split::load_any_pages, Split::p, Split::splits;
  using Split::packed_rows, Split::end, Split::finish_packed_row, Split::first_row_end, Split::kPackedRows,
      Split::kLowest;
  using Split::request, Split::step_key, Split::store;

  static constexpr int kKeys = 64, kPanels = (kLatent + 64) / 64;
  static constexpr int kGroups = kWaves / mma::kWaves, kGroupThreads = kThreads / kGroups;
  static constexpr int kConsumers = kPackedRows == 64 ? 1 : 2, kConsumerGroups = kGroups / kConsumers;
  static constexpr int kConsumerThreads = kGroupThreads * kConsumerGroups;
  static constexpr int kStages = kConsumerGroups;  // per consumer
  static constexpr int kScorePackedRows = kPackedRows / kConsumerGroups, kScores = kScorePackedRows / 2;
  static constexpr int kDimTiles = kLatent / 64 / kConsumerGroups, kSums = kPackedRows / 2;
  static constexpr int kLanePackedRows = kScores / 2;
  static constexpr int kRows = kWaveKeys / 4;  // keys that a wave copies

  static constexpr int kPanelBytes = kKeys * tile::kDepth, kStageBytes = kPanels * kPanelBytes;
  static constexpr int kQueryPanelBytes = kPackedRows * tile::kDepth;
  // LDS offsets after the keys.
  static constexpr int kQuery = kGroups * kStageBytes, kWeights = kQuery + kPanels * kQueryPanelBytes;
  static constexpr int kMaxima = kWeights + kConsumers * kQueryPanelBytes;
  static constexpr int kFactors = kMaxima + kGroups * kScorePackedRows * 16, kBytes = kFactors + kPackedRows * 4;
  static_assert(kBytes + 1024 <= 227 * 1024);
  // At the end, sums replace them.
  static constexpr int kRowFloats = kLatent + 4;  // for a column's sums
  static_assert(kConsumers * kPackedRows * kRowFloats * 4 <= kQuery);
  struct Ends {
    float wave_sum[kConsumers][kPackedRows][mma::kWaves], maximum[kConsumers][kPackedRows], factor[kPackedRows];
  };
  static_assert(sizeof(Ends) <= kPanels * kQueryPanelBytes);

  const MlaProblem& mla;
  const int wave_index = wave::read(wave::index(), 0), group = wave_index / mma::kWaves,
            group_wave = wave_index % mma::kWaves;
  const int consumer = group / kConsumerGroups, member = group % kConsumerGroups;
  float score[kScores];
  float out[kDimTiles][kSums] = {};
  float maximum[kLanePackedRows], sum[kLanePackedRows];
  int row_end[kLanePackedRows];  // end of the keys that the column sees
  float scale;
  int first_step, next_step, keys_end, slot;  // the split's steps, the end of its keys, and its slot

  // Every parts-th step.
  DEVICE explicit MlaDecodeInLds(const MlaProblem& problem) : Split(problem.decode), mla(problem) {
    first_step = slot = wave::block_id_y(), next_step = splits, keys_end = end;
    this->own = first_step * Split::kStepKeys;
  }
  // Consecutive steps [first, last) of a work tile that `part_count` blocks share.
  DEVICE MlaDecodeInLds(const MlaProblem& problem, int block, int first, int last, int slot, int split_count)
      : Split(problem.decode, block, first), mla(problem), slot(slot) {
    first_step = first, next_step = 1, keys_end = last * Split::kStepKeys < end ? last * Split::kStepKeys : end;
    splits = split_count;
    this->own = first_step * Split::kStepKeys;
  }

  DEVICE static lds::Local<u8>* at(int place) { return (lds::Local<u8>*)dynamic_lds + place; }
  DEVICE int stage_at(int stage) const { return (consumer * kStages + stage) * kStageBytes; }
  // The offset in a scalar register, so that descriptors are computed where needed: hoisted out of a loop they take 36
  // registers, and a copy each.
  DEVICE static int in_scalars(int place) { return wave::read(place, 0); }
  // A barrier for one consumer's threads: LDS stores before it are visible after it.
  DEVICE void own_barrier() const {
    if constexpr (kConsumers == 1) block_barrier();
    else consumer_barrier<kConsumerThreads>(consumer);
  }
  // Value i of a lane's scores or sums: its column, relative to a group's first, and its row of 64.
  DEVICE int value_packed_row(int i) const { return i / 4 * 8 + lane % 4 * 2 + i % 2; }
  DEVICE int value_row(int i) const { return group_wave * 16 + lane / 4 + i / 2 % 2 * 8; }
  DEVICE static constexpr int lane_packed_row(int i) { return i / 4 * 2 + i % 2; }  // the lane's column index
  DEVICE int packed_row_of(int lane_packed_row) const {
    return lane_packed_row / 2 * 8 + lane % 4 * 2 + lane_packed_row % 2;
  }

  // Each lane copies 16 bytes of a panel row, a wave four rows; lane l's go to place l.
  DEVICE int row_of_copy(int first) const { return first + lane / 8; }
  DEVICE int vec_of_copy(int first) const { return lane % 8 ^ lds::swizzle(row_of_copy(first)); }

  DEVICE void load_query() const {
#pragma unroll 1
    for (int i = wave_index; i < kPackedRows / 4 * kPanels; i += kWaves) {
      const int panel = i / (kPackedRows / 4), first = i % (kPackedRows / 4) * 4, vec = vec_of_copy(first) * 8;
      const auto c = this->packed_row(row_of_copy(first));
      const i64 row = i64(request) * p.query_len + c.row;
      const u16* latent = (const u16*)p.query + row * p.query_stride + c.head * p.query_head_stride + panel * 64;
      const u16* rope = (const u16*)mla.query_pe + row * mla.query_pe_stride + c.head * mla.query_pe_head_stride;
      const u16* from = (panel < kPanels - 1 ? latent : rope) + vec;
      lds::start_copy((const u8*)from, 0, 0, true, at(kQuery + panel * kQueryPanelBytes + first * tile::kDepth));
    }
  }

  // The keys of a step that this wave copies: their addresses, their count, and whether the block has any.
  struct Rows {
    const u8* from[kRows];
    int count;
    bool any;
  };
  DEVICE Rows rows(int pages, int step) const {
    const u32 places = Split::template place<T, 8>(p.key_cache, pages, step_key(step));
    Rows rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      rows.from[i] =
          (const u8*)Split::template at<T, 8>(p.key_cache, places, i * 4 + lane / 8) + vec_of_copy(i * 4) * 16;
    rows.count = keys_end - step_key(step);
    rows.any = has_keys(step);
    return rows;
  }
  // Zeros past the last key.
  DEVICE void load(const Rows& rows, int panel, int stage) const {
    const int first = wave_index * kWaveKeys % kKeys;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      lds::start_copy(rows.from[i], 0, panel * tile::kDepth, row_of_copy(i * 4) < rows.count,
                      at(stage_at(stage) + panel * kPanelBytes + (first + i * 4) * tile::kDepth));
  }

  DEVICE bool has_keys(int step) const { return step * Split::kStepKeys < keys_end; }
  // The consumer's first key in a step. A consumer without keys there has zeros, and weights of 0: all threads take
  // part in the block's barriers.
  DEVICE int first_key(int step) const { return step * Split::kStepKeys + consumer * kKeys; }

  DEVICE void multiply_query(int stage) {
    const mma::Panel keys(0, false), query(member * kScorePackedRows, false);
    const int keys_from = in_scalars(stage_at(stage)), query_from = in_scalars(kQuery);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        mma::wgmma<T>(score, keys.at(at(keys_from + panel * kPanelBytes), i),
                      query.at(at(query_from + panel * kQueryPanelBytes), i), panel + i > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    mma::wait_for_sums(score);
  }

  // Stores p for a step's keys, from `first` on, to LDS, and returns the factors for the previous sums.
  DEVICE void weigh(int first, float (&factor)[kLanePackedRows]) {
    constexpr Max max{};
    float largest[kLanePackedRows];
#pragma unroll
    for (int c = 0; c < kLanePackedRows; ++c) largest[c] = -__builtin_inff();
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int c = lane_packed_row(i);
      score[i] = first + value_row(i) < row_end[c] ? score[i] * scale : -__builtin_inff();
      largest[c] = max(largest[c], score[i]);
    }
    auto* maxima = (lds::Local<f32x4>*)at(kMaxima) + group * kScorePackedRows;
#pragma unroll
    for (int c = 0; c < kLanePackedRows; ++c) {
      largest[c] = attention::reduce_rows(largest[c], max);
      if (lane / 4 == 0) ((lds::Local<float>*)(maxima + packed_row_of(c)))[group_wave] = largest[c];
    }
    consumer_barrier<kGroupThreads>(kConsumers + group);  // hazard: the waves' maxima are read before they are written
#pragma unroll
    for (int c = 0; c < kLanePackedRows; ++c) {
      const f32x4 of_waves = maxima[packed_row_of(c)];
      const float new_maximum = max(max(maximum[c], max(of_waves.x, of_waves.y)), max(of_waves.z, of_waves.w));
      factor[c] = numerics::exp2_approx(maximum[c] - new_maximum);
      maximum[c] = new_maximum;
      sum[c] *= factor[c];
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const int c = lane_packed_row(i);
      score[i] = numerics::exp2_approx(score[i] - maximum[c]);
      sum[c] += score[i];
    }
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const u32 pair = attention::transposed(T::pack({score[i], score[i + 1]}));
      const int c = member * kScorePackedRows + i / 4 * 8 + lane / 4, vec = group_wave * 2 + i / 2 % 2;
      const int to = c * tile::kDepth + (vec ^ lds::swizzle(c)) * 16 + lane % 4 * 4;
      *(lds::Local<u32>*)at(kWeights + consumer * kQueryPanelBytes + to) = pair;
    }
    if constexpr (kConsumerGroups > 1)
#pragma unroll
      for (int c = 0; c < kLanePackedRows; ++c)
        if (lane / 4 == 0 && group_wave == 0)
          ((lds::Local<float>*)at(kFactors))[member * kScorePackedRows + packed_row_of(c)] = factor[c];
    lds::publish();
  }

  // Rescales the sums by the factors for the new maxima.
  DEVICE void scale_sums(const float (&factor)[kLanePackedRows]) {
    float of_sums[kSums / 2];
    bool grows = false;
#pragma unroll
    for (int c = 0; c < kSums / 2; ++c) {
      if constexpr (kConsumerGroups > 1) of_sums[c] = ((const lds::Local<float>*)at(kFactors))[packed_row_of(c)];
      else of_sums[c] = factor[c];
      grows |= of_sums[c] != 1.0f;
    }
    if (wave::count(grows) == 0) return;
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
      for (int i = 0; i < kSums; ++i) out[d][i] *= of_sums[lane_packed_row(i)];
  }

  // Adds the product of the latents with p, and loads other keys in their place.
  DEVICE void multiply_weights(int stage, const Rows& next) {
    constexpr int kAtOnce = 2, kChunks = kDimTiles / kAtOnce;
    const mma::Panel values{mma::Panel::Transposed{}}, weights(0, false);
    const int values_from = in_scalars(stage_at(stage) + member * kDimTiles * kPanelBytes);
    const int weights_from = in_scalars(kWeights + consumer * kQueryPanelBytes);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        mma::wgmma_of_transposed<T>(out[d], values.at(at(values_from + d * kPanelBytes), i),
                                    weights.at(at(weights_from), i), 1);
      if (d % kAtOnce == kAtOnce - 1) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    if (next.any) load(next, kPanels - 1, stage);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      wait_for_groups<kChunks>(chunk);
      own_barrier();  // hazard: keys are loaded over keys that other waves still multiply
      if (next.any)
#pragma unroll
        for (int g = 0; g < kConsumerGroups; ++g)
#pragma unroll
          for (int d = 0; d < kAtOnce; ++d) load(next, g * kDimTiles + chunk * kAtOnce + d, stage);
    }
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d) mma::wait_for_sums(out[d]);
    lds::end_group();
  }
  // Waits until product groups 0 to `chunk`, of kChunks, are complete.
  template <int kChunks>
  DEVICE static void wait_for_groups(int chunk) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kChunks - 1 - chunk) : "memory");
  }

  DEVICE void run() {
    load_query();
    lds::end_group();
    int step = first_step;
    int pages = p.window == 0 ? this->early_pages : 0;
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      const Rows of_stage = rows(pages, step + s * next_step);
      pages = load_any_pages(step_key(step + (s + 1) * next_step));
      if (of_stage.any)
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) load(of_stage, panel, s);
      lds::end_group();
    }
    scale = p.scale * (p.key_cache.scale ? mem::load<float>(p.key_cache.scale) : 1.0f);
#pragma unroll
    for (int c = 0; c < kLanePackedRows; ++c) {
      maximum[c] = kLowest;
      sum[c] = 0.0f;
      row_end[c] = first_row_end + this->packed_row(member * kScorePackedRows + packed_row_of(c)).row;
    }
    lds::wait_for_copies<kStages>();
    block_barrier();  // hazard: the query is multiplied before it has arrived
    int stage = 0;
#pragma unroll 1
    for (; has_keys(step); step += next_step) {
      const Rows next = rows(pages, step + kStages * next_step);
      pages = load_any_pages(step_key(step + (kStages + 1) * next_step));
      lds::wait_for_copies<kStages - 1>();
      own_barrier();  // hazard: keys are multiplied before they have arrived
      multiply_query(stage);
      float factor[kLanePackedRows];
      weigh(first_key(step), factor);
      own_barrier();  // hazard: p is multiplied before it is written
      scale_sums(factor);
      multiply_weights(stage, next);
      stage = stage + 1 < kStages ? stage + 1 : 0;
    }
    finish();
  }

  // Stores this split's sums, and combines all splits.
  DEVICE void finish() {
    lds::wait_for_copies<0>();
    block_barrier();  // hazard: keys and queries are overwritten before they are read
    auto& ends = *(lds::Local<Ends>*)at(kQuery);
#pragma unroll
    for (int i = 0; i < kLanePackedRows; ++i) {
      const float of_wave = attention::reduce_rows(sum[i], Add{});
      const int c = member * kScorePackedRows + packed_row_of(i);
      if (lane / 4 > 0) continue;
      ends.wave_sum[consumer][c][group_wave] = of_wave;
      if (group_wave == 0) ends.maximum[consumer][c] = maximum[i];
    }
    block_barrier();  // hazard: sums and maxima are read before they are written
    const auto largest = [&](int c) {
      float largest = ends.maximum[0][c];
      for (int t = 1; t < kConsumers; ++t) largest = __builtin_fmaxf(largest, ends.maximum[t][c]);
      return largest;
    };
    auto* sums = (lds::Local<float>*)at(0);
#pragma unroll
    for (int i = 0; i < kSums; i += i % 4 == 1 ? 3 : 1) {
      const int c = value_packed_row(i);
      const float factor = numerics::exp2_approx(ends.maximum[consumer][c] - largest(c));
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
        for (int half = 0; half < 4; half += 2)
          sums[(consumer * kPackedRows + c) * kRowFloats + (member * kDimTiles + d) * 64 + value_row(half)] =
              out[d][i + half] * factor;
    }
    const mem::Buffer to = Split::slot(slot);
    const bool is_whole = splits == 1;
    if (wave::thread_id() < kPackedRows) {
      const int c = wave::thread_id();
      float total = 0.0f;
      for (int t = 0; t < kConsumers; ++t) {
        const f32x4 of_waves = *(lds::Local<f32x4>*)ends.wave_sum[t][c];
        total += numerics::exp2_approx(ends.maximum[t][c] - largest(c)) *
                 (of_waves.x + of_waves.y + of_waves.z + of_waves.w);
      }
      if (is_whole) ends.factor[c] = finish_packed_row(c, largest(c), total, true);
      else Split::store_sums(to, c, largest(c), total);
    }
    block_barrier();  // hazard: the consumers' sums are read before they are written
#pragma unroll 4
    for (int i = 0; i < kPackedRows * kLatent / 4 / kThreads; ++i) {
      const int vec = i * kThreads + wave::thread_id(), c = vec / (kLatent / 4), dim = vec % (kLatent / 4) * 4;
      f32x4 total = {};
#pragma unroll
      for (int t = 0; t < kConsumers; ++t)
        total += *(lds::Local<f32x4>*)(sums + (t * kPackedRows + c) * kRowFloats + dim);
      if (is_whole) store(c, dim, total * ends.factor[c]);
      else if (c < packed_rows()) mem::store_device(to, (c * kLatent + dim) * 4, 0, total);
    }
    if (!is_whole && p.counters) Split::combine_splits();
  }

  DEVICE static void run(const MlaProblem& problem) {
    MlaDecodeInLds decode(problem);
    if (decode.has_work()) decode.run();
  }
  DEVICE static void run_even_steps(const MlaProblem& problem) {
    constexpr int kSteps = EvenSteps::kKeys / Split::kStepKeys;
    const EvenSteps even(problem);
    const int own = wave::block_id_x();
    if (own >= even.blocks) return;
    const int end = even.first_of(own + 1);
    int step = even.first_of(own);
    auto place = even.place_of(step);
#pragma unroll 1
    while (true) {
      const int after = place.first + place.steps, last = after < end ? after : end;
      const int split_count = even.block_of(after - 1) - even.block_of(place.first) + 1;
      MlaDecodeInLds decode(problem, place.block, (step - place.first) * kSteps, (last - place.first) * kSteps, own,
                            split_count);
      decode.run();
      step = last;
      if (step == end) return;
      ++place.block;
      place.first = step;
      place.steps = even.steps_of(u32(place.block) / problem.decode.tiles_divisor);
      block_barrier();  // hazard: sums are overwritten before they are read
    }
  }
};
