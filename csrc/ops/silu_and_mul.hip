// SwiGLU activation of rows [gate | up], with an optional e4m3 quantisation behind.
//
//     y = gate * sigmoid(gate) * up, which device/row_output.h stores or quantises
//
// Rounding is that of vLLM's ops of the same names in the wheel of 0.33.0 (per token: on its main branch). Plain and
// static outputs round gate * sigmoid(gate) to T, and y. Dynamic outputs keep fp32 up to the cast. scale_ub bounds the
// absolute maximum per token, but the scale per block.
//
// Bytes per element: 4 (gate and up) + 1 or 2 (out); some 8 flops and two transcendentals. Without a maximum over the
// row, blocks share a row: there are as many as it has chunks for. The per-token output gives a row to one block, which
// keeps y in registers across its one barrier. Thread t of a block has the chunks of 8 elements t, t + threads, ... of
// the block's columns.
#include "device/row_output.h"

template <class T, Output kOutput>
using Activation = RowOutput<T, kOutput, kOutput == Output::kPerBlock ? ScaleBound::kScale : ScaleBound::kAbsmax>;

struct GatedRow {
  const void* gate;  // [hidden] T
  const void* up;    // [hidden] T
  int hidden;
};

DEVICE f32x2 silu(f32x2 gate) { return {silu(gate.x), silu(gate.y)}; }

template <class T, bool kRounded>
DEVICE Chunk silu_and_mul(u32x4 gate, u32x4 up) {
  Chunk g = unpack<T>(gate), y = unpack<T>(up);
  for (int i = 0; i < kChunk / 2; ++i) {
    f32x2 activated = silu(g.pair[i]);
    if constexpr (kRounded) activated = round_to<T>(activated);
    y.pair[i] *= activated;
    if constexpr (kRounded) y.pair[i] = round_to<T>(y.pair[i]);
  }
  return y;
}

// hidden is a multiple of 8; gate, up and out are 16-byte aligned. The block has the chunks from `first` on, kChunks
// per thread.
template <class T, Output kOutput, int kChunks>
DEVICE void silu_and_mul_vector(GatedRow row, int first, Activation<T, kOutput> output) {
  RowChunks<kChunks, Chunk> chunks;
  u32x4 gate[kChunks], up[kChunks];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunks.index[i] = first + wave::thread_id() + i * output.threads;
    chunks.in_bounds[i] = chunks.index[i] * kChunk < row.hidden;
    gate[i] = mem::load_vector_or_zero(row.gate, chunks.index[i], chunks.in_bounds[i]);
    up[i] = mem::load_vector_or_zero(row.up, chunks.index[i], chunks.in_bounds[i]);
  }
  output.locate(row.hidden);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    chunks.y[i] = silu_and_mul<T, !is_dynamic(kOutput)>(gate[i], up[i]);
    output.store(chunks.index[i], chunks.in_bounds[i], chunks.y[i]);
  }
  output.finish(chunks);
}

// Any hidden size and alignment, a block per row, one element per access.
template <class T, Output kOutput>
DEVICE void silu_and_mul_general(GatedRow row, Activation<T, kOutput> output) {
  output.locate(row.hidden);
  output.store_elements(row.hidden, [&](int column) {
    constexpr bool kRounded = !is_dynamic(kOutput);
    float y = silu(load_element<T>(row.gate, column));
    if constexpr (kRounded) y = round_to<T>(y);
    y *= load_element<T>(row.up, column);
    return kRounded ? round_to<T>(y) : y;
  });
}

