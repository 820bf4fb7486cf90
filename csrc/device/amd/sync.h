#pragma once
#include "../mem.h"

// All threads of the block meet here, and what each wrote to LDS before is seen by all after. Only LDS is ordered, so
// global loads in flight stay in flight (LLVM AMDGPU usage, "Memory Model gfx942": fence with "local").
DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// What a thread stored with mem::store_device is where the whole device sees it, once this returns.
DEVICE void wait_for_stores() {
  asm volatile("" ::: "memory");       // the compiler moves no store over it
  __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0)
}
// The count, from 0 to `blocks` - 1, of the blocks that counted before; the last leaves 0. It orders nothing: what blocks stored
// they wait for, before a barrier, and what the last one reads it loads with mem::load_device, after another.
DEVICE u32 block_count(u32* counter, u32 blocks) {
  return __builtin_amdgcn_atomic_inc32(mem::global(counter), blocks - 1, __ATOMIC_RELAXED, "agent");
}
