// Wave64 primitives. Lane exchange is DPP: one VALU instruction per step, no LDS (CDNA3 ISA, section 6.6.10 "DPP").
#pragma once
#include "../types.h"

namespace wave {

constexpr int kLanes = 64;
// The likelihood that makes the compiler branch instead of select. Branches run on the scalar unit; selects cost every
// iteration.
constexpr double kLikely = 0.9999;

DEVICE int lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)); }
DEVICE int thread_id() { return __builtin_amdgcn_workitem_id_x(); }
// The wave's index in its block, in a scalar register.
DEVICE int index() { return __builtin_amdgcn_readfirstlane(thread_id() / kLanes); }
DEVICE int block_id_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE int block_id_y() { return __builtin_amdgcn_workgroup_id_y(); }
// Ends the wave, in uniform control flow where no effects would follow. The compiler takes it for a call that returns:
// a second exit of a loop would join the loop's latch, and its waits would allow fewer loads in flight.
DEVICE void may_end() { asm volatile("s_endpgm"); }

// A uniform value, in a scalar register.
DEVICE int uniform(int value) { return __builtin_amdgcn_readfirstlane(value); }
// The number of lanes where `yes` holds, and the number of such lanes below this one.
DEVICE int count(bool yes) { return __builtin_popcountll(__builtin_amdgcn_ballot_w64(yes)); }
DEVICE int count_below(bool yes) {
  const unsigned long long all = __builtin_amdgcn_ballot_w64(yes);
  return __builtin_amdgcn_mbcnt_hi(u32(all >> 32), __builtin_amdgcn_mbcnt_lo(u32(all), 0));
}
// Another lane's value. Here and below, T is float, int or u32.
template <class T>
DEVICE T from_lane(T value, int lane) {
  return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(lane * 4, __builtin_bit_cast(int, value)));
}

// Broadcasts one uniform lane's value to every lane (in a scalar register). Here and below, T is float, int or u32.
template <class T>
DEVICE T read(T value, int lane) {
  return __builtin_bit_cast(T, __builtin_amdgcn_readlane(__builtin_bit_cast(int, value), lane));
}

template <int kControl, int kRowMask = 0xf, class T>
DEVICE T dpp(T identity, T value) {
  return __builtin_bit_cast(T, __builtin_amdgcn_update_dpp(__builtin_bit_cast(int, identity),
                                                           __builtin_bit_cast(int, value), kControl, kRowMask, 0xf,
                                                           /*bound_ctrl=*/false));
}

// A value from the other half of each aligned group of 2 * kHalf lanes (kHalf 1..8). The source lane is unspecified:
// all lanes of a half must hold the same value.
template <int kHalf, class T>
DEVICE T other_half(T value) {
  static_assert(kHalf == 1 || kHalf == 2 || kHalf == 4 || kHalf == 8, "a DPP row has 16 lanes");
  if constexpr (kHalf == 1) return dpp<0xB1>(value, value);        // quad_perm [1,0,3,2]
  else if constexpr (kHalf == 2) return dpp<0x4E>(value, value);   // quad_perm [2,3,0,1]
  else if constexpr (kHalf == 4) return dpp<0x141>(value, value);  // row_half_mirror
  else return dpp<0x140>(value, value);                            // row_mirror
}

// Reduces each aligned group of kGroup lanes (2..16); every lane gets its group's result.
template <int kGroup, class T, class Combine>
DEVICE T reduce_group(T value, T identity, Combine combine) {
  static_assert(kGroup == 2 || kGroup == 4 || kGroup == 8 || kGroup == 16, "a DPP row has 16 lanes");
  value = combine(value, dpp<0xB1>(identity, value));                               // quad_perm [1,0,3,2]
  if constexpr (kGroup >= 4) value = combine(value, dpp<0x4E>(identity, value));    // quad_perm [2,3,0,1]
  if constexpr (kGroup >= 8) value = combine(value, dpp<0x141>(identity, value));   // row_half_mirror
  if constexpr (kGroup >= 16) value = combine(value, dpp<0x140>(identity, value));  // row_mirror
  return value;
}

// Reduces all 64 lanes; every lane gets the result (in a scalar register).
template <class T, class Combine>
DEVICE T reduce(T value, T identity, Combine combine) {
  value = reduce_group<16>(value, identity, combine);
  value = combine(value, dpp<0x142, 0xa>(identity, value));  // row_bcast15: rows 0 and 2 into rows 1 and 3
  value = combine(value, dpp<0x143, 0xc>(identity, value));  // row_bcast31: row 1 into rows 2 and 3
  return read(value, kLanes - 1);
}

// The maximum over all lanes, in every lane.
DEVICE u32 maximum(u32 value) {
  return reduce(value, 0u, [](u32 a, u32 b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// The first lane where `holds` is true. At least one lane must hold.
DEVICE int first_lane(bool holds) { return __builtin_ctzll(__builtin_amdgcn_ballot_w64(holds)); }

// Hides a uniform value's origin from the compiler, so that values computed from it, such as lane masks, are recomputed
// instead of kept in scalar registers.
template <class T>
DEVICE T anew(T value) {
  asm volatile("" : "+s"(value));
  return value;
}

}  // namespace wave
