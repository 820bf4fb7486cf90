// Kernels of RoPE and KV cache write, with or without QK norm; see attention/rope_and_cache.h.
#include "attention/rope_and_cache.h"

#define INSTANCE(symbol, T, Cache)                                                         \
  KERNEL(256) symbol(const RopeAndCacheProblem problem, int threads) {                     \
    RopeAndCache<T, Cache>(problem).run(wave::block_id_y() * threads + wave::thread_id()); \
  }

INSTANCE(rope_and_cache_bf16, Bf16, Bf16)
INSTANCE(rope_and_cache_bf16_fp8, Bf16, E4m3)
INSTANCE(rope_and_cache_fp16, F16, F16)
INSTANCE(rope_and_cache_fp16_fp8, F16, E4m3)

#define NORM_INSTANCE(symbol, maximum, Problem, T, Cache, lanes)       \
  KERNEL(maximum) symbol(const Problem problem, int threads) {         \
    const int item = wave::block_id_y() * threads + wave::thread_id(); \
    qk_norm_rope_and_cache<T, Cache, lanes>(problem, item, threads);   \
  }
// The symbols end in the maximum head size.
#define NORM_INSTANCES(symbol, T, Cache)                                                 \
  NORM_INSTANCE(symbol##_128, 256, QkNormRopeAndCacheProblem, T, Cache, 8)               \
  NORM_INSTANCE(symbol##_256, 256, QkNormRopeAndCacheProblem, T, Cache, 16)              \
  NORM_INSTANCE(symbol##_offset_128, 256, OffsetQkNormRopeAndCacheProblem, T, Cache, 8)  \
  NORM_INSTANCE(symbol##_offset_256, 256, OffsetQkNormRopeAndCacheProblem, T, Cache, 16) \
  NORM_INSTANCE(symbol##_all_heads_128, 1024, AllHeadsQkNormRopeAndCacheProblem, T, Cache, 8)

NORM_INSTANCES(qk_norm_rope_and_cache_bf16, Bf16, Bf16)
NORM_INSTANCES(qk_norm_rope_and_cache_bf16_fp8, Bf16, E4m3)
NORM_INSTANCES(qk_norm_rope_and_cache_fp16, F16, F16)
NORM_INSTANCES(qk_norm_rope_and_cache_fp16_fp8, F16, E4m3)
