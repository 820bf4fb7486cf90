// FP8 matrix product, few tokens times a weight that is streamed once; see device/skinny.h.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a[m] * scale_b[n] + bias[n])
//
// a and b are e4m3 of the arch's format, scales fp32, one or one per row; sums are fp32.
#include "device/skinny.h"

#define INSTANCE(symbol, tokens) \
  KERNEL(kSkinnyThreads) symbol(Product product) { multiply_skinny<E4m3, tokens, Scales::kRow>(product); }

INSTANCE(scaled_mm_skinny_16, 16)
INSTANCE(scaled_mm_skinny_32, 32)
INSTANCE(scaled_mm_skinny_64, 64)
