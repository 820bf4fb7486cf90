// SwiGLU activation on [gate | up] rows with clamped inputs, with optional fused quantization.
//
//     g = min(gate, limit);  u = max(min(up, limit), -limit)
//     y = g * sigmoid(alpha * g) * (u + beta), which device/row_output.h stores or quantizes
//
// Everything is fp32 up to a single rounding to T, as in vLLM's swiglu_oai_split, whose result the static output
// quantizes; dynamic outputs do not round, as its swiglu_oai_quantize_mxfp8. NaN stays NaN up to the cast.
//
// Bytes per element: 4 (gate and up) + 1 or 2 (out); about 12 flops and two transcendentals.
#include "device/gated_row.h"

template <class T, Output kOutput>
struct ClampedSiluAndMul {
  float limit, exponent, beta;  // exponent is -alpha * log2(e)

  DEVICE float operator()(float gate, float up) const {
    const float g = gate > limit ? limit : gate;
    const float u = up > limit ? limit : up < -limit ? -limit : up;
    const float y = g * numerics::rcp_approx(1.0f + numerics::exp2_approx(g * exponent)) * (u + beta);
    return kOutput == Output::kStatic ? round_to<T>(y) : y;
  }
  DEVICE f32x2 operator()(f32x2 gate, f32x2 up) const { return {(*this)(gate.x, up.x), (*this)(gate.y, up.y)}; }
};

#define CLAMP , float limit, float exponent, float beta
#define INSTANCE(threads, symbol, T, output, chunks) \
  GATED_ROWS(threads, symbol, T, output, chunks, CLAMP, ClampedSiluAndMul<T, Output::output>{limit, exponent, beta})
GATED_INSTANCES(INSTANCE, silu_and_mul_with_clamp, bf16, Bf16)
GATED_INSTANCES(INSTANCE, silu_and_mul_with_clamp, fp16, F16)
