// Buffer loads at 32-bit offsets from a uniform base. An out-of-range offset masks a lane: it reads zeros without a
// branch (CDNA3 ISA, section 9.1.5.2 "Range checking"). After a branch the compiler could no longer count the loads in
// flight.
#pragma once
#include "../mem.h"

namespace mem {

using Buffer = __amdgpu_buffer_rsrc_t;

// True if loads are predicated. Here a branch around the use of the result is cheaper.
constexpr bool kPredicates = false;

// A descriptor for the 2 GB from `base` on; `base` is uniform.
DEVICE Buffer buffer(const void* base) {
  constexpr int kRawData = 0x00027000;  // DATA_FORMAT 32: no swizzle, no thread index
  return __builtin_amdgcn_make_buffer_rsrc((void*)base, 0, 0x80000000u, kRawData);
}
// 16 bytes at base + lane_offset + offset, or zeros; `offset` is uniform.
DEVICE u32x4 load_or_zero(Buffer from, int lane_offset, int offset, bool inside) {
  return __builtin_amdgcn_raw_buffer_load_b128(from, inside ? lane_offset : -1, offset, 0);
}
// 16-byte vector `index` from `base` on, or zeros; `base` is uniform.
DEVICE u32x4 load_vector_or_zero(const void* base, int index, bool inside) {
  return load_or_zero(buffer(base), index * int(sizeof(u32x4)), 0, inside);
}
// Streaming load: data that is read once should not evict data that is read again.
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

// Stores `value` if `inside`.
template <class T>
DEVICE void store_if(bool inside, void* address, T value) {
  if (inside) store(address, value);
}

// Stores 4 or 16 bytes at base + lane_offset + offset for other blocks in the launch. Device scope bypasses the L2
// caches, one per XCD (LLVM AMDGPU usage, "Memory Model gfx942": sc1 is agent scope). The store has no scalar offset:
// with one, clang may miss that the next instruction overwrites the data.
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

// True if uniform scalars are loaded before vectors. Here scalar and vector loads have separate counters, so neither
// waits for the other.
constexpr bool kScalarsFirst = true;

// True if expert weights may be in fragment order, as AITER leaves them.
constexpr bool kExpertFragments = true;
// Loads above are issued before loads below.
DEVICE void issue_loads() { __builtin_amdgcn_sched_barrier(0); }
// Waits once for scalars (arguments and values loaded through them) whose loads were issued above. Otherwise the
// compiler loads each scalar at its use and waits there.
template <class T, class... More>
DEVICE void wait_for_scalars(T& value, More&... more) {
  if constexpr (__is_const(T)) asm volatile("" ::"s"(value));
  else asm volatile("" : "+s"(value));  // dependent code is scheduled after this
  if constexpr (sizeof...(more) > 0) wait_for_scalars(more...);
  else __builtin_amdgcn_sched_barrier(0);
}

// A lane's position in a stream.
struct Cursor {
  Buffer base;
  int lane_offset;
};
DEVICE Cursor cursor(const void* base, int lane_offset) { return {buffer(base), lane_offset}; }
// Loads the 16 bytes `offset` further on into `value`, as a streaming load. If not `inside`, `value` becomes zero or is
// unchanged.
DEVICE void refill(u32x4& value, const Cursor& from, int offset, bool inside) {
  value = load_once_or_zero(from.base, from.lane_offset, offset, inside);
}

}  // namespace mem
