// Where elements of a paged cache of keys or values lie; families/attention.py says which layouts there are.
#pragma once
#include "device/types.h"

struct CacheView {
  u8* data;
  const float* scale;  // [1], of e4m3; null is 1
  i64 offset, block_stride, head_stride;
  i64 group_stride, slot_stride;     // between groups of 16 bytes of slots, and between slots of a group
  i64 chunk_stride, element_stride;  // between chunks of 16 bytes of a head's elements, and between elements of a chunk
};

template <class Cache>
struct CacheType {  // 16 bits
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

// Where elements of one page, slot and head begin.
template <class Cache>
DEVICE typename CacheType<Cache>::Element* slot_of(const CacheView& cache, i64 page, i64 slot, int head) {
  constexpr int kLog2Group = CacheType<Cache>::kLog2Group;
  return (typename CacheType<Cache>::Element*)cache.data + cache.offset + page * cache.block_stride +
         head * cache.head_stride + (slot >> kLog2Group) * cache.group_stride +
         (slot & ((1 << kLog2Group) - 1)) * cache.slot_stride;
}
