// Addresses in a paged KV cache; shared/attention.py lists the layouts.
#pragma once
#include "device/types.h"

struct CacheView {
  u8* data;
  const float* scale;  // [1], for e4m3; null is 1
  i64 offset, block_stride, head_stride;
  i64 group_stride, slot_stride;     // between 16-byte groups of slots, and between a group's slots
  i64 chunk_stride, element_stride;  // between 16-byte chunks of a head's elements, and between a chunk's elements
};

template <class Cache>
struct CacheType {  // 16-bit
  using Element = u16;
  using Vec = u32x4;                    // 8 elements
  static constexpr int kLog2Group = 3;  // elements in 16 bytes
};
template <>
struct CacheType<E4m3> {
  using Element = u8;
  using Vec = u32x2;
  static constexpr int kLog2Group = 4;
};

// The first element for a page, slot and head.
template <class Cache>
DEVICE typename CacheType<Cache>::Element* slot_of(const CacheView& cache, i64 page, i64 slot, int head) {
  constexpr int kLog2Group = CacheType<Cache>::kLog2Group;
  return (typename CacheType<Cache>::Element*)cache.data + cache.offset + page * cache.block_stride +
         head * cache.head_stride + (slot >> kLog2Group) * cache.group_stride +
         (slot & ((1 << kLog2Group) - 1)) * cache.slot_stride;
}
