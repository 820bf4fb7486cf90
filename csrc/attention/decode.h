// Paged split-KV decode. In a block, up to 16 columns (packed-GQA rows: query rows times the heads that share a KV
// head) attend to the keys of one request and one KV head.
//
//     scores^T = K q^T,   out^T = V^T p^T,   p = exp2(score - running maximum of the column)
//
// A request's keys are split over blocks; a split's steps of 128 keys are divided over four waves, 32 each. A wave
// holds 32 keys and 32 values in registers, and loads the next ones as soon as it has multiplied: keys are in flight
// while values are multiplied, and vice versa. For D 128 in bf16 a wave has 8 KB of each, a block 32 KB to 64 KB. Pages
// are looked up two steps ahead. No operand goes through LDS: a lane loads the keys that its instruction reads, and
// values stored slot by slot are transposed in registers, 8 keys x 8 elements per lane. On NVIDIA queries are in LDS,
// so that registers suffice. The waves' sums are reduced in LDS (decode_sums.h), the splits' in HBM (output.h).
//
// For D 256 two waves have the same 32 keys and half of the head each, and use the registers of D 128. They add their
// halves of the scores through LDS, once per step; both then have all weights, and half of the sums.
#pragma once
#include "attention/decode_sums.h"

// kD: head size. kNative: V's slots are contiguous for each element, otherwise its elements for each slot.
template <class T, class Cache, int kD, bool kNative, class Problem = DecodeProblem, int kPackedRows = 16>
struct Decode : DecodeSums<T, kD, kNative, Problem, kPackedRows> {
  using Split = HeadSplit<T, kD, Problem, kPackedRows>;
  using Sums = DecodeSums<T, kD, kNative, Problem, kPackedRows>;
  using Split::begin, Split::block, Split::packed_row, Split::end, Split::first_row_end, Split::kAddsAtOnce,
      Split::kLowest;
  using Split::first_key, Split::lane, Split::load_pages, Split::p, Split::splits, Split::request, Split::step_key;
  using Sums::buffer, Sums::dim, Sums::finish, Sums::finish_at_once, Sums::key_set, Sums::part;
  using Sums::kDimTiles, Sums::kGroups, Sums::kKeySets, Sums::kLaneDims, Sums::kParts, Sums::kTiles, Sums::kWaveD;
  using typename Sums::Buffer;

  static constexpr bool kFp8 = __is_same(Cache, E4m3);
  static constexpr int kKeyLoads = kWaveD / (kFp8 ? 64 : 32);  // steps of 64 bytes
  static constexpr int kProducts = kWaveD / 32;                // per key tile
  static constexpr int kLaneKeys = 8;                          // of V

  using Element = typename CacheType<Cache>::Element;
  using ValueVec = typename Words<(kNative ? kLaneKeys : kLaneDims) * int(sizeof(Element))>::Type;

  struct Keys {
    u32x4 load[2][kKeyLoads][mma::kLoads];
  };
  struct Values {  // native: a vector of keys per dim; otherwise a vector of dims per key
    ValueVec vec[kNative ? kDimTiles : kGroups * kLaneKeys][mma::kLoads];
  };

  static constexpr bool kHasRegisters = ::kHasRegisters<kD>;
  // True if a wave's queries are in its part of `out` until sums replace them. Waves that divide heads share them.
  static constexpr bool kQueryInLds = attention::kQueryInLds && kHasRegisters;
  static constexpr bool kSeparateMask = attention::kSeparateMask && kHasRegisters;
  static constexpr bool kPeelLastIter = attention::kPeelLastIter && kHasRegisters;
  static_assert(!kQueryInLds || kParts > 1 || kTiles * kProducts * wave::kLanes * 16 <= sizeof(Buffer::out[0]));

  const int of_lane = mma::depth(lane) / 16;     // the lane's 16-byte vector of a key
  const int first_value = mma::depth(lane) / 2;  // of the lane's eight

  DEVICE Decode(const Problem& problem, Buffer& buffer) : Sums(problem, buffer) {
    // Otherwise ptxas delays the page loads until the block is known to have keys.
    if constexpr (kHasRegisters) attention::issue_here();
  }

