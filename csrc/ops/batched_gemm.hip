// Small-M batched GEMM, one weight per head, for MLA absorption (W_UK, W_UV); see gemm/batched.h.
//
//     out[m, h, n] = T(sum_k x[m, h, k] * weight[h, k, n])
//
// Accumulation is fp32. In the kernels with rope, a head has further blocks, which rotate q_pe in place as
// ops/rope_and_cache.hip does, 8 pairs per thread. No block waits for another. q_pe may have more rows than x, and x
// none.
#include "attention/rotation.h"
#include "gemm/batched.h"

struct RotatedHeads {
  u16* data;                      // [tokens, heads, at least 16 * rotary_vecs]
  i64 token_stride, head_stride;  // elements; groups of 8 elements are contiguous and aligned
  int tokens;
  Rotation rotation;
  Divisor vecs_divisor;

  template <class T>
  DEVICE void rotate_pairs(int item) const {
    const Rotation& r = rotation;
    const int token = u32(item) / vecs_divisor, vec = item - token * r.rotary_vecs;
    if (token >= tokens) return;
    const int first = r.is_neox ? vec * kChunk : 2 * vec * kChunk;
    const int second = first + (r.is_neox ? r.rotary_vecs * kChunk : kChunk);
    const i64 position = mem::load<i64>(r.positions + token);
    u16* const head = data + token * token_stride + wave::block_id_x() * head_stride;
    const u32x4 x = mem::load<u32x4>(head + first), y = mem::load<u32x4>(head + second);
    Chunk rotated[2];
    rotate(unpack<T>(x), unpack<T>(y), angles<T>(r, position, vec), r.is_neox, rotated);
    mem::store((u32x4*)(head + first), pack<T>(rotated[0]));
    mem::store((u32x4*)(head + second), pack<T>(rotated[1]));
  }
};

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
// first_block: block_id_y of a head's first block that rotates.
#define TRANSPOSED_ROPE(kind, T, tokens)                                                                     \
  KERNEL(256)                                                                                                \
  batched_gemm_rope_##kind##_transposed_##tokens(int first_block, int threads, const BatchedProblem problem, \
                                                 const RotatedHeads q_pe) {                                  \
    using Kernel = TransposedTile<T, tokens>;                                                                \
    LDS static Kernel::Buffer buffer;                                                                        \
    const int block = wave::block_id_y() - first_block;                                                      \
    if (block >= 0) q_pe.rotate_pairs<T>(block * threads + wave::thread_id());                               \
    else Kernel::run(problem.of_head(wave::block_id_x()), wave::block_id_y(), buffer);                       \
  }
#define TOKENS(kind, T)        \
  WAVES(kind, T, 16)           \
  WAVES(kind, T, 32)           \
  WAVES(kind, T, 64)           \
  TRANSPOSED(kind, T, 16)      \
  TRANSPOSED(kind, T, 32)      \
  TRANSPOSED(kind, T, 64)      \
  TRANSPOSED_ROPE(kind, T, 16) \
  TRANSPOSED_ROPE(kind, T, 32) \
  TRANSPOSED_ROPE(kind, T, 64)

TOKENS(bf16, Bf16)
TOKENS(fp16, F16)
