// SwiGLU with clamped inputs: g = min(gate, limit); u = max(min(up, limit), -limit); g * sigmoid(alpha * g) * (u + beta).
// NaN stays NaN.
#pragma once
#include "gpu.h"

struct ClampedSilu {
  float limit, exponent, beta;  // limit may be infinite; exponent is -alpha * log2(e)

  DEVICE float operator()(float gate, float up) const {
    const float g = gate > limit ? limit : gate;
    const float u = up > limit ? limit : up < -limit ? -limit : up;
    return g * numerics::rcp_approx(1.0f + numerics::exp2_approx(g * exponent)) * (u + beta);
  }
};
