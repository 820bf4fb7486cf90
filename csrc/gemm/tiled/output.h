// Output stores.
#pragma once
#include "device/vec.h"

// Stores the first `count` of 8 consecutive results, 16 bytes at a time if `aligned`.
DEVICE void store_outputs(void* out, i64 at, const Chunk& x, int count, bool aligned, int type) {
  const bool whole = aligned && count >= kChunk;
  if (type == 2) {
    float* to = (float*)out + at;
    if (whole) {
      mem::store(to, f32x4{x.pair[0].x, x.pair[0].y, x.pair[1].x, x.pair[1].y});
      mem::store(to + 4, f32x4{x.pair[2].x, x.pair[2].y, x.pair[3].x, x.pair[3].y});
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (!whole && i < count) mem::store(to + i, x.pair[i / 2][i % 2]);
  } else {
    u16* to = (u16*)out + at;
    const u32x4 packed = type == 0 ? pack<Bf16>(x) : pack<F16>(x);
    if (whole) mem::store(to, packed);
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (!whole && i < count) mem::store<u16>(to + i, u16(packed[i / 2] >> i % 2 * 16));
  }
}
