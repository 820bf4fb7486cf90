// Tile epilogue: other blocks' partial sums, scales, bias, output.
#pragma once
#include "device/arrive.h"
#include "device/vec.h"
#include "gemm/skinny/schedule.h"

constexpr int kGroupTokens = 64;  // of the smallest kernel that serves groups of tokens, one for each block_id_y

// Floats of consecutive rows.
template <int kVec>
using FloatVec = float __attribute__((ext_vector_type(kVec)));

// Stores results as T (bf16, fp16 or float) from element `at` on, if `inside`.
template <class T, int kVec>
DEVICE void store_vec(bool inside, void* out, u64 at, FloatVec<kVec> x) {
  if constexpr (__is_same(T, float)) mem::store_if(inside, (float*)out + at, x);
  else if constexpr (kVec == 1) mem::store_if(inside, (u16*)out + at, u16(T::pack({x[0], x[0]})));
  else if constexpr (kVec == 2) mem::store_if(inside, (u16*)out + at, T::pack(x));
  else mem::store_if(inside, (u16*)out + at, u32x2{T::pack(x.lo), T::pack(x.hi)});
}
template <int kVec>
DEVICE FloatVec<kVec> load_bias(const SkinnyProblem& p, int row) {
  FloatVec<kVec> bias = {};
  if (p.bias)
    for (int i = 0; i < kVec; ++i)
      if (row + i < p.n) bias[i] = load_output(p.bias, row + i, p.out_type);
  return bias;
}

// A thread's value [i][j] belongs to token token(i) and to kVec rows of b from row(j) on. The epilogue may use
// registers for kFreeFloats floats. kMx stages leave few, and so do many rows: there the bias is loaded after the sums.
template <ScaleGranularity kScales, int kLaneTokens, int kLaneVecs, int kVec, int kGroupSteps, int kThreads,
          int kFreeFloats, bool kGated = false, bool kGroups = false>
struct TileEpilogue {
  static constexpr bool kMx = kScales == ScaleGranularity::kMx, kBiasLast = kMx || kLaneVecs * kVec > 4;
  using Value = FloatVec<kVec>;
  static constexpr int kValues = kLaneTokens * kLaneVecs;
  const SkinnyProblem& p;
  const StreamKSchedule<kGroupSteps>& schedule;
  int tile = 0, first_block = 0, last_block = 0;  // the blocks that share the tile
  int is_second_tile = 0;                         // 1 if first_block began in an earlier tile
  int row[kLaneVecs] = {}, token[kLaneTokens] = {};
  float scale_a[kLaneTokens] = {};
  Value scale_b[kLaneVecs] = {}, bias[kLaneVecs] = {};
  float out_scale[kGated] = {};

