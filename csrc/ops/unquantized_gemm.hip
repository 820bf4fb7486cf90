// bf16 or fp16 skinny GEMM: few tokens times a weight that is streamed once; see gemm/skinny.h.
//
//     out[m, n] = T(sum_k x[m, k] * weight[n, k] + bias[n])
//
// Accumulation is fp32.
#include "gemm/skinny.h"

WAVE_SPLIT_K(unquantized_gemm_bf16_wave_splitk_8, Bf16, 8, ScaleGranularity::kNone)
WAVE_SPLIT_K(unquantized_gemm_bf16_wave_splitk_16, Bf16, 16, ScaleGranularity::kNone)
STREAMED_TILES(unquantized_gemm_bf16_skinny, Bf16, ScaleGranularity::kNone)
WIDE_TILES(unquantized_gemm_bf16_wide, Bf16, ScaleGranularity::kNone, Fp32Scale)
WAVE_SPLIT_K(unquantized_gemm_fp16_wave_splitk_8, F16, 8, ScaleGranularity::kNone)
WAVE_SPLIT_K(unquantized_gemm_fp16_wave_splitk_16, F16, 16, ScaleGranularity::kNone)
STREAMED_TILES(unquantized_gemm_fp16_skinny, F16, ScaleGranularity::kNone)
WIDE_TILES(unquantized_gemm_fp16_wide, F16, ScaleGranularity::kNone, Fp32Scale)
