// FP8 matrix product, few tokens times a weight that is streamed once; see gemm/skinny.h.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a[m] * scale_b[n] + bias[n])
//
// a and b are e4m3 of the arch's format, scales fp32, one or one per row; sums are fp32.
#include "gemm/skinny.h"

NARROW(scaled_mm_narrow_8, E4m3, 8, Scales::kRow)
NARROW(scaled_mm_narrow_16, E4m3, 16, Scales::kRow)
SKINNY(scaled_mm_skinny_16, E4m3, 16, Scales::kRow)
SKINNY(scaled_mm_skinny_32, E4m3, 32, Scales::kRow)
SKINNY(scaled_mm_skinny_64, E4m3, 64, Scales::kRow)
