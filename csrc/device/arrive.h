// Last-block detection: the last of several blocks to arrive continues, the others return. No block waits for another.
#pragma once
#include "gpu.h"

// Called by all threads of the `blocks` blocks that share `counter`, which is 0 before the first arrival and 0 again
// after the last. Returns true in the last block to arrive, which then loads with mem::load_device what the others
// stored with mem::store_device before the call. `stored` is false in waves that stored nothing. `arrived` is LDS that
// no thread uses after the call.
DEVICE bool is_last_block(u32* counter, u32 blocks, u32& arrived, bool stored = true) {
  if (stored) wait_for_stores();  // this thread's results, before its block's count
  block_barrier();                // hazard: counted before all threads have written
  if (wave::thread_id() == 0) arrived = block_count(counter, blocks);
  block_barrier();  // hazard: `arrived` is read before it is written
  return wave::uniform(arrived) == int(blocks) - 1;
}
DEVICE bool is_last_block(u32* counter, u32 blocks, bool stored = true) {
  LDS static u32 arrived;
  return is_last_block(counter, blocks, arrived, stored);
}