  static constexpr int kUnit = 1 << CacheType<Cache>::kLog2Group;  // elements per 16 bytes
  struct Places {
    u32 key, value;
  };
  // Addresses of the lane's key, of 32.
  DEVICE Places places(int pages, int first) const {
    return {Split::template place<Cache, kUnit>(p.key_cache, pages, first),
            Split::template place<Cache, kLaneKeys, kNative>(p.value_cache, pages, first)};
  }
  DEVICE void load(Keys& keys, const Places& places) const {
    const i64 chunk = kNative ? p.key_cache.chunk_stride : kUnit;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int l = 0; l < mma::kLoads; ++l) {
        const int index = attention::key(tile, mma::row(lane, l));
        const Element* from = Split::template at<Cache, kUnit>(p.key_cache, places.key, index) +
                              (part() * kKeyLoads * 4 + of_lane) * chunk;
#pragma unroll
        for (int i = 0; i < kKeyLoads; ++i) keys.load[tile][i][l] = mem::load<u32x4>(from + i * 4 * chunk);
      }
  }
  DEVICE void load(Values& values, const Places& places) const {
    if constexpr (kNative) {
      // All eight keys are in one page; some may be past the last.
      const Element* from = Split::template at<Cache, kLaneKeys>(p.value_cache, places.value, first_value) +
                            part() * kWaveD * p.value_cache.element_stride;
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile)
#pragma unroll
        for (int l = 0; l < mma::kLoads; ++l)
          values.vec[tile][l] = mem::load<ValueVec>(from + dim(tile, mma::row(lane, l)) * p.value_cache.element_stride);
    } else {
#pragma unroll
      for (int k = 0; k < kLaneKeys; ++k) {
        const Element* from =
            Split::template at<Cache, kLaneKeys>(p.value_cache, places.value, first_value + k) + part() * kWaveD;
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
#pragma unroll
          for (int l = 0; l < mma::kLoads; ++l)
            values.vec[g * kLaneKeys + k][l] = mem::load<ValueVec>(from + dim(g * kLaneDims, mma::row(lane, l)));
      }
    }
  }

  // This lane's row i of a V^T tile: one dim of its eight keys.
  DEVICE mma::Weights value_operand(const Values& values, int tile, const u32x4& valid) const {
    mma::Weights operand;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
      if constexpr (kNative) operand.load[l] = as_operand<T>(values.vec[tile][l]) & valid;
      else {
        const int first = tile / kLaneDims * kLaneKeys, dim = tile % kLaneDims;
#pragma unroll
        for (int w = 0; w < 4; ++w)
          operand.load[l][w] = pair<T, kFp8>(values.vec[first + 2 * w][l], values.vec[first + 2 * w + 1][l], dim);
      }
    return operand;
  }

  // Query operands, in key load order.
  using Query = u32x4[kTiles][kProducts];
  // Loads them, or copies them to LDS. Loaded e4m3 is converted once keys are on their way.
  template <class Element>
  DEVICE void load_query(Query& query, u32x4* query_in_lds, bool has_keys) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const auto c = packed_row(t * mma::kTileTokens + mma::tile_token(lane));
      const i64 row = i64(request) * p.query_len + c.row;
      const Element* from = (const Element*)p.query + row * p.query_stride + c.head * p.query_head_stride;
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        const int element = part() * kWaveD + (kFp8 ? i / 2 * 64 + of_lane * 16 + i % 2 * 8 : i * 32 + of_lane * 8);
        if constexpr (!kQueryInLds) query[t][i] = ::load_query(from + element);
        else if (has_keys && (kParts == 1 || (t * kProducts + i) % kKeySets == key_set())) {
          u32x4* const to = query_in_lds + (t * kProducts + i) * wave::kLanes;
          if constexpr (sizeof(Element) == 1) to[lane] = as_operand<T>(mem::load<u32x2>(from + element));
          else attention::copy_query((u8*)to, from + element);  // hazard: without keys, no wave waits for the copies
        }
      }
    }
    if constexpr (kQueryInLds) attention::end_query();
  }

  DEVICE void run() {
    constexpr Max max{};
    Query query;
    u32x4* const query_in_lds = kParts > 1 ? buffer.parts.query[part()][0] : (u32x4*)buffer.out[wave::index()];
    int step = wave::block_id_y();
    const bool has_fp8_query = Split::template has_fp8_query<Cache>();
    if (has_fp8_query) load_query<u8>(query, query_in_lds, first_key(step) < end);
    else load_query<u16>(query, query_in_lds, first_key(step) < end);
    int first_seen[kTiles][mma::kValueTokens], seen[kTiles][mma::kValueTokens];  // the column's keys in this lane
    float maximum[kTiles][mma::kValueTokens], sum[kTiles][mma::kValueTokens];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v) {
        const int row_end = first_row_end + packed_row(t * mma::kTileTokens + mma::value_token(lane, v)).row;
        first_seen[t][v] = p.window > 0 ? row_end - p.window : 0;
        seen[t][v] = row_end > first_seen[t][v] ? row_end - first_seen[t][v] : 0;
        maximum[t][v] = kLowest;
        sum[t][v] = 0.0f;
      }
    f32x4 out[kTiles][kDimTiles] = {};
    const float scale = Split::template score_scale<Cache>();
    this->load_early_scale();

    if (first_key(step) < end) {
      Keys keys;
      Values values;
      Places at = places(Split::first_pages(), step_key(step));
      load(keys, at);
      attention::issue_now();  // in loop order, so that the loop waits for no more than its own loads
      int next_pages = load_pages(step_key(step + splits));
      attention::issue_now();
      load(values, at);
      if constexpr (!kQueryInLds)
        if (has_fp8_query)
#pragma unroll
          for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < kProducts; ++i) query[t][i] = as_operand<T>(query[t][i].lo);
      if constexpr (kQueryInLds) {
        attention::issue_here();  // keys and values do not wait for queries
        attention::wait_for_query();
        if constexpr (kParts > 1) block_barrier();  // hazard: queries are read before they are written
      }
      [[maybe_unused]] int scores = 0;  // where the step's are in LDS

      // The last iteration, if peeled, loads nothing.
