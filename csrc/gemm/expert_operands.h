// What a lane of ExpertMainLoop holds of a K slice, and where the slice's sums are. T is an element type, or Packed.
#pragma once
#include "gemm/experts.h"
#include "gemm/skinny/packed_tile.h"

template <class T>
struct ExpertOperands {
  static constexpr bool kPacked = false;
  static constexpr int kWeightSteps = kSliceSteps, kTokenVecs = kSliceSteps, kValueRows = 0;
  struct Scales {};

  // Token and row of a lane's value i in the tile.
  static constexpr int kValueTokens = mma::kValueTokens;
  DEVICE static int value_token(int lane, int i) { return mma::value_token(lane, i); }
  DEVICE static int value_row(int lane, int i) { return mma::value_row(lane, i); }
};

// Four-bit weights [E, N, K / 2], bf16 tokens, and a scale per row and kGroup of K: [E, N, K / kGroup]. K is a multiple
// of kGroup. In Experts and walks k counts elements, so that a K slice is kSliceBytes of them. The numbers that are
// multiplied are kUnit times the weights'.
template <class Value_, class Scale_, int kGroup_>
struct Packed {
  using Value = Value_;
  using Scale = Scale_;
  static constexpr int kGroup = kGroup_, kGroups = kSliceBytes / kGroup;
  static_assert(kSliceBytes == 2 * mma::kDepth && (kGroup == 32 || kGroup == 128));
};

template <class Value, class Scale, int kGroup>
struct ExpertOperands<Packed<Value, Scale, kGroup>> {
  static constexpr bool kPacked = true;
  static constexpr int kWeightSteps = 1, kTokenVecs = four_bit::kTokenVecs, kValueRows = packed::kValueRows;
  static constexpr int kGroups = kSliceBytes / kGroup;
  using Scales = typename Scale::Loaded[kValueRows][kGroups];

  static constexpr int kValueTokens = packed::kValueTokens;
  DEVICE static int value_token(int lane, int i) { return packed::value_token(lane, i); }
  DEVICE static int value_row(int lane, int i) { return packed::value_row(lane, i); }
  // The place of value i in a tile of mma's layout: [value][lane].
  DEVICE static float& at(float (&tile)[4][wave::kLanes], int i, int lane) {
    return tile[packed::mma_value(lane, i)][packed::mma_lane(lane, i)];
  }

  // Where a lane's weights, and its vector v of a token or one of the same group, begin in a slice, in K.
  DEVICE static int depth(int lane) { return 2 * mma::depth(lane); }
  DEVICE static int depth(int lane, int v) { return packed::depth<kGroups>(lane, v); }

  DEVICE static f32x4 multiply(f32x4 sum, const mma::Weights& weights, const u32x4 (&tokens)[kTokenVecs],
                               const Scales& scales) {
    float factors[kValueRows][kGroups];
#pragma unroll
    for (int i = 0; i < kValueRows; ++i)
#pragma unroll
      for (int g = 0; g < kGroups; ++g) factors[i][g] = Scale::value(scales[i][g]);
    return packed::multiply<Value>(sum, weights, tokens, factors);
  }
};