  // Called when a tile begins, so that loads and divisions complete before it ends.
  template <class RowOf, class TokenOf>
  DEVICE void begin(int tile_, TokenOf token_of, RowOf row_of) {
    tile = tile_, first_block = last_block = schedule.block;
    if (p.partials) {
      first_block = schedule.first_block(tile), last_block = schedule.last_block(tile);
      is_second_tile = schedule.first_step(first_block) < tile * p.steps_per_tile;
    }
    if constexpr (kGated) out_scale[0] = mem::load<float>(static_cast<const GatedProblem&>(p).out_scale);
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i) {
      token[i] = token_of(i);
      if (kScales == ScaleGranularity::kRow)
        scale_a[i] = mem::load_float_or_zero(mem::buffer(p.scale_a), token[i] * p.scale_a_row * 4, 0, token[i] < p.m);
    }
#pragma unroll
    for (int j = 0; j < kLaneVecs; ++j) {
      row[j] = row_of(j);
      if (kScales == ScaleGranularity::kRow)
        for (int i = 0; i < kVec; ++i) {
          if constexpr (kGated)
            scale_b[j][i] = mem::load<float>(p.scale_b + u64(gated_row(p, row[j] + i)) * u32(p.scale_b_row));
          else
            scale_b[j][i] =
                row[j] + i < p.n ? mem::load<float>(p.scale_b + u64(row[j] + i) * u32(p.scale_b_row)) : 0.0f;
        }
      if (!kBiasLast && !kGated) bias[j] = load_bias<kVec>(p, row[j]);
    }
  }

  // Called by all threads of the block, including those that stored nothing. Returns false if a later block ends the
  // tile.
  DEVICE static bool is_last(const SkinnyProblem& p, int tile, int first_block, int last_block, bool stored) {
    const int of_group = kGroups ? wave::block_id_y() * p.group_tiles : 0;
    return first_block == last_block ||
           is_last_block(p.counters + of_group + tile, last_block - first_block + 1, stored);
  }

  // Byte offset of block b's value v. A block shares at most two tiles: the one it starts in and the one it ends in.
  DEVICE int partial_offset(int b, int v) const {
    return ((b * 2 + (b == first_block ? is_second_tile : 0)) * kValues + v) * kThreads * int(sizeof(Value));
  }

  // True if value v is stored to HBM. Kernels with more than two tokens per lane store every value, which saves scarce
  // predicates.
  DEVICE bool has_partial(int v) const { return kLaneTokens > 2 || token[v / kLaneVecs] < p.m; }

  DEVICE void end(Value (&sum)[kLaneTokens][kLaneVecs]) const {
    if (first_block != last_block) {
      const mem::Buffer partials = mem::buffer(p.partials + (kGroups ? wave::block_id_y() * p.group_partials : 0));
      const int at = wave::thread_id() * int(sizeof(Value));
#pragma unroll
      for (int v = 0; v < kValues; ++v)
        if (has_partial(v))
          mem::store_device(partials, at, partial_offset(schedule.block, v), sum[v / kLaneVecs][v % kLaneVecs]);
      if (!is_last(p, tile, first_block, last_block, /*stored=*/true)) return;
#pragma unroll
      for (int v = 0; v < kValues; ++v) sum[v / kLaneVecs][v % kLaneVecs] = Value{};
      constexpr int kFit = kFreeFloats / (kValues * kVec), kMin = kMx || kValues * kVec > 32 ? 1 : 2;
      // Blocks whose sums are loaded together.
      constexpr int kBlocksAtOnce = kFit > 8 ? 8 : kFit > kMin ? kFit : kMin;
#pragma unroll 1
      for (int b = first_block; b <= last_block; b += kBlocksAtOnce) {
        Value partial[kBlocksAtOnce][kValues];
#pragma unroll
        for (int other = 0; other < kBlocksAtOnce; ++other)
#pragma unroll
          for (int v = 0; v < kValues; ++v) {
            const bool there = b + other <= last_block;
            partial[other][v] = mem::load_device_or_zero<Value>(
                partials, at, partial_offset(there || mem::kPredicates ? b + other : last_block, v),
                (there || !mem::kPredicates) && has_partial(v));
          }
#pragma unroll
        for (int other = 0; other < kBlocksAtOnce; ++other)
#pragma unroll
          for (int v = 0; v < kValues; ++v)
            if (mem::kPredicates || b + other <= last_block) sum[v / kLaneVecs][v % kLaneVecs] += partial[other][v];
      }
    }
#pragma unroll
    for (int j = 0; j < kLaneVecs; ++j) {
      const Value added = kBiasLast ? load_bias<kVec>(p, row[j]) : bias[j];
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        if constexpr (kScales == ScaleGranularity::kRow) sum[i][j] *= scale_a[i] * scale_b[j];
        sum[i][j] += added;
      }
    }
    if constexpr (kGated) return store_gated(sum);
    auto store = [&](auto store_value) __attribute__((always_inline)) {
      // Block scales and many tokens leave few scalar registers, which comparisons with m would fill.
      const int m = kScales == ScaleGranularity::kBlock && kValues * kVec > 16 ? wave::anew(p.m) : p.m;
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
        for (int j = 0; j < kLaneVecs; ++j)
          store_value(token[i] < m, u64(u32(token[i])) * u32(p.n) + u32(row[j]), row[j], sum[i][j]);
    };
    auto store_one = [&]<class T>(T*, bool inside, u64 at, int row, Value x)
                         __attribute__((always_inline)) { store_vec<T, kVec>(inside && row < p.n, p.out, at, x); };
    auto store_odd = [&](bool inside, u64 at, int row, Value x) __attribute__((always_inline)) {
      for (int r = 0; r < kVec; ++r)
        if (inside && row + r < p.n) store_output(p.out, at + r, x[r], p.out_type);
    };
    // A single type branch around all stores takes the fewest instructions. Where stores also need branches, and with
    // many values, it costs registers: there each store branches.
    if constexpr (!mem::kPredicates && kValues * kVec > 8)
      store([&](auto... value) __attribute__((always_inline)) {
        if (p.n % kVec) store_odd(value...);
        else
          with_output_type(p.out_type, [&](auto* type) __attribute__((always_inline)) { store_one(type, value...); });
      });
    else if (p.n % kVec) store(store_odd);
    else
      with_output_type(p.out_type, [&](auto* type) __attribute__((always_inline)) {
        store([&](auto... value) __attribute__((always_inline)) { store_one(type, value...); });
      });
  }

  // Lanes with gate sums fetch the up sums, and store columns rounded as silu_and_mul_quant does.
  DEVICE void store_gated(const Value (&sum)[kLaneTokens][kLaneVecs]) const {
    static_assert(kLaneVecs == 1);
    constexpr int kLanesApart = kVec == 2 ? 8 : 16;  // between rows that are kGatedRows apart
    const float inverse = 1.0f / out_scale[0];
    const int columns = p.n / 2, column = gated_column(row[0]), other = wave::lane() ^ kLanesApart;
    auto store = [&]<class T>(T*) __attribute__((always_inline)) {
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        f32x4 y = {};
#pragma unroll
        for (int r = 0; r < kVec; ++r) {
          const float up = round_to<T>(wave::from_lane(sum[i][0][r], other));
          y[r] = round_to<T>(up * round_to<T>(silu(round_to<T>(sum[i][0][r])))) * inverse;
        }
        const u32 bytes = numerics::to_e4m3x4(y.lo, y.hi);
        u8* to = (u8*)p.out + u64(u32(token[i])) * u32(columns) + u32(column);
        const bool inside = token[i] < p.m && !is_up(row[0]) && column < columns;
        if constexpr (kVec == 4) mem::store_if(inside, to, bytes);
        else if constexpr (kVec == 2) mem::store_if(inside, to, u16(bytes));
        else if (inside) mem::store(to, u8(bytes));
      }
    };
    if (p.out_type == 0) store((Bf16*)nullptr);
    else store((F16*)nullptr);
  }
};
