// Small-M batched GEMM, one weight per head, with a quantized output, for MLA's W_UV; see gemm/batched_quant.h.
#include "gemm/batched_quant.h"

// K-contiguous weights: tiles of 16 rows along N.
#define QUANTIZED(kind, T, tokens)                                                             \
  KERNEL(256) batched_gemm_quant_##kind##_##tokens(const BatchedQuantProblem problem) {        \
    using Epilogue = HeadEpilogue<T, (tokens + mma::kTileTokens - 1) / mma::kTileTokens>;      \
    using Kernel = WaveSplitK<T, tokens, ScaleGranularity::kNone, Fp32Scale, false, Epilogue>; \
    LDS static Kernel::Buffer buffer;                                                          \
    const HeadProblem p = problem.of_head(wave::block_id_x(), Epilogue::kProducts);            \
    const Kernel kernel{p, buffer, {p, wave::block_id_y()}};                                   \
    kernel.multiply();                                                                         \
    Epilogue::quantize_head(p);                                                                \
  }
#define TOKENS(kind, T)  \
  QUANTIZED(kind, T, 16) \
  QUANTIZED(kind, T, 32) \
  QUANTIZED(kind, T, 64)

TOKENS(bf16, Bf16)
TOKENS(fp16, F16)
