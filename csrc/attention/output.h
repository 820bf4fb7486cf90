// What a block of flash decoding computes, and where that goes. The sums of parts meet in HBM, where the last block to arrive adds them
// in the order of the parts. A part is `least_steps` steps or more, so that it does not depend on other requests where `parts`
// parts of that are enough.
#pragma once
#include "attention/problem.h"
#include "device/reduce.h"

template <class T, int kD, int kColumns_ = 16, int kWaves_ = 4>
struct DecodeOutput {
  static constexpr int kColumns = kColumns_, kWaves = kWaves_, kThreads = kWaves * wave::kLanes;
  static constexpr float kLowest = -3.0e38f;  // a maximum of no scores, so that there is no infinity to subtract
  static constexpr int kPartFloats = kColumns * (kD + 2);

  const DecodeProblem& p;
  int block, column_tile, head, request;  // block: of a part
  int parts;                              // of the request

  DEVICE explicit DecodeOutput(const DecodeProblem& p) : p(p), block(wave::block_id_x()) {
    const int of_tiles = u32(block) / p.tiles_divisor;
    column_tile = block - of_tiles * p.column_tiles;
    request = u32(of_tiles) / p.heads_divisor;
    head = of_tiles - request * p.kv_heads;
  }

  // Column c of the tile is a row of the query and one of the heads of the group; behind the last column the last.
  struct Column {
    int row, head;
  };
  DEVICE int columns() const { return p.query_len * p.group - column_tile * kColumns; }
  DEVICE Column column(int c) const {
    const int last = columns() - 1, of_all = column_tile * kColumns + (c < last ? c : last);
    const int row = u32(of_all) / p.group_divisor;
    return {row, head * p.group + of_all - row * p.group};
  }

  // Four elements of a column, divided by exp2(maximum), and the sum of its weights, so divided.
  struct Sums {
    f32x4 total;
    float maximum, sum;
    DEVICE void clear() { *this = {{}, kLowest, 0.0f}; }
    DEVICE void add(const Sums& other) {
      const float largest = __builtin_fmaxf(maximum, other.maximum);
      const float factor = numerics::exp2_approx(maximum - largest);
      const float of_other = numerics::exp2_approx(other.maximum - largest);
      total = total * factor + other.total * of_other;
      sum = sum * factor + other.sum * of_other;
      maximum = largest;
    }
  };
  static constexpr int kColumnVecs = kD / 4, kVecs = kColumns * kColumnVecs;  // of four elements
  DEVICE mem::Buffer partials() const { return mem::buffer(p.partials + i64(block) * p.parts * kPartFloats); }
  DEVICE Sums load_sums(mem::Buffer from, int part, int vec) const {
    constexpr int kBytes = kPartFloats * 4, kMaxima = kColumns * kD * 4, kSums = kMaxima + kColumns * 4;
    const int c = vec / kColumnVecs;
    Sums sums;
    sums.maximum = mem::load_device_or_zero<float>(from, part * kBytes + kMaxima + c * 4, 0, true);
    sums.sum = mem::load_device_or_zero<float>(from, part * kBytes + kSums + c * 4, 0, true);
    sums.total = mem::load_device_or_zero<f32x4>(from, part * kBytes + vec * 16, 0, true);
    return sums;
  }
  DEVICE void store(int vec, const Sums& sums) const {
    store(vec / kColumnVecs, vec % kColumnVecs * 4, sums.total, sums.maximum, sums.sum);
  }

  // Adds the parts, in their order. A thread loads several vecs at a time: the loads of one alone would wait for each other.
  DEVICE void combine() const {
    constexpr int kThreadVecs = kVecs / kThreads, kAtOnce = kThreadVecs < 4 ? kThreadVecs : 4;
    const mem::Buffer from = partials();
#pragma unroll 1
    for (int first = 0; first < kThreadVecs; first += kAtOnce) {
      Sums sums[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sums[i].clear();
#pragma unroll 2
      for (int part = 0; part < parts; ++part)
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          sums[i].add(load_sums(from, part, (first + i) * kThreads + wave::thread_id()));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) store((first + i) * kThreads + wave::thread_id(), sums[i]);
    }
  }

  // Four elements of a column, of these sums.
  DEVICE void store(int c, int first_dim, f32x4 total, float maximum, float sum) const {
    if (c >= columns()) return;
    const Column of = column(c);
    if (p.sinks) {
      const float sink = mem::load<float>(p.sinks + of.head) * 1.4426950408889634f;
      const float largest = __builtin_fmaxf(maximum, sink), factor = numerics::exp2_approx(maximum - largest);
      sum = sum * factor + numerics::exp2_approx(sink - largest);
      total *= factor;
      maximum = largest;
    }
    const float value_scale = p.value_cache.scale ? mem::load<float>(p.value_cache.scale) : 1.0f;
    const float factor = sum != 0.0f ? value_scale / sum : 0.0f;
    const i64 row = i64(request) * p.query_len + of.row;
    const i64 at = row * p.out_stride + of.head * p.out_head_stride + first_dim;
    total *= factor;
    if (p.out_scale) {
      total *= 1.0f / mem::load<float>(p.out_scale);
      mem::store((u8*)p.out + at, numerics::to_e4m3x4(total.lo, total.hi));
    } else mem::store((u16*)p.out + at, u32x2{T::pack(total.lo), T::pack(total.hi)});
    if (first_dim == 0 && p.lse)
      mem::store(p.lse + row * p.query_heads + of.head,
                 sum != 0.0f ? (maximum + numerics::log2_approx(sum)) * 0.6931471805599453f : -__builtin_inff());
  }
};
