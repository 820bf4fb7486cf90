// fused_experts_tiled GEMMs for other 8-bit weights: int8, e5m2 and weight-only.
//
// int8: weights and tokens are int8, with a scale per row or tensor; int32 accumulation is exact, and rounded once to
// fp32. It does not overflow for K up to 2^17. e5m2: tokens are e4m3, as with e4m3 weights: the matrix instructions
// take one format per operand. Weight-only (W8A16): tokens are bf16 or fp16, and weights are widened to that on the way
// to LDS, which is exact.
//
// Rates: int8 and 8-bit floats are equal (CDNA3 ISA, section 7; CDNA4 ISA, section 7); weight-only runs at the 16-bit
// rate, but reads one byte less per weight.
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
