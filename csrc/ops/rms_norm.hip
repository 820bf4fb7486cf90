// RMSNorm of rows, with an optional residual add in front and an optional e4m3 quantisation behind.
//
//     z = input + residual                   (residual := z, rounded to T)
//     n = T(z * rsqrt(mean(z^2) + epsilon) * weight)
//     plain:     out = n
//     static:    out = e4m3(n * (1 / scale))
//     per token: scale[row] = max(min(absmax(n), scale_ub) / 448, min_scale);  out = e4m3(n / scale[row])
//     per block: the same for each run of group_size columns
//
// Rounding follows vLLM 0.33.0's ops of the same names, as its wheel behaves: the plain and static kinds take z rounded to
// T and round n once; the dynamic kinds take z unrounded and round n before the weight too.
//
// Bytes per element: 2 (input) + 4 (residual, read and written) + 1 or 2 (out); some 10 flops. Up to about 64 rows the
// time is latency, above it is HBM bandwidth. A block owns a row and keeps it in registers between the reductions; lane
// by lane a thread owns chunks of 8 elements, thread t those at t, t + threads, ... All loads of a row, the weight's
// too, are in flight before the first is used, and there is one barrier per reduction. A row is not split over blocks:
// its sum of squares would need a barrier between blocks, which costs more than reading 64 KB in one block does. Nor do
// the two reductions of the per-token kind share a barrier: the scale that vLLM computes depends on the rounded n.
#include "device/reduce.h"
#include "device/rows.h"

struct NormRow : RowOutput {
  const void* input;   // [hidden] T
  void* residual;      // [hidden] T, updated, or null
  const void* weight;  // [hidden] T, or null for ones
  int hidden, threads;
  float inverse_hidden, epsilon;
};

DEVICE float inverse_rms(float sum_of_squares, const NormRow& row) {
  return numerics::rsqrt_approx(divide(sum_of_squares, float(row.hidden), row.inverse_hidden) + row.epsilon);
}

// z * rms * weight, before the last rounding.
template <class T, bool kRoundTwice>
DEVICE f32x2 normalize(f32x2 z, float rms, f32x2 weight) {
  f32x2 n = z * rms;
  if constexpr (kRoundTwice) n = round_to<T>(n);
  return n * weight;
}

DEVICE float dynamic_scale(float absmax, float scale_ub) { return absmax_to_scale(__builtin_fminf(absmax, scale_ub)); }

