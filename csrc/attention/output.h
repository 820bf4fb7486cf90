// Split-KV decode output of a work tile: one request, KV head and column tile. The splits' partial sums are combined in
// HBM: the last blocks to arrive add them in split order. A split has at least `min_steps` steps; if `num_kv_splits` splits
// of that size suffice, the partition does not depend on other requests.
#pragma once
#include "attention/operands.h"
#include "attention/problem.h"
#include "device/arrive.h"
#include "device/float8.h"
#include "device/reduce.h"

// The scale of values, if it is loaded early, for example with the first keys, instead of after the last.
template <bool kIsEarly>
struct EarlyScale {};
template <>
struct EarlyScale<true> {
  float value_scale;
};

// A combining thread loads kAddedVecs vectors from all splits at once or, with kAddsAtOnce, all that registers hold.
// With kRounds, values are rounded to T before quantization, bit-identical to quantizing a result in T.
template <class T, int kD, int kPackedRows_ = 16, int kWaves_ = 4, int kFanIn_ = 16, int kAddedVecs = 2,
          bool kAddsAtOnce_ = false, bool kRounds = false, class Problem_ = DecodeProblem>
struct DecodeOutput : EarlyScale<kD == 256 || (kD == 512 && attention::kSumsInRegisters)> {
  using Problem = Problem_;
  static constexpr bool kScalesEarly = kD == 256 || (kD == 512 && attention::kSumsInRegisters);
  static constexpr bool kAddsAtOnce = kAddsAtOnce_, kGrouped = __is_same(Problem, GroupedProblem);
  static_assert(!kGrouped || (kAddsAtOnce && kRounds && kD == 128));
  static constexpr int kPackedRows = kPackedRows_, kWaves = kWaves_, kThreads = kWaves * wave::kLanes;
  static constexpr float kLowest = -3.0e38f;  // the maximum without scores: avoids subtracting infinities
  static constexpr int kSplitFloats = kPackedRows * (kD + 2);

  const Problem& p;
  int block, packed_row_tile, head, request;  // block: index of the work tile
  int splits;                                 // of the request

  DEVICE explicit DecodeOutput(const Problem& p, int block = wave::block_id_x()) : p(p), block(block) {
    const int of_tiles = u32(block) / p.tiles_divisor;
    packed_row_tile = block - of_tiles * p.packed_row_tiles;
    request = u32(of_tiles) / p.heads_divisor;
    head = of_tiles - request * p.kv_heads;
  }

  // Column c of the tile is a query row and one of the group's heads; columns past the last repeat it.
  struct PackedRow {
    int row, head;
  };
  DEVICE int packed_rows() const { return p.query_len * p.group - packed_row_tile * kPackedRows; }
  DEVICE PackedRow packed_row(int c) const {
    const int last = packed_rows() - 1, of_all = packed_row_tile * kPackedRows + (c < last ? c : last);
    const int row = u32(of_all) / p.group_divisor;
    return {row, head * p.group + of_all - row * p.group};
  }

  static constexpr int kPackedRowVecs = kD / 4;  // four elements each
  static constexpr int kFanIn = kFanIn_;         // splits, or partial combinations, that a block adds
  static constexpr int kMostAdded = kD == 256 ? 2 * kFanIn : kFanIn;  // that a block adds if there are no more
  static constexpr int kMaxima = kPackedRows * kD * 4, kSums = kMaxima + kPackedRows * 4;  // byte offsets in a slot

  DEVICE mem::Buffer slot(int index) const {
    return mem::buffer(p.partials + (i64(block) * p.slots + index) * kSplitFloats);
  }
  DEVICE static void store_sums(mem::Buffer slot, int c, float maximum, float sum) {
    mem::store_device(slot, kMaxima + c * 4, 0, maximum);
    mem::store_device(slot, kSums + c * 4, 0, sum);
  }

