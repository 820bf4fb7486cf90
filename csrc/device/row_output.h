// The epilogue of row kernels (norms, activations, quantization). It stores a row y as T, or quantized to e4m3 with
// scales.
//
//     plain:     out = T(y)
//     static:    out = e4m3(y * (1 / scale))
//     per token: scale_out = max(min(absmax(y), scale_ub) / kE4m3Max, kMinScale);  out = e4m3(y / scale_out)
//     per block: as per token, for each group of 64 or 128 columns
//     mx:        out = e4m3fn(y * 2^(127 - s)) for each group of 32 columns; scale_out = s, the smallest e8m0 scale
//                (at most 254) for which absmax(y) * 2^(127 - s) is at most 448
//
// A kernel constructs a RowOutput from its arguments, loads its row and calls locate(). It then calls store() for each
// chunk and finish(), or store_elements(). Rows and chunks are passed by value: the compiler keeps an array in
// registers only while no reference to it exists.
#pragma once
#include "float8.h"
#include "reduce.h"

enum class Output { kPlain, kStatic, kPerToken, kPerBlock, kMx };

// Instances of a row kernel with some further arguments, in order of chunks per thread; 0 is the general kernel.
#define ROW_INSTANCES(INSTANCE, name, ...)  \
  INSTANCE(1024, name##_x1, __VA_ARGS__, 1) \
  INSTANCE(1024, name##_x2, __VA_ARGS__, 2) \
  INSTANCE(512, name##_x4, __VA_ARGS__, 4)  \
  INSTANCE(1024, name##_general, __VA_ARGS__, 0)
#define FEW_ROW_INSTANCES(INSTANCE, name, ...) \
  INSTANCE(1024, name##_x1, __VA_ARGS__, 1)    \
  INSTANCE(1024, name##_general, __VA_ARGS__, 0)

// True if the scales are computed from y.
constexpr bool is_dynamic(Output output) { return output != Output::kPlain && output != Output::kStatic; }

constexpr int kMxGroup = 32;  // columns that share an mx scale

// The quantity that scale_ub bounds: nothing, absmax(y), or the scale, which is then max(min(absmax(y) / kE4m3Max,
// scale_ub), kMinScale).
enum class ScaleBound { kNone, kAbsmax, kScale };

// A thread's chunks of a row, and their y: fp32 (Chunk) or T (u32x4).
template <int kChunks, class Y>
struct RowChunks {
  int index[kChunks];
  bool in_bounds[kChunks];
  Y y[kChunks];
};

// A row's output. kGroupSize is the group's column count if known at compile time, else 0.
template <class T, Output kOutput, ScaleBound kBound = kOutput == Output::kMx ? ScaleBound::kNone : ScaleBound::kAbsmax,
          int kGroupSize = kOutput == Output::kMx ? kMxGroup : 0>
struct RowOutput {
  const float* scale_at;  // [1]: the static scale; for dynamic outputs scale_ub, or null
  float loaded_scale;     // *scale_at; locate() replaces a static scale by its inverse
  void* out;              // [columns] T or e4m3; before locate() the first row, as is scale_out
  float* scale_out;       // per token: [1]; per block and mx: one per group, scale_stride apart
  i64 scale_row_stride, scale_stride;
  int group_size;              // 64 or 128
  int threads, waves;          // per row
  float thread_absmax = 0.0f;  // over its chunks, per token

  DEVICE RowOutput(const float* scale_at, void* out, float* scale_out, i64 scale_row_stride, i64 scale_stride,
                   int group_size, int threads)
      : scale_at(scale_at),
        loaded_scale(mem::kScalarsFirst ? load_scale() : 0.0f),
        out(out),
        scale_out(scale_out),
        scale_row_stride(scale_row_stride),
        scale_stride(scale_stride),
        group_size(group_size),
        threads(threads),
        waves(threads / wave::kLanes) {}

  // Moves to this block's row. Called after the row's loads, so that no load waits for the scale.
  DEVICE void locate(i64 columns) {
    constexpr bool kHasScale = kOutput == Output::kStatic || (is_dynamic(kOutput) && kBound != ScaleBound::kNone);
    if constexpr (!mem::kScalarsFirst && kOutput != Output::kPerToken) loaded_scale = load_scale();
    if constexpr (kHasScale) mem::wait_for_scalars(out, loaded_scale);
    else if constexpr (kGroupSize == 0) mem::wait_for_scalars(out);
    const i64 row = u32(wave::block_id_x());
    out = (u8*)out + row * columns * (kOutput == Output::kPlain ? 2 : 1);
    if constexpr (is_dynamic(kOutput)) {
      if constexpr (kGroupSize == 0) mem::wait_for_scalars(scale_out, scale_row_stride);
      if constexpr (kOutput == Output::kMx) scale_out = (float*)((u8*)scale_out + row * scale_row_stride);
      else scale_out += row * scale_row_stride;
    }
    if constexpr (kOutput == Output::kPerBlock && kGroupSize == 0) mem::wait_for_scalars(scale_stride, group_size);
    if constexpr (kOutput == Output::kStatic) loaded_scale = 1.0f / loaded_scale;
  }

  // Stores a chunk; for the per-token output it only accumulates the absolute maximum. y is 0 where out of bounds.
  template <class Y>
  DEVICE void store(int index, bool in_bounds, Y y) {
    if constexpr (kOutput == Output::kPlain) {
      if (in_bounds) mem::store((u32x4*)out + index, as_packed(y));
    } else if constexpr (kOutput == Output::kStatic) {
      if (in_bounds) mem::store((u32x2*)out + index, quantize(as_fp32(y), loaded_scale));
    } else if constexpr (kOutput == Output::kPerToken) {
      thread_absmax = max_abs(thread_absmax, as_fp32(y));
    } else store_group(index, in_bounds, as_fp32(y));
  }
  // Called after store() for all chunks. The per-token output stores them here.
  template <int kChunks, class Y, class Threads = BlockOfRow>
  DEVICE void finish(RowChunks<kChunks, Y> chunks, const Threads& of_row = {}) {
    if constexpr (kOutput == Output::kPerToken) {
      LDS static float maxima[kMaxWaves];
      const float scale = absmax_to_bounded_scale(of_row.reduce(thread_absmax, 0.0f, maxima, waves, Max{}));
      if (of_row.thread() == 0) mem::store(scale_out, scale);
      const Scale divisor(scale);
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        if (chunks.in_bounds[i]) mem::store((u32x2*)out + chunks.index[i], quantize(as_fp32(chunks.y[i]), divisor));
    }
  }

  // Stores a row of any size and alignment, one element per access, with all threads of the block. value(column)
  // returns y. Dynamic outputs call it twice per column, in the same thread. last(column) is called after the last call
  // for a column.
  template <class Value, class Last>
  DEVICE void store_elements(int columns, Value value, Last last) const {
    const int thread = wave::thread_id();
    auto store_divided = [&](int column, const Scale& by) {
      const float y = value(column);
      last(column);
      mem::store((u8*)out + column, numerics::to_e4m3(divide(y, by.value, by.inverse)));
    };
    if constexpr (kOutput == Output::kMx) {
      const int lane = wave::lane();
      for (int group = wave::index(); group * kMxGroup < columns; group += waves) {
        const int column = group * kMxGroup + lane;
        const bool in_bounds = lane < kMxGroup;
        const float y = in_bounds ? value(column) : 0.0f;
        const float absmax = Max{}(0.0f, __builtin_fabsf(y));  // 0 for NaN, as in store_group
        const u32 scale = absmax_to_e8m0(wave::reduce(absmax, 0.0f, Max{}));
        if (lane == 0) mem::store((u8*)scale_out + group * scale_stride, u8(scale));
        const f32x2 scaled = {y * inverse_e8m0(scale), 0.0f};
        if (in_bounds) {
          last(column);
          mem::store((u8*)out + column, u8(numerics::to_e4m3fnx4(scaled, scaled)));
        }
      }
    } else if constexpr (kOutput == Output::kPerBlock) {
      const int lane = wave::lane();
      for (int group = wave::index(); group * group_size < columns; group += waves) {
        const int end = (group + 1) * group_size;
        float absmax = 0.0f;
        for (int column = group * group_size + lane; column < end; column += wave::kLanes)
          absmax = __builtin_fmaxf(absmax, __builtin_fabsf(value(column)));
        const float scale = absmax_to_bounded_scale(wave::reduce(absmax, 0.0f, Max{}));
        if (lane == 0) mem::store(scale_out + group * scale_stride, scale);
        const Scale divisor(scale);
        for (int column = group * group_size + lane; column < end; column += wave::kLanes)
          store_divided(column, divisor);
      }
    } else if constexpr (kOutput == Output::kPerToken) {
      LDS static float maxima[kMaxWaves];
      float absmax = 0.0f;
      for (int column = thread; column < columns; column += threads)
        absmax = __builtin_fmaxf(absmax, __builtin_fabsf(value(column)));
      const float scale = absmax_to_bounded_scale(reduce_block(absmax, 0.0f, maxima, waves, Max{}));
      if (thread == 0) mem::store(scale_out, scale);
      const Scale divisor(scale);
      for (int column = thread; column < columns; column += threads) store_divided(column, divisor);
    } else {
      for (int column = thread; column < columns; column += threads) {
        const float y = value(column);
        last(column);
        if constexpr (kOutput == Output::kPlain) store_element<T>(out, column, y);
        else mem::store((u8*)out + column, numerics::to_e4m3(y * loaded_scale));
      }
    }
  }
  template <class Value>
  DEVICE void store_elements(int columns, Value value) const {
    store_elements(columns, value, [](int) {});
  }

 private:
  DEVICE float load_scale() const {
    if constexpr (kOutput == Output::kStatic) return mem::load<float>(scale_at);
    else if constexpr (!is_dynamic(kOutput) || kBound == ScaleBound::kNone) return 0.0f;
    else return scale_at ? mem::load<float>(scale_at) : __builtin_inff();
  }

  // Returns min(x, scale_ub). Where scalars are not loaded first, the per-token output loads scale_ub here, at its only
  // use.
  DEVICE float bounded(float x) const {
    if (mem::kScalarsFirst || kOutput != Output::kPerToken) return __builtin_fminf(x, loaded_scale);
    return scale_at ? __builtin_fminf(x, mem::load<float>(scale_at)) : x;
  }
  DEVICE float absmax_to_bounded_scale(float absmax) const {
    if constexpr (kBound == ScaleBound::kNone) return absmax_to_scale(absmax);
    else if constexpr (kBound == ScaleBound::kAbsmax) return absmax_to_scale(bounded(absmax));
    else return __builtin_fmaxf(bounded(absmax_to_scale(absmax)), kMinScale);
  }

  // Stores a chunk and, in a group's first lane, the group's scale. A group spans the chunks of consecutive lanes.
  DEVICE void store_group(int index, bool in_bounds, const Chunk& y) const {
    int log2_lanes;
    float absmax = max_abs(0.0f, y);
    if constexpr (kGroupSize > 0) {
      log2_lanes = __builtin_ctz(kGroupSize / kChunk);
      absmax = wave::reduce_group<kGroupSize / kChunk>(absmax, 0.0f, Max{});
    } else {
      log2_lanes = group_size == 128 ? 4 : 3;
      absmax = wave::reduce_group<8>(absmax, 0.0f, Max{});
      if (group_size == 128) absmax = Max{}(absmax, wave::other_half<8>(absmax));
    }
    const bool is_first = (index & ((1 << log2_lanes) - 1)) == 0;
    const i64 group_scale = (index >> log2_lanes) * scale_stride;
    if constexpr (kOutput == Output::kMx) {
      static_assert(kGroupSize == kMxGroup);
      const u32 scale = absmax_to_e8m0(absmax);
      if (in_bounds) {
        mem::store((u32x2*)out + index, quantize_mx(y, scale));
        if (is_first) mem::store((u8*)scale_out + group_scale, u8(scale));
      }
    } else {
      const float scale = absmax_to_bounded_scale(absmax);
      if (in_bounds) {
        mem::store((u32x2*)out + index, quantize(y, Scale(scale)));
        if (is_first) mem::store(scale_out + group_scale, scale);
      }
    }
  }

  DEVICE static Chunk as_fp32(u32x4 y) { return unpack<T>(y); }
  DEVICE static Chunk as_fp32(const Chunk& y) { return y; }
  DEVICE static u32x4 as_packed(u32x4 y) { return y; }
  DEVICE static u32x4 as_packed(const Chunk& y) { return pack<T>(y); }
};
