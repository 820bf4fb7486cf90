#pragma once
#include "../mem.h"

// All threads of the block meet here, and what each wrote to LDS (shared memory) before is seen by all after.
DEVICE void block_barrier() { __syncthreads(); }
// The same for the kThreads threads of one consumer group.
template <int kThreads>
DEVICE void consumer_barrier(int consumer_group) {
  asm volatile("bar.sync %0, %1;" ::"r"(consumer_group + 1), "n"(kThreads) : "memory");
}

// What a thread stored with mem::store_device the count below orders.
DEVICE void wait_for_stores() {}
// The count, from 0 to `blocks` - 1, of the blocks that counted before; the last leaves 0. One thread counts after a barrier, and
// others read after another: what a barrier orders, the count orders too (PTX ISA, "Causality order"), so that no other thread
// waits for a fence. Spelled out: clang makes it the whole system.
DEVICE u32 block_count(u32* counter, u32 blocks) {
  u32 count;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(count) : "l"(mem::global(counter)) : "memory");
  if (count == blocks - 1) __scoped_atomic_store_n(counter, 0u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  return count;
}
