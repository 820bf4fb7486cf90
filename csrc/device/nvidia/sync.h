// Block barriers, and counters shared by blocks.
#pragma once
#include "../mem.h"

// Block-wide barrier: stores to LDS (shared memory) before it are visible to all threads after it.
DEVICE void block_barrier() { __syncthreads(); }
// The same for one consumer group's kThreads threads.
template <int kThreads>
DEVICE void consumer_barrier(int consumer_group) {
  asm volatile("bar.sync %0, %1;" ::"r"(consumer_group + 1), "n"(kThreads) : "memory");
}

// Nothing to wait for: the count below orders this thread's mem::store_device stores.
DEVICE void wait_for_stores() {}
// Returns the number of blocks that counted before, 0 to `blocks` - 1; the last block resets the counter to 0. One
// thread counts after a barrier, and the others read after another barrier. The count extends the barriers' ordering
// (PTX ISA, "Causality order"), so no other thread waits for a fence. Inline assembly, because clang's atomics have
// system scope.
DEVICE u32 block_count(u32* counter, u32 blocks) {
  u32 count;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(count) : "l"(mem::global(counter)) : "memory");
  if (count == blocks - 1) __scoped_atomic_store_n(counter, 0u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  return count;
}
