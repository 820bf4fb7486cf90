#pragma once

// All threads of the block meet here, and what each wrote to LDS (shared memory) before is seen by all after.
DEVICE void block_barrier() { __syncthreads(); }
