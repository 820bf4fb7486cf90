// FlashAttention forward (prefill): a block computes 128 rows of a head, and iterates over the keys they see.
//
//     scores^T = K q^T,   out^T = V^T p^T,   p = exp2(score - running maximum of the row)
//
// A wave holds its own rows in registers, as columns of its instructions, with their sums. All waves read the same keys
// and values from LDS. While they multiply those, the next ones are in flight to registers. Sums are rescaled only if a
// maximum in the wave grows. The running maximum is exact, not updated lazily: a row's largest weight is then 1,
// without the rounding error that would be much of the total.
#pragma once
#include "device/arrive.h"
#include "device/reduce.h"
#include "ops/standalone/flash_general.h"

template <class T, int kD, int kDv, int kKeys, bool kGeneral>
struct Flash {
  static constexpr int kTileRows = 128, kWaves = 256 / wave::kLanes, kThreads = 256;
  static constexpr int kTiles = kTileRows / kWaves / mma::kTileTokens;  // of a wave's rows
  static constexpr int kWaveRows = kTiles * mma::kTileTokens;
  static constexpr int kKeyTiles = kKeys / 16, kProducts = kD / 32, kDimTiles = kDv / 16;
  static constexpr float kLowest = -1.0e30f;  // the maximum without scores: avoids subtracting infinities
  using Layout = FlashLayout<kD, kDv, kKeys, kThreads>;
  using Tile = FlashTile<kTileRows>;
  using Buffer = typename Layout::Buffer;

  const FlashProblem& problem;
  const FlashExtras* const extras;  // for general kernels
  const FlashProblem& p = reloaded(problem);
  Buffer& buffer;
  const Tile tile;
  const int lane = wave::lane() & (wave::kLanes - 1);  // masked, so the compiler knows that it is not negative
  const int wave_row = tile.first_row + wave::index() * kWaveRows;
  u32x4 query[kTiles][kProducts];
  float maximum[kTiles][mma::kValueTokens], sum[kTiles][mma::kValueTokens];
  f32x4 out[kTiles][kDimTiles];
  float factor;  // of the scores, to exponents of 2

  DEVICE Flash(const FlashProblem& problem, const FlashExtras* extras, Buffer& buffer, int index)
      : problem(problem), extras(extras), buffer(buffer), tile(p, index) {}

  DEVICE int row(int t, int v) const { return wave_row + t * mma::kTileTokens + mma::value_token(lane, v); }
  DEVICE int last_row() const {
    const int last = wave_row + kWaveRows < tile.rows ? wave_row + kWaveRows : tile.rows;
    return last - 1;
  }

  // The offset of a query row; rows past the last repeat it.
  DEVICE i64 query_at(int row) const {
    return tile.sequence * p.query_batch_stride + tile.head * p.query_head_stride +
           (tile.first_query + (row < tile.rows ? row : tile.rows - 1)) * p.query_row_stride;
  }
  DEVICE static int query_element(int lane, int product) { return product * 32 + mma::depth(lane) / 16 * 8; }
  DEVICE void load_query() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const i64 from = query_at(wave_row + t * mma::kTileTokens + mma::tile_token(lane));
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
        query[t][i] = mem::load<u32x4>((const u16*)p.query + from + query_element(lane, i));
    }
  }
  // Loads queries of any type and strides. Non-contiguous elements are copied to LDS one by one.
  DEVICE void load_any_query(const FlashExtras& e) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int first = wave_row + t * mma::kTileTokens;
      if (e.query_order == kByElement) {
        const i64 from = query_at(first + mma::tile_token(lane));
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
          const int element = query_element(lane, i);
          query[t][i] = element < e.size ? flash_eight(p.query, from + element, e.query_type) : u32x4{};
        }
        flash_operands<T>(query[t], e.query_type);
        continue;
      }
      u16* rows = (u16*)&buffer + wave::index() * mma::kTileTokens * kD;
      block_barrier();  // hazard: other waves still read the previous keys, and this wave the previous rows
