// RMSNorm of a row held in a block's registers. ops/rms_norm.hip loads it from HBM, collectives/ sums it over all
// ranks.
#pragma once
#include "row_output.h"

struct NormRow {
  const void* input;   // [hidden] T
  void* residual;      // [hidden] T, updated, or null
  const void* weight;  // [hidden] T, or null for ones
  int hidden;
  float inverse_hidden, epsilon;
  bool adds_one = false;         // to the weight, for Factor::kEither
  const void* addend = nullptr;  // [hidden] T, for sources that add it to the input, times addend_factor
  float addend_factor = 1.0f;
};

DEVICE float inverse_rms(float sum_of_squares, const NormRow& row) {
  return numerics::rsqrt_approx(divide(sum_of_squares, float(row.hidden), row.inverse_hidden) + row.epsilon);
}

// The factor applied to z: the weight, 1 + weight (Gemma), or chosen per NormRow.
enum class Factor { kWeight, kOnePlusWeight, kEither };

// z * rms * factor, before the last rounding.
template <class T, bool kRoundTwice, Factor kFactor>
DEVICE f32x2 normalize(f32x2 z, float rms, f32x2 weight, bool adds_one = false) {
  f32x2 n = z * rms;
  if (kFactor == Factor::kOnePlusWeight || (kFactor == Factor::kEither && adds_one)) return n * (1.0f + weight);
  if constexpr (kRoundTwice) n = round_to<T>(n);
  return n * weight;
}

// True if z is rounded to T before use.
constexpr bool rounds_sum(Output output) { return !is_dynamic(output) || output == Output::kMx; }
template <class RowOut>
constexpr bool kRoundsSum = true;  // for outputs that store y as T
template <class T, Output kOutput>
constexpr bool kRoundsSum<RowOutput<T, kOutput>> = rounds_sum(kOutput);

// x + factor * y, rounded to T.
template <class T>
DEVICE u32x4 rounded_sum(u32x4 x, u32x4 y, float factor) {
  Chunk sum = unpack<T>(x), addend = unpack<T>(y);
  for (int j = 0; j < kChunk / 2; ++j) sum.pair[j] += factor * addend.pair[j];
  return pack<T>(sum);
}

// The row's source and the threads that hold it: FromMemory loads it from HBM into one block, SumFromMemory adds the
// addend to it. Any other source fills `input` once all other loads are issued; its rows may have a residual or none.
struct FromMemory : BlockOfRow {
  static constexpr bool kLoads = true, kAdds = false;
};
struct SumFromMemory : FromMemory {
  static constexpr bool kAdds = true;
};

// hidden is a multiple of 8 and at most threads * kChunks * 8; rows and weight are 16-byte aligned. RowOut is a
// RowOutput or provides its functions.
template <class T, bool kResidual, Factor kFactor, int kChunks, class RowOut, class Source = FromMemory>
DEVICE void rms_norm_vector(NormRow row, RowOut output, Source source = {}) {
  constexpr bool kRounded = kRoundsSum<RowOut>;
  LDS static float sums[kMaxWaves];
  RowChunks<kChunks, u32x4> chunks;
  u32x4 input[kChunks], addend[kChunks], residual[kChunks], weight[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunks.index[i] = source.thread() + i * output.threads;
    chunks.in_bounds[i] = chunks.index[i] * kChunk < row.hidden;
    auto load = [&](const void* from) { return mem::load_vector_or_zero(from, chunks.index[i], chunks.in_bounds[i]); };
    if constexpr (!Source::kLoads) {
      // Without a residual, -0: it changes no sum.
      const u32 nothing = row.residual ? 0 : T::pack({-0.0f, -0.0f});
      residual[i] =
          mem::load_vector_or_zero(row.residual, chunks.index[i], chunks.in_bounds[i] && row.residual) | nothing;
      continue;
    }
    if constexpr (kResidual && !kRounded) residual[i] = load(row.residual);
    input[i] = load(row.input);
    if constexpr (Source::kAdds) addend[i] = load(row.addend);
    if constexpr (kResidual && kRounded) residual[i] = load(row.residual);
  }
  // Ones without a weight: set before predicated loads, otherwise ORed into the zeros they return.
  const u32 one = T::pack({1.0f, 1.0f}), ones = mem::kPredicates || row.weight ? 0 : one;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if constexpr (mem::kPredicates) weight[i] = u32x4{one, one, one, one};
    if (!mem::kPredicates || (chunks.in_bounds[i] && row.weight))
      weight[i] = mem::load_vector_or_zero(row.weight, chunks.index[i], chunks.in_bounds[i] && row.weight);
  }
  if constexpr (!Source::kLoads) source.fill(chunks, input);
  if constexpr (Source::kAdds) mem::wait_for_scalars(row.addend_factor);
  mem::wait_for_scalars(row.inverse_hidden, row.epsilon);
  output.locate(row.hidden);

  // z: the row. Rounded rows stay packed.
  Chunk exact[kChunks];
  f32x2 squares = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if constexpr (Source::kAdds) input[i] = rounded_sum<T>(input[i], addend[i], row.addend_factor);
    Chunk z = unpack<T>(input[i]);
    if constexpr (kResidual) {
      Chunk r = unpack<T>(residual[i]);
      for (int j = 0; j < kChunk / 2; ++j) z.pair[j] += r.pair[j];
      u32x4 rounded = pack<T>(z);
      if (chunks.in_bounds[i] && (Source::kLoads || row.residual))
        mem::store((u32x4*)row.residual + chunks.index[i], rounded);
      if constexpr (kRounded) z = unpack<T>(rounded);
    }
    for (f32x2 pair : z.pair) squares = __builtin_elementwise_fma(pair, pair, squares);
    exact[i] = z;
  }
  const float rms = inverse_rms(source.reduce(squares.x + squares.y, 0.0f, sums, output.waves, Add{}), row);

#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    Chunk w = unpack<T>(weight[i] | ones), n;
    for (int j = 0; j < kChunk / 2; ++j)
      n.pair[j] = normalize<T, !kRounded, kFactor>(exact[i].pair[j], rms, w.pair[j], row.adds_one);
    chunks.y[i] = pack<T>(n);
    if constexpr (!Source::kLoads) source.keep(chunks.index[i], chunks.in_bounds[i], chunks.y[i]);
    output.store(chunks.index[i], chunks.in_bounds[i], chunks.y[i]);
  }
  output.finish(chunks, source);
}
