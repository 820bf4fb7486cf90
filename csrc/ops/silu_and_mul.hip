// SwiGLU activation on [gate | up] rows, with optional fused quantization.
//
//     y = gate * sigmoid(gate) * up, which device/row_output.h stores or quantizes
//
// Rounding matches vLLM's ops of the same names in the 0.33.0 wheel (per token: on its main branch; MX: as its
// swiglu_oai_quantize_mxfp8). Plain and static outputs round gate * sigmoid(gate) to T, and y. Dynamic outputs keep
// fp32 up to the cast. scale_ub bounds the absolute maximum per token, but the scale per block.
//
// Bytes per element: 4 (gate and up) + 1 or 2 (out); about 8 flops and two transcendentals.
#include "device/gated_row.h"

template <class T, Output kOutput>
struct SiluAndMul {
  template <class V>  // float or f32x2
  DEVICE V operator()(V gate, V up) const {
    V y;
    if constexpr (__is_same(V, float)) y = silu(gate);
    else y = {silu(gate.x), silu(gate.y)};
    if constexpr (is_dynamic(kOutput)) return up * y;
    else return round_to<T>(up * round_to<T>(y));
  }
};

#define NOTHING
#define INSTANCE(threads, symbol, T, output, chunks) \
  GATED_ROWS(threads, symbol, T, output, chunks, NOTHING, SiluAndMul<T, Output::output>{})
GATED_INSTANCES(INSTANCE, silu_and_mul, bf16, Bf16)
GATED_INSTANCES(INSTANCE, silu_and_mul, fp16, F16)
