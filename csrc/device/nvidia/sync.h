// Barriers of the threads of a block, and counters that blocks share.
#pragma once
#include "../mem.h"

// A barrier of all threads of the block: after it all see what each wrote to LDS (shared memory) before.
DEVICE void block_barrier() { __syncthreads(); }
// The same for the kThreads threads of one consumer group.
template <int kThreads>
DEVICE void consumer_barrier(int consumer_group) {
  asm volatile("bar.sync %0, %1;" ::"r"(consumer_group + 1), "n"(kThreads) : "memory");
}

// Nothing: the count below orders what a thread stored with mem::store_device.
DEVICE void wait_for_stores() {}
// The number of blocks that counted before, from 0 to `blocks` - 1; the last block resets the counter to 0. One thread counts
// after a barrier, and the others read after another barrier. The count orders what the barriers order (PTX ISA, "Causality
// order"), so that no other thread waits for a fence. In assembler, because clang's atomics have the scope of the whole system.
DEVICE u32 block_count(u32* counter, u32 blocks) {
  u32 count;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(count) : "l"(mem::global(counter)) : "memory");
  if (count == blocks - 1) __scoped_atomic_store_n(counter, 0u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  return count;
}
