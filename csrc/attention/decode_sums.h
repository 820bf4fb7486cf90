// Decode epilogue of a block. It reduces the waves' sums in LDS, then stores results, or partial sums for the request's
// other splits.
#pragma once
#include "attention/operands.h"
#include "attention/split.h"
#include "device/reduce.h"

// Elements of a head that a wave has: two waves divide heads of 256, and have the same keys.
template <int kD>
constexpr int kWaveElements = kD == 256 ? 128 : kD;
constexpr int kMaxForRegisters = 128;  // elements: keys and values of more fill all registers
template <int kD>
constexpr bool kHasRegisters = kWaveElements<kD> <= kMaxForRegisters;
template <int kD>
constexpr int kHeadParts = kD / kWaveElements<kD>;
template <int kD>
constexpr int kHeadWaves = 4 * kHeadParts<kD>;

template <class T, int kD, class Problem, int kPackedRows>
using HeadSplit = DecodeSplit<DecodeOutput<T, kD, kPackedRows, kHeadWaves<kD>, 16, 2, kHasRegisters<kD>, true, Problem>,
                              128, 32, 128, kHeadParts<kD>>;

// kD: head size. kNative: tiles hold consecutive elements, otherwise rows hold kLaneDims consecutive ones.
template <class T, int kD, bool kNative, class Problem, int kPackedRows_>
struct DecodeSums : HeadSplit<T, kD, Problem, kPackedRows_> {
  using Split = HeadSplit<T, kD, Problem, kPackedRows_>;
  using Split::lane, Split::splits, Split::store;
  using Split::packed_rows, Split::finish_packed_row, Split::kPackedRows, Split::kGrouped, Split::kThreads,
      Split::kWaves;

  static constexpr int kTiles = kPackedRows / mma::kTileTokens;
  static constexpr int kParts = kHeadParts<kD>, kWaveD = kWaveElements<kD>, kKeySets = kWaves / kParts;
  static constexpr int kDimTiles = kWaveD / 16;
  static constexpr int kLaneDims = kD % 128 == 0 ? 8 : 4;                      // contiguous, in a slot of V
  static constexpr int kRound = kNative && kParts == 1 ? 64 : 16 * kLaneDims;  // dims of consecutive tiles
  static constexpr int kGroups = kWaveD / kRound;

  static constexpr int kPartsAtOnce = kPackedRows < 16 ? kParts : 1;  // whose sums are in LDS together
  static constexpr int kRoundDims = kPartsAtOnce * kRound;

  struct Parts {  // of queries and of scores, alternate steps
    u32x4 query[kParts][kParts > 1 && attention::kQueryInLds ? kTiles * kWaveD / 32 : 1][wave::kLanes];
    f32x4 score[2][kWaves][kParts > 1 ? kTiles * 2 : 1][kParts > 1 ? wave::kLanes : 1];
  };
  struct Buffer {
    float maximum[kKeySets][kPackedRows], sum[kKeySets][kPackedRows], factor[kPackedRows];
    union {
      f32x4 out[kKeySets][kPackedRows][kRoundDims / 4 + 1];
      Parts parts;  // while the waves have steps, if they divide heads
    };
  };

  Buffer& buffer;

  DEVICE DecodeSums(const Problem& problem, Buffer& buffer) : Split(problem), buffer(buffer) {}

  // The wave's part of the head, and its keys among the block's waves.
  DEVICE static int part() { return wave::index() % kParts; }
  DEVICE static int key_set() { return wave::index() / kParts; }

  // The dim in this row of a tile, of the wave's part.
  DEVICE static int dim(int tile, int row) {
    if constexpr (kNative) return tile * 16 + row;
    else return tile / kLaneDims * 16 * kLaneDims + row * kLaneDims + tile % kLaneDims;
  }

  // Reduces the waves' sums, then the splits'.
  DEVICE void finish(float (&maximum)[kTiles][mma::kValueTokens], float (&sum)[kTiles][mma::kValueTokens],
                     f32x4 (&out)[kTiles][kDimTiles]) const {
    put_maxima(maximum, sum);
    block_barrier();  // hazard: the waves' maxima are read before they are written
    float factor[kTiles][mma::kValueTokens];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v)
        factor[t][v] =
            numerics::exp2_approx(maximum[t][v] - block_maximum(t * mma::kTileTokens + mma::value_token(lane, v)));

    static_assert(kParts == 1);
    constexpr int kVecs = kPackedRows * kRound / 4, kThreadVecs = kVecs / kThreads;
    const mem::Buffer to = Split::slot(wave::block_id_y());
    const bool is_whole = splits == 1;
    if (wave::thread_id() < kPackedRows) {
      const int c = wave::thread_id();
      if (is_whole) buffer.factor[c] = finish_packed_row(c, block_maximum(c), block_sum(c), true);
      else Split::store_sums(to, c, block_maximum(c), block_sum(c));
    }
#pragma unroll
    for (int round = 0; round < kGroups; ++round) {
      if (round > 0) block_barrier();  // hazard: the previous round's sums are overwritten before they are read
      put_round(round, out, factor);
      block_barrier();  // hazard: the waves' sums are read before they are written
#pragma unroll
      for (int i = 0; i < kThreadVecs; ++i) {
        const int vec = i * kThreads + wave::thread_id(), c = vec / (kRound / 4), of_packed_row = vec % (kRound / 4);
        f32x4 total = {};
#pragma unroll
        for (int w = 0; w < kWaves; ++w) total += buffer.out[w][c][of_packed_row];
        const int first_dim = round * kRound + of_packed_row * 4;
        if (is_whole) store(c, first_dim, total * buffer.factor[c]);
        else if (c < packed_rows()) mem::store_device(to, (c * kD + first_dim) * 4, 0, total);
      }
    }
    if (!is_whole) Split::combine_splits();
  }

  // The same with one barrier fewer: the waves' sums are multiplied by their factors as they are added.
  DEVICE void finish_at_once(float (&maximum)[kTiles][mma::kValueTokens], float (&sum)[kTiles][mma::kValueTokens],
                             f32x4 (&out)[kTiles][kDimTiles]) const {
    put_maxima(maximum, sum);
    float one[kTiles][mma::kValueTokens];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v) one[t][v] = 1.0f;
    constexpr int kVecs = kPackedRows * kRoundDims / 4, kThreadVecs = kVecs / kThreads;
    const bool is_whole = splits == 1;
    f32x4 whole[kThreadVecs][kGroups];
