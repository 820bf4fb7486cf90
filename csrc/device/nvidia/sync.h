#pragma once

// All threads of the block meet here, and what each wrote to LDS (shared memory) before is seen by all after.
DEVICE void block_barrier() { __syncthreads(); }
// The same for team `team` of kThreads threads alone.
template <int kThreads>
DEVICE void team_barrier(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kThreads) : "memory");
}

// What a block wrote, those blocks see that count after it: one thread counts after a barrier, and others read after another.
// What a barrier orders, the count orders too (PTX ISA, "Causality order"), so that no other thread waits for a fence. The count
// is what it was before. Spelled out: clang makes it the whole system.
DEVICE void thread_release() {}
DEVICE u32 block_count(u32* counter) {
  u32 count;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(count) : "l"(mem::global(counter)) : "memory");
  return count;
}
DEVICE void thread_acquire() {}
