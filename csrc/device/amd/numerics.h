// Hardware rounding, conversion and approximation. Accuracy: 1 ulp for v_rcp_f32, v_rsq_f32 and v_exp_f32 (CDNA3 ISA,
// section 12.8 "VOP1").
#pragma once
#include "../types.h"

namespace numerics {

DEVICE float rcp_approx(float x) { return __builtin_amdgcn_rcpf(x); }
DEVICE float rsqrt_approx(float x) { return __builtin_amdgcn_rsqf(x); }
DEVICE float exp2_approx(float x) { return __builtin_amdgcn_exp2f(x); }
DEVICE float log2_approx(float x) { return __builtin_amdgcn_logf(x); }

#if !defined(__gfx942__) && !defined(__gfx950__)
#error "unknown AMD arch: add it to each condition in amd/, then here"
#endif

// The arch's e4m3: FNUZ on gfx942, OCP from gfx950 on. kE4m3Max is vLLM's quantization limit: 224, not 240, for FNUZ.
#if defined(__gfx942__)
constexpr float kE4m3Max = 224.0f;
#else
constexpr float kE4m3Max = 448.0f;
#endif

// Converts four floats in [-kE4m3Max, kE4m3Max] or NaN to four e4m3 bytes, round to nearest even. NaN becomes
// +kE4m3Max, as in vLLM's clamp. Not med3: it would map NaN to the lower bound.
DEVICE float clamp_e4m3(float x) { return __builtin_fmaxf(__builtin_fminf(x, kE4m3Max), -kE4m3Max); }
DEVICE u32 to_e4m3x4(f32x2 low, f32x2 high) {
  int packed = __builtin_amdgcn_cvt_pk_fp8_f32(clamp_e4m3(low.x), clamp_e4m3(low.y), 0, false);
  return __builtin_amdgcn_cvt_pk_fp8_f32(clamp_e4m3(high.x), clamp_e4m3(high.y), packed, true);
}
DEVICE u8 to_e4m3(float x) { return u8(__builtin_amdgcn_cvt_pk_fp8_f32(clamp_e4m3(x), 0.0f, 0, false)); }

// Converts the lower or upper pair of e4m3 or e5m2 in a word to floats.
template <bool kUpper>
DEVICE f32x2 from_e4m3x2(u32 word) {
  return __builtin_amdgcn_cvt_pk_f32_fp8(word, kUpper);
}
template <bool kUpper>
DEVICE f32x2 from_e5m2x2(u32 word) {
  return __builtin_amdgcn_cvt_pk_f32_bf8(word, kUpper);
}

// OCP e4m3 on every arch, for MX formats: four floats -> four bytes, clamped to kE4m3fnMax. Where e4m3 is FNUZ, the
// FNUZ byte of x / 2 is the OCP byte of x, except for negative x that rounds to zero: FNUZ has no -0.
constexpr float kE4m3fnMax = 448.0f;
DEVICE u32 to_e4m3fnx4(f32x2 low, f32x2 high) {
#if defined(__gfx942__)
  low = {clamp_e4m3(low.x * 0.5f), clamp_e4m3(low.y * 0.5f)};
  high = {clamp_e4m3(high.x * 0.5f), clamp_e4m3(high.y * 0.5f)};
  const u32x2 l = __builtin_bit_cast(u32x2, low), h = __builtin_bit_cast(u32x2, high);
  const u32 tops = __builtin_amdgcn_perm(l.y, l.x, 0x0c0c0703) | __builtin_amdgcn_perm(h.y, h.x, 0x07030c0c);
  return to_e4m3x4(low, high) | (tops & 0x80808080);
#else
  return to_e4m3x4(low, high);
#endif
}

// Rounds to nearest even. A NaN that came from bf16 or fp16 has clear low bits, so the carry cannot reach its exponent.
DEVICE u32 to_bf16x2(f32x2 x) {
#if defined(__gfx942__)
  // The vector is cast whole: clang 22 mistakes __builtin_bit_cast(u32, x.y) for x.x.
  u32x2 bits = __builtin_bit_cast(u32x2, x);
  bits += ((bits >> 16) & 1) + 0x7fff;
  return __builtin_amdgcn_perm(bits.y, bits.x, 0x07060302);
#else
  using bf16x2 = __bf16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, __builtin_convertvector(x, bf16x2));
#endif
}

}  // namespace numerics
