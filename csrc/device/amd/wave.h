// Waves of 64 lanes. Lane exchange is DPP: one VALU instruction per step, no LDS (CDNA3 ISA, section 6.6.10 "DPP").
#pragma once

namespace wave {

constexpr int kLanes = 64;

DEVICE int lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)); }
DEVICE int thread() { return __builtin_amdgcn_workitem_id_x(); }
// The wave's number in its block, in a scalar register.
DEVICE int index() { return __builtin_amdgcn_readfirstlane(thread() / kLanes); }
DEVICE int block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE int block_y() { return __builtin_amdgcn_workgroup_id_y(); }

template <int kControl, int kRowMask = 0xf>
DEVICE float dpp(float identity, float value) {
  return __builtin_bit_cast(float, __builtin_amdgcn_update_dpp(__builtin_bit_cast(int, identity),
                                                               __builtin_bit_cast(int, value), kControl, kRowMask, 0xf,
                                                               /*bound_ctrl=*/false));
}

// Combines the values of each aligned run of kGroup lanes (2..16); every lane gets its run's result.
template <int kGroup, class Combine>
DEVICE float reduce_group(float value, float identity, Combine combine) {
  static_assert(kGroup == 2 || kGroup == 4 || kGroup == 8 || kGroup == 16, "a DPP row has 16 lanes");
  value = combine(value, dpp<0xB1>(identity, value));                               // quad_perm [1,0,3,2]
  if constexpr (kGroup >= 4) value = combine(value, dpp<0x4E>(identity, value));    // quad_perm [2,3,0,1]
  if constexpr (kGroup >= 8) value = combine(value, dpp<0x141>(identity, value));   // row_half_mirror
  if constexpr (kGroup >= 16) value = combine(value, dpp<0x140>(identity, value));  // row_mirror
  return value;
}

// Combines the values of all 64 lanes; every lane gets the result (in a scalar register).
template <class Combine>
DEVICE float reduce(float value, float identity, Combine combine) {
  value = reduce_group<16>(value, identity, combine);
  value = combine(value, dpp<0x142, 0xa>(identity, value));  // row_bcast15: rows 1 and 3 take rows 0 and 2
  value = combine(value, dpp<0x143, 0xc>(identity, value));  // row_bcast31: rows 2 and 3 take row 1
  return __builtin_bit_cast(float, __builtin_amdgcn_readlane(__builtin_bit_cast(int, value), kLanes - 1));
}

}  // namespace wave
