// Flash attention, forward; see attention/flash.h.
#include "attention/flash.h"

// The kernels leave registers for so many waves of a SIMD.
#define INSTANCE(symbol, waves, T, ...)                                  \
  KERNEL(256) WAVES_PER_SIMD(waves) symbol(const FlashProblem problem) { \
    using Kernel = Flash<T, __VA_ARGS__>;                                \
    LDS static typename Kernel::Buffer buffer;                           \
    flash_tiles<Kernel>(problem, buffer);                                \
  }
#define SIZES(kind, T)                                       \
  INSTANCE(flash_attention_##kind##_64, 2, T, 64, 64, 64)    \
  INSTANCE(flash_attention_##kind##_128, 2, T, 128, 128, 64) \
  INSTANCE(flash_attention_##kind##_192, 1, T, 192, 128, 64) \
  INSTANCE(flash_attention_##kind##_256, 1, T, 256, 256, 32)

SIZES(bf16, Bf16)
SIZES(fp16, F16)
