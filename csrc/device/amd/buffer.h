// Loads at 32-bit offsets from a base that is the same in all lanes. A lane that must not load gets zeros without a branch: its
// offset is out of the buffer's range (CDNA3 ISA, section 9.1.5.2 "Range checking"). Behind a branch the compiler could no longer
// count the loads in flight.
#pragma once
#include "../mem.h"

namespace mem {

using Buffer = __amdgpu_buffer_rsrc_t;

// Whether loads take predicates. Without them, a branch around the use of the result is cheaper.
constexpr bool kPredicates = false;

// The 2 GB from `base` on; `base` is the same in all lanes.
DEVICE Buffer buffer(const void* base) {
  constexpr int kRawData = 0x00027000;  // DATA_FORMAT 32: no swizzle, no thread index
  return __builtin_amdgcn_make_buffer_rsrc((void*)base, 0, 0x80000000u, kRawData);
}
// 16 bytes at base + lane_offset + offset, or zeros; `offset` is the same in all lanes.
DEVICE u32x4 load_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return __builtin_amdgcn_raw_buffer_load_b128(from, inside ? lane_offset : -1, offset, 0);
}
// Vector `index` of those from base on, or zeros; `base` is the same in all lanes.
DEVICE u32x4 load_vector_or_zero(const void* base, int index, bool inside) {
  return load_or_zero(buffer(base), index * int(sizeof(u32x4)), 0, inside);
}
// The same for data that is read once: it should not displace data that is read again.
DEVICE u32x4 load_once_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  constexpr int kNonTemporal = 2;
  return __builtin_amdgcn_raw_buffer_load_b128(from, inside ? lane_offset : -1, offset, kNonTemporal);
}
DEVICE float load_float_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  u32 bits = __builtin_amdgcn_raw_buffer_load_b32(from, inside ? lane_offset : -1, offset, 0);
  return __builtin_bit_cast(float, bits);
}
DEVICE u32 load_byte_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return __builtin_amdgcn_raw_buffer_load_b8(from, inside ? lane_offset : -1, offset, 0);
}
DEVICE u32 load_short_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return __builtin_amdgcn_raw_buffer_load_b16(from, inside ? lane_offset : -1, offset, 0);
}

// The value at address, if inside.
template <class T>
DEVICE void store_if(bool inside, void* address, T value) {
  if (inside) store(address, value);
}

// Data for other blocks of the launch, at base + lane_offset + offset: 4 or 16 bytes. It bypasses the L2 cache, of which each
// XCD has its own (LLVM AMDGPU usage, "Memory Model gfx942": sc1 is agent scope). Stores have no scalar offset: with one, clang
// may miss that the next instruction overwrites the data.
constexpr int kDeviceScope = 16;
template <class T>
DEVICE void store_device(Buffer to, int lane_offset, int offset, T value) {
  const int at = lane_offset + offset;
  if constexpr (sizeof(T) == 4)
    __builtin_amdgcn_raw_buffer_store_b32(__builtin_bit_cast(u32, value), to, at, 0, kDeviceScope);
  else __builtin_amdgcn_raw_buffer_store_b128(__builtin_bit_cast(u32x4, value), to, at, 0, kDeviceScope);
}
template <class T>
DEVICE T load_device_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  const int at = inside ? lane_offset : -1;
  if constexpr (sizeof(T) == 4)
    return __builtin_bit_cast(T, __builtin_amdgcn_raw_buffer_load_b32(from, at, offset, kDeviceScope));
  else return __builtin_bit_cast(T, __builtin_amdgcn_raw_buffer_load_b128(from, at, offset, kDeviceScope));
}

// Whether scalars, which are the same in all lanes, are loaded before vectors. Here scalar loads are of another kind, and neither
// kind waits for the other.
constexpr bool kScalarsFirst = true;

// Whether experts' weights may be in fragment order, as AITER leaves them.
constexpr bool kExpertFragments = true;
// Loads above are issued before those below.
DEVICE void issue_loads() { __builtin_amdgcn_sched_barrier(0); }
// One wait for scalars (arguments and what is loaded through them) whose loads were issued above. Left alone, the compiler loads
// each at its use, and waits for it there.
template <class T, class... More>
DEVICE void wait_for_scalars(T& value, More&... more) {
  if constexpr (__is_const(T)) asm volatile("" ::"s"(value));
  else asm volatile("" : "+s"(value));  // what is computed from it comes after
  if constexpr (sizeof...(more) > 0) wait_for_scalars(more...);
  else __builtin_amdgcn_sched_barrier(0);
}

// The position of a lane in a stream.
struct Cursor {
  Buffer base;
  int lane_offset;
};
DEVICE Cursor cursor(const void* base, int lane_offset) { return {buffer(base), lane_offset}; }
// Loads the 16 bytes `offset` further on, which are read once, to `value`. If not inside, `value` becomes zero or stays.
DEVICE void refill(u32x4& value, const Cursor& from, int offset, bool inside) {
  value = load_once_or_zero(from.base, from.lane_offset, offset, inside);
}

}  // namespace mem