#pragma unroll 1
      for (int i = lane; i < mma::kTileTokens * kD; i += wave::kLanes) {
        const int element = i % kD;
        const i64 from = query_at(first + i / kD) + element * e.query_element_stride;
        rows[i] = element < e.size ? flash_element<T>(p.query, from, e.query_type) : 0;
      }
      block_barrier();  // hazard: rows are read before they are written
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
        query[t][i] = *(const u32x4*)(rows + mma::tile_token(lane) * kD + query_element(lane, i));
    }
  }

  DEVICE void run() {
    const int last = tile.first_row + kTileRows < tile.rows ? tile.first_row + kTileRows : tile.rows;
    const int begin = tile.begin(p, tile.first_row) / kKeys * kKeys, end = tile.end(p, last - 1);
    if constexpr (kGeneral) {
      const FlashExtras& e = reloaded(*extras);
      const FlashScores scores(p, e, tile);
      load_any_query(e);
      add_all(GeneralFlashLoader<T, Layout>(problem, *extras, tile, begin), begin, end, 1.0f, &scores);
      finish(scores.out_factor(reloaded(problem), reloaded(*extras), tile.kv_head));
    } else {
      load_query();
      add_all(FlashLoader<T, Layout>(p, tile, begin), begin, end, p.scale * 1.4426950408889634f, (FlashScores*)nullptr);
      finish(1.0f);
    }
  }

  // Iterates over keys [begin, end).
  template <class Loader>
  DEVICE void add_all(Loader loader, int begin, int end, float of_scores, const FlashScores* scores) {
    factor = of_scores;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v) {
        maximum[t][v] = kLowest;
        sum[t][v] = 0.0f;
      }
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) out[t][d] = {};
    }
    if (begin < end) loader.start();  // before the loop, which then waits for no query load after key loads
#pragma unroll 1
    for (int step = begin; step < end; step += kKeys) {
      block_barrier();  // hazard: other waves still read the previous keys
      loader.finish(buffer);
      block_barrier();  // hazard: keys are read before they are written
      if (step + kKeys < end) loader.start();
      attention::issue_now();
      if (wave_row < tile.rows && step < tile.end(p, last_row())) add_keys(step, scores);
    }
  }

  DEVICE void add_keys(int step, const FlashScores* scores) {
    constexpr Max max{};
    f32x4 score[kTiles][kKeyTiles] = {};
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k)
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        mma::Weights operand;
#pragma unroll
        for (int l = 0; l < mma::kLoads; ++l)
          operand.load[l] = buffer.key[Layout::key_at(k * 16 + mma::row(lane, l), i * 4 + mma::depth(lane) / 16)];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) score[t][k] = mma::multiply_tile<T>(score[t][k], operand, query[t][i]);
      }
    for (auto& tiles : score)
      for (auto& four : tiles) attention::compute_now(four);

    if constexpr (kGeneral) {
      const FlashExtras& e = reloaded(*extras);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        scores->to_exponents(
            e, score[t], [&](int i) { return row(t, i % mma::kValueTokens); },
            [&](int k, int i) { return step + Layout::key_of(k, mma::value_row(lane, i)); });
    }
    const bool all_seen = step + kKeys <= tile.end(p, wave_row) && step >= tile.begin(p, last_row());
    if (!all_seen) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        int begin[mma::kValueTokens], end[mma::kValueTokens];
#pragma unroll
        for (int v = 0; v < mma::kValueTokens; ++v) {
          begin[v] = tile.begin(p, row(t, v));
          end[v] = tile.end(p, row(t, v));
        }
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int v = i % mma::kValueTokens, key = step + Layout::key_of(k, mma::value_row(lane, i));
            if (key < begin[v] || key >= end[v]) score[t][k][i] = -__builtin_inff();
          }
      }
    }
    bool grows = false;
    float largest[kTiles][mma::kValueTokens];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v) {
        float most = maximum[t][v];
#pragma unroll
        for (int k = 0; k < kKeyTiles; ++k)
#pragma unroll
          for (int i = v; i < 4; i += mma::kValueTokens) most = max(most, score[t][k][i]);
        largest[t][v] = attention::reduce_rows(most, max);
        grows |= largest[t][v] > maximum[t][v];
      }
    if (wave::count(grows) > 0) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        float by[mma::kValueTokens];
#pragma unroll
        for (int v = 0; v < mma::kValueTokens; ++v) {
          by[v] = numerics::exp2_approx((maximum[t][v] - largest[t][v]) * factor);
          sum[t][v] *= by[v];
          maximum[t][v] = largest[t][v];
        }
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
          for (int i = 0; i < 4; ++i) out[t][d][i] *= by[i % mma::kValueTokens];
      }
    }
    u32x4 weights[kTiles][kKeyTiles / 2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int k = 0; k < kKeyTiles; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int v = i % mma::kValueTokens;
          score[t][k][i] = numerics::exp2_approx(__builtin_fmaf(score[t][k][i], factor, -maximum[t][v] * factor));
          sum[t][v] += score[t][k][i];
        }
      if constexpr (kGeneral) drop(step, t, score[t], *scores);
