// Flash attention, forward: a block has 128 rows of a head, and goes through the keys that they see.
//
//     scores^T = K q^T,   out^T = V^T p^T,   p = exp2(score - running maximum of the row)
//
// A wave has rows of its own in registers, as columns of its instructions, and their sums. All waves read the same keys and values from
// LDS. While they multiply those, the next ones are under way to registers. A running maximum stays until scores exceed it by
// kSlack, so that sums are rarely multiplied; both cancel in the end.
#pragma once
#include "attention/flash_loader.h"
#include "device/arrive.h"
#include "device/reduce.h"

template <class T, int kD, int kDv, int kKeys>
struct Flash {
  static constexpr int kTileRows = 128, kWaves = 256 / wave::kLanes, kThreads = 256;
  static constexpr int kTiles = kTileRows / kWaves / mma::kTileTokens;  // of a wave's rows
  static constexpr int kWaveRows = kTiles * mma::kTileTokens;
  static constexpr int kKeyTiles = kKeys / 16, kProducts = kD / 32, kDimTiles = kDv / 16;
  static constexpr float kLowest = -1.0e30f;  // a maximum of no scores, so that there is no infinity to subtract
  static constexpr float kSlack = 8.0f;       // of exponents of 2
  using Layout = FlashLayout<kD, kDv, kKeys, kThreads>;
  using Tile = FlashTile<kTileRows>;
  using Loader = FlashLoader<T, Layout>;
  using Buffer = typename Layout::Buffer;

  const FlashProblem& arguments;
  const FlashProblem& p = reloaded(arguments);
  Buffer& buffer;
  const Tile tile;
  const int lane = wave::lane() & (wave::kLanes - 1);  // which tells the compiler that it is not negative
  const int wave_row = tile.first_row + wave::index() * kWaveRows;
  u32x4 query[kTiles][kProducts];
  float maximum[kTiles][mma::kValueTokens], sum[kTiles][mma::kValueTokens];
  f32x4 out[kTiles][kDimTiles];
  float factor;  // of scores, to exponents of 2

  DEVICE Flash(const FlashProblem& problem, Buffer& buffer, int index)
      : arguments(problem), buffer(buffer), tile(p, index) {}
  // The arguments, loaded again where they are used below: over loops there are too few registers for all.
  DEVICE static const FlashProblem& reloaded(const FlashProblem& problem) {
    int zero = 0;
    attention::compute_now(zero);
    return (&problem)[wave::uniform(zero)];
  }

  DEVICE int row(int t, int v) const { return wave_row + t * mma::kTileTokens + mma::value_token(lane, v); }
  DEVICE static float scale_of(const float* scale, int stride, int head) {
    return scale ? mem::load<float>(scale + head * stride) : 1.0f;
  }
  DEVICE int last_row() const {
    const int last = wave_row + kWaveRows < tile.rows ? wave_row + kWaveRows : tile.rows;
    return last - 1;
  }

  DEVICE void load_query() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int of_tile = wave_row + t * mma::kTileTokens + mma::tile_token(lane);
      const int row = of_tile < tile.rows ? of_tile : tile.rows - 1;
      const u8* from = p.query + 2 * (tile.sequence * p.query_batch_stride + tile.head * p.query_head_stride +
                                      (tile.first_query + row) * p.query_row_stride);
#pragma unroll
      for (int i = 0; i < kProducts; ++i)
        query[t][i] = mem::load<u32x4>(from + (i * 32 + mma::depth(lane) / 16 * 8) * 2);
    }
  }

  DEVICE void run() {
    load_query();
    factor = p.scale * 1.4426950408889634f;
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
    const int last = tile.first_row + kTileRows < tile.rows ? tile.first_row + kTileRows : tile.rows;
    const int begin = tile.begin(p, tile.first_row) / kKeys * kKeys, end = tile.end(p, last - 1);
    Loader loader(p, tile, begin, tile.keys);
    if (begin < end) loader.start();
#pragma unroll 1
    for (int step = begin; step < end; step += kKeys) {
      block_barrier();  // hazard: others still read the last keys
      loader.finish(buffer);
      block_barrier();  // hazard: keys are read before they are written
      if (step + kKeys < end) loader.start();
      attention::issue_now();
      if (wave_row < tile.rows && step < tile.end(p, last_row())) add_keys(step);
    }
    finish();
  }

  DEVICE void add_keys(int step) {
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
        grows |= (largest[t][v] - maximum[t][v]) * factor > kSlack;
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

  DEVICE void finish() {
    const FlashProblem& p = reloaded(arguments);
    constexpr int kQuarterTiles = kDimTiles / 4;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float by[mma::kValueTokens];
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v) {
        const float total = attention::reduce_rows(sum[t][v], Add{});
        by[v] = total > 0.0f ? 1.0f / total : 0.0f;
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
          mem::store(to + element, u32x2{T::pack(four.lo * by[v]), T::pack(four.hi * by[v])});
        }
      }
    }
  }
};

// Goes through tiles: one, or without a counter every blocks-th, or with one the next that nobody has.
template <class Kernel>
DEVICE void flash_tiles(const FlashProblem& p, typename Kernel::Buffer& buffer) {
  int index = wave::block_id_x();
#pragma unroll 1
  while (index < p.tiles) {
    Kernel kernel(p, buffer, index);
    if (kernel.tile.has_rows()) kernel.run();
    if (!p.counter) index += p.blocks;
    else {
      int& next = *(int*)&buffer;
      block_barrier();  // hazard: others still read the last keys
      if (wave::thread_id() == 0) next = p.blocks + block_count(p.counter, p.tiles);
      block_barrier();  // hazard: the number is read before it is written
      index = wave::uniform(next);
    }
  }
}
