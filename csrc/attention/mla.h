// Split-KV decode for multi-head latent attention (MLA). In a block, 16 or 32 columns (packed-GQA rows: query rows
// times heads) attend to the keys of one request, shared by all heads. A key is a latent of 512 elements, which is also
// its value, and a rotary part of 64.
//
//     scores^T = K q^T,   out^T = latent^T p^T,   p = exp2(score - running maximum of the column)
//
// A request's keys are split over blocks, and a split into steps of 32 keys. The waves partition the latent's elements:
// each loads its own as operands of the QK product, and transposes them in registers for the PV product, so the latent
// is read once and bypasses LDS. Of the rotary part, a wave holds 32 elements of 16 keys. Partial scores are reduced in
// LDS. Sixteen threads per column add the waves' scores, mask them, keep the maximum and the sum, and pass p to all
// waves. Each wave holds the keys of kStages steps in registers, and the pages of the kStages steps after. A step's
// keys are loaded as soon as an earlier step's have been multiplied, or converted, and no wait covers more than one
// step.
#pragma once
#include "attention/mla_combine.h"
#include "device/reduce.h"

template <class T, class Cache, int kPackedRowTiles>
struct MlaDecode : MlaSplit<T, kPackedRowTiles> {
  using Split = MlaSplit<T, kPackedRowTiles>;
  using Split::kThreads, Split::kWaveKeys, Split::kWaves, Split::lane, Split::load_pages, Split::p, Split::splits,
      Split::request;
  using Split::packed_rows, Split::end, Split::finish_packed_row, Split::first_row_end, Split::kPackedRows,
      Split::kLowest;
  using Split::step_key, Split::store;

  using Element = typename CacheType<Cache>::Element;
  using RopeVec = typename CacheType<Cache>::Vec;
  static constexpr bool kFp8 = __is_same(Cache, E4m3);
  static constexpr int kStages = attention::stages(kPackedRowTiles);
  static constexpr int kTiles = kPackedRows / mma::kTileTokens, kTilesOf16 = 16 / mma::kTileTokens;
  static constexpr int kWaveDims = kLatent / kWaves;
  static constexpr int kLoads = kWaveDims * int(sizeof(Element)) / 64;  // steps of 64 bytes
  static constexpr int kProducts = kWaveDims / 32;                      // per key tile
  // Sixteen threads reduce a column, kAtOnce columns at a time.
  static constexpr int kAtOnce = kThreads / 16 < kPackedRows ? kThreads / 16 : kPackedRows;
  static constexpr int kOwned = kPackedRows / kAtOnce;  // columns that a thread reduces
  static constexpr int kCounted = 4;                    // the most splits that a block combines from registers

  struct Keys {
    u32x4 latent[2][kLoads][mma::kLoads];
    RopeVec rope[mma::kLoads];
    int pages;  // of the keys loaded here next
  };
  struct Scores {
    float score[kWaves][kPackedRows][kWaveKeys + 4];
    u16 weight[kPackedRows][kWaveKeys + 8];
    float factor[kPackedRows];
  };
  struct Sums {
    f32x4 out[16][kWaves * 8 + 1];
    float factor[kPackedRows];
  };
  union Buffer {
    Scores scores;
    Sums sums;
  };

  const MlaProblem& mla;
  Buffer& buffer;
  // This wave's tile order: tile 0 is the one whose rotary part it holds.
  const int flip = wave::index() % 2;
  const int owner = wave::thread_id() / 16, owned_key = wave::thread_id() % 16 * 2;

  u32x4 query[kTiles][kProducts], query_rope[kTiles];
  f32x4 out[kTiles][2 * kProducts] = {};
  float maximum[kOwned], sum[kOwned];  // for columns `owner`, owner + kAtOnce, ...
  float scale;

  DEVICE MlaDecode(const MlaProblem& problem, Buffer& buffer) : Split(problem.decode), mla(problem), buffer(buffer) {}

