#pragma once

// All threads of the block meet here, and what each wrote to LDS (shared memory) before is seen by all after.
DEVICE void block_barrier() { __syncthreads(); }
// The same for team `team` of kThreads threads alone.
template <int kThreads>
DEVICE void team_barrier(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kThreads) : "memory");
}

// What this thread wrote is seen by all of the device that acquire after. Spelled out: clang makes it the whole system.
DEVICE void device_release() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
DEVICE void device_acquire() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
