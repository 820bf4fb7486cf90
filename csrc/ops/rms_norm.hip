// RMSNorm of rows, with optional fused residual add and e4m3 quantization.
//
//     x = input, or T(input + addend_factor * addend)
//     z = x + residual               (residual := z, rounded to T)
//     y = T(z * rsqrt(mean(z^2) + epsilon) * weight), which device/row_output.h stores or quantizes
//
// Rounding matches the ops of the same names in vLLM 0.33.0's wheel. Plain and static outputs use z rounded to T and
// round y once. Dynamic outputs use z unrounded and also round before the weight. With 1 + weight instead of the
// weight, as in vLLM's GemmaRMSNorm, all outputs round y once. The MX output, for which vLLM has no fused op, rounds as
// the plain one does: it equals a norm followed by quantization of its result. So does the quantized one of two outputs,
// the plain y and y per 128 columns.
//
// Bytes per element: 2 (input) + 2 (addend) + 4 (residual, read and written) + 1, 2 or 3 (out); about 10 flops.
// Latency-bound up to about 64 rows, bound by HBM bandwidth above. A block owns a row and keeps it in registers between
// the reductions. Thread t processes the 8-element chunks t, t + threads, ... All loads of the row and the weight are
// in flight before the first is used. Each reduction has one barrier. Rejected: blocks that share a row. The sum of
// squares would need a barrier between blocks, which takes longer than one block takes to read 64 KB. The two
// reductions of the per-token output cannot share a barrier: vLLM's scale depends on the rounded y. More blocks that
// prefetch 3 to 12 MB of the next GEMM's weight to L2: a GEMM after an idle kernel took 1 to 2 us less on an H100, but
// 40 layers of Llama-405B gained nothing (6.66 ms with 6 MB, 6.63 without; 12 MB: 6.83).
#include "device/divisor.h"
#include "device/norm_row.h"

// Two outputs per row: y as T, and the same y quantized as in ops/fused_experts_quantize.hip.
constexpr int kGroup = 128;
template <class T>
struct PlainAndPerBlock : RowOutput<T, Output::kPerBlock, ScaleBound::kNone, kGroup> {
  using Quantized = RowOutput<T, Output::kPerBlock, ScaleBound::kNone, kGroup>;
  void* plain;  // [columns] T; before locate() the first row

  DEVICE PlainAndPerBlock(void* plain, void* values, float* scale_out, int hidden, int threads)
      : Quantized(nullptr, values, scale_out, u32(hidden) / kGroup, 1, kGroup, threads), plain(plain) {}

  DEVICE void locate(i64 columns) {
    mem::wait_for_scalars(plain, Quantized::out, Quantized::scale_out);
    Quantized::locate(columns);
    plain = (u16*)plain + u32(wave::block_id_x()) * columns;
  }
  DEVICE void store(int index, bool in_bounds, u32x4 y) {
    if (in_bounds) mem::store((u32x4*)plain + index, y);
    Quantized::store(index, in_bounds, y);
  }
  template <class Value, class Last>
  DEVICE void store_elements(int columns, Value value, Last) const {
    Quantized::store_elements(columns, value, [&](int column) { store_element<T>(plain, column, value(column)); });
  }
};

// Any hidden size and alignment, one element per access; rereads the row from HBM instead of keeping it.
template <class T, class Source, bool kResidual, Factor kFactor, class Outputs>
DEVICE void rms_norm_general(NormRow row, Outputs output) {
  constexpr bool kRounded = kRoundsSum<Outputs>;
  LDS static float sums[kMaxWaves];
  if constexpr (Source::kAdds) mem::wait_for_scalars(row.addend_factor);
  mem::wait_for_scalars(row.inverse_hidden, row.epsilon);
  output.locate(row.hidden);

  auto sum = [&](int column) {
    float z = load_element<T>(row.input, column);
    if constexpr (Source::kAdds) z = round_to<T>(z + row.addend_factor * load_element<T>(row.addend, column));
    if constexpr (kResidual) z += load_element<T>(row.residual, column);
    return z;
  };
  float squares = 0.0f;
  for (int column = wave::thread_id(); column < row.hidden; column += output.threads) {
    float z = sum(column);
    if constexpr (kResidual && kRounded) {
      z = round_to<T>(z);
      store_element<T>(row.residual, column, z);
    }
    squares = __builtin_fmaf(z, z, squares);
  }
  const float rms = inverse_rms(reduce_block(squares, 0.0f, sums, output.waves, Add{}), row);

  auto normed = [&](int column) {
    // The rounded kinds have already stored z to the residual.
    float z = kResidual && kRounded ? load_element<T>(row.residual, column) : sum(column);
    float weight = row.weight ? load_element<T>(row.weight, column) : 1.0f;
    return round_to<T>(normalize<T, !kRounded, kFactor>(f32x2{z, 0.0f}, rms, f32x2{weight, 0.0f})).x;
  };
  output.store_elements(row.hidden, normed, [&](int column) {
    if constexpr (kResidual && !kRounded) store_element<T>(row.residual, column, sum(column));
  });
}

