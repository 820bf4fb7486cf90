// Weights of four bits times bf16 tokens, by one wave: a tile of 16 rows, 128 of K, which are 64 bytes of a row, and
// scales per group of 32 or 128 of K. A lane has 16 bytes of a row, 32 of K, in four words.
//
// Scaled weights do not fit bf16, so scales are applied to the fp32 sums of a group. A matrix instruction adds the
// products of all lanes that have a row, and with groups of 32 each of them has another group. So either an instruction
// with four separate sums takes one from each lane, or these lanes exchange words first, such that each has a word of
// every group.
//
// Includes the vendor's half.
#pragma once
#include "device/scale.h"
#include "device/vec.h"

#if defined(__AMDGCN__)
#include "gemm/skinny/amd/packed_tile.h"
#elif defined(__NVPTX__)
#include "gemm/skinny/nvidia/packed_tile.h"
#endif

namespace packed {

// Where a lane's vector v of a token, or the first of its group, begins in a slice, in K.
template <int kGroups>
DEVICE int depth(int lane, int v) {
  const int of_lane = mma::depth(lane) / 16;
  return kExchanges<kGroups> ? of_lane * 8 + v * 32 : of_lane * 32;
}
// Loads vector v, where vector 0 is at lane_offset + offset, or zeros. With exchanged words it is of group v. Else all are of the
// lane's group, so that they begin inside K if the first does.
template <int kGroups>
DEVICE u32x4 load_vec(mem::Buffer from, int lane_offset, int v, int offset, bool inside) {
  return load_further(from, lane_offset, v * (kExchanges<kGroups> ? 64 : 16), offset, inside);
}

}  // namespace packed
