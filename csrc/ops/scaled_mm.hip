// FP8 skinny GEMM: few tokens times a weight that is streamed once; see gemm/skinny.h.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a[m] * scale_b[n] + bias[n])
//
// a and b are e4m3 in the arch's format; scales are fp32, one per tensor or row; accumulation is fp32.
#include "gemm/skinny.h"

WAVE_SPLIT_K(scaled_mm_wave_splitk_8, E4m3, 8, ScaleGranularity::kRow)
WAVE_SPLIT_K(scaled_mm_wave_splitk_16, E4m3, 16, ScaleGranularity::kRow)
STREAMED_TILES(scaled_mm_skinny, E4m3, ScaleGranularity::kRow)
WIDE_TILES(scaled_mm_wide, E4m3, ScaleGranularity::kRow, Fp32Scale)

// With a [gate | up] weight: out[m, c] = e4m3(silu(gate) * up / out_scale), from out[m, n] rounded to T.
#define GATED ScaleGranularity::kRow, Fp32Scale, true
WAVE_SPLIT_K(scaled_mm_silu_wave_splitk_8, E4m3, 8, GATED)
WAVE_SPLIT_K(scaled_mm_silu_wave_splitk_16, E4m3, 16, GATED)
STREAMED_TILES(scaled_mm_silu_skinny, E4m3, GATED)