  // The first of the 8 latent elements that operand i reads from a lane, relative to the wave's first.
  DEVICE static int first_element(int i, int of_lane) {
    return kFp8 ? i / 2 * 64 + of_lane * 16 + i % 2 * 8 : i * 32 + of_lane * 8;
  }
  DEVICE static int of_lane() { return mma::depth(wave::lane()) / 16; }
  // The wave's half (32 elements) of the rotary part.
  DEVICE static int rope_half() { return wave::index() % 4 / 2; }
  // The step's key in this row of this wave's tile.
  DEVICE int key(int tile, int row) const { return attention::key(tile ^ flip, row); }

  template <class Query>
  DEVICE void load_query() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const auto c = this->packed_row(t * mma::kTileTokens + mma::tile_token(lane));
      const i64 row = i64(request) * p.query_len + c.row;
      const Query* from = (const Query*)p.query + row * p.query_stride + c.head * p.query_head_stride;
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
        query[t][i] = ::load_query(from + wave::index() * kWaveDims + first_element(i, of_lane()));
      from = (const Query*)mla.query_pe + row * mla.query_pe_stride + c.head * mla.query_pe_head_stride;
      query_rope[t] = ::load_query(from + rope_half() * 32 + of_lane() * 8);
      if (wave::index() >= 4) query_rope[t] = {};  // waves 0 to 3 add these scores
    }
  }
  DEVICE void convert_query() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kProducts; ++i) query[t][i] = as_operand<T>(query[t][i].lo);
      query_rope[t] = as_operand<T>(query_rope[t].lo);
    }
  }

  DEVICE void load(Keys& keys, int step) const {
    constexpr int kUnit = 1 << CacheType<Cache>::kLog2Group;
    const u32 places = Split::template place<Cache, kUnit>(p.key_cache, keys.pages, step_key(step));
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int l = 0; l < mma::kLoads; ++l) {
        const Element* row = Split::template at<Cache, kUnit>(p.key_cache, places, key(tile, mma::row(lane, l)));
        const Element* from = row + wave::index() * kWaveDims + of_lane() * (16 / sizeof(Element));
#pragma unroll
        for (int i = 0; i < kLoads; ++i) keys.latent[tile][i][l] = mem::load<u32x4>(from + i * (64 / sizeof(Element)));
        if (tile == 0) keys.rope[l] = mem::load<RopeVec>(row + kLatent + rope_half() * 32 + of_lane() * 8);
      }
    keys.pages = load_pages(step_key(wave::uniform(step + kStages * splits)));
    attention::issue_now();
  }

  // Keys as operands of the products.
  struct Operands {
    mma::Weights latent[2][kProducts], rope;
  };
  DEVICE Operands operands(const Keys& keys) const {
    Operands of;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
          if constexpr (kFp8) {
            const u32x4 bytes = keys.latent[tile][i / 2][l];
            of.latent[tile][i].load[l] = as_operand<T>(i % 2 ? bytes.hi : bytes.lo);
            attention::compute_now(of.latent[tile][i].load[l]);
          } else of.latent[tile][i].load[l] = keys.latent[tile][i][l];
        }
      of.rope.load[l] = as_operand<T>(keys.rope[l]);
      if constexpr (kFp8) attention::compute_now(of.rope.load[l]);
    }
    return of;
  }

  // Multiplies a step's keys, if any, and loads later ones. Every path issues the same number of loads, so waits never
  // over-wait.
  DEVICE void iteration(Keys& keys, int step) {
    const Operands of = operands(keys);
    const int next = wave::uniform(step + kStages * splits);
    if constexpr (kFp8) load(keys, next);
    if (step_key(step) < end) multiply(of, step_key(step));
    if constexpr (!kFp8) load(keys, next);
  }

  DEVICE void multiply(const Operands& of, int first) {
    add_scores(of);
    block_barrier();  // hazard: the waves' scores are read before they are written
    reduce_scores(first);
    block_barrier();  // hazard: p is read before it is written, or scores are overwritten before they are read
    u32x4 weights[kTiles];
    read_weights(weights);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      mma::Weights values[2];
      attention::transpose<T>(of.latent[0][i], of.latent[1][i], values);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
          out[t][2 * i + half] = mma::multiply_tile<T>(out[t][2 * i + half], values[half], weights[t]);
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int d = 0; d < 2 * kProducts; ++d) attention::compute_now(out[t][d]);
  }

  // Adds the wave's elements' contribution to the scores.
  DEVICE void add_scores(const Operands& of) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        f32x4 score = {};
