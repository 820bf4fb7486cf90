// MLA paged split-KV decode, q_len 1 to 8; see attention/mla.h.
#include "attention/mla.h"

template <class Kernel>
DEVICE void decode(const MlaProblem& problem) {
  LDS static typename Kernel::Buffer buffer;
  Kernel decode(problem, buffer);
  if (decode.has_work()) decode.run();
}

// The last of a request's blocks combines the splits if there are counters, otherwise another launch does.
template <class Kernel>
DEVICE void combine(const MlaProblem& problem) {
  LDS static typename Kernel::Buffer buffer;
  const Kernel combine(problem);
  if (combine.splits > 1) combine.run(buffer);
}

// Up to 16 columns, two blocks share a compute unit.
#define DECODE(symbol, T, Cache, tiles)                                                                 \
  KERNEL(kMlaWaves* wave::kLanes) WAVES_PER_SIMD(tiles == 1 ? 4 : 2) symbol(const MlaProblem problem) { \
    decode<MlaDecode<T, Cache, tiles>>(problem);                                                        \
  }
#define COMBINE(symbol, Combine, T, tiles) \
  KERNEL(kMlaWaves* wave::kLanes) symbol(const MlaProblem problem) { combine<Combine<T, tiles>>(problem); }
#ifdef HAS_MLA_64
#include "attention/amd/mla_in_lds.h"

#define DECODE_64(symbol, ...)                                                         \
  KERNEL(kMlaWaves* wave::kLanes) WAVES_PER_SIMD(2) symbol(const MlaProblem problem) { \
    decode<MlaDecodeInLds<__VA_ARGS__>>(problem);                                      \
  }
#endif
#define PACKED_ROW_TILES(tiles)                                     \
  DECODE(mla_decode_bf16_##tiles, Bf16, Bf16, tiles)                \
  DECODE(mla_decode_bf16_fp8_##tiles, Bf16, E4m3, tiles)            \
  DECODE(mla_decode_fp16_##tiles, F16, F16, tiles)                  \
  DECODE(mla_decode_fp16_fp8_##tiles, F16, E4m3, tiles)             \
  COMBINE(mla_decode_combine_bf16_##tiles, MlaCombine, Bf16, tiles) \
  COMBINE(mla_decode_combine_fp16_##tiles, MlaCombine, F16, tiles)

PACKED_ROW_TILES(1)
PACKED_ROW_TILES(2)
COMBINE(mla_decode_combine_bf16_4, MlaCombine, Bf16, 4)
COMBINE(mla_decode_combine_fp16_4, MlaCombine, F16, 4)
#ifdef HAS_MLA_64
DECODE_64(mla_decode_bf16_lds_4, Bf16, Bf16)
DECODE_64(mla_decode_bf16_fp8_lds_4, Bf16, E4m3)
DECODE_64(mla_decode_bf16_fp8_query_lds_4, Bf16, E4m3, E4m3)
DECODE_64(mla_decode_fp16_lds_4, F16, F16)
DECODE_64(mla_decode_fp16_fp8_lds_4, F16, E4m3)
DECODE_64(mla_decode_fp16_fp8_query_lds_4, F16, E4m3, E4m3)
#endif
#ifdef HAS_MLA_IN_LDS
#include "attention/nvidia/mla_in_lds.h"

#define IN_LDS(symbol, T, tiles, run) \
  KERNEL(kMlaWaves* wave::kLanes) symbol(const MlaProblem problem) { MlaDecodeInLds<T, tiles>::run(problem); }
#define IN_LDS_PACKED_ROW_TILES(tiles)                                       \
  IN_LDS(mla_decode_bf16_lds_##tiles, Bf16, tiles, run)                      \
  IN_LDS(mla_decode_fp16_lds_##tiles, F16, tiles, run)                       \
  IN_LDS(mla_decode_bf16_lds_even_##tiles, Bf16, tiles, run_even_steps)      \
  IN_LDS(mla_decode_fp16_lds_even_##tiles, F16, tiles, run_even_steps)       \
  COMBINE(mla_decode_combine_bf16_even_##tiles, MlaCombineEven, Bf16, tiles) \
  COMBINE(mla_decode_combine_fp16_even_##tiles, MlaCombineEven, F16, tiles)

IN_LDS_PACKED_ROW_TILES(1)
IN_LDS_PACKED_ROW_TILES(2)
IN_LDS_PACKED_ROW_TILES(4)
#endif
