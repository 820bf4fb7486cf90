// Small-M batched GEMM, one weight per head, for MLA absorption (W_UK, W_UV); see gemm/batched.h.
//
//     out[m, h, n] = T(sum_k x[m, h, k] * weight[h, k, n])
//
// Accumulation is fp32.
#include "gemm/batched.h"

// K-contiguous weights: tiles of 16 rows along N.
#define WAVES(kind, T, tokens)                                                           \
  KERNEL(256) batched_gemm_##kind##_wave_splitk_##tokens(const BatchedProblem problem) { \
    using Kernel = WaveSplitK<T, tokens, ScaleGranularity::kNone>;                       \
    LDS static Kernel::Buffer buffer;                                                    \
    const SkinnyProblem p = problem.of_head(wave::block_id_x());                         \
    const Kernel kernel{p, buffer, {p, wave::block_id_y()}};                             \
    kernel.multiply();                                                                   \
  }
#define TRANSPOSED(kind, T, tokens)                                                     \
  KERNEL(256) batched_gemm_##kind##_transposed_##tokens(const BatchedProblem problem) { \
    using Kernel = TransposedTile<T, tokens>;                                           \
    LDS static Kernel::Buffer buffer;                                                   \
    Kernel::run(problem.of_head(wave::block_id_x()), wave::block_id_y(), buffer);       \
  }
#define TOKENS(kind, T)   \
  WAVES(kind, T, 16)      \
  WAVES(kind, T, 32)      \
  WAVES(kind, T, 64)      \
  TRANSPOSED(kind, T, 16) \
  TRANSPOSED(kind, T, 32) \
  TRANSPOSED(kind, T, 64)

TOKENS(bf16, Bf16)
TOKENS(fp16, F16)