#pragma unroll
        for (int i = 0; i < kProducts; ++i) score = mma::multiply_tile<T>(score, of.latent[tile][i], query[t][i]);
        if (tile == 0) score = mma::multiply_tile<T>(score, of.rope, query_rope[t]);
        auto& scores = buffer.scores.score[wave::index()];
        const int c = t * mma::kTileTokens + mma::value_token(lane, 0);
        if constexpr (mma::kValueTokens == 1) *(f32x4*)&scores[c][key(tile, mma::value_row(lane, 0))] = score;
        else
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[c + i % mma::kValueTokens][key(tile, mma::value_row(lane, i))] = score[i];
      }
  }

  DEVICE void reduce_scores(int first) {
    constexpr Max max{};
    if (owner >= kAtOnce) return;
#pragma unroll
    for (int owned = 0; owned < kOwned; ++owned) {
      int c = owned * kAtOnce + owner;
      attention::use_below(c);  // so its addresses take no registers across the loop
      const int row_end = first_row_end + this->packed_row(c).row;
      f32x2 score = {};
#pragma unroll
      for (int w = 0; w < kWaves; ++w) score += *(const f32x2*)&buffer.scores.score[w][c][owned_key];
#pragma unroll
      for (int i = 0; i < 2; ++i) score[i] = first + owned_key + i < row_end ? score[i] * scale : -__builtin_inff();
      const float largest = wave::reduce_group<16>(max(maximum[owned], max(score.x, score.y)), kLowest, max);
      const float factor = numerics::exp2_approx(maximum[owned] - largest);
      maximum[owned] = largest;
      const f32x2 weight = {numerics::exp2_approx(score.x - largest), numerics::exp2_approx(score.y - largest)};
      sum[owned] = sum[owned] * factor + (weight.x + weight.y);
      *(u32*)&buffer.scores.weight[c][owned_key] = T::pack(weight);
      if (owned_key == 0) buffer.scores.factor[c] = factor;
    }
  }

  // Reads the operands of p and rescales the sums by the factors for the new maxima.
  DEVICE void read_weights(u32x4 (&weights)[kTiles]) {
    float factor[kTiles][mma::kValueTokens];
    bool grows = false;
    int own = lane;
    attention::use_below(own);  // as in reduce_scores
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v) {
        factor[t][v] = buffer.scores.factor[t * mma::kTileTokens + mma::value_token(own, v)];
        grows |= factor[t][v] != 1.0f;
      }
      // The first 8 bytes are for tile 0.
      const auto* from = (const u32x2*)buffer.scores.weight[t * mma::kTileTokens + mma::tile_token(own)];
      weights[t].lo = from[mma::depth(own) / 16 * 2 + flip];
      weights[t].hi = from[mma::depth(own) / 16 * 2 + (flip ^ 1)];
    }
    if (wave::count(grows) > 0) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int d = 0; d < 2 * kProducts; ++d)
