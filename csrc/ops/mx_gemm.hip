// bf16 GEMM of few tokens and MX weights that are streamed once; see gemm/skinny.h and gemm/skinny/mx_weights.h.
//
//     out[m, n] = T(sum_g scale[n, g] * sum_k in g x[m, k] * weight[n, k] + bias[n])
//
// Accumulation is fp32.
#include "gemm/skinny.h"
#include "gemm/skinny/mx_weights.h"

#ifdef HAS_INT4_TILES_OF_TOKENS
using Fp8 = Bf16Mx<MxE4m3, 4>;
using Fp4 = Bf16Mx<MxE2m1, 4>;
using Fp8Tiles = Bf16Mx<MxE4m3, 2>;
using Fp4Tiles = Bf16Mx<MxE2m1, 2>;
WAVE_SPLIT_K(mx_gemm_fp8_wave_splitk_16, Fp8, 16, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp8_wave_splitk_64, Fp8Tiles, 64, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp4_wave_splitk_16, Fp4, 16, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp4_wave_splitk_64, Fp4Tiles, 64, ScaleGranularity::kNone)
#else
using Fp8 = Bf16Mx<MxE4m3, 2>;
using Fp4 = Bf16Mx<MxE2m1, 4>;
WAVE_SPLIT_K(mx_gemm_fp8_wave_splitk_8, Fp8, 8, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp8_wave_splitk_16, Fp8, 16, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp4_wave_splitk_8, Fp4, 8, ScaleGranularity::kNone)
WAVE_SPLIT_K(mx_gemm_fp4_wave_splitk_16, Fp4, 16, ScaleGranularity::kNone)
#endif
