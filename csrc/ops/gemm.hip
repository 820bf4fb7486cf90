// Matrix products of operands of any type, any strides and any sizes.
//
//     out[m, n] = T(activation(scale_a[m] * scale_b[n] * sum_k a[m, k] * b[k, n] + bias))
//
// a and b are int8, e4m3 or e5m2 of the arch's formats, bf16 or fp16. Two types of 8 bits that are both fp8 are multiplied as they
// are, and int8 with int8, in sums of 32 bits. Other pairs are converted to 16 bits, which is exact. Flops: 2 * M * N * K; bytes:
// those of a, b and out.
//
// gemm_<type>_<tile>: a block computes a tile of the output, or a K slice of one (gemm/tiled/main_loop.h, split_k.h), of operands
// whose rows along K are side by side and aligned. gemm_any_<type>_<tile>: the same of any strides, element by element
// (gemm/tiled/element_loader.h). gemm_few_<sums>_<tokens>: a wave multiplies a column of b with all tokens and adds up its lanes' sums.
// gemm_int8_narrow_<tokens>, gemm_int8_skinny_<tokens>: int8 with scales and few tokens (gemm/skinny.h), whose sums are exact over 64
// of K and then fp32. The same inputs give the same bits.
#include "gemm/any.h"
#include "gemm/skinny.h"

// clang-format off
TILES(gemm_int8,          64,  I8,       E4m3, false)
TILES(gemm_int8,          128, I8,       E4m3, false)
TILES(gemm_any_int8,      64,  I8,       E4m3, true)
TILES(gemm_e4m3,          64,  E4m3,     E4m3, false)
TILES(gemm_e4m3,          128, E4m3,     E4m3, false)
TILES(gemm_any_e4m3,      64,  E4m3,     E4m3, true)
TILES(gemm_e5m2,          64,  E5m2,     E4m3, false)
TILES(gemm_any_e5m2,      64,  E5m2,     E4m3, true)
TILES(gemm_e4m3_e5m2,     64,  E4m3E5m2, E4m3, false)
TILES(gemm_any_e4m3_e5m2, 64,  E4m3E5m2, E4m3, true)
TILES(gemm_e5m2_e4m3,     64,  E5m2E4m3, E4m3, false)
TILES(gemm_any_e5m2_e4m3, 64,  E5m2E4m3, E4m3, true)
TILES(gemm_bf16,          64,  Bf16,     Bf16, false)
TILES(gemm_bf16,          128, Bf16,     Bf16, false)
TILES(gemm_any_bf16,      64,  Bf16,     Bf16, true)
TILES(gemm_fp16,          64,  F16,      F16,  false)
TILES(gemm_fp16,          128, F16,      F16,  false)
TILES(gemm_any_fp16,      64,  F16,      F16,  true)
FEW(gemm_few_float_1, float, 1)
FEW(gemm_few_float_8, float, 8)
FEW(gemm_few_int_1,   int,   1)
FEW(gemm_few_int_8,   int,   8)
WAVE_SPLIT_K(gemm_int8_narrow_8,   I8, 8,  ScaleGranularity::kRow)
WAVE_SPLIT_K(gemm_int8_narrow_16,  I8, 16, ScaleGranularity::kRow)
#ifdef HAS_INT8_STREAMS
STREAMED_TILE(gemm_int8_skinny_16, I8, 16, ScaleGranularity::kRow)
STREAMED_TILE(gemm_int8_skinny_32, I8, 32, ScaleGranularity::kRow)
STREAMED_TILE(gemm_int8_skinny_64, I8, 64, ScaleGranularity::kRow)
#endif
// clang-format on