// kChunks == 0 is the general kernel.
template <class T, class Source, bool kResidual, Factor kFactor, int kChunks, class Outputs>
DEVICE void rms_norm(NormRow row, Outputs output) {
  mem::issue_loads();
  if constexpr (kChunks == 0) rms_norm_general<T, Source, kResidual, kFactor>(row, output);
  else rms_norm_vector<T, kResidual, kFactor, kChunks>(row, output, Source{});
}

template <bool kResidual>
DEVICE NormRow row_of(i64 index, const void* input, void* residual, const void* weight, i64 input_stride,
                      i64 residual_stride, int hidden, float inverse_hidden, float epsilon, const void* addend,
                      float addend_factor) {
  return {(const u16*)input + index * input_stride,
          kResidual ? (u16*)residual + index * residual_stride : nullptr,
          weight,
          hidden,
          inverse_hidden,
          epsilon,
          false,
          addend,
          addend_factor};
}

// clang-format off
// The arguments for an addend, and the row that a block adds. Shorter strides leave room for the scale among the
// preloaded arguments.
#define STRIDE_FromMemory i64
#define STRIDE_SumFromMemory int
#define ADDEND_FromMemory
#define ADDEND_SumFromMemory const void* addend, /* [rows, hidden] T, strided as input */
#define FACTOR_FromMemory
#define FACTOR_SumFromMemory , float addend_factor
#define ADDED_FromMemory nullptr, 1.0f
#define ADDED_SumFromMemory (const u16*)addend + index * input_stride, addend_factor
#define INSTANCE(threads, symbol, T, output_kind, Source, residual_add, factor, chunks)                               \
  KERNEL(threads) symbol(                                                                                             \
      const void* input,      /* [rows, hidden] T, rows input_stride elements apart */                                \
      void* residual,         /* [rows, hidden] T, rows residual_stride elements apart; or null */                    \
      ADDEND_##Source                                                                                                 \
      const void* weight,     /* [hidden] T or null */                                                                \
      STRIDE_##Source input_stride, STRIDE_##Source residual_stride, int hidden, int threads_per_block,               \
      const float* scale,     /* [1]: the static scale, or for dynamic outputs scale_ub or null */                    \
      void* out,              /* [rows, hidden] T or e4m3 */                                                          \
      float* scale_out,       /* [rows, 1] or [rows, hidden / group_size], strided; null if unused */                 \
      i64 scale_row_stride, i64 scale_stride, int group_size, float inverse_hidden, float epsilon FACTOR_##Source) {  \
    const i64 index = u32(wave::block_id_x());                                                                        \
    const RowOutput<T, Output::output_kind> output(                                                                   \
        scale, out, scale_out, scale_row_stride, scale_stride, group_size, threads_per_block);                        \
    rms_norm<T, Source, residual_add, Factor::factor, chunks>(row_of<residual_add>(                                   \
        index, input, residual, weight, input_stride, residual_stride, hidden, inverse_hidden, epsilon,               \
        ADDED_##Source), output);                                                                                     \
  }
// Two outputs instead of one with an output kind.
#define BOTH_INSTANCE(threads, symbol, T, Source, residual_add, factor, chunks)                                       \
  KERNEL(threads) symbol(                                                                                             \
      const void* input, void* residual, ADDEND_##Source const void* weight, /* as above, here and below */           \
      STRIDE_##Source input_stride, STRIDE_##Source residual_stride, int hidden, int threads_per_block,               \
      void* out,              /* [rows, hidden] T */                                                                  \
      void* quantized,        /* [rows, hidden] e4m3 */                                                               \
      float* scale_out,       /* [rows, hidden / 128] */                                                              \
      float inverse_hidden, float epsilon FACTOR_##Source) {                                                          \
    const i64 index = u32(wave::block_id_x());                                                                        \
    const PlainAndPerBlock<T> output(out, quantized, scale_out, hidden, threads_per_block);                           \
    rms_norm<T, Source, residual_add, Factor::factor, chunks>(row_of<residual_add>(                                   \
        index, input, residual, weight, input_stride, residual_stride, hidden, inverse_hidden, epsilon,               \
        ADDED_##Source), output);                                                                                     \
  }
// Rows with two strides, such as heads that are part of wider rows.
#define HEADS_INSTANCE(threads, symbol, T, output_kind, factor, chunks)                                               \
  KERNEL(threads) symbol(                                                                                             \
      const void* input,      /* [rows / inner_count, inner_count, hidden] T, two strides */                          \
      const void* weight,     /* [hidden] T or null */                                                                \
      const float* scale,     /* as above, here and below */                                                          \
      i64 outer_stride, int inner_stride, int inner_count, u32 inverse, int shift, /* the divisor inner_count */      \
      int hidden, int threads_per_block, void* out, float* scale_out, i64 scale_row_stride, i64 scale_stride,         \
      int group_size, float inverse_hidden, float epsilon) {                                                          \
    const RowOutput<T, Output::output_kind> output(                                                                   \
        scale, out, scale_out, scale_row_stride, scale_stride, group_size, threads_per_block);                        \
    const u32 row = wave::block_id_x();                                                                               \
    const int outer = row / Divisor{inverse, shift}, inner = int(row) - outer * inner_count;                          \
    rms_norm<T, FromMemory, false, Factor::factor, chunks>(                                                           \
        {(const u16*)input + outer * outer_stride + i64(inner) * inner_stride, nullptr,                               \
         weight, hidden, inverse_hidden, epsilon}, output);                                                           \
  }
// clang-format on

// `instance` makes a kernel from T and, if it has an output kind, this kind.
#define ROWS(instance, type, name, ...)                                                                          \
  ROW_INSTANCES(instance, name##_##type, __VA_ARGS__, FromMemory, false, kWeight)                                \
  ROW_INSTANCES(instance, fused_add_##name##_##type, __VA_ARGS__, FromMemory, true, kWeight)                     \
  FEW_ROW_INSTANCES(instance, fused_add_sum_##name##_##type, __VA_ARGS__, SumFromMemory, true, kWeight)          \
  FEW_ROW_INSTANCES(instance, name##_one_plus_##type, __VA_ARGS__, FromMemory, false, kOnePlusWeight)            \
  FEW_ROW_INSTANCES(instance, fused_add_##name##_one_plus_##type, __VA_ARGS__, FromMemory, true, kOnePlusWeight) \
  FEW_ROW_INSTANCES(instance, fused_add_sum_##name##_one_plus_##type, __VA_ARGS__, SumFromMemory, true, kOnePlusWeight)
#define ROWS_AND_HEADS(type, name, T, output_kind)                                \
  ROWS(INSTANCE, type, name, T, output_kind)                                      \
  FEW_ROW_INSTANCES(HEADS_INSTANCE, name##_heads_##type, T, output_kind, kWeight) \
  FEW_ROW_INSTANCES(HEADS_INSTANCE, name##_heads_one_plus_##type, T, output_kind, kOnePlusWeight)
#define ALL(type, T)                                                   \
  ROWS_AND_HEADS(type, rms_norm, T, kPlain)                            \
  ROWS_AND_HEADS(type, rms_norm_static_fp8_quant, T, kStatic)          \
  ROWS_AND_HEADS(type, rms_norm_dynamic_per_token_quant, T, kPerToken) \
  ROWS_AND_HEADS(type, rms_norm_per_block_quant, T, kPerBlock)         \
  ROWS(INSTANCE, type, rms_norm_mxfp8_quant, T, kMx)                   \
  ROWS(BOTH_INSTANCE, type, rms_norm_and_per_block_quant, T)

ALL(bf16, Bf16)
ALL(fp16, F16)
