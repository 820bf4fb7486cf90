// Payload and flag apart, between devices: stores and loads at system scope, and the flag that follows them.
// The memory is fine-grained, as in system.h: sc0 sc1 on every access (LLVM AMDGPU usage, "Memory Model gfx942"). No
// store of a payload is below system scope, so a release has no cache to write back: it waits for the stores.
#pragma once
#include "../gpu.h"

namespace mem {

// 4, 8 or 16 bytes at base + at; `base` is uniform.
template <class V>
DEVICE void store_payload(void* base, u32 at, V value) {
  constexpr int kSystemScope = 17;  // sc0 sc1
  if constexpr (sizeof(V) == 4) __builtin_amdgcn_raw_buffer_store_b32(value, buffer(base), at, 0, kSystemScope);
  else if constexpr (sizeof(V) == 8) __builtin_amdgcn_raw_buffer_store_b64(value, buffer(base), at, 0, kSystemScope);
  else __builtin_amdgcn_raw_buffer_store_b128(value, buffer(base), at, 0, kSystemScope);
}
// The same bytes, or zeros.
template <class V>
DEVICE V load_payload_or_zero(const void* base, u32 at, bool inside) {
  constexpr int kSystemScope = 17;
  const int offset = inside ? int(at) : -1;
  if constexpr (sizeof(V) == 4) return __builtin_amdgcn_raw_buffer_load_b32(buffer(base), offset, 0, kSystemScope);
  else if constexpr (sizeof(V) == 8) return __builtin_amdgcn_raw_buffer_load_b64(buffer(base), offset, 0, kSystemScope);
  else return __builtin_amdgcn_raw_buffer_load_b128(buffer(base), offset, 0, kSystemScope);
}
// Every thread calls it after its payload, before the barrier in front of release_flag.
DEVICE void complete_payload() { wait_for_stores(); }
// Stores a flag that no device sees before the block's payload.
DEVICE void release_flag(u32* flag, u32 value) { store_system(flag, value); }
// Loads a flag: the payload is there, for this wave and after a barrier for its block, once it has the awaited value.
DEVICE u32 acquire_flag(const u32* flag) {
  const u32 value = load_system<u32>(flag);
  asm volatile("" ::: "memory");  // the compiler moves no load of the payload before it
  return value;
}

}  // namespace mem
