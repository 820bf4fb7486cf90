// What a block of flash decoding computes, and where that goes. The sums of parts meet in HBM, where the last block to arrive adds them
// in the order of the parts. A part is `least_steps` steps or more, so that it does not depend on other requests where `parts`
// parts of that are enough.
#pragma once
#include "attention/problem.h"
#include "device/reduce.h"

template <class T, int kD>
struct DecodeOutput {
  static constexpr int kColumns = 16, kWaves = 4, kThreads = kWaves * wave::kLanes;
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

  // Adds the parts, in their order.
  DEVICE void combine() const {
    constexpr int kVecs = kColumns * kD / 4;
    const mem::Buffer from = mem::buffer(p.partials + i64(block) * p.parts * kPartFloats);
    constexpr int kBytes = kPartFloats * 4, kMaxima = kColumns * kD * 4, kSums = kMaxima + kColumns * 4;
#pragma unroll 1
    for (int vec = wave::thread_id(); vec < kVecs; vec += kThreads) {
      const int c = vec / (kD / 4);
      float largest = kLowest, sum = 0.0f;
#pragma unroll 4
      for (int part = 0; part < parts; ++part)
        largest =
            __builtin_fmaxf(largest, mem::load_device_or_zero<float>(from, part * kBytes + kMaxima + c * 4, 0, true));
      f32x4 total = {};
#pragma unroll 4
      for (int part = 0; part < parts; ++part) {
        const float maximum = mem::load_device_or_zero<float>(from, part * kBytes + kMaxima + c * 4, 0, true);
        const float part_sum = mem::load_device_or_zero<float>(from, part * kBytes + kSums + c * 4, 0, true);
        const f32x4 out = mem::load_device_or_zero<f32x4>(from, part * kBytes + vec * 16, 0, true);
        const float factor = numerics::exp2_approx(maximum - largest);
        sum += part_sum * factor;
        total += out * factor;
      }
      store(c, vec % (kD / 4) * 4, total, largest, sum);
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
    const i64 at = (i64(request) * p.query_len + of.row) * p.query_heads + of.head;
    mem::store(p.out + at * kD + first_dim, u32x2{T::pack(total.lo * factor), T::pack(total.hi * factor)});
    if (first_dim == 0 && p.lse)
      mem::store(p.lse + at,
                 sum != 0.0f ? (maximum + numerics::log2_approx(sum)) * 0.6931471805599453f : -__builtin_inff());
  }
};