#pragma unroll
      for (int is_last = 0; is_last <= kPeelLastIter; ++is_last)
#pragma unroll 1
        for (; first_key(step + (kPeelLastIter && !is_last ? splits : 0)) < end; step += splits) {
          f32x4 score[kTiles][2] = {};
#pragma unroll
          for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int i = 0; i < kProducts; ++i) {
              mma::Weights operand;
#pragma unroll
              for (int l = 0; l < mma::kLoads; ++l) {
                if constexpr (kFp8) {
                  const u32x4 bytes = keys.load[tile][i / 2][l];
                  operand.load[l] = as_operand<T>(i % 2 ? bytes.hi : bytes.lo);
                } else operand.load[l] = keys.load[tile][i][l];
              }
#pragma unroll
              for (int t = 0; t < kTiles; ++t) {
                if constexpr (kQueryInLds) query[t][i] = query_in_lds[(t * kProducts + i) * wave::kLanes + lane];
                score[t][tile] = mma::multiply_tile<T>(score[t][tile], operand, query[t][i]);
              }
            }
#pragma unroll
          for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              attention::compute_now(score[t][tile]);
              if constexpr (kParts > 1) buffer.parts.score[scores][wave::index()][t * 2 + tile][lane] = score[t][tile];
            }
          int pages = 0;
          if (!is_last) {
            at = places(next_pages, step_key(step + splits));
            load(keys, at);
            pages = load_pages(step_key(step + 2 * splits));
          }
          // Otherwise ptxas moves the key loads after the PV product. Hazard: other lanes' sums overwrite
          // queries.
          if constexpr (kParts > 1) {
            block_barrier();  // hazard: scores are read before they are written
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
              for (int tile = 0; tile < 2; ++tile)
                score[t][tile] += buffer.parts.score[scores][wave::index() ^ 1][t * 2 + tile][lane];
            scores ^= 1;  // the next step's barrier is after these loads
          } else if constexpr (kQueryInLds) attention::issue_here();

          const int first = step_key(step);
          if constexpr (kSeparateMask) scale_and_mask(score, scale, first);
          bool grows = false;
          float before[kTiles][mma::kValueTokens];
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            float largest[mma::kValueTokens];
#pragma unroll
            for (int v = 0; v < mma::kValueTokens; ++v) largest[v] = before[t][v] = maximum[t][v];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const int v = i % mma::kValueTokens, key = first + attention::key(tile, mma::value_row(lane, i));
                if constexpr (!kSeparateMask) {
                  const bool is_seen = u32(key - first_seen[t][v]) < u32(seen[t][v]);
                  score[t][tile][i] = is_seen ? score[t][tile][i] * scale : -__builtin_inff();
                }
                largest[v] = max(largest[v], score[t][tile][i]);
              }