// kChunks == 0 is the general kernel.
template <class T, Output kOutput, int kChunks>
DEVICE void silu_and_mul_row(const void* input, i64 input_stride, int hidden, int threads, void* out,
                             const float* scale, float* scale_out, i64 scale_row_stride, i64 scale_stride,
                             int group_size) {
  const u16* gate = (const u16*)input + i64(u32(wave::block_id_x())) * input_stride;
  const GatedRow row{gate, gate + hidden, hidden};
  const Activation<T, kOutput> output(scale, out, scale_out, scale_row_stride, scale_stride, group_size, threads);
  mem::issue_loads();
  if constexpr (kChunks == 0) silu_and_mul_general<T, kOutput>(row, output);
  else silu_and_mul_vector<T, kOutput, kChunks>(row, wave::block_id_y() * threads * kChunks, output);
}

// clang-format off
#define INSTANCE(threads, symbol, T, output, chunks)                                                                  \
  KERNEL(threads) symbol(                                                                                             \
      const void* input,      /* [rows, 2 * hidden] T, rows input_stride elements apart */                            \
      i64 input_stride, int hidden, int threads_per_block,                                                            \
      void* out,              /* [rows, hidden] T or e4m3 */                                                          \
      const float* scale,     /* [1], of the static kind; of the dynamic kinds scale_ub or null */                    \
      float* scale_out,       /* [rows, 1] or [rows, hidden / group_size], by the two strides; null without */        \
      i64 scale_row_stride, i64 scale_stride, int group_size) {                                                       \
    silu_and_mul_row<T, Output::output, chunks>(input, input_stride, hidden, threads_per_block, out, scale,           \
        scale_out, scale_row_stride, scale_stride, group_size);                                                       \
  }

INSTANCE(1024, silu_and_mul_bf16_x1,                         Bf16, kPlain,    1)
INSTANCE(1024, silu_and_mul_bf16_general,                    Bf16, kPlain,    0)
INSTANCE(1024, silu_and_mul_quant_bf16_x1,                   Bf16, kStatic,   1)
INSTANCE(1024, silu_and_mul_quant_bf16_general,              Bf16, kStatic,   0)
INSTANCE(1024, silu_and_mul_per_token_quant_bf16_x1,         Bf16, kPerToken, 1)
INSTANCE(1024, silu_and_mul_per_token_quant_bf16_x2,         Bf16, kPerToken, 2)
INSTANCE( 512, silu_and_mul_per_token_quant_bf16_x4,         Bf16, kPerToken, 4)
INSTANCE( 512, silu_and_mul_per_token_quant_bf16_x8,         Bf16, kPerToken, 8)
INSTANCE(1024, silu_and_mul_per_token_quant_bf16_general,    Bf16, kPerToken, 0)
INSTANCE(1024, silu_and_mul_per_block_quant_bf16_x1,         Bf16, kPerBlock, 1)
INSTANCE(1024, silu_and_mul_per_block_quant_bf16_general,    Bf16, kPerBlock, 0)
INSTANCE(1024, silu_and_mul_fp16_x1,                         F16,  kPlain,    1)
INSTANCE(1024, silu_and_mul_fp16_general,                    F16,  kPlain,    0)
INSTANCE(1024, silu_and_mul_quant_fp16_x1,                   F16,  kStatic,   1)
INSTANCE(1024, silu_and_mul_quant_fp16_general,              F16,  kStatic,   0)
INSTANCE(1024, silu_and_mul_per_token_quant_fp16_x1,         F16,  kPerToken, 1)
INSTANCE(1024, silu_and_mul_per_token_quant_fp16_x2,         F16,  kPerToken, 2)
INSTANCE( 512, silu_and_mul_per_token_quant_fp16_x4,         F16,  kPerToken, 4)
INSTANCE( 512, silu_and_mul_per_token_quant_fp16_x8,         F16,  kPerToken, 8)
INSTANCE(1024, silu_and_mul_per_token_quant_fp16_general,    F16,  kPerToken, 0)
INSTANCE(1024, silu_and_mul_per_block_quant_fp16_x1,         F16,  kPerBlock, 1)
INSTANCE(1024, silu_and_mul_per_block_quant_fp16_general,    F16,  kPerBlock, 0)
// clang-format on
