// Block-scaled FP8 GEMM, one scale per 1x128 of the tokens and per 128x128 of the weight; see gemm/skinny.h.
//
//     out[m, n] = T(sum_j scale_a[m, j] * scale_b[n / 128, j] * sum_{k in block j} a[m, k] * b[n, k])
//
// a and b are e4m3 in the arch's format; scales are both fp32 or both e8m0; accumulation is fp32: the products over 128
// K are summed first, then scaled. If only one operand's scales are e8m0, they are widened to fp32 beforehand, which
// keeps the number of these and the tiled kernels low.
#include "gemm/skinny.h"

WAVE_SPLIT_K(block_scaled_mm_wave_splitk_8, E4m3, 8, ScaleGranularity::kBlock)
WAVE_SPLIT_K(block_scaled_mm_wave_splitk_16, E4m3, 16, ScaleGranularity::kBlock)
STREAMED_TILES(block_scaled_mm_skinny, E4m3, ScaleGranularity::kBlock)
WIDE_TILES(block_scaled_mm_wide, E4m3, ScaleGranularity::kBlock, Fp32Scale)
WAVE_SPLIT_K(block_scaled_mm_e8m0_wave_splitk_8, E4m3, 8, ScaleGranularity::kBlock, E8m0Scale)
WAVE_SPLIT_K(block_scaled_mm_e8m0_wave_splitk_16, E4m3, 16, ScaleGranularity::kBlock, E8m0Scale)
STREAMED_TILES(block_scaled_mm_e8m0_skinny, E4m3, ScaleGranularity::kBlock, E8m0Scale)
WIDE_TILES(block_scaled_mm_e8m0_wide, E4m3, ScaleGranularity::kBlock, E8m0Scale)

// Each thread widens one of `count` scales, [count / blocks, blocks] on both sides; row_stride and block_stride are for
// the e8m0 input.
KERNEL(256)
block_scaled_mm_widen(const u8* scales, float* widened, i64 row_stride, i64 block_stride, int blocks, u32 inverse,
                      int shift, int count) {  // inverse and shift: the Divisor of blocks
  const int at = wave::block_id_x() * 256 + wave::thread_id(), row = u32(at) / Divisor{inverse, shift};
  if (at >= count) return;
  const u8* scale = scales + row * row_stride + (at - row * blocks) * block_stride;
  mem::store(widened + at, E8m0Scale::value(mem::load<u8>(scale)));
}