#pragma unroll
          for (int i = 0; i < 4; ++i) out[t][d][i] *= factor[t][i % mma::kValueTokens];
    }
  }

  DEVICE void run() {
    const bool has_fp8_query = Split::template has_fp8_query<Cache>();
    if (has_fp8_query) load_query<u8>();
    else load_query<u16>();
    scale = Split::template score_scale<Cache>();
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      maximum[i] = kLowest;
      sum[i] = 0.0f;
    }
    int step = wave::block_id_y();
    if (step_key(step) < end) {
      Keys stages[kStages];
#pragma unroll
      for (int i = 0; i < kStages; ++i)
        stages[i].pages = i == 0 ? Split::first_pages() : load_pages(step_key(step + i * splits));
#pragma unroll
      for (int i = 0; i < kStages; ++i) load(stages[i], step + i * splits);
      if (has_fp8_query) convert_query();  // keys are on their way
#pragma unroll 1
      for (; step_key(step) < end; step += kStages * splits)
#pragma unroll
        for (int i = 0; i < kStages; ++i)
          iteration(stages[i], wave::uniform(step + i * splits));  // avoids per-lane addresses
    }
    finish();
  }

  // Stores this split's sums, and combines all splits.
  DEVICE void finish() {
    static_assert(sizeof(Sums) <= sizeof(Scores::score));  // p, which waves may still read, follows them
    const mem::Buffer to = Split::slot(wave::block_id_y());
    const bool is_whole = splits == 1;
    this->load_early_scale();
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const float total = wave::reduce_group<16>(sum[i], 0.0f, Add{});
      const int c = i * kAtOnce + owner;
      if (owner >= kAtOnce || owned_key > 0) continue;
      if (is_whole) buffer.sums.factor[c] = finish_packed_row(c, maximum[i], total, true);
      else Split::store_sums(to, c, maximum[i], total);
    }
    if constexpr (attention::kSumsInRegisters) finish_in_registers(to, is_whole);
    else finish_in_lds(to, is_whole);
  }
  DEVICE void finish_in_lds(mem::Buffer to, bool is_whole) {
    constexpr int kRoundVecs = kWaves * 8;  // per column: 32 elements from each wave
#pragma unroll
    for (int tile = 0; tile < kPackedRowTiles; ++tile)
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
        if (tile + product > 0) block_barrier();  // hazard: the previous sums are overwritten before they are read
#pragma unroll
        for (int t = 0; t < kTilesOf16; ++t)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const f32x4 sums = out[tile * kTilesOf16 + t][2 * product + half];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int row = mma::value_row(lane, i), at = attention::quarter(row) * 8 + attention::element(half, row);
              float* packed_row = (float*)buffer.sums.out[t * mma::kTileTokens + mma::value_token(lane, i)];
              if constexpr (mma::kValueTokens > 1) packed_row[wave::index() * 32 + at] = sums[i];
              else if (i == 0) *(f32x4*)(packed_row + wave::index() * 32 + at) = sums;  // consecutive
            }
          }
        block_barrier();  // hazard: the waves' sums are read before they are written
