// FP8 matrix product with a scale per 1x128 of the tokens and per 128x128 of the weight; see device/skinny.h.
//
//     out[m, n] = T(sum_j scale_a[m, j] * scale_b[n / 128, j] * sum_{k in block j} a[m, k] * b[n, k])
//
// a and b are e4m3 of the arch's format, scales fp32, sums fp32: the products of 128 of K are summed first, then scaled.
#include "device/skinny.h"

SKINNY(block_scaled_mm_skinny_16, E4m3, 16, Scales::kBlock)
SKINNY(block_scaled_mm_skinny_32, E4m3, 32, Scales::kBlock)
SKINNY(block_scaled_mm_skinny_64, E4m3, 64, Scales::kBlock)
