// The output gate of attention on rows of heads, with fused quantization: Qwen3-Next, Qwen3.5.
//
//     y = input * sigmoid(gate), which device/row_output.h quantizes
//
// The gate has a stride per token and one per head: it stays where the projection [q | gate] of each head wrote it. The
// static output rounds y to T before quantization, as vLLM's compiled graph does. Dynamic outputs keep fp32 up to the
// cast, as in ops/silu_and_mul.hip. Bytes per element: 4 (input and gate) + 1 (out).
#include "device/gated_row.h"
#include "device/sigmoid.h"

template <class T, Output kOutput>
struct SigmoidAndMul {
  template <class V>  // float or f32x2
  DEVICE V operator()(V gate, V input) const {
    V y;
    if constexpr (__is_same(V, float)) y = input * sigmoid(gate);
    else y = input * V{sigmoid(gate.x), sigmoid(gate.y)};
    if constexpr (is_dynamic(kOutput)) return y;
    else return round_to<T>(y);
  }
};

// clang-format off
#define INSTANCE(threads, symbol, T, output, chunks)                                                                  \
  KERNEL(threads) symbol(                                                                                             \
      const void* input,      /* [rows, hidden] T, rows input_stride elements apart */                                \
      const void* gate,       /* [rows, hidden / head_size, head_size] T */                                           \
      i64 input_stride, i64 gate_stride, int head_stride, int head_size, u32 inverse, int shift, /* its divisor */    \
      int hidden, int threads_per_block,                                                                              \
      void* out,              /* [rows, hidden] e4m3 */                                                               \
      const float* scale,     /* [1]: the static scale, or for dynamic outputs scale_ub or null */                    \
      float* scale_out,       /* [rows, 1] or [rows, hidden / group_size], strided; null if unused */                 \
      i64 scale_row_stride, i64 scale_stride, int group_size) {                                                       \
    const i64 index = u32(wave::block_id_x());                                                                        \
    const GatedHeads row{(const u16*)gate + index * gate_stride, (const u16*)input + index * input_stride, hidden,    \
                         head_size, head_stride, Divisor{inverse, shift}};                                            \
    gated_row<T, Output::output, chunks>(row, threads_per_block, out, scale, scale_out, scale_row_stride,             \
        scale_stride, group_size, SigmoidAndMul<T, Output::output>{});                                                \
  }
// clang-format on

GATED_QUANT_INSTANCES(INSTANCE, sigmoid_and_mul, bf16, Bf16)
GATED_QUANT_INSTANCES(INSTANCE, sigmoid_and_mul, fp16, F16)
