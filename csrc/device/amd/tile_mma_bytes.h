// MMA of accumulator tiles for int8, e5m2, and e4m3 with e5m2 (v_mfma_f32_16x16x32_bf8_fp8 and variants;
// v_mfma_f32_16x16x128_f8f6f4). CDNA3 and CDNA4 ISA, section 7.
#pragma once
#include "tile_mma.h"

namespace tile {

template <>
DEVICE void multiply_add<I8>(AccumulatorTile& accumulator, const Fragment& tokens, const Fragment (&weights)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const i32x4 sum = __builtin_bit_cast(i32x4, accumulator.sum[row]);
      accumulator.sum[row] =
          __builtin_bit_cast(f32x4, mma::multiply_add_whole(sum, weights[row].half[half], tokens.half[half]));
    }
}

// Weights and tokens in either 8-bit float format.
#if defined(__gfx942__)
#define PRODUCT(type, instruction, weights_format, tokens_format)                                                      \
  template <>                                                                                                          \
  DEVICE void multiply_add<type>(AccumulatorTile & accumulator, const Fragment& tokens, const Fragment(&weights)[2]) { \
    using Words = i64 __attribute__((ext_vector_type(2)));                                                             \
    _Pragma("unroll") for (int i = 0; i < 4; ++i) {                                                                    \
      const Words t = __builtin_bit_cast(Words, tokens.half[i / 2]);                                                   \
      _Pragma("unroll") for (int row = 0; row < 2; ++row) {                                                            \
        const Words w = __builtin_bit_cast(Words, weights[row].half[i / 2]);                                           \
        accumulator.sum[row] =                                                                                         \
            __builtin_amdgcn_mfma_f32_16x16x32_##instruction(w[i % 2], t[i % 2], accumulator.sum[row], 0, 0, 0);       \
      }                                                                                                                \
    }                                                                                                                  \
  }
#else
#define PRODUCT(type, instruction, weights_format, tokens_format)                                                      \
  template <>                                                                                                          \
  DEVICE void multiply_add<type>(AccumulatorTile & accumulator, const Fragment& tokens, const Fragment(&weights)[2]) { \
    using Operand = int __attribute__((ext_vector_type(8)));                                                           \
    constexpr int kUnitScale = 0;                                                                                      \
    _Pragma("unroll") for (int row = 0; row < 2; ++row) accumulator.sum[row] =                                         \
        __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(__builtin_bit_cast(Operand, weights[row]),                    \
                                                         __builtin_bit_cast(Operand, tokens), accumulator.sum[row],    \
                                                         weights_format, tokens_format, 0, kUnitScale, 0, kUnitScale); \
  }
#endif
PRODUCT(E5m2, bf8_bf8, 1, 1)
PRODUCT(E4m3E5m2, bf8_fp8, 1, 0)
PRODUCT(E5m2E4m3, fp8_bf8, 0, 1)
#undef PRODUCT

}  // namespace tile
