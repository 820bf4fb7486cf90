// SwiGLU activation on [gate | up] rows with clamped inputs, with optional fused quantization.
//
//     y = ClampedSilu of gate and up (device/clamped_silu.h), which device/row_output.h stores or quantizes
//
// Everything is fp32 up to a single rounding to T, as in vLLM's swiglu_oai_split, whose result the static output
// quantizes; dynamic outputs do not round, as its swiglu_oai_quantize_mxfp8. NaN stays NaN up to the cast.
//
// Bytes per element: 4 (gate and up) + 1 or 2 (out); about 12 flops and two transcendentals.
#include "device/clamped_silu.h"
#include "device/gated_row.h"

template <class T, Output kOutput>
struct ClampedSiluAndMul {
  ClampedSilu clamped;

  DEVICE float operator()(float gate, float up) const {
    const float y = clamped(gate, up);
    return kOutput == Output::kStatic ? round_to<T>(y) : y;
  }
  DEVICE f32x2 operator()(f32x2 gate, f32x2 up) const { return {(*this)(gate.x, up.x), (*this)(gate.y, up.y)}; }
};

#define CLAMP , float limit, float exponent, float beta
#define INSTANCE(threads, symbol, T, output, chunks) \
  GATED_ROWS(threads, symbol, T, output, chunks, CLAMP, ClampedSiluAndMul<T, Output::output>{{limit, exponent, beta}})
GATED_INSTANCES(INSTANCE, silu_and_mul_with_clamp, bf16, Bf16)
GATED_INSTANCES(INSTANCE, silu_and_mul_with_clamp, fp16, F16)