#pragma unroll
    for (int round = 0; round < kD / kRoundDims; ++round) {
      // Hazard: the previous round's sums, or scores, are overwritten before they are read.
      if (round > 0 || kParts > 1) block_barrier();
      if (kPartsAtOnce == kParts || part() == round / kGroups) put_round(round % kGroups, out, one);
      block_barrier();  // hazard: the waves' sums are read before they are written
      f32x4 total[kThreadVecs] = {};
#pragma unroll
      for (int i = 0; i < kThreadVecs; ++i) {
        const int vec = i * kThreads + wave::thread_id(), c = vec / (kRoundDims / 4),
                  of_packed_row = vec % (kRoundDims / 4);
        const float largest = block_maximum(c);
#pragma unroll
        for (int w = 0; w < kKeySets; ++w)
          total[i] += buffer.out[w][c][of_packed_row] * numerics::exp2_approx(buffer.maximum[w][c] - largest);
      }
      if (is_whole) {
        if (round == 0) {
          const int c = wave::thread_id();
          if (c < kPackedRows) buffer.factor[c] = finish_packed_row(c, block_maximum(c), block_sum(c), true);
          block_barrier();  // hazard: factors are read before they are written
        }
#pragma unroll
        for (int i = 0; i < kThreadVecs; ++i) {
          const int vec = i * kThreads + wave::thread_id(), c = vec / (kRoundDims / 4);
          if constexpr (kGrouped) whole[i][round] = total[i] * buffer.factor[c];
          else store(c, round * kRoundDims + vec % (kRoundDims / 4) * 4, total[i] * buffer.factor[c]);
        }
      } else {
        const mem::Buffer to = Split::slot(wave::block_id_y());
#pragma unroll
        for (int i = 0; i < kThreadVecs; ++i) {
          const int vec = i * kThreads + wave::thread_id(), c = vec / (kRoundDims / 4);
          if (c < packed_rows())
            mem::store_device(to, (c * kD + round * kRoundDims + vec % (kRoundDims / 4) * 4) * 4, 0, total[i]);
        }
      }
    }
    if constexpr (kGrouped)
      if (is_whole)
#pragma unroll
        for (int i = 0; i < kThreadVecs; ++i) {
          const int vec = i * kThreads + wave::thread_id(), c = vec / (kRoundDims / 4);
          Split::template store_group<kRoundDims / 4>(c, vec % (kRoundDims / 4) * 4, kRoundDims, whole[i],
                                                      c < packed_rows());
        }
    if (is_whole) return;
    if (const int c = wave::thread_id(); c < kPackedRows)
      Split::store_sums(Split::slot(wave::block_id_y()), c, block_maximum(c), block_sum(c));
    Split::combine_splits();
  }
  // Stores the wave's maxima and weight sums to LDS; put_round stores its output sums for one round.
  DEVICE void put_maxima(const float (&maximum)[kTiles][mma::kValueTokens],
                         float (&sum)[kTiles][mma::kValueTokens]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v) {
        const int c = t * mma::kTileTokens + mma::value_token(lane, v);
        sum[t][v] = attention::reduce_rows(sum[t][v], Add{});
        if (mma::value_row(lane, v) == 0 && part() == 0) {
          buffer.maximum[key_set()][c] = maximum[t][v];
          buffer.sum[key_set()][c] = sum[t][v];
        }
      }
  }
  DEVICE void put_round(int round, const f32x4 (&out)[kTiles][kDimTiles],
                        const float (&factor)[kTiles][mma::kValueTokens]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int v = i % mma::kValueTokens, c = t * mma::kTileTokens + mma::value_token(lane, i);
        const int first = kPartsAtOnce > 1 ? part() * kRound : 0;
        float* packed_row = (float*)buffer.out[key_set()][c] + first + dim(0, mma::value_row(lane, i));
        constexpr int kNeighbours = kNative ? 1 : 4;  // dims per row
#pragma unroll
        for (int d = 0; d < kRound / 16; d += kNeighbours) {
          const auto value = [&](int n) { return out[t][round * (kRound / 16) + d + n][i] * factor[t][v]; };
          if constexpr (kNative) packed_row[d * 16] = value(0);
          else *(f32x4*)(packed_row + d) = f32x4{value(0), value(1), value(2), value(3)};
        }
      }
  }

  DEVICE float block_maximum(int c) const {
    float largest = buffer.maximum[0][c];
#pragma unroll
    for (int w = 1; w < kKeySets; ++w) largest = __builtin_fmaxf(largest, buffer.maximum[w][c]);
    return largest;
  }
  DEVICE float block_sum(int c) const {
    const float largest = block_maximum(c);
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kKeySets; ++w)
      total += buffer.sum[w][c] * numerics::exp2_approx(buffer.maximum[w][c] - largest);
    return total;
  }
};
