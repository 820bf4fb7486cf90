// Loads at 32-bit offsets from a uniform base. A masked lane gets zeros.
#pragma once
#include "../mem.h"

namespace mem {

using Buffer = const u8*;

// True if loads are predicated. Masked loads start from zeros; a branch would serialize the loads.
constexpr bool kPredicates = true;

DEVICE Buffer buffer(const void* base) { return (Buffer)base; }
// 16 bytes at base + lane_offset + offset, or zeros; `offset` is uniform.
DEVICE u32x4 load_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return inside ? load<u32x4>(from + lane_offset + offset) : u32x4{};
}
// 16-byte vector `index` from `base` on, or zeros. The pointer is indexed, not byte-offset: with byte offsets each load
// computes an address, and ptxas moves later loads after the first load's consumers.
DEVICE u32x4 load_vector_or_zero(const void* base, int index, bool inside) {
  u32x4 value = {};
  if (inside) value = load<u32x4>((const u32x4*)base + index);
  return value;
}
// Streaming load: data that is read once should not evict data that is read again.
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

// Stores `value` if `inside`, under a predicate: a branch around each store would serialize the stores.
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

// Stores at base + lane_offset + offset for other blocks in the launch, in the shared L2 cache.
template <class T>
DEVICE void store_device(Buffer to, int lane_offset, int offset, T value) {
  store((u8*)to + offset + lane_offset, value);
}
template <class T>
DEVICE T load_device_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return inside ? load<T>(from + lane_offset + offset) : T{};
}

// True if uniform scalars are loaded before vectors. Here they are ordinary loads, and ptxas moves some of a row's
// loads after a leading scalar load.
constexpr bool kScalarsFirst = false;

// True if expert weights may be in fragment order. AITER does not run here, and fragment order needs more registers:
// 140 instead of 128 in a tiled kernel, hence one block per SM instead of two.
constexpr bool kExpertFragments = false;
// Nothing to order: arguments are constants here, and the compiler may choose where loads are issued and waited for.
DEVICE void issue_loads() {}
template <class... T>
DEVICE void wait_for_scalars(T&...) {}

// A lane's position in a stream.
struct Cursor {
  const u8* at;
};

DEVICE Cursor cursor(const void* base, int lane_offset) { return {(const u8*)base + lane_offset}; }
// Loads the 16 bytes `offset` further on into `value`, as a streaming load. If not `inside`, `value` becomes zero or is
// unchanged.
DEVICE void refill(u32x4& value, const Cursor& from, int offset, bool inside) {
  if (inside) value = load_once<u32x4>(from.at + offset);
}

}  // namespace mem
