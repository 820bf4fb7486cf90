// LayerNorm of rows, with optional fused e4m3 quantization.
//
//     d = input - mean(input)
//     y = T(d * rsqrt(mean(d^2) + epsilon) * weight + bias)
//     plain:     out = y
//     static:    out = e4m3(y * (1 / scale))
//     per token: scale[row] = max(min(absmax(y), scale_ub) / 448, min_scale);  out = e4m3(y / scale[row])
//     per block: the same for each group of group_size columns
//     mx:        out = e4m3fn(y * 2^(127 - s)), s per group of 32 columns
//
// Everything is fp32 up to the single rounding to T. The variance is computed from the differences to the mean, which
// takes a second reduction but loses no precision where the mean is far from zero; mean(input^2) - mean(input)^2 would
// lose all of it.
//
// Bytes per element: 2 (input) + 1 or 2 (out). As in rms_norm.hip a block owns a row and keeps it in registers, thread
// t the 8-element chunks t, t + threads, ..., and all loads are in flight before the first is used.
#include "device/row_output.h"

struct LayerNormRow {
  const void* input;   // [hidden] T
  const void* weight;  // [hidden] T, or null for ones
  const void* bias;    // [hidden] T, or null for zeros
  int hidden;
  float inverse_hidden, epsilon;

  // The row's mean, from the sum of all its elements.
  DEVICE float mean(float sum) const { return divide(sum, float(hidden), inverse_hidden); }
  DEVICE float inverse_deviation(float sum_of_squares) const {
    return numerics::rsqrt_approx(mean(sum_of_squares) + epsilon);
  }
};

// hidden is a multiple of 8 and at most threads * kChunks * 8; rows, weight and bias are 16-byte aligned.
template <class T, Output kOutput, int kChunks>
DEVICE void layer_norm_vector(LayerNormRow row, RowOutput<T, kOutput> output) {
  LDS static float sums[kMaxWaves], squares[kMaxWaves];
  RowChunks<kChunks, u32x4> chunks;
  u32x4 input[kChunks], weight[kChunks], bias[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunks.index[i] = wave::thread_id() + i * output.threads;
    chunks.in_bounds[i] = chunks.index[i] * kChunk < row.hidden;
    input[i] = mem::load_vector_or_zero(row.input, chunks.index[i], chunks.in_bounds[i]);
  }
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    weight[i] = mem::load_vector_or_zero(row.weight, chunks.index[i], chunks.in_bounds[i] && row.weight);
    bias[i] = mem::load_vector_or_zero(row.bias, chunks.index[i], chunks.in_bounds[i] && row.bias);
  }
  const u32 ones = row.weight ? 0 : T::pack({1.0f, 1.0f});  // ORed into the zeros loaded without a weight
  mem::wait_for_scalars(row.inverse_hidden, row.epsilon);
  output.locate(row.hidden);

  Chunk d[kChunks];
  f32x2 sum = {0.0f, 0.0f}, square = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    d[i] = unpack<T>(input[i]);
    for (f32x2 pair : d[i].pair) sum += pair;
  }
  const float mean = row.mean(reduce_block(sum.x + sum.y, 0.0f, sums, output.waves, Add{}));
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const float its_mean = chunks.in_bounds[i] ? mean : 0.0f;
    for (f32x2& pair : d[i].pair) {
      pair -= its_mean;
      square = __builtin_elementwise_fma(pair, pair, square);
    }
  }
  const float factor = row.inverse_deviation(reduce_block(square.x + square.y, 0.0f, squares, output.waves, Add{}));

#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    Chunk w = unpack<T>(weight[i] | ones), y = unpack<T>(bias[i]);
    for (int j = 0; j < kChunk / 2; ++j) y.pair[j] += d[i].pair[j] * factor * w.pair[j];
    chunks.y[i] = pack<T>(y);
    output.store(chunks.index[i], chunks.in_bounds[i], chunks.y[i]);
  }
  output.finish(chunks);
}

