// How a tile ends: the sums of all blocks that have a part of it, scales, bias, and the output.
#pragma once
#include "device/arrive.h"
#include "device/vec.h"
#include "gemm/skinny/schedule.h"

// Floats of rows in a row.
template <int kRun>
using Run = float __attribute__((ext_vector_type(kRun)));

// A run of results as T, bf16 or fp16 or float, from element `at` on, if there is one.
template <class T, int kRun>
DEVICE void store_run(bool inside, void* out, u64 at, Run<kRun> x) {
  if constexpr (__is_same(T, float)) mem::store_if(inside, (float*)out + at, x);
  else if constexpr (kRun == 1) mem::store_if(inside, (u16*)out + at, u16(T::pack({x[0], x[0]})));
  else if constexpr (kRun == 2) mem::store_if(inside, (u16*)out + at, T::pack(x));
  else mem::store_if(inside, (u16*)out + at, u32x2{T::pack(x.lo), T::pack(x.hi)});
}
template <int kRun>
DEVICE Run<kRun> load_bias(const Product& p, int row) {
  Run<kRun> bias = {};
  if (p.bias)
    for (int i = 0; i < kRun; ++i)
      if (row + i < p.n) bias[i] = load_output(p.bias, row + i, p.out_type);
  return bias;
}

// The end of a tile: value [i][j] of a thread is of token token(i) and kRun rows of b, row(j) and those behind it; registers for
// kLoaded floats are free. The rings of kMx leave few, so that bias is loaded once values are summed up.
template <Scales kScales, int kLaneTokens, int kLaneRuns, int kRun, int kGroup, int kThreads, int kLoaded>
struct Finish {
  static constexpr bool kMx = kScales == Scales::kMx;
  using Value = Run<kRun>;
  static constexpr int kValues = kLaneTokens * kLaneRuns;
  const Product& p;
  const Share<kGroup>& share;
  int tile = 0, from = 0, to = 0;  // and the first and the last block that share it
  int ends_here = 0;               // 1 if the first began in an earlier tile
  int row[kLaneRuns] = {}, token[kLaneTokens] = {};
  float scale_a[kLaneTokens] = {};
  Value scale_b[kLaneRuns] = {}, bias[kLaneRuns] = {};

  // When a tile begins, so that what is loaded and divided here is there when it ends.
  template <class RowOf, class TokenOf>
  DEVICE void begin(int tile_, TokenOf token_of, RowOf row_of) {
    tile = tile_, from = to = share.block;
    if (p.partials) {
      from = share.first_sharer(tile), to = share.last_sharer(tile);
      ends_here = share.first_step(from) < tile * p.steps;
    }
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      token[i] = token_of(i);
      if (kScales == Scales::kRow)
        scale_a[i] = mem::load_float_or_zero(mem::buffer(p.scale_a), token[i] * p.scale_a_row * 4, 0, token[i] < p.m);
    }
#pragma unroll
    for (int j = 0; j < kLaneRuns; ++j) {
      row[j] = row_of(j);
      if (kScales == Scales::kRow)
        for (int i = 0; i < kRun; ++i)
          scale_b[j][i] = row[j] + i < p.n ? mem::load<float>(p.scale_b + u64(row[j] + i) * u32(p.scale_b_row)) : 0.0f;
      if (!kMx) bias[j] = load_bias<kRun>(p, row[j]);
    }
  }

  // By all threads of the block, those that stored sums and those that did not: false if a later block finishes the tile.
  DEVICE static bool is_last(const Product& p, int tile, int from, int to, bool stored) {
    return from == to || is_last_block(p.counters + tile, to - from + 1, stored);
  }

  // Where value v of block b's sums lies, in bytes. It shares at most two tiles: the one that it starts in, and the one that it
  // ends in.
  DEVICE int place(int b, int v) const {
    return ((b * 2 + (b == from ? ends_here : 0)) * kValues + v) * kThreads * int(sizeof(Value));
  }

  // Whether value v goes to HBM. Kernels for more tokens than a few have at least half of them, and need no predicates for
  // each, of which there are few.
  DEVICE bool is_shared(int v) const { return kLaneTokens > 2 || token[v / kLaneRuns] < p.m; }

  DEVICE void end(Value (&sum)[kLaneTokens][kLaneRuns]) const {
    if (from != to) {
      const mem::Buffer partials = mem::buffer(p.partials);
      const int at = wave::thread() * int(sizeof(Value));
#pragma unroll
      for (int v = 0; v < kValues; ++v)
        if (is_shared(v)) mem::store_device(partials, at, place(share.block, v), sum[v / kLaneRuns][v % kLaneRuns]);
      if (!is_last(p, tile, from, to, /*stored=*/true)) return;
#pragma unroll
      for (int v = 0; v < kValues; ++v) sum[v / kLaneRuns][v % kLaneRuns] = Value{};
      constexpr int kFit = kLoaded / (kValues * kRun), kLeast = kMx ? 1 : 2;
      constexpr int kAtOnce = kFit > 8 ? 8 : kFit > kLeast ? kFit : kLeast;  // blocks whose sums are loaded together
#pragma unroll 1
      for (int b = from; b <= to; b += kAtOnce) {
        Value theirs[kAtOnce][kValues];
#pragma unroll
        for (int other = 0; other < kAtOnce; ++other)
#pragma unroll
          for (int v = 0; v < kValues; ++v) {
            const bool there = b + other <= to;
            theirs[other][v] =
                mem::load_device_or_zero<Value>(partials, at, place(there || mem::kPredicates ? b + other : to, v),
                                                (there || !mem::kPredicates) && is_shared(v));
          }
#pragma unroll
        for (int other = 0; other < kAtOnce; ++other)
#pragma unroll
          for (int v = 0; v < kValues; ++v)
            if (mem::kPredicates || b + other <= to) sum[v / kLaneRuns][v % kLaneRuns] += theirs[other][v];
      }
    }
#pragma unroll
    for (int j = 0; j < kLaneRuns; ++j) {
      const Value added = kMx ? load_bias<kRun>(p, row[j]) : bias[j];
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        if constexpr (kScales == Scales::kRow) sum[i][j] *= scale_a[i] * scale_b[j];
        sum[i][j] += added;
      }
    }
    auto store = [&](auto store_value) __attribute__((always_inline)) {
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
        for (int j = 0; j < kLaneRuns; ++j)
          store_value(token[i] < p.m, u64(u32(token[i])) * u32(p.n) + u32(row[j]), row[j], sum[i][j]);
    };
    auto store_one = [&]<class T>(T*, bool inside, u64 at, int row, Value x)
                         __attribute__((always_inline)) { store_run<T, kRun>(inside && row < p.n, p.out, at, x); };
    auto store_odd = [&](bool inside, u64 at, int row, Value x) __attribute__((always_inline)) {
      for (int r = 0; r < kRun; ++r)
        if (inside && row + r < p.n) store_output(p.out, at + r, x[r], p.out_type);
    };
    // The type is asked for once, so that a block ends with few instructions; but with branches, and for many values, that
    // takes registers.
    if constexpr (!mem::kPredicates && kValues * kRun > 8)
      store([&](auto... value) __attribute__((always_inline)) {
        if (p.n % kRun) store_odd(value...);
        else
          with_output_type(p.out_type, [&](auto* type) __attribute__((always_inline)) { store_one(type, value...); });
      });
    else if (p.n % kRun) store(store_odd);
    else
      with_output_type(p.out_type, [&](auto* type) __attribute__((always_inline)) {
        store([&](auto... value) __attribute__((always_inline)) { store_one(type, value...); });
      });
  }
};
