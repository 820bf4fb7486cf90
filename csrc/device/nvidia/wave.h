// Warp primitives: 32 lanes, called a wave here as everywhere.
#pragma once
#include "../types.h"

namespace wave {

constexpr int kLanes = 32;
constexpr double kLikely = 0.5;  // the compiler may choose: selects cost no more than branches

DEVICE int thread_id() { return __nvvm_read_ptx_sreg_tid_x(); }
DEVICE int lane() { return thread_id() % kLanes; }
// The wave's index in its block.
DEVICE int index() { return thread_id() / kLanes; }
DEVICE int block_id_x() { return __nvvm_read_ptx_sreg_ctaid_x(); }
DEVICE int block_id_y() { return __nvvm_read_ptx_sreg_ctaid_y(); }
// Does nothing: loads that follow are predicated off.
DEVICE void may_end() {}

// A uniform value.
DEVICE int uniform(int value) { return value; }
// The number of lanes where `yes` holds, and the number of such lanes below this one.
DEVICE int count(bool yes) { return __builtin_popcount(__nvvm_vote_ballot_sync(~0u, yes)); }
DEVICE int count_below(bool yes) {
  return __builtin_popcount(u32(__nvvm_vote_ballot_sync(~0u, yes)) & ((1u << lane()) - 1));
}
// Another lane's value. Here and below, T is float, int or u32.
template <class T>
DEVICE T from_lane(T value, int lane) {
  return __builtin_bit_cast(T, __nvvm_shfl_sync_idx_i32(~0u, __builtin_bit_cast(int, value), lane, kLanes - 1));
}

// Broadcasts one uniform lane's value to every lane.
template <class T>
DEVICE T read(T value, int lane) {
  return __builtin_bit_cast(T, __nvvm_shfl_sync_idx_i32(~0u, __builtin_bit_cast(int, value), lane, kLanes - 1));
}

// A value from the other half of each aligned group of 2 * kHalf lanes (kHalf 1..16). The source lane is unspecified:
// all lanes of a half must hold the same value.
template <int kHalf, class T>
DEVICE T other_half(T value) {
  return __builtin_bit_cast(T, __nvvm_shfl_sync_bfly_i32(~0u, __builtin_bit_cast(int, value), kHalf, kLanes - 1));
}

template <int kFirst, int kGroup, class T, class Combine>
DEVICE T butterfly(T value, Combine combine) {
  if constexpr (kFirst >= kGroup) return value;
  else return butterfly<2 * kFirst, kGroup>(combine(value, other_half<kFirst>(value)), combine);
}

// Reduces each aligned group of kGroup lanes (2..32); every lane gets its group's result.
template <int kGroup, class T, class Combine>
DEVICE T reduce_group(T value, T /*identity*/, Combine combine) {
  return butterfly<1, kGroup>(value, combine);
}

// Reduces all 32 lanes; every lane gets the result.
template <class T, class Combine>
DEVICE T reduce(T value, T /*identity*/, Combine combine) {
  return butterfly<1, kLanes>(value, combine);
}

// The maximum over all lanes, in every lane.
DEVICE u32 maximum(u32 value) { return __nvvm_redux_sync_umax(value, ~0u); }

// The first lane where `holds` is true. At least one lane must hold.
DEVICE int first_lane(bool holds) { return __builtin_ctz(__nvvm_vote_ballot_sync(~0u, holds)); }

// Nothing to hide: scalars share the general register file.
template <class T>
DEVICE T anew(T value) {
  return value;
}

}  // namespace wave
