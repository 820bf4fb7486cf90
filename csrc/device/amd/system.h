// Words exchanged between devices, and the primitives to wait for them. They lie in fine-grained memory, which caches
// may hold although HIP's flag for it says "uncached". Only system scope, sc0 sc1, reaches other devices (LLVM AMDGPU
// usage, "Memory Model gfx942"): never relax these accesses to nontemporal (nt) or plain ones.
#pragma once
#include "../mem.h"

namespace mem {

template <class T>
DEVICE void store_system(void* address, T value) {
  __scoped_atomic_store_n(global((T*)address), value, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
}
template <class T>
DEVICE T load_system(const void* address) {
  return __scoped_atomic_load_n(global((T*)address), __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
}

}  // namespace mem

namespace wave {

constexpr u32 kTicksPerMicrosecond = 100;
// Time in ticks, independent of clock frequencies.
DEVICE u64 time() { return __builtin_amdgcn_s_memrealtime(); }
// Forces the value to be computed here, in vector registers.
template <class Value>
DEVICE void in_lanes(Value& value) {
  asm volatile("" : "+v"(value));
}
// Yields the compute unit to other waves for about 64 cycles.
DEVICE void sleep() { __builtin_amdgcn_s_sleep(1); }

}  // namespace wave
