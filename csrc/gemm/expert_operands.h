// What a lane of ExpertMainLoop holds of a K slice, and where the slice's sums are. T is an element type, Packed, or
// Bf16Mx8.
#pragma once
#include "device/mx_values.h"
#include "gemm/experts.h"
#include "gemm/skinny/packed_tile.h"

template <class T>
struct ExpertOperands {
  static constexpr bool kPacked = false;
  static constexpr int kWeightSteps = kSliceSteps, kTokenVecs = kSliceSteps, kValueRows = 0;
  using Weights = mma::Weights[kWeightSteps];
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

// MX-FP8 weights, as bytes [E, N, K]; the rest as Packed.
struct Bf16Mx8 {
  using Value = MxE4m3;
  using Scale = E8m0Scale;
  static constexpr int kGroup = 32, kGroups = kSliceBytes / kGroup;
};

// The factor of sums, or with kScalesWeights of weights, for a scale.
template <class Value, bool kScalesWeights>
struct ScaleFactor {
  using Type = float;
  DEVICE static float of(float scale) { return scale; }
};
template <class Value>
struct ScaleFactor<Value, true> : Value::Factor {};

// What both have in common. kOfGroups: as packed::depth. kScalesWeights: as packed::kScalesWeights.
template <class T, bool kOfGroups_, bool kScalesWeights = false>
struct PackedOperands {
  static constexpr bool kPacked = true, kOfGroups = kOfGroups_;
  static constexpr int kTokenVecs = four_bit::kTokenVecs, kValueRows = packed::kValueRows;
  static constexpr int kGroups = kScalesWeights ? 1 : T::kGroups;  // of a slice whose scales a lane has
  using Scale = typename T::Scale;
  using Scales = typename Scale::Loaded[kValueRows][kGroups];

  static constexpr int kValueTokens = packed::kValueTokens;
  DEVICE static int value_token(int lane, int i) { return packed::value_token(lane, i); }
  DEVICE static int value_row(int lane, int i) { return packed::value_row(lane, i); }
  // The place of value i in a tile of mma's layout: [value][lane].
  DEVICE static float& at(float (&tile)[4][wave::kLanes], int i, int lane) {
    return tile[packed::mma_value(lane, i)][packed::mma_lane(lane, i)];
  }

  // Where a lane's vector v of a token, or one of the same group, begins in a slice, in K.
  DEVICE static int depth(int lane, int v) { return packed::depth<kOfGroups>(lane, v); }

  // A slice's group whose scale is the lane's scale g.
  DEVICE static int group(int lane, int g) { return kScalesWeights ? mma::depth(lane) / 16 : g; }
  // The unit of the sums.
  static constexpr float unit() {
    if constexpr (kScalesWeights) return T::Value::Factor::kUnit;
    else return T::Value::kUnit;
  }

  using Factor = ScaleFactor<typename T::Value, kScalesWeights>;
  using Factors = typename Factor::Type[kValueRows][kGroups];
  DEVICE static void convert(Factors& factors, const Scales& scales) {
#pragma unroll
    for (int i = 0; i < kValueRows; ++i)
#pragma unroll
      for (int g = 0; g < kGroups; ++g) factors[i][g] = Factor::of(Scale::value(scales[i][g]));
  }
};

template <class T>
constexpr bool kScalesWeights = packed::kScalesWeights<typename T::Scale, T::kGroups>;
template <class T>
using PackedBase = PackedOperands<T, packed::kExchanges<T::kGroups> && !kScalesWeights<T>, kScalesWeights<T>>;

template <class Value, class Scale, int kGroup>
struct ExpertOperands<Packed<Value, Scale, kGroup>> : PackedBase<Packed<Value, Scale, kGroup>> {
  using T = Packed<Value, Scale, kGroup>;
  using Base = PackedBase<T>;
  using Weights = mma::Weights;

  // Where a lane's weights begin in a slice, in K, and in bytes.
  DEVICE static int weight_depth(int lane) { return 2 * mma::depth(lane); }
  DEVICE static int weight_bytes(int lane) { return mma::depth(lane); }

  // Loads a slice's weights from k on, if they are among the `left` of K.
  DEVICE static void refill(Weights& weights, const mem::Cursor (&from)[mma::kLoads], int lane, int k, int left) {
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) mem::refill(weights.load[l], from[l], k / 2, weight_depth(lane) < left);
  }
  DEVICE static f32x4 multiply(f32x4 sum, const Weights& weights, const u32x4 (&tokens)[Base::kTokenVecs],
                               const typename Base::Scales& scales) {
    typename Base::Factors factors;
    Base::convert(factors, scales);
    return packed::multiply<Value>(sum, weights, tokens, factors);
  }
};

template <>
struct ExpertOperands<Bf16Mx8> : PackedOperands<Bf16Mx8, true> {
  using Value = Bf16Mx8::Value;
  using Weights = u32[mma::kLoads][kTokenVecs][Value::kWords];
  static constexpr int kGroup = Bf16Mx8::kGroup;

  DEVICE static int weight_depth(int lane) { return depth(lane, 0); }
  DEVICE static int weight_bytes(int lane) { return depth(lane, 0); }

  DEVICE static void refill(Weights& weights, const mem::Cursor (&from)[mma::kLoads], int /*lane*/, int k, int left) {
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
#pragma unroll
      for (int v = 0; v < kTokenVecs; ++v)  // whole groups are inside
        four_bit::refill(weights[l][v][0], weights[l][v][1], from[l], k + v * kGroup, v * kGroup < left);
  }
  DEVICE static f32x4 multiply(f32x4 sum, const Weights& weights, const u32x4 (&tokens)[kTokenVecs],
                               const Scales& scales) {
    Factors factors;
    convert(factors, scales);
    return packed::multiply_bytes<Value>(sum, weights, tokens, factors);
  }
};