// hidden is a multiple of 8 and at most threads * kChunks * 8; rows and weight are 16-byte aligned.
template <class T, bool kResidual, Output kOutput, int kChunks>
DEVICE void rms_norm_vector(NormRow row) {
  constexpr bool kRounded = kOutput == Output::kPlain || kOutput == Output::kStatic;  // z is rounded before it is used
  LDS static float sums[kMaxWaves], maxima[kMaxWaves];
  const int waves = row.threads / wave::kLanes;

  u32x4 input[kChunks], residual[kChunks], weight[kChunks];
  int chunk[kChunks];
  bool in_bounds[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunk[i] = wave::thread_id() + i * row.threads;
    in_bounds[i] = chunk[i] * kChunk < row.hidden;
    input[i] = mem::load_vector_or_zero(row.input, chunk[i], in_bounds[i]);
    if constexpr (kResidual) residual[i] = mem::load_vector_or_zero(row.residual, chunk[i], in_bounds[i]);
  }
  // Ones without a weight: in place of the loads where those take predicates, else in place of the zeros that they give.
  const u32 one = T::pack({1.0f, 1.0f}), ones = mem::kPredicates || row.weight ? 0 : one;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if constexpr (mem::kPredicates) weight[i] = u32x4{one, one, one, one};
    if (!mem::kPredicates || (in_bounds[i] && row.weight))
      weight[i] = mem::load_vector_or_zero(row.weight, chunk[i], in_bounds[i] && row.weight);
  }
  mem::wait_for_scalars(row.inverse_hidden, row.epsilon);
  row.find<kOutput>(row.hidden);
  const float inverse_scale = kOutput == Output::kStatic ? 1.0f / row.scale : 0.0f;

  // z: the row, rounded ones kept packed.
  Chunk exact[kChunks];
  f32x2 squares = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    Chunk z = unpack<T>(input[i]);
    if constexpr (kResidual) {
      Chunk r = unpack<T>(residual[i]);
      for (int j = 0; j < kChunk / 2; ++j) z.pair[j] += r.pair[j];
      u32x4 rounded = pack<T>(z);
      if (in_bounds[i]) mem::store((u32x4*)row.residual + chunk[i], rounded);
      if constexpr (kRounded) z = unpack<T>(rounded);
    }
    for (f32x2 pair : z.pair) squares = __builtin_elementwise_fma(pair, pair, squares);
    exact[i] = z;
  }
  const float rms = inverse_rms(reduce_block(squares.x + squares.y, 0.0f, sums, waves, Add{}), row);

  u32x4 normed[kChunks];
  float absmax = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    Chunk w = unpack<T>(weight[i] | ones), n;
    for (int j = 0; j < kChunk / 2; ++j) n.pair[j] = normalize<T, !kRounded>(exact[i].pair[j], rms, w.pair[j]);
    normed[i] = pack<T>(n);
    if constexpr (kOutput == Output::kPlain) {
      if (in_bounds[i]) mem::store((u32x4*)row.out + chunk[i], normed[i]);
    } else if constexpr (kOutput == Output::kStatic) {
      if (in_bounds[i]) mem::store((u32x2*)row.out + chunk[i], quantize(unpack<T>(normed[i]), inverse_scale));
    } else if constexpr (kOutput == Output::kPerToken) {
      absmax = max_abs(absmax, unpack<T>(normed[i]));
    } else {
      // A group is the chunks of 8 or 16 neighbouring lanes.
      float group_max = wave::reduce_group<8>(max_abs(0.0f, unpack<T>(normed[i])), 0.0f, Max{});
      if (row.group_size == 128) group_max = wave::reduce_group<16>(group_max, 0.0f, Max{});
      const float scale = dynamic_scale(group_max, row.scale);
      if (in_bounds[i]) {
        mem::store((u32x2*)row.out + chunk[i], quantize(unpack<T>(normed[i]), Scale(scale)));
        const int log2_lanes = row.group_size == 128 ? 4 : 3;
        if ((chunk[i] & ((1 << log2_lanes) - 1)) == 0)
          mem::store(row.scale_out + (chunk[i] >> log2_lanes) * row.scale_stride, scale);
      }
    }
  }
  if constexpr (kOutput == Output::kPerToken) {
    const float scale = absmax_to_scale(row.bounded(reduce_block(absmax, 0.0f, maxima, waves, Max{})));
    if (wave::thread_id() == 0) mem::store(row.scale_out, scale);
    const Scale divisor(scale);
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      if (in_bounds[i]) mem::store((u32x2*)row.out + chunk[i], quantize(unpack<T>(normed[i]), divisor));
  }
}

