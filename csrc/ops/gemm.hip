// GEMM with operands of any type, strides and sizes.
//
//     out[m, n] = T(activation(scale_a[m] * scale_b[n] * sum_k a[m, k] * b[k, n] + bias))
//
// a and b are int8, e4m3 or e5m2 in the arch's formats, bf16 or fp16. fp8 with fp8, and int8 with int8, are multiplied
// unconverted, with 32-bit accumulation. Other pairs are converted to 16 bits, which is exact. Flops: 2 * M * N * K;
// bytes: a, b and out.
//
// gemm_<type>_<tile>: a block computes an output tile, or a K slice of one (gemm/tiled/main_loop.h, split_k.h), from
// K-contiguous, aligned operands. gemm_any_<type>_<tile>: the same for any strides, element by element
// (gemm/tiled/element_loader.h). gemm_few_<sums>_<tokens>: a wave multiplies a column of b with all tokens and reduces
// over its lanes. gemm_int8_wave_splitk_<tokens>, gemm_int8_skinny_<tokens>: int8 with scales and few tokens
// (gemm/skinny.h), accumulated exactly over 64 K and in fp32 beyond. The same inputs give the same bits.
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
WAVE_SPLIT_K(gemm_int8_wave_splitk_8,   I8, 8,  ScaleGranularity::kRow)
WAVE_SPLIT_K(gemm_int8_wave_splitk_16,  I8, 16, ScaleGranularity::kRow)
#ifdef HAS_INT8_STREAMS
STREAMED_TILES(gemm_int8_skinny, I8, ScaleGranularity::kRow)
#endif
// clang-format on