#pragma unroll
            for (int v = 0; v < mma::kValueTokens; ++v) {
              maximum[t][v] = attention::reduce_rows(largest[v], max);
              grows |= maximum[t][v] > before[t][v];
            }
          }
          if (wave::count(grows) > 0) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
              float factor[mma::kValueTokens];
#pragma unroll
              for (int v = 0; v < mma::kValueTokens; ++v) {
                factor[v] = numerics::exp2_approx(before[t][v] - maximum[t][v]);
                sum[t][v] *= factor[v];
              }
#pragma unroll
              for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[t][d][i] *= factor[i % mma::kValueTokens];
            }
          }
          u32x4 weights[kTiles];
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const int v = i % mma::kValueTokens;
                score[t][tile][i] = numerics::exp2_approx(score[t][tile][i] - maximum[t][v]);
                sum[t][v] += score[t][tile][i];
              }
            weights[t] = attention::operand<T>(score[t][0], score[t][1]);
          }

          u32x4 valid = {};  // native: slots past the last key, or before the first, are undefined
          if constexpr (kNative) {
#pragma unroll
            for (int tile = 0; tile < kDimTiles; ++tile)
#pragma unroll
              for (int l = 0; l < mma::kLoads; ++l) attention::use_below(values.vec[tile][l]);
            const int key = first + first_value;
#pragma unroll
            for (int w = 0; w < 4; ++w)
              valid[w] = (is_key(key + 2 * w) ? 0xffffu : 0) | (is_key(key + 2 * w + 1) ? 0xffff0000u : 0);
          }
#pragma unroll
          for (int d = 0; d < kDimTiles; ++d) {
            const mma::Weights operand = value_operand(values, d, valid);
#pragma unroll
            for (int t = 0; t < kTiles; ++t) out[t][d] = mma::multiply_tile<T>(out[t][d], operand, weights[t]);
          }
#pragma unroll
          for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) attention::compute_now(out[t][d]);
          if (!is_last) load(values, at);
          attention::issue_now();
          attention::use_below(pages);  // a copy above the value loads would wait for the keys
          next_pages = pages;
          if (is_last) break;
        }
    }
    if constexpr (kAddsAtOnce) finish_at_once(maximum, sum, out);
    else finish(maximum, sum, out);
  }
  // Scales and masks the wave's scores for a step, for keys from `first` on.
  DEVICE void scale_and_mask(f32x4 (&score)[kTiles][2], float scale, int first) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) score[t][tile] *= scale;
    // The first row's keys end first, and the last row's begin last.
    if (first + Split::kWaveKeys <= first_row_end && (p.window == 0 || first >= end - p.window)) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row_end = first_row_end + packed_row(t * mma::kTileTokens + mma::value_token(lane, i)).row;
          const int key = first + attention::key(tile, mma::value_row(lane, i));
          if (key >= row_end || (p.window > 0 && key < row_end - p.window)) score[t][tile][i] = -__builtin_inff();
        }
  }
  DEVICE bool is_key(int key) const { return key >= begin && key < end; }
};
