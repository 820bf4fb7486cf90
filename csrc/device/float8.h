// e4m3 quantization as in vLLM. Values are clamped to the format's limit and rounded to nearest even; scales are at
// least 1 / (limit * 512). vLLM 0.33 (csrc/.../quantization) divides by a dynamic scale and multiplies by the inverse
// of a static one. The results differ in the last bit, so both are here.
#pragma once
#include "vec.h"

constexpr float kMinScale = 1.0f / (numerics::kE4m3Max * 512.0f);

// Correctly rounded numerator / denominator, given inverse = 1 / denominator to within 1 ulp: Markstein's residual
// step. An infinite or NaN quotient has no residual and is returned unchanged.
DEVICE float divide(float numerator, float denominator, float inverse) {
  float quotient = numerator * inverse;
  float refined = __builtin_fmaf(__builtin_fmaf(-quotient, denominator, numerator), inverse, quotient);
  return refined == refined ? refined : quotient;
}
DEVICE f32x2 divide(f32x2 numerator, float denominator, float inverse) {
  f32x2 d = {-denominator, -denominator}, r = {inverse, inverse};
  f32x2 quotient = numerator * r;
  f32x2 refined = __builtin_elementwise_fma(__builtin_elementwise_fma(quotient, d, numerator), r, quotient);
  return {refined.x == refined.x ? refined.x : quotient.x, refined.y == refined.y ? refined.y : quotient.y};
}

// A dynamic scale as a divisor, with an inverse exact enough for divide(). A row with an infinity has an infinite
// scale: its finite elements become 0, infinities NaN.
struct Scale {
  float value, inverse;
  DEVICE explicit Scale(float scale) : value(__builtin_fminf(scale, __FLT_MAX__)) {
    float approx = numerics::rcp_approx(scale);
    float refined = __builtin_fmaf(__builtin_fmaf(-scale, approx, 1.0f), approx, approx);
    inverse = scale == value ? refined : 0.0f;
  }
};

DEVICE float absmax_to_scale(float absmax) {
  return __builtin_fmaxf(divide(absmax, numerics::kE4m3Max, 1.0f / numerics::kE4m3Max), kMinScale);
}

// The e8m0 scale for absmax / 448, rounded up to a power of two: 448 is 1.75 * 2^8.
DEVICE u32 absmax_to_e8m0(float absmax) {
  static_assert(numerics::kE4m3fnMax == 448.0f);
  constexpr u32 kMantissa = 23, kOver = (1 << kMantissa) / 4 - 1;  // carries when added to a mantissa above 0.75
  const u32 exponent = (__builtin_bit_cast(u32, absmax) + kOver) >> kMantissa;
  return exponent > 8 ? exponent - 8 : 0;
}
// Returns 2^(127 - scale).
DEVICE float inverse_e8m0(u32 scale) { return __builtin_bit_cast(float, (254 - scale) << 23); }

DEVICE u32x2 quantize_mx(const Chunk& x, u32 scale) {
  Chunk q;
  for (int i = 0; i < kChunk / 2; ++i) q.pair[i] = x.pair[i] * inverse_e8m0(scale);
  return {numerics::to_e4m3fnx4(q.pair[0], q.pair[1]), numerics::to_e4m3fnx4(q.pair[2], q.pair[3])};
}

DEVICE u32x2 quantize(const Chunk& x, float inverse_scale) {
  Chunk q;
  for (int i = 0; i < kChunk / 2; ++i) q.pair[i] = x.pair[i] * inverse_scale;
  return {numerics::to_e4m3x4(q.pair[0], q.pair[1]), numerics::to_e4m3x4(q.pair[2], q.pair[3])};
}
DEVICE u32x2 quantize(const Chunk& x, Scale scale) {
  Chunk q;
  for (int i = 0; i < kChunk / 2; ++i) q.pair[i] = divide(x.pair[i], scale.value, scale.inverse);
  return {numerics::to_e4m3x4(q.pair[0], q.pair[1]), numerics::to_e4m3x4(q.pair[2], q.pair[3])};
}
