// The products of fused_experts_tiled.hip with weights of 8 bits beside e4m3 with e4m3.
//
// int8: weights and tokens are int8, with a scale per row or tensor; sums are int32, exact, and rounded once to fp32. They have
// room for K up to 2^17. e5m2: tokens are e4m3, as beside e4m3 weights: the matrix instructions take one format each.
// Weights alone (W8A16): tokens are bf16 or fp16, and weights are widened to that on their way to LDS, which is exact.
//
// Rates: int8 and 8-bit floats have the same (CDNA3 ISA, section 7; CDNA4 ISA, section 7); weights alone have that of 16 bits, and
// a byte of weights less to read.
#include "gemm/expert_tiles.h"

EXPERTS_TILES(fused_experts_tiled_bytes, int8, I8, I8, kRow)
EXPERTS_TILES(fused_experts_tiled_bytes, e5m2_row, E4m3E5m2, E4m3E5m2, kRow)
EXPERTS_TILES(fused_experts_tiled_bytes, e5m2_block, E4m3E5m2, E4m3E5m2, kBlock)

#define WEIGHTS_ALONE(name, Weights)                                              \
  EXPERTS_TILES(fused_experts_tiled_bytes, name##_with_bf16, Bf16, Weights, kRow) \
  EXPERTS_TILES(fused_experts_tiled_bytes, name##_with_fp16, F16, Weights, kRow)
WEIGHTS_ALONE(int8, I8)
WEIGHTS_ALONE(e4m3, E4m3)
WEIGHTS_ALONE(e5m2, E5m2)
