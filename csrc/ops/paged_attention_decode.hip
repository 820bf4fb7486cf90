// Paged split-KV decode attention, q_len 1 to 8; see attention/decode.h.
#include "attention/decode.h"

template <int kD>
constexpr int kThreads = kHeadParts<kD> == 1 ? 256 : kHeadWaves<kD> * wave::kLanes;

#define INSTANCE(symbol, T, Cache, D, is_native, Problem, ...)                         \
  KERNEL((kThreads<D>)) symbol(const Problem problem) {                                \
    using Kernel = Decode<T, Cache, D, is_native, Problem __VA_OPT__(, ) __VA_ARGS__>; \
    LDS static typename Kernel::Buffer buffer;                                         \
    Kernel decode(problem, buffer);                                                    \
    if (decode.has_work()) decode.run();                                               \
  }
// Up to 8 packed-GQA rows.
#ifdef HAS_DECODE_8
#define FEW_ROWS(symbol, T, Cache, D, is_native) INSTANCE(symbol, T, Cache, D, is_native, DecodeProblem, 8)
#else
#define FEW_ROWS(...)
#endif
#define SIZES(kind, T, Cache, layout, is_native)                                                  \
  INSTANCE(paged_attention_decode_##kind##_64_##layout, T, Cache, 64, is_native, DecodeProblem)   \
  INSTANCE(paged_attention_decode_##kind##_128_##layout, T, Cache, 128, is_native, DecodeProblem) \
  INSTANCE(paged_attention_decode_##kind##_192_##layout, T, Cache, 192, is_native, DecodeProblem) \
  INSTANCE(paged_attention_decode_##kind##_256_##layout, T, Cache, 256, is_native, DecodeProblem) \
  FEW_ROWS(paged_attention_decode_##kind##_256_##layout##_8, T, Cache, 256, is_native)            \
  INSTANCE(paged_attention_decode_##kind##_128_##layout##_grouped, T, Cache, 128, is_native, GroupedProblem)
#define LAYOUTS(kind, T, Cache)        \
  SIZES(kind, T, Cache, packed, false) \
  SIZES(kind, T, Cache, native, true)

LAYOUTS(bf16, Bf16, Bf16)
LAYOUTS(bf16_fp8, Bf16, E4m3)
LAYOUTS(fp16, F16, F16)
LAYOUTS(fp16_fp8, F16, E4m3)