#pragma unroll
        for (int i = 0; i < 16 * kRoundVecs / kThreads; ++i) {
          const int vec = i * kThreads + wave::thread_id(), of_tile = vec / kRoundVecs,
                    of_packed_row = vec % kRoundVecs;
          const f32x4 total = buffer.sums.out[of_tile][of_packed_row];
          const int c = tile * 16 + of_tile, of_wave = of_packed_row % 8;
          const int first = of_packed_row / 8 * kWaveDims + first_element(product, of_wave / 2) + of_wave % 2 * 4;
          if (is_whole) store(c, first, total * buffer.sums.factor[c]);
          else if (c < packed_rows()) mem::store_device(to, (c * kLatent + first) * 4, 0, total);
        }
      }
    if (!is_whole && p.counters) Split::combine_splits();
  }

  DEVICE void finish_in_registers(mem::Buffer to, bool is_whole) {
    int own = lane;
    attention::use_below(own);  // as in reduce_scores
    if (is_whole) {
      block_barrier();  // hazard: factors are read before they are written
#pragma unroll
      for (int t = 0; t < kPackedRowTiles; ++t) store_results(own, t, buffer.sums.factor[column_of(own, t)]);
      return;
    }
#pragma unroll
    for (int t = 0; t < kPackedRowTiles; ++t)
#pragma unroll
      for (int d = 0; d < 2 * kProducts; ++d)
        if (column_of(own, t) < packed_rows()) mem::store_device(to, place_of_sums(own, t, d), 0, out[t][d]);
    if (p.counters && is_last_block(p.counters + Split::block, splits)) add_splits(own);
  }
  // A lane's column in a tile, and the first of its eight consecutive elements of a product, four in each half.
  DEVICE static int column_of(int of_lane, int tile) { return tile * 16 + mma::value_token(of_lane, 0); }
  DEVICE static int first_of(int of_lane, int product) {
    return wave::index() * kWaveDims + first_element(product, attention::quarter(mma::value_row(of_lane, 0)));
  }
  // The bytes from a slot to a lane's sums `d` of a tile.
  DEVICE static int place_of_sums(int of_lane, int tile, int d) {
    const int of_packed_row = first_of(of_lane, d / 2) / 4 + d % 2;
    return ((tile * Split::kPackedRowVecs + of_packed_row) * 16 + mma::value_token(of_lane, 0)) * 16;
  }
  // Stores a tile's sums times a factor as results.
  DEVICE void store_results(int of_lane, int tile, float factor) const {
    if (column_of(of_lane, tile) >= packed_rows()) return;
    const auto c = this->packed_row(column_of(of_lane, tile));
    const i64 row = i64(request) * p.query_len + c.row;
    u16* const to = (u16*)p.out + row * p.out_stride + c.head * p.out_head_stride;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const f32x4 low = out[tile][2 * i] * factor, high = out[tile][2 * i + 1] * factor;
      mem::store(to + first_of(of_lane, i),
                 u32x4{T::pack(low.lo), T::pack(low.hi), T::pack(high.lo), T::pack(high.hi)});
    }
  }
  // Adds the other splits' sums to this block's, which are still in registers, in split order, and stores the results.
  DEVICE void add_splits(int of_lane) {
    constexpr int kVecs = 2 * kProducts, kAhead = 2, kSlotBytes = Split::kSplitFloats * 4;
    const mem::Buffer from = Split::slot(0);
    const int own = wave::block_id_y();
#pragma unroll
    for (int t = 0; t < kPackedRowTiles; ++t) {
      const int c = column_of(of_lane, t);
      const int added_splits = c < packed_rows() ? splits : 0;
      float factor[kCounted], sums[kCounted], largest = kLowest, total = 0.0f;
      f32x4 vecs[kVecs][kCounted];
      const auto load_vecs = [&](int d) {
#pragma unroll
        for (int i = 0; i < kCounted; ++i)
          vecs[d][i] = mem::load_device_or_zero<f32x4>(from, place_of_sums(of_lane, t, d), i * kSlotBytes,
                                                       i < added_splits && i != own);
      };
#pragma unroll
      for (int i = 0; i < kCounted; ++i) {
        factor[i] = mem::load_device_or_zero<float>(from, Split::kMaxima + c * 4, i * kSlotBytes, i < added_splits);
        sums[i] = mem::load_device_or_zero<float>(from, Split::kSums + c * 4, i * kSlotBytes, i < added_splits);
      }
#pragma unroll
      for (int d = 0; d < kAhead; ++d) load_vecs(d);
      attention::issue_now();
#pragma unroll
      for (int i = 0; i < kCounted; ++i) {
        if (i >= splits) factor[i] = kLowest;
        largest = __builtin_fmaxf(largest, factor[i]);
      }
#pragma unroll
      for (int i = 0; i < kCounted; ++i) {
        factor[i] = numerics::exp2_approx(factor[i] - largest);
        total += sums[i] * factor[i];
      }
#pragma unroll
      for (int d = 0; d < kVecs; ++d) {
        if (d + kAhead < kVecs) load_vecs(d + kAhead);
        attention::issue_now();
        f32x4 added = {};
#pragma unroll
        for (int i = 0; i < kCounted; ++i) added += (i == own ? out[t][d] : vecs[d][i]) * factor[i];
        out[t][d] = added;
        attention::compute_now(out[t][d]);
      }
      store_results(of_lane, t, finish_packed_row(c, largest, total, wave::index() == 0 && of_lane < 16));
    }
  }
};