#pragma unroll
      for (int k = 0; k < kKeyTiles / 2; ++k)
        weights[t][k] = attention::operand<T>(score[t][2 * k], score[t][2 * k + 1]);
    }
    for (auto& tiles : weights)
      for (auto& four : tiles) attention::compute_now(four);
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
      for (int k = 0; k < kKeyTiles / 2; ++k) {
        mma::Weights operand;
#pragma unroll
        for (int l = 0; l < mma::kLoads; ++l)
          operand.load[l] = buffer.value[Layout::value_at(d * 16 + mma::row(lane, l), k * 4 + mma::depth(lane) / 16)];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) out[t][d] = mma::multiply_tile<T>(out[t][d], operand, weights[t][k]);
      }
  }

  // Applies dropout and integer rounding to a tile's weights, after their sum.
  DEVICE void drop(int step, int t, f32x4 (&weight)[kKeyTiles], const FlashScores& scores) const {
    const FlashExtras& e = reloaded(*extras);
    if (!e.threshold && !e.weight_scale) return;
#pragma unroll
    for (int k = 0; k < kKeyTiles; ++k) {
      u32x4 words = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = step + Layout::key_of(k, mma::value_row(lane, i));
        // With one row per lane, its four keys are consecutive.
        if (e.threshold && (i == 0 || mma::kValueTokens > 1))
          words = scores.words(e, row(t, i % mma::kValueTokens), key);
        const int w = mma::kValueTokens > 1 ? key % 4 : i;
        const u32 word = w < 2 ? w ? words.y : words.x : w == 2 ? words.z : words.w;
        weight[k][i] = scores.weight(e, weight[k][i], word);
      }
    }
  }

  DEVICE void finish(float of_out) {
    const FlashProblem& p = reloaded(problem);
    const int value_size = kGeneral ? reloaded(*extras).value_size : kDv;
    constexpr int kQuarterTiles = kDimTiles / 4;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float by[mma::kValueTokens];
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v) {
        const float total = attention::reduce_rows(sum[t][v], Add{});
        by[v] = total > 0.0f ? of_out / total : 0.0f;
        if (p.lse && mma::value_row(lane, v) == 0 && row(t, v) < tile.rows) {
          const float lse = (maximum[t][v] * factor + numerics::log2_approx(total)) * 0.6931471805599453f;
          mem::store(
              p.lse + tile.sequence * p.lse_batch_stride + tile.head * p.lse_head_stride + tile.first_query + row(t, v),
              total > 0.0f ? lse : __builtin_inff());
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int v = i % mma::kValueTokens;
        if (row(t, v) >= tile.rows) continue;
        u16* to = p.out + tile.sequence * p.out_batch_stride + tile.head * p.out_head_stride +
                  (tile.first_query + row(t, v)) * p.out_row_stride;
#pragma unroll
        for (int d = 0; d < kQuarterTiles; ++d) {
          const f32x4 four = {out[t][d][i], out[t][d + kQuarterTiles][i], out[t][d + 2 * kQuarterTiles][i],
                              out[t][d + 3 * kQuarterTiles][i]};
          const int element = 4 * (d * 16 + mma::value_row(lane, i));
          const u32x2 packed = {T::pack(four.lo * by[v]), T::pack(four.hi * by[v])};
          if constexpr (kGeneral) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
              if (element + j < value_size) mem::store<u16>(to + element + j, packed[j / 2] >> j % 2 * 16);
          } else mem::store(to + element, packed);
        }
      }
    }
  }
};

// Iterates over tiles: one, or every blocks-th, or with a counter the next unclaimed one.
template <class Kernel>
DEVICE void flash_tiles(const FlashProblem& p, const FlashExtras* extras, typename Kernel::Buffer& buffer) {
  int index = wave::block_id_x();
#pragma unroll 1
  while (index < p.tiles) {
    Kernel kernel(p, extras, buffer, index);
    if (kernel.tile.has_rows()) kernel.run();
    if (!p.counter) index += p.blocks;
    else {
      int& next = *(int*)&buffer;
      block_barrier();  // hazard: other waves still read the previous keys
      if (wave::thread_id() == 0) next = p.blocks + block_count(p.counter, p.tiles);
      block_barrier();  // hazard: the number is read before it is written
      index = wave::uniform(next);
    }
  }
}
