// Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
#pragma once
#include "device/types.h"

DEVICE u32x4 philox(u32x4 counter, u32 key_low, u32 key_high) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 first = u64(counter.x) * 0xD2511F53u, second = u64(counter.z) * 0xCD9E8D57u;
    counter = {u32(second >> 32) ^ counter.y ^ key_low, u32(second), u32(first >> 32) ^ counter.w ^ key_high,
               u32(first)};
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}
