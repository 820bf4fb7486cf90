// Weights of four bits times bf16 tokens, by one wave: a tile of 16 rows, 128 of K, which are 64 bytes of a row, and
// scales per group of 32 or 128 of K. A lane has 16 bytes of a row, 32 of K, in four words.
//
// A weight times a scale does not fit bf16, so scales are applied to the fp32 sums of a group. A matrix instruction adds
// the products of all lanes that have a row, and with groups of 32 each of them has another group. So either an
// instruction with four separate sums takes one from each lane, or these lanes exchange words first, such that each has a
// word of every group. Only with kScalesWeights do scales fit.
//
// Weights of eight bits with scales per group of 32 are loaded as if they were exchanged: a lane has eight of each group.
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

// The first K, within a slice, of a lane's vector v of a token. With kOfGroups a lane has one vector of each group; else
// all of its vectors are of one group, and this is the K of the first.
template <bool kOfGroups>
DEVICE int depth(int lane, int v) {
  const int of_lane = mma::depth(lane) / 16;
  return kOfGroups ? of_lane * 8 + v * 32 : of_lane * 32;
}
// Loads vector v, or zeros; vector 0 is at lane_offset + offset. With kOfGroups vector v is of group v. Else all are of
// the lane's group, so all are inside K if the first is.
template <bool kOfGroups>
DEVICE u32x4 load_vec(mem::Buffer from, int lane_offset, int v, int offset, bool inside) {
  return load_further(from, lane_offset, v * (kOfGroups ? 64 : 16), offset, inside);
}

// As `multiply`, for weights of eight bits: words[l][v] have the values of load l's row in group v.
template <class Value>
DEVICE f32x4 multiply_bytes(f32x4 sum, const u32 (&words)[mma::kLoads][four_bit::kTokenVecs][Value::kWords],
                            const u32x4 (&tokens)[four_bit::kTokenVecs],
                            const float (&scales)[kValueRows][four_bit::kTokenVecs]) {
#pragma unroll
  for (int v = 0; v < four_bit::kTokenVecs; ++v) {
    mma::Weights values;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) values.load[l] = Value::to_bf16(words[l][v]);
    const f32x4 product = four_bit::multiply_tile(f32x4{}, values, tokens[v]);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += product[i] * scales[four_bit::value_load(i)][v];
  }
  return sum;
}

}  // namespace packed