  // Combines the splits once their blocks have stored them, in a tree: among kFanIn consecutive splits, the last to
  // arrive adds all, in order. Up to kMostAdded have no second level.
  DEVICE void combine_splits() const {
    int place = wave::block_id_y(), count = splits, first_slot = 0, slots = p.num_kv_splits;
    u32* counters = p.counters + i64(block) * p.groups;
    while (true) {
      const bool is_last_level = kMostAdded > kFanIn && count <= kMostAdded;
      const int group = is_last_level ? 0 : place / kFanIn, first = group * kFanIn;
      const int members = is_last_level || count - first < kFanIn ? count - first : kFanIn;
      if (!is_last_block(counters + group, members)) return;
      count = is_last_level ? 1 : (count + kFanIn - 1) / kFanIn;
      if constexpr (kAddsAtOnce) add_at_once(first_slot + first, members, count > 1 ? first_slot + slots + group : -1);
      else add(first_slot + first, members, count > 1 ? first_slot + slots + group : -1);
      if (count == 1) return;
      place = group;
      first_slot += slots;
      slots = (slots + kFanIn - 1) / kFanIn;
      counters += slots;
    }
  }
  // Adds `members` slots from `first` on into slot `to`, or into the results if `to` is below 0.
  DEVICE void add(int first, int members, int to) const {
    constexpr int kPackedRowThreads = kThreads / kPackedRows, kThreadVecs = kPackedRowVecs / kPackedRowThreads;
    constexpr int kAtOnce = kThreadVecs % kAddedVecs ? 1 : kAddedVecs;
    const int c = wave::thread_id() / kPackedRowThreads, own = wave::thread_id() % kPackedRowThreads;
    if (c >= packed_rows()) return;
    const mem::Buffer from = slot(first);
    float factor[kFanIn], sums[kFanIn], largest = kLowest, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kFanIn; ++i) {
      const float maximum = mem::load_device_or_zero<float>(from, kMaxima + c * 4, i * kSplitFloats * 4, i < members);
      sums[i] = mem::load_device_or_zero<float>(from, kSums + c * 4, i * kSplitFloats * 4, i < members);
      factor[i] = i < members ? maximum : kLowest;
    }
#pragma unroll
    for (int i = 0; i < kFanIn; ++i) largest = __builtin_fmaxf(largest, factor[i]);
#pragma unroll
    for (int i = 0; i < kFanIn; ++i) {
      factor[i] = numerics::exp2_approx(factor[i] - largest);
      sum += sums[i] * factor[i];
    }
    const float of_packed_row = to < 0 ? finish_packed_row(c, largest, sum, own == 0) : 1.0f;
    if (to >= 0 && own == 0) store_sums(slot(to), c, largest, sum);
#pragma unroll 1
    for (int begin = own; begin < kPackedRowVecs; begin += kAtOnce * kPackedRowThreads) {
      const int left = wave::anew(members);
      f32x4 vecs[kAtOnce][kFanIn];
#pragma unroll
      for (int v = 0; v < kAtOnce; ++v)
#pragma unroll
        for (int i = 0; i < kFanIn; ++i) {
          const int vec = c * kPackedRowVecs + begin + v * kPackedRowThreads;
          vecs[v][i] = mem::load_device_or_zero<f32x4>(from, vec * 16, i * kSplitFloats * 4, i < left);
        }
#pragma unroll
      for (int v = 0; v < kAtOnce; ++v) {
        f32x4 total = {};
#pragma unroll
        for (int i = 0; i < kFanIn; ++i) total += vecs[v][i] * factor[i];
        const int dim = (begin + v * kPackedRowThreads) * 4;
        if (to < 0) store(c, dim, total * of_packed_row);
        else mem::store_device(slot(to), (c * kD + dim) * 4, 0, total);
      }
    }
  }

  // The same, with all of a thread's loads for some slots in flight before any is used. `add` waits for the maxima,
  // then for the sums, then for the vectors.
  DEVICE void add_at_once(int first, int members, int to) const {
    constexpr int kPackedRowThreads = kThreads / kPackedRows, kThreadVecs = kPackedRowVecs / kPackedRowThreads;
    constexpr int kMembers = 32 / kThreadVecs;  // at once, as registers allow
    const int own_packed_row = wave::thread_id() / kPackedRowThreads, own = wave::thread_id() % kPackedRowThreads;
    const bool is_packed_row = own_packed_row < packed_rows();
    const int c = is_packed_row ? own_packed_row : 0;
    float largest = kLowest, sum = 0.0f;
    f32x4 total[kThreadVecs] = {};
#pragma unroll 1
    for (int begin = 0; begin < members; begin += kMembers) {
      const int left = members - begin;
      const mem::Buffer from = slot(first + begin);
      float maximum[kMembers], sums[kMembers];
      f32x4 vecs[kThreadVecs][kMembers];
#pragma unroll
      for (int i = 0; i < kMembers; ++i) {
        maximum[i] = mem::load_device_or_zero<float>(from, kMaxima + c * 4, i * kSplitFloats * 4, i < left);
        sums[i] = mem::load_device_or_zero<float>(from, kSums + c * 4, i * kSplitFloats * 4, i < left);
      }
#pragma unroll
      for (int v = 0; v < kThreadVecs; ++v)
#pragma unroll
        for (int i = 0; i < kMembers; ++i) {
          const int vec = c * kPackedRowVecs + own + v * kPackedRowThreads;
          vecs[v][i] = mem::load_device_or_zero<f32x4>(from, vec * 16, i * kSplitFloats * 4, i < left);
        }
      attention::issue_here();  // otherwise ptxas loads the vectors once the maxima have arrived
      float factor = largest;
#pragma unroll
      for (int i = 0; i < kMembers; ++i) {
        if (i >= left) maximum[i] = kLowest;
        largest = __builtin_fmaxf(largest, maximum[i]);
      }
      factor = numerics::exp2_approx(factor - largest);
      sum *= factor;
#pragma unroll
      for (int v = 0; v < kThreadVecs; ++v) total[v] *= factor;
#pragma unroll
      for (int i = 0; i < kMembers; ++i) {
        factor = numerics::exp2_approx(maximum[i] - largest);
        sum += sums[i] * factor;
#pragma unroll
        for (int v = 0; v < kThreadVecs; ++v) total[v] += vecs[v][i] * factor;
      }
    }
    if constexpr (kGrouped)
      if (to < 0) {
        const float of_packed_row = finish_packed_row(c, largest, sum, is_packed_row && own == 0);
#pragma unroll
        for (int v = 0; v < kThreadVecs; ++v) total[v] *= of_packed_row;
        store_group<kPackedRowThreads>(c, own * 4, kPackedRowThreads * 4, total, is_packed_row);
        return;
      }
    if (!is_packed_row) return;
    if (to < 0) {
      const float of_packed_row = finish_packed_row(c, largest, sum, own == 0);
#pragma unroll
      for (int v = 0; v < kThreadVecs; ++v) total[v] *= of_packed_row;
      store(c, own * 4, kPackedRowThreads * 4, total);
    } else {
      if (own == 0) store_sums(slot(to), c, largest, sum);
#pragma unroll
      for (int v = 0; v < kThreadVecs; ++v)
        mem::store_device(slot(to), (c * kPackedRowVecs + own + v * kPackedRowThreads) * 16, 0, total[v]);
    }
  }

  DEVICE float load_value_scale() const { return p.value_cache.scale ? mem::load<float>(p.value_cache.scale) : 1.0f; }
  DEVICE void load_early_scale() {
    if constexpr (kScalesEarly) this->value_scale = load_value_scale();
  }
  // Returns the factor for a column's sums, given its maximum and its weight sum, divided by exp2(maximum). With
  // `stores`, also stores the log-sum-exp.
  DEVICE float finish_packed_row(int c, float maximum, float sum, bool stores) const {
    const PackedRow of = packed_row(c);
    float before = 1.0f;
    if (p.sinks) {
      const float sink = mem::load<float>(p.sinks + of.head) * 1.4426950408889634f;
      const float largest = __builtin_fmaxf(maximum, sink);
      before = numerics::exp2_approx(maximum - largest);
      sum = sum * before + numerics::exp2_approx(sink - largest);
      maximum = largest;
    }
    if (stores && p.lse && c < packed_rows())
      mem::store(p.lse + (i64(request) * p.query_len + of.row) * p.query_heads + of.head,
                 sum != 0.0f ? (maximum + numerics::log2_approx(sum)) * 0.6931471805599453f : -__builtin_inff());
    float value_scale;
    if constexpr (kScalesEarly) value_scale = this->value_scale;
    else value_scale = load_value_scale();
    return sum != 0.0f ? before * (value_scale / sum) : 0.0f;
  }
  // Stores four elements of a column, already multiplied by that factor.
  DEVICE void store(int c, int first_dim, f32x4 values) const {
    if (c >= packed_rows()) return;
    const PackedRow of = packed_row(c);
    const i64 row = i64(request) * p.query_len + of.row;
    const i64 at = row * p.out_stride + of.head * p.out_head_stride + first_dim;
    if (p.out_scale) {
      if constexpr (kRounds) values = rounded(values);
      values *= 1.0f / mem::load<float>(p.out_scale);
      mem::store((u8*)p.out + at, numerics::to_e4m3x4(values.lo, values.hi));
    } else mem::store((u16*)p.out + at, u32x2{T::pack(values.lo), T::pack(values.hi)});
  }
  // Stores several such vectors, `apart` dims apart, with one branch.
  template <int kVecs>
  DEVICE void store(int c, int first_dim, int apart, const f32x4 (&vecs)[kVecs]) const {
    const PackedRow of = packed_row(c);
    const i64 row = i64(request) * p.query_len + of.row;
    const i64 at = row * p.out_stride + of.head * p.out_head_stride + first_dim;
    if (p.out_scale) {
      const float inverse = 1.0f / mem::load<float>(p.out_scale);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        f32x4 values = vecs[v];
        if constexpr (kRounds) values = rounded(values);
        values *= inverse;
        mem::store((u8*)p.out + at + v * apart, numerics::to_e4m3x4(values.lo, values.hi));
      }
    } else {
#pragma unroll
      for (int v = 0; v < kVecs; ++v)
        mem::store((u16*)p.out + at + v * apart, u32x2{T::pack(vecs[v].lo), T::pack(vecs[v].hi)});
    }
  }
  DEVICE static f32x4 rounded(f32x4 x) {
    x.lo = round_to<T>(x.lo);
    x.hi = round_to<T>(x.hi);
    return x;
  }
  // The same with one scale per column, whose elements are in kLanes consecutive lanes. All lanes take part.
  template <int kLanes, int kVecs>
  DEVICE void store_group(int c, int first_dim, int apart, f32x4 (&vecs)[kVecs], bool stores) const {
    float absmax = 0.0f;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      vecs[v] = rounded(vecs[v]);
      absmax = max_abs(max_abs(absmax, vecs[v].lo), vecs[v].hi);
    }
    absmax = wave::reduce_group < kLanes<16 ? kLanes : 16>(absmax, 0.0f, Max{});
    if constexpr (kLanes == 32) absmax = Max{}(absmax, wave::from_lane(absmax, wave::lane() ^ 16));
    static_assert(kLanes <= 32);
    if (!stores) return;
    const PackedRow of = packed_row(c);
    const i64 row = i64(request) * p.query_len + of.row;
    const i64 at = row * p.out_stride + of.head * p.out_head_stride + first_dim;
    const float scale = absmax_to_scale(absmax);
    const Scale by(scale);
    if (first_dim == 0)
      mem::store(p.out_scales + row * p.out_scales_stride + of.head * p.out_scales_head_stride, scale);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const f32x2 low = divide(vecs[v].lo, by.value, by.inverse), high = divide(vecs[v].hi, by.value, by.inverse);
      mem::store((u8*)p.out + at + v * apart, numerics::to_e4m3x4(low, high));
    }
  }
};
