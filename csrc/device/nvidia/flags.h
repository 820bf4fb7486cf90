// Payload and flag apart, between devices: stores and loads, and the flag that follows them. The flag's release
// and acquire at system scope order the payload of a whole block, which a barrier joins (PTX ISA, "Causality order").
#pragma once
#include "../gpu.h"

namespace mem {

// 4, 8 or 16 bytes at base + at; `base` is uniform.
template <class V>
DEVICE void store_payload(void* base, u32 at, V value) {
  store((u8*)base + at, value);
}
// The same bytes, or zeros.
template <class V>
DEVICE V load_payload_or_zero(const void* base, u32 at, bool inside) {
  V value = {};
  if (inside) value = load<V>((const u8*)base + at);
  return value;
}
// Nothing to wait for: the release below does.
DEVICE void complete_payload() {}
// Stores a flag that no device sees before the block's payload, from a thread behind a barrier.
DEVICE void release_flag(u32* flag, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(global(flag)), "r"(value) : "memory");
}
// Loads a flag: the payload is there, for this wave and after a barrier for its block, once it has the awaited value.
DEVICE u32 acquire_flag(const u32* flag) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(global(flag)) : "memory");
  return value;
}

}  // namespace mem
