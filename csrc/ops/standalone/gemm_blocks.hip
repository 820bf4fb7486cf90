// GEMM with operands of any type, strides and sizes, with block scales.
//
//     out[m, n] = T(activation(sum_j scale_a[m, j] * scale_b[j, n / 128] * sum_{k in block j of 128} a[m, k] * b[k, n] + bias))
//
// The products over 128 K are summed first (int8: exactly), then scaled and added in fp32. The rest is as in gemm.hip.
#include "gemm/any.h"
#include "gemm/skinny.h"

// clang-format off
TILES(gemm_blocks_int8,          64,  I8,       E4m3, false, true)
TILES(gemm_blocks_int8,          128, I8,       E4m3, false, true)
TILES(gemm_blocks_any_int8,      64,  I8,       E4m3, true,  true)
TILES(gemm_blocks_e4m3,          64,  E4m3,     E4m3, false, true)
TILES(gemm_blocks_e4m3,          128, E4m3,     E4m3, false, true)
TILES(gemm_blocks_any_e4m3,      64,  E4m3,     E4m3, true,  true)
TILES(gemm_blocks_e5m2,          64,  E5m2,     E4m3, false, true)
TILES(gemm_blocks_any_e5m2,      64,  E5m2,     E4m3, true,  true)
TILES(gemm_blocks_e4m3_e5m2,     64,  E4m3E5m2, E4m3, false, true)
TILES(gemm_blocks_any_e4m3_e5m2, 64,  E4m3E5m2, E4m3, true,  true)
TILES(gemm_blocks_e5m2_e4m3,     64,  E5m2E4m3, E4m3, false, true)
TILES(gemm_blocks_any_e5m2_e4m3, 64,  E5m2E4m3, E4m3, true,  true)
TILES(gemm_blocks_any_bf16,      64,  Bf16,     Bf16, true,  true)
TILES(gemm_blocks_any_fp16,      64,  F16,      F16,  true,  true)
FEW(gemm_blocks_few_1, float, 1, true)
FEW(gemm_blocks_few_8, float, 8, true)
WAVE_SPLIT_K(gemm_blocks_int8_wave_splitk_8,   I8, 8,  ScaleGranularity::kBlock)
WAVE_SPLIT_K(gemm_blocks_int8_wave_splitk_16,  I8, 16, ScaleGranularity::kBlock)
#ifdef HAS_INT8_STREAMS
STREAMED_TILES(gemm_blocks_int8_skinny, I8, ScaleGranularity::kBlock)
#endif
// clang-format on
