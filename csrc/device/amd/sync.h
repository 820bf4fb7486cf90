// Block barriers, and counters shared by blocks.
#pragma once
#include "../mem.h"

// Block-wide barrier: LDS stores before it are visible to all threads after it. Only LDS is ordered, so global loads
// stay in flight (LLVM AMDGPU usage, "Memory Model gfx942": fence with "local").
DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// On return, the whole device sees this thread's mem::store_device stores. For other devices it says nothing: system.h.
DEVICE void wait_for_stores() {
  asm volatile("" ::: "memory");       // the compiler moves no store across
  __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0)
}
// Returns the number of blocks that counted before, 0 to `blocks` - 1; the last block resets the counter to 0. It
// orders nothing: a block waits for its stores before a barrier, and the last block loads with mem::load_device after
// another barrier.
DEVICE u32 block_count(u32* counter, u32 blocks) {
  return __builtin_amdgcn_atomic_inc32(mem::global(counter), blocks - 1, __ATOMIC_RELAXED, "agent");
}
