// FlashAttention forward (prefill); see ops/standalone/flash.h.
#include "ops/standalone/flash.h"

// The compiler limits registers for `waves` waves per SIMD.
#define PLAIN(symbol, waves, T, ...)                                     \
  KERNEL(256) WAVES_PER_SIMD(waves) symbol(const FlashProblem problem) { \
    using Kernel = Flash<T, __VA_ARGS__, false>;                         \
    LDS static typename Kernel::Buffer buffer;                           \
    flash_tiles<Kernel>(problem, nullptr, buffer);                       \
  }
#define GENERAL(symbol, T, ...)                                              \
  KERNEL(256) symbol(const FlashProblem problem, const FlashExtras extras) { \
    using Kernel = Flash<T, __VA_ARGS__, true>;                              \
    LDS static typename Kernel::Buffer buffer;                               \
    flash_tiles<Kernel>(problem, &extras, buffer);                           \
  }
#define SIZES(kind, T)                                           \
  PLAIN(flash_attention_##kind##_64, 2, T, 64, 64, 64)           \
  PLAIN(flash_attention_##kind##_128, 2, T, 128, 128, 64)        \
  PLAIN(flash_attention_##kind##_192, 1, T, 192, 128, 64)        \
  PLAIN(flash_attention_##kind##_256, 1, T, 256, 256, 32)        \
  GENERAL(flash_attention_##kind##_general_128, T, 128, 128, 64) \
  GENERAL(flash_attention_##kind##_general_256, T, 256, 256, 32)

SIZES(bf16, Bf16)
SIZES(fp16, F16)

KERNEL(256) flash_attention_mask(const FlashMask problem) { flash_mask(problem); }
