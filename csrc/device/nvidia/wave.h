// Warps of 32 lanes, called waves here as everywhere.
#pragma once

namespace wave {

constexpr int kLanes = 32;

DEVICE int thread() { return __nvvm_read_ptx_sreg_tid_x(); }
DEVICE int lane() { return thread() % kLanes; }
// The wave's number in its block.
DEVICE int index() { return thread() / kLanes; }
DEVICE int block_x() { return __nvvm_read_ptx_sreg_ctaid_x(); }
DEVICE int block_y() { return __nvvm_read_ptx_sreg_ctaid_y(); }

template <int kFirst, int kGroup, class Combine>
DEVICE float butterfly(float value, Combine combine) {
  for (int step = kFirst; step < kGroup; step *= 2) {
    int other = __nvvm_shfl_sync_bfly_i32(~0u, __builtin_bit_cast(int, value), step, kLanes - 1);
    value = combine(value, __builtin_bit_cast(float, other));
  }
  return value;
}

// Combines the values of each aligned run of kGroup lanes (2..32); every lane gets its run's result.
template <int kGroup, class Combine>
DEVICE float reduce_group(float value, float /*identity*/, Combine combine) {
  return butterfly<1, kGroup>(value, combine);
}

// Combines the values of all 32 lanes; every lane gets the result.
template <class Combine>
DEVICE float reduce(float value, float /*identity*/, Combine combine) {
  return butterfly<1, kLanes>(value, combine);
}

}  // namespace wave
