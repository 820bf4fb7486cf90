// Values of MX formats as exact bf16, eight at a time, for a group's scale to multiply the fp32 sums of their products
// (E8m0Scale in scale.h). The bf16 values are kUnit times the format's. Includes the vendor's half.
#pragma once
#include "four_bit.h"
#include "scale.h"
#if defined(__AMDGCN__)
#include "amd/mx_values.h"
#elif defined(__NVPTX__)
#include "nvidia/mx_values.h"
#endif

struct MxE2m1 {
  static constexpr int kWords = 1;
  static constexpr float kUnit = four_bit::E2m1::kUnit;
  DEVICE static u32x4 to_bf16(const u32 (&word)[kWords]) { return four_bit::E2m1::to_bf16(word[0]); }
};

// e4m3 of OCP; NaN stays NaN but on gfx942.
struct MxE4m3 {
  static constexpr int kWords = 2;
  static constexpr float kUnit = mx_values::kE4m3Unit;
  DEVICE static u32x4 to_bf16(const u32 (&word)[kWords]) {
    using mx_values::e4m3_pair;
    return {e4m3_pair<false>(word[0]), e4m3_pair<true>(word[0]), e4m3_pair<false>(word[1]), e4m3_pair<true>(word[1])};
  }
};
