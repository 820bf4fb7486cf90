// bf16 GEMM of few tokens and int4 weights that are streamed once; see gemm/skinny.h and gemm/skinny/int4_weights.h.
//
//     out[m, n] = T(sum_g scale[g, n] * sum_k in g x[m, k] * (weight[k, n] - 8) + bias[n])
//
// Accumulation is fp32.
#include "gemm/skinny.h"
#include "gemm/skinny/int4_weights.h"

WAVE_SPLIT_K(w4a16_gemm_32_wave_splitk_16, Bf16Int4Columns<1>, 16, ScaleGranularity::kNone)
WAVE_SPLIT_K(w4a16_gemm_64_wave_splitk_16, Bf16Int4Columns<2>, 16, ScaleGranularity::kNone)
#if defined(__AMDGCN__)
WAVE_SPLIT_K(w4a16_gemm_32_wave_splitk_32, Bf16Int4Columns<1>, 32, ScaleGranularity::kNone)
WAVE_SPLIT_K(w4a16_gemm_64_wave_splitk_32, Bf16Int4Columns<2>, 32, ScaleGranularity::kNone)
WAVE_SPLIT_K(w4a16_gemm_32_wave_splitk_64, Bf16Int4Columns<1>, 64, ScaleGranularity::kNone)
#else
WAVE_SPLIT_K(w4a16_gemm_32_wave_splitk_8, Bf16Int4Columns<1>, 8, ScaleGranularity::kNone)
WAVE_SPLIT_K(w4a16_gemm_64_wave_splitk_8, Bf16Int4Columns<2>, 8, ScaleGranularity::kNone)
#endif
