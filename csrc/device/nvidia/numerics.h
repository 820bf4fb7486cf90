// Hardware rounding, conversion and approximation.
#pragma once
#include "../types.h"

namespace numerics {

DEVICE float rcp_approx(float x) { return __nvvm_rcp_approx_ftz_f(x); }
DEVICE float rsqrt_approx(float x) { return __nvvm_rsqrt_approx_f(x); }
DEVICE float exp2_approx(float x) { return __nvvm_ex2_approx_f(x); }
DEVICE float log2_approx(float x) { return __nvvm_lg2_approx_f(x); }

constexpr float kE4m3Max = 448.0f;  // OCP

// Converts four floats to four e4m3 bytes, round to nearest even, saturating. NaN becomes +kE4m3Max, as in vLLM's
// clamp.
DEVICE float clamp_e4m3(float x) { return __builtin_fminf(x, kE4m3Max); }  // the conversion saturates the lower bound
DEVICE u32 to_e4m3x4(f32x2 low, f32x2 high) {
  u32 first = u16(__nvvm_ff_to_e4m3x2_rn(clamp_e4m3(low.y), clamp_e4m3(low.x)));
  u32 second = u16(__nvvm_ff_to_e4m3x2_rn(clamp_e4m3(high.y), clamp_e4m3(high.x)));
  return first | second << 16;
}
DEVICE u8 to_e4m3(float x) { return u8(__nvvm_ff_to_e4m3x2_rn(0.0f, clamp_e4m3(x))); }

// Converts the lower or upper pair of e4m3 or e5m2 in a word to floats.
DEVICE f32x2 from_f16x2(u32 pair) {
  using Pair = _Float16 __attribute__((ext_vector_type(2)));
  return __builtin_convertvector(__builtin_bit_cast(Pair, pair), f32x2);
}
template <bool kUpper>
DEVICE f32x2 from_e4m3x2(u32 word) {
  u32 pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(u16(kUpper ? word >> 16 : word)));
  return from_f16x2(pair);
}
template <bool kUpper>
DEVICE f32x2 from_e5m2x2(u32 word) {
  u32 pair;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(pair) : "h"(u16(kUpper ? word >> 16 : word)));
  return from_f16x2(pair);
}

// OCP e4m3, for MX formats.
constexpr float kE4m3fnMax = kE4m3Max;
DEVICE u32 to_e4m3fnx4(f32x2 low, f32x2 high) { return to_e4m3x4(low, high); }

DEVICE u32 to_bf16x2(f32x2 x) {
  using bf16x2 = __bf16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, __builtin_convertvector(x, bf16x2));
}

}  // namespace numerics
