// Warps of 32 lanes, called waves here as everywhere.
#pragma once
#include "../types.h"

namespace wave {

constexpr int kLanes = 32;
constexpr double kLikely = 0.5;  // the compiler may choose: selects cost no more than branches

DEVICE int thread_id() { return __nvvm_read_ptx_sreg_tid_x(); }
DEVICE int lane() { return thread_id() % kLanes; }
// The wave's number in its block.
DEVICE int index() { return thread_id() / kLanes; }
DEVICE int block_id_x() { return __nvvm_read_ptx_sreg_ctaid_x(); }
DEVICE int block_id_y() { return __nvvm_read_ptx_sreg_ctaid_y(); }

// A value that is the same in all lanes.
DEVICE int uniform(int value) { return value; }
// The number of lanes that say yes, and the number of those below this lane.
DEVICE int count(bool yes) { return __builtin_popcount(__nvvm_vote_ballot_sync(~0u, yes)); }
DEVICE int count_below(bool yes) {
  return __builtin_popcount(u32(__nvvm_vote_ballot_sync(~0u, yes)) & ((1u << lane()) - 1));
}
// The value of another lane. T, here and below, is float, int or u32.
template <class T>
DEVICE T from_lane(T value, int lane) {
  return __builtin_bit_cast(T, __nvvm_shfl_sync_idx_i32(~0u, __builtin_bit_cast(int, value), lane, kLanes - 1));
}

// The value of one lane, the same one for all, in every lane.
template <class T>
DEVICE T read(T value, int lane) {
  return __builtin_bit_cast(T, __nvvm_shfl_sync_idx_i32(~0u, __builtin_bit_cast(int, value), lane, kLanes - 1));
}

// The value of a lane in the other half of each aligned group of 2 * kHalf lanes (kHalf 1..16); which one does not matter where
// all lanes of a half have the same.
template <int kHalf, class T>
DEVICE T other_half(T value) {
  return __builtin_bit_cast(T, __nvvm_shfl_sync_bfly_i32(~0u, __builtin_bit_cast(int, value), kHalf, kLanes - 1));
}

template <int kFirst, int kGroup, class T, class Combine>
DEVICE T butterfly(T value, Combine combine) {
  if constexpr (kFirst >= kGroup) return value;
  else return butterfly<2 * kFirst, kGroup>(combine(value, other_half<kFirst>(value)), combine);
}

// Combines the values of each aligned group of kGroup lanes (2..32); every lane gets the result of its group.
template <int kGroup, class T, class Combine>
DEVICE T reduce_group(T value, T /*identity*/, Combine combine) {
  return butterfly<1, kGroup>(value, combine);
}

// Combines the values of all 32 lanes; every lane gets the result.
template <class T, class Combine>
DEVICE T reduce(T value, T /*identity*/, Combine combine) {
  return butterfly<1, kLanes>(value, combine);
}

// The largest of all lanes' values, in every lane.
DEVICE u32 maximum(u32 value) { return __nvvm_redux_sync_umax(value, ~0u); }

// The first lane where it holds. It must hold in one.
DEVICE int first_lane(bool holds) { return __builtin_ctz(__nvvm_vote_ballot_sync(~0u, holds)); }

// Nothing: there are as many registers of scalars as of others.
template <class T>
DEVICE T anew(T value) {
  return value;
}

}  // namespace wave