// Any hidden size and alignment, one element per access; rereads the row from HBM instead of keeping it.
template <class T, bool kResidual, Output kOutput>
DEVICE void rms_norm_general(NormRow row) {
  constexpr bool kRounded = kOutput == Output::kPlain || kOutput == Output::kStatic;
  LDS static float sums[kMaxWaves], maxima[kMaxWaves];
  const int waves = row.threads / wave::kLanes;
  mem::wait_for_scalars(row.inverse_hidden, row.epsilon);
  row.find<kOutput>(row.hidden);

  auto sum = [&](int column) {
    float z = load_element<T>(row.input, column);
    if constexpr (kResidual) z += load_element<T>(row.residual, column);
    return z;
  };
  float squares = 0.0f;
  for (int column = wave::thread_id(); column < row.hidden; column += row.threads) {
    float z = sum(column);
    if constexpr (kResidual && kRounded) {
      z = round_to<T>(z);
      store_element<T>(row.residual, column, z);
    }
    squares = __builtin_fmaf(z, z, squares);
  }
  const float rms = inverse_rms(reduce_block(squares, 0.0f, sums, waves, Add{}), row);

  auto normed = [&](int column) {
    // The rounded kinds have already left z in the residual.
    float z = kResidual && kRounded ? load_element<T>(row.residual, column) : sum(column);
    float weight = row.weight ? load_element<T>(row.weight, column) : 1.0f;
    return round_to<T>(normalize<T, !kRounded>(f32x2{z, 0.0f}, rms, f32x2{weight, 0.0f})).x;
  };
  auto finish = [&](int column, const Scale& scale) {
    float n = normed(column);
    if constexpr (kResidual) store_element<T>(row.residual, column, sum(column));
    mem::store((u8*)row.out + column, numerics::to_e4m3(divide(n, scale.value, scale.inverse)));
  };

  if constexpr (kOutput == Output::kPerBlock) {
    const int lane = wave::lane();
    for (int group = wave::index(); group * row.group_size < row.hidden; group += waves) {
      const int end = (group + 1) * row.group_size;
      float absmax = 0.0f;
      for (int column = group * row.group_size + lane; column < end; column += wave::kLanes)
        absmax = __builtin_fmaxf(absmax, __builtin_fabsf(normed(column)));
      const float scale = dynamic_scale(wave::reduce(absmax, 0.0f, Max{}), row.scale);
      if (lane == 0) mem::store(row.scale_out + group * row.scale_stride, scale);
      const Scale divisor(scale);
      for (int column = group * row.group_size + lane; column < end; column += wave::kLanes) finish(column, divisor);
    }
  } else if constexpr (kOutput == Output::kPerToken) {
    float absmax = 0.0f;
    for (int column = wave::thread_id(); column < row.hidden; column += row.threads)
      absmax = __builtin_fmaxf(absmax, __builtin_fabsf(normed(column)));
    const float scale = absmax_to_scale(row.bounded(reduce_block(absmax, 0.0f, maxima, waves, Max{})));
    if (wave::thread_id() == 0) mem::store(row.scale_out, scale);
    const Scale divisor(scale);
    for (int column = wave::thread_id(); column < row.hidden; column += row.threads) finish(column, divisor);
  } else {
    const float inverse_scale = kOutput == Output::kStatic ? 1.0f / row.scale : 1.0f;
    for (int column = wave::thread_id(); column < row.hidden; column += row.threads) {
      float n = normed(column);
      if constexpr (kOutput == Output::kPlain) store_element<T>(row.out, column, n);
      else mem::store((u8*)row.out + column, numerics::to_e4m3(n * inverse_scale));
    }
  }
}

// kChunks == 0 is the general kernel.
template <class T, bool kResidual, Output kOutput, int kChunks>
DEVICE void rms_norm(const void* input, void* residual, const void* weight, i64 input_stride, i64 residual_stride,
                     int hidden, int threads, const float* scale, void* out, float* scale_out, i64 scale_row_stride,
                     i64 scale_stride, int group_size, float inverse_hidden, float epsilon) {
  const i64 index = u32(wave::block_id_x());
  const NormRow row{{scale, mem::kScalarsFirst ? load_scale<kOutput>(scale) : 0.0f, out, scale_out, scale_row_stride,
                     scale_stride, group_size},
                    (const u16*)input + index * input_stride,
                    kResidual ? (u16*)residual + index * residual_stride : nullptr,
                    weight,
                    hidden,
                    threads,
                    inverse_hidden,
                    epsilon};
  mem::issue_loads();
  if constexpr (kChunks == 0) rms_norm_general<T, kResidual, kOutput>(row);
  else rms_norm_vector<T, kResidual, kOutput, kChunks>(row);
}

// clang-format off
#define INSTANCE(threads, symbol, T, residual_add, output, chunks)                                                    \
  KERNEL(threads) symbol(                                                                                             \
      const void* input,      /* [rows, hidden] T, rows input_stride elements apart */                                \
      void* residual,         /* [rows, hidden] T, rows residual_stride elements apart; null without */               \
      const void* weight,     /* [hidden] T or null */                                                                \
      i64 input_stride, i64 residual_stride, int hidden, int threads_per_block,                                       \
      const float* scale,     /* [1], of the static kind; of the dynamic kinds scale_ub or null */                    \
      void* out,              /* [rows, hidden] T or e4m3 */                                                          \
      float* scale_out,       /* [rows, 1] or [rows, hidden / group_size], by the two strides; null without */        \
      i64 scale_row_stride, i64 scale_stride, int group_size, float inverse_hidden, float epsilon) {                  \
    rms_norm<T, residual_add, Output::output, chunks>(input, residual, weight, input_stride, residual_stride, hidden, \
        threads_per_block, scale, out, scale_out, scale_row_stride, scale_stride, group_size, inverse_hidden,         \
        epsilon);                                                                                                     \
  }

