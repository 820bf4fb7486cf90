// bf16 GEMM of few tokens and MX weights that are streamed once; see gemm/skinny.h and gemm/skinny/mx_weights.h.
//
//     out[m, n] = T(sum_g scale[n, g] * sum_k in g x[m, k] * weight[n, k] + bias[n])
//
// Accumulation is fp32.
#include "gemm/skinny.h"
#include "gemm/skinny/mx_weights.h"

#ifdef HAS_INT4_TILES_OF_TOKENS
WAVE_SPLIT_K(mx_gemm_fp8_wave_splitk_16, Bf16Mx<MxE4m3>, 16, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp8_wave_splitk_64, Bf16Mx<MxE4m3>, 64, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp4_wave_splitk_16, Bf16Mx<MxE2m1>, 16, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp4_wave_splitk_64, Bf16Mx<MxE2m1>, 64, ScaleGranularity::kNone)
#else
WAVE_SPLIT_K(mx_gemm_fp8_wave_splitk_8, Bf16Mx<MxE4m3>, 8, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp8_wave_splitk_16, Bf16Mx<MxE4m3>, 16, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp4_wave_splitk_8, Bf16Mx<MxE2m1>, 8, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp4_wave_splitk_16, Bf16Mx<MxE2m1>, 16, ScaleGranularity::kNone)
#endif
