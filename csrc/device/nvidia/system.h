// Words exchanged between devices, and the primitives to wait for them.
#pragma once
#include "../mem.h"

namespace mem {

template <class T>
DEVICE void store_system(void* address, T value) {
  if constexpr (sizeof(T) == 8)
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(global(address)), "l"(value) : "memory");
  else asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(global(address)), "r"(value) : "memory");
}
template <class T>
DEVICE T load_system(const void* address) {
  T value;
  if constexpr (sizeof(T) == 8)
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(global(address)));
  else asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(global(address)));
  return value;
}

}  // namespace mem

namespace wave {

constexpr u32 kTicksPerMicrosecond = 1000;
// Time in ticks, independent of clock frequencies.
DEVICE u64 time() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
// Nothing to do: all values are in vector registers.
template <class Value>
DEVICE void in_lanes(Value&) {}
// Yields the SM to other waves for a while.
DEVICE void sleep() { asm volatile("nanosleep.u32 20;"); }

}  // namespace wave