INSTANCE(1024, rms_norm_bf16_x1,                                          Bf16, false, kPlain,    1)
INSTANCE(1024, rms_norm_bf16_x2,                                          Bf16, false, kPlain,    2)
INSTANCE( 512, rms_norm_bf16_x4,                                          Bf16, false, kPlain,    4)
INSTANCE(1024, rms_norm_bf16_general,                                     Bf16, false, kPlain,    0)
INSTANCE(1024, rms_norm_static_fp8_quant_bf16_x1,                         Bf16, false, kStatic,   1)
INSTANCE(1024, rms_norm_static_fp8_quant_bf16_x2,                         Bf16, false, kStatic,   2)
INSTANCE( 512, rms_norm_static_fp8_quant_bf16_x4,                         Bf16, false, kStatic,   4)
INSTANCE(1024, rms_norm_static_fp8_quant_bf16_general,                    Bf16, false, kStatic,   0)
INSTANCE(1024, rms_norm_dynamic_per_token_quant_bf16_x1,                  Bf16, false, kPerToken, 1)
INSTANCE(1024, rms_norm_dynamic_per_token_quant_bf16_x2,                  Bf16, false, kPerToken, 2)
INSTANCE( 512, rms_norm_dynamic_per_token_quant_bf16_x4,                  Bf16, false, kPerToken, 4)
INSTANCE(1024, rms_norm_dynamic_per_token_quant_bf16_general,             Bf16, false, kPerToken, 0)
INSTANCE(1024, rms_norm_per_block_quant_bf16_x1,                          Bf16, false, kPerBlock, 1)
INSTANCE(1024, rms_norm_per_block_quant_bf16_x2,                          Bf16, false, kPerBlock, 2)
INSTANCE( 512, rms_norm_per_block_quant_bf16_x4,                          Bf16, false, kPerBlock, 4)
INSTANCE(1024, rms_norm_per_block_quant_bf16_general,                     Bf16, false, kPerBlock, 0)
INSTANCE(1024, fused_add_rms_norm_bf16_x1,                                Bf16, true,  kPlain,    1)
INSTANCE(1024, fused_add_rms_norm_bf16_x2,                                Bf16, true,  kPlain,    2)
INSTANCE( 512, fused_add_rms_norm_bf16_x4,                                Bf16, true,  kPlain,    4)
INSTANCE(1024, fused_add_rms_norm_bf16_general,                           Bf16, true,  kPlain,    0)
INSTANCE(1024, fused_add_rms_norm_static_fp8_quant_bf16_x1,               Bf16, true,  kStatic,   1)
INSTANCE(1024, fused_add_rms_norm_static_fp8_quant_bf16_x2,               Bf16, true,  kStatic,   2)
INSTANCE( 512, fused_add_rms_norm_static_fp8_quant_bf16_x4,               Bf16, true,  kStatic,   4)
INSTANCE(1024, fused_add_rms_norm_static_fp8_quant_bf16_general,          Bf16, true,  kStatic,   0)
INSTANCE(1024, fused_add_rms_norm_dynamic_per_token_quant_bf16_x1,        Bf16, true,  kPerToken, 1)
INSTANCE(1024, fused_add_rms_norm_dynamic_per_token_quant_bf16_x2,        Bf16, true,  kPerToken, 2)
INSTANCE( 512, fused_add_rms_norm_dynamic_per_token_quant_bf16_x4,        Bf16, true,  kPerToken, 4)
INSTANCE(1024, fused_add_rms_norm_dynamic_per_token_quant_bf16_general,   Bf16, true,  kPerToken, 0)
INSTANCE(1024, fused_add_rms_norm_per_block_quant_bf16_x1,                Bf16, true,  kPerBlock, 1)
INSTANCE(1024, fused_add_rms_norm_per_block_quant_bf16_x2,                Bf16, true,  kPerBlock, 2)
INSTANCE( 512, fused_add_rms_norm_per_block_quant_bf16_x4,                Bf16, true,  kPerBlock, 4)
INSTANCE(1024, fused_add_rms_norm_per_block_quant_bf16_general,           Bf16, true,  kPerBlock, 0)
INSTANCE(1024, rms_norm_fp16_x1,                                          F16,  false, kPlain,    1)
INSTANCE(1024, rms_norm_fp16_x2,                                          F16,  false, kPlain,    2)
INSTANCE( 512, rms_norm_fp16_x4,                                          F16,  false, kPlain,    4)
INSTANCE(1024, rms_norm_fp16_general,                                     F16,  false, kPlain,    0)
INSTANCE(1024, rms_norm_static_fp8_quant_fp16_x1,                         F16,  false, kStatic,   1)
INSTANCE(1024, rms_norm_static_fp8_quant_fp16_x2,                         F16,  false, kStatic,   2)
INSTANCE( 512, rms_norm_static_fp8_quant_fp16_x4,                         F16,  false, kStatic,   4)
INSTANCE(1024, rms_norm_static_fp8_quant_fp16_general,                    F16,  false, kStatic,   0)
INSTANCE(1024, rms_norm_dynamic_per_token_quant_fp16_x1,                  F16,  false, kPerToken, 1)
INSTANCE(1024, rms_norm_dynamic_per_token_quant_fp16_x2,                  F16,  false, kPerToken, 2)
INSTANCE( 512, rms_norm_dynamic_per_token_quant_fp16_x4,                  F16,  false, kPerToken, 4)
INSTANCE(1024, rms_norm_dynamic_per_token_quant_fp16_general,             F16,  false, kPerToken, 0)
INSTANCE(1024, rms_norm_per_block_quant_fp16_x1,                          F16,  false, kPerBlock, 1)
INSTANCE(1024, rms_norm_per_block_quant_fp16_x2,                          F16,  false, kPerBlock, 2)
INSTANCE( 512, rms_norm_per_block_quant_fp16_x4,                          F16,  false, kPerBlock, 4)
INSTANCE(1024, rms_norm_per_block_quant_fp16_general,                     F16,  false, kPerBlock, 0)
INSTANCE(1024, fused_add_rms_norm_fp16_x1,                                F16,  true,  kPlain,    1)
INSTANCE(1024, fused_add_rms_norm_fp16_x2,                                F16,  true,  kPlain,    2)
INSTANCE( 512, fused_add_rms_norm_fp16_x4,                                F16,  true,  kPlain,    4)
INSTANCE(1024, fused_add_rms_norm_fp16_general,                           F16,  true,  kPlain,    0)
INSTANCE(1024, fused_add_rms_norm_static_fp8_quant_fp16_x1,               F16,  true,  kStatic,   1)
INSTANCE(1024, fused_add_rms_norm_static_fp8_quant_fp16_x2,               F16,  true,  kStatic,   2)
INSTANCE( 512, fused_add_rms_norm_static_fp8_quant_fp16_x4,               F16,  true,  kStatic,   4)
INSTANCE(1024, fused_add_rms_norm_static_fp8_quant_fp16_general,          F16,  true,  kStatic,   0)
INSTANCE(1024, fused_add_rms_norm_dynamic_per_token_quant_fp16_x1,        F16,  true,  kPerToken, 1)
INSTANCE(1024, fused_add_rms_norm_dynamic_per_token_quant_fp16_x2,        F16,  true,  kPerToken, 2)
INSTANCE( 512, fused_add_rms_norm_dynamic_per_token_quant_fp16_x4,        F16,  true,  kPerToken, 4)
INSTANCE(1024, fused_add_rms_norm_dynamic_per_token_quant_fp16_general,   F16,  true,  kPerToken, 0)
INSTANCE(1024, fused_add_rms_norm_per_block_quant_fp16_x1,                F16,  true,  kPerBlock, 1)
INSTANCE(1024, fused_add_rms_norm_per_block_quant_fp16_x2,                F16,  true,  kPerBlock, 2)
INSTANCE( 512, fused_add_rms_norm_per_block_quant_fp16_x4,                F16,  true,  kPerBlock, 4)
INSTANCE(1024, fused_add_rms_norm_per_block_quant_fp16_general,           F16,  true,  kPerBlock, 0)
// clang-format on
