// The last of several blocks to arrive continues alone; the others are done. Nobody waits.
#pragma once
#include "gpu.h"

// Called by all threads of each of `blocks` blocks that share `counter` (0 before the first arrives, 0 again after the
// last). True in the last block to arrive, which then sees all that the others wrote to HBM before they called. `arrived` is
// LDS that no thread uses after it called.
DEVICE bool is_last_block(u32* counter, u32 blocks, u32& arrived) {
  thread_release();  // this thread's results, before its count
  block_barrier();   // hazard: counted before all threads wrote
  if (wave::thread() == 0) {
    arrived = block_count(counter) + 1;
    if (arrived == blocks) __scoped_atomic_store_n(counter, 0u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  }
  block_barrier();  // hazard: `arrived` is read before it is written
  if (arrived != blocks) return false;
  thread_acquire();  // before the others' results are read
  return true;
}
DEVICE bool is_last_block(u32* counter, u32 blocks) {
  LDS static u32 arrived;
  return is_last_block(counter, blocks, arrived);
}
