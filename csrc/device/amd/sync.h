// Barriers of the threads of a block, and counters that blocks share.
#pragma once
#include "../mem.h"

// A barrier of all threads of the block: after it all see what each wrote to LDS before. Only LDS is ordered, so that
// global loads in flight stay in flight (LLVM AMDGPU usage, "Memory Model gfx942": fence with "local").
DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// Once this returns, the whole device sees what the thread stored with mem::store_device.
DEVICE void wait_for_stores() {
  asm volatile("" ::: "memory");       // the compiler moves no store over it
  __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0)
}
// The number of blocks that counted before, from 0 to `blocks` - 1; the last block resets the counter to 0. It orders
// nothing: a block waits for its stores before a barrier, and the last block loads with mem::load_device after another
// barrier.
DEVICE u32 block_count(u32* counter, u32 blocks) {
  return __builtin_amdgcn_atomic_inc32(mem::global(counter), blocks - 1, __ATOMIC_RELAXED, "agent");
}
