// Loads at 32-bit offsets from a base that is the same in all lanes. A lane that must not load gets zeros.
#pragma once
#include "../mem.h"

namespace mem {

using Buffer = const u8*;

// Whether loads take predicates. Zeros are added for what is not loaded; a branch would have the loads wait for each other.
constexpr bool kPredicates = true;

DEVICE Buffer buffer(const void* base) { return (Buffer)base; }
// 16 bytes at base + lane_offset + offset, or zeros; `offset` is the same in all lanes.
DEVICE u32x4 load_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return inside ? load<u32x4>(from + lane_offset + offset) : u32x4{};
}
// Vector `index` of those from base on, or zeros. The index is that of a pointer: of byte offsets, each load has an address to
// compute, and ptxas puts the later loads behind what is done with the first.
DEVICE u32x4 load_vector_or_zero(const void* base, int index, bool inside) {
  u32x4 value = {};
  if (inside) value = load<u32x4>((const u32x4*)base + index);
  return value;
}
// The same for data that is read once: it should not displace data that is read again.
DEVICE u32x4 load_once_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return inside ? load_once<u32x4>(from + lane_offset + offset) : u32x4{};
}
DEVICE float load_float_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return inside ? load<float>(from + lane_offset + offset) : 0.0f;
}
DEVICE u32 load_byte_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return inside ? load<u8>(from + lane_offset + offset) : 0;
}
DEVICE u32 load_short_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return inside ? load<u16>(from + lane_offset + offset) : 0;
}

// The value at address, if inside: under a predicate, as a branch around each store would have them wait for each other.
template <class T>
DEVICE void store_if(bool inside, void* address, T value) {
#define STORE(bits, letter, type)                                                                              \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p st.global." bits " [%0], %1;}" ::"l"(global(address)), \
               letter(__builtin_bit_cast(type, value)), "r"(int(inside))                                       \
               : "memory")
  if constexpr (sizeof(T) == 2) STORE("b16", "h", u16);
  else if constexpr (sizeof(T) == 4) STORE("b32", "r", u32);
  else STORE("b64", "l", i64);
#undef STORE
}

// Data for other blocks of the launch, at base + lane_offset + offset, in the L2 cache of all.
template <class T>
DEVICE void store_device(Buffer to, int lane_offset, int offset, T value) {
  store((u8*)to + offset + lane_offset, value);
}
template <class T>
DEVICE T load_device_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return inside ? load<T>(from + lane_offset + offset) : T{};
}

// Whether scalars, which are the same in all lanes, are loaded before vectors. Here they are loads as any other, and ptxas puts
// some loads of a row behind a scalar one that comes first.
constexpr bool kScalarsFirst = false;

// Whether experts' weights may be in fragment order. There is no AITER here, and its order takes registers: 140 in place of 128 in
// a tiled kernel, which leaves one block where there were two.
constexpr bool kExpertFragments = false;
// Nothing to order: arguments are constants here, and the compiler may choose where loads are issued and waited for.
DEVICE void issue_loads() {}
template <class... T>
DEVICE void wait_for_scalars(T&...) {}

// The position of a lane in a stream.
struct Cursor {
  const u8* at;
};

DEVICE Cursor cursor(const void* base, int lane_offset) { return {(const u8*)base + lane_offset}; }
// Loads the 16 bytes `offset` further on, which are read once, to `value`. If not inside, `value` becomes zero or stays.
DEVICE void refill(u32x4& value, const Cursor& from, int offset, bool inside) {
  if (inside) value = load_once<u32x4>(from.at + offset);
}

}  // namespace mem
