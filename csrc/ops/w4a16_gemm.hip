// bf16 GEMM of few tokens and int4 weights that are streamed once; see gemm/skinny.h and gemm/skinny/int4_weights.h.
//
//     out[m, n] = T(sum_g scale[g, n] * sum_k in g x[m, k] * (weight[k, n] - 8) + bias[n])
//
// Accumulation is fp32.
#include "gemm/skinny.h"
#include "gemm/skinny/int4_weights.h"

#ifdef HAS_INT4_TILES_OF_TOKENS
using Words = Bf16Int4Columns<2>;
using Word = Bf16Int4Columns<1>;
WAVE_SPLIT_K(w4a16_gemm_32_wave_splitk_16, Words, 16, ScaleGranularity::kNone)
WAVE_SPLIT_K(w4a16_gemm_32_wave_splitk_32, Words, 32, ScaleGranularity::kNone)
WAVE_SPLIT_K(w4a16_gemm_32_wave_splitk_64, Word, 64, ScaleGranularity::kNone)
#else
using Word = Bf16Int4Columns<1>;
WAVE_SPLIT_K(w4a16_gemm_32_wave_splitk_8, Word, 8, ScaleGranularity::kNone)
WAVE_SPLIT_K(w4a16_gemm_32_wave_splitk_16, Word, 16, ScaleGranularity::kNone)
#endif