// Any hidden size and alignment, one element per access; rereads the row from HBM instead of keeping it.
template <class T, Output kOutput>
DEVICE void layer_norm_general(LayerNormRow row, RowOutput<T, kOutput> output) {
  LDS static float sums[kMaxWaves], squares[kMaxWaves];
  mem::wait_for_scalars(row.inverse_hidden, row.epsilon);
  output.locate(row.hidden);

  float sum = 0.0f, square = 0.0f;
  for (int column = wave::thread_id(); column < row.hidden; column += output.threads)
    sum += load_element<T>(row.input, column);
  const float mean = row.mean(reduce_block(sum, 0.0f, sums, output.waves, Add{}));
  for (int column = wave::thread_id(); column < row.hidden; column += output.threads) {
    const float d = load_element<T>(row.input, column) - mean;
    square = __builtin_fmaf(d, d, square);
  }
  const float factor = row.inverse_deviation(reduce_block(square, 0.0f, squares, output.waves, Add{}));

  output.store_elements(row.hidden, [&](int column) {
    const float weight = row.weight ? load_element<T>(row.weight, column) : 1.0f;
    const float bias = row.bias ? load_element<T>(row.bias, column) : 0.0f;
    return round_to<T>(bias + (load_element<T>(row.input, column) - mean) * factor * weight);
  });
}

// kChunks == 0 is the general kernel.
#define INSTANCE(threads, symbol, T, kOutput, kChunks)                                                    \
  KERNEL(threads)                                                                                         \
  symbol(const void* input,  /* [rows, hidden] T, rows input_stride elements apart */                     \
         const void* weight, /* [hidden] T or null */                                                     \
         const void* bias,   /* [hidden] T or null */                                                     \
         i64 input_stride, int hidden, int threads_per_block,                                             \
         const float* scale, /* [1]: the static scale, or for dynamic outputs scale_ub or null */         \
         void* out,          /* [rows, hidden] T or e4m3 */                                               \
         float* scale_out,   /* [rows, 1] or [rows, hidden / group_size], strided; null if unused */      \
         i64 scale_row_stride, i64 scale_stride, int group_size, float inverse_hidden, float epsilon) {   \
    const RowOutput<T, kOutput> output(scale, out, scale_out, scale_row_stride, scale_stride, group_size, \
                                       threads_per_block);                                                \
    const i64 first = i64(u32(wave::block_id_x())) * input_stride;                                        \
    const LayerNormRow row{(const u16*)input + first, weight, bias, hidden, inverse_hidden, epsilon};     \
    mem::issue_loads();                                                                                   \
    if constexpr (kChunks == 0) layer_norm_general<T, kOutput>(row, output);                              \
    else layer_norm_vector<T, kOutput, kChunks>(row, output);                                             \
  }

ROW_INSTANCES(INSTANCE, layer_norm_bf16, Bf16, Output::kPlain)
ROW_INSTANCES(INSTANCE, layer_norm_static_fp8_quant_bf16, Bf16, Output::kStatic)
ROW_INSTANCES(INSTANCE, layer_norm_dynamic_per_token_quant_bf16, Bf16, Output::kPerToken)
ROW_INSTANCES(INSTANCE, layer_norm_per_block_quant_bf16, Bf16, Output::kPerBlock)
ROW_INSTANCES(INSTANCE, layer_norm_mxfp8_quant_bf16, Bf16, Output::kMx)
ROW_INSTANCES(INSTANCE, layer_norm_fp16, F16, Output::kPlain)
ROW_INSTANCES(INSTANCE, layer_norm_static_fp8_quant_fp16, F16, Output::kStatic)
ROW_INSTANCES(INSTANCE, layer_norm_dynamic_per_token_quant_fp16, F16, Output::kPerToken)
ROW_INSTANCES(INSTANCE, layer_norm_per_block_quant_fp16, F16, Output::kPerBlock)
ROW_INSTANCES(INSTANCE, layer_norm_mxfp8_quant_fp16, F16, Output::kMx)
