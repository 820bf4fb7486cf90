// Top-k routing of a token by a wave, with all experts in registers; the formula is in ops/moe_routing.hip.
#pragma once
#include "device/reduce.h"

constexpr float kInfinity = __builtin_inff(), kLowest = -__FLT_MAX__;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// A lane's experts.
struct LaneExperts {
  int group, first, count;
};

DEVICE LaneExperts lane_experts(int lane, int groups, int group_size, int log2_lanes) {
  const int per_lane = (group_size + (1 << log2_lanes) - 1) >> log2_lanes, group = lane >> log2_lanes;
  const int begin = (lane - (group << log2_lanes)) * per_lane, left = group_size - begin;
  const int count = left < per_lane ? left : per_lane;
  return {group, group * group_size + begin, group < groups && count > 0 ? count : 0};
}

// Element storage in HBM.
template <class T>
struct Element {
  using Bits = u16;
  DEVICE static float value(u32 bits) { return T::unpack(bits).x; }
};
template <>
struct Element<float> {
  using Bits = u32;
  DEVICE static float value(u32 bits) { return __builtin_bit_cast(float, bits); }
};

template <class T>
DEVICE const void* row_of(const void* rows, i64 row, i64 stride) {
  return (const typename Element<T>::Bits*)rows + row * stride;
}

// A lane's elements of a row, one access each. They are converted later, so that later loads need not wait.
template <class T, int kValues>
struct Elements {
  u32 bits[kValues];

  DEVICE void load(const void* row, const LaneExperts& own, int experts) {
    using Bits = typename Element<T>::Bits;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int expert = own.first + i;
      bits[i] = mem::load<Bits>((const Bits*)row + (expert < experts ? expert : experts - 1));
    }
  }
  DEVICE float value(int i) const { return Element<T>::value(bits[i]); }
  // Converts to logits: -inf for NaN, and where the lane has no expert.
  DEVICE void logits(float (&x)[kValues], const LaneExperts& own) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      x[i] = value(i);
      if (i >= own.count || x[i] != x[i]) x[i] = -kInfinity;
    }
  }
};

enum BiasType { kBf16, kF16, kFp32 };

// A lane's biases, of a type known at run time.
template <int kValues>
struct Biases {
  u32 bits[kValues];

  template <class T>
  DEVICE void load_as(const void* biases, const LaneExperts& own, int experts) {
    Elements<T, kValues> loaded;
    loaded.load(biases, own, experts);
#pragma unroll
    for (int i = 0; i < kValues; ++i) bits[i] = loaded.bits[i];
  }
  DEVICE void load(const void* biases, int type, const LaneExperts& own, int experts) {
    if (type == kFp32) load_as<float>(biases, own, experts);
    else load_as<Bf16>(biases, own, experts);  // also for F16: two bytes each
  }
  template <class T>
  DEVICE void add_as(float (&sum)[kValues], const float (&score)[kValues]) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum[i] = score[i] + Element<T>::value(bits[i]);
  }
  DEVICE void add(float (&sum)[kValues], const float (&score)[kValues], int type) const {
    if (type == kFp32) add_as<float>(sum, score);
    else if (type == kBf16) add_as<Bf16>(sum, score);
    else add_as<F16>(sum, score);
  }
};

// exp(logits - maximum) over a wave, and its sum. The largest logit, infinite or not, becomes 1.
template <int kValues>
struct Exponentials {
  float value[kValues], maximum, sum;
  DEVICE Exponentials(const float (&logits)[kValues], int count) {
    maximum = -kInfinity, sum = 0.0f;
#pragma unroll
    for (float x : logits) maximum = __builtin_fmaxf(maximum, x);
    maximum = wave::reduce(maximum, -kInfinity, Max{});
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float x = logits[i] == maximum ? 1.0f : numerics::exp2_approx((logits[i] - maximum) * kLog2E);
      value[i] = i < count ? x : 0.0f;
      sum += value[i];
    }
    sum = wave::reduce(sum, 0.0f, Add{});
  }
};

// A group's two largest choices, combined over its lanes.
struct Top {
  float first, second;
  DEVICE void insert(float x) {
    second = __builtin_fmaxf(second, __builtin_fminf(first, x));
    first = __builtin_fmaxf(first, x);
  }
  template <int kHalf>
  DEVICE void combine() {
    const float other_first = wave::other_half<kHalf>(first), other_second = wave::other_half<kHalf>(second);
    insert(other_first);
    second = __builtin_fmaxf(second, other_second);
  }
};

struct TopkRouting {
  const void* logits;  // [tokens, experts] T, rows stride elements apart
  const void* bias;    // [experts], bias_type, or null
  const u8* padding;   // [tokens] bool, or null
  float* weights;      // [tokens, topk]
  int* ids;            // [tokens, topk]
  i64 stride, tokens, bias_type;
  int experts, topk, is_sigmoid, renormalize;
  int groups, topk_group;      // groups in total, and groups to choose from
  int group_size, log2_lanes;  // experts per group, and lanes
  float epsilon, scale;
};

// The number of groups that rank before this lane's.
template <int kValues>
DEVICE int groups_before(const float (&choice)[kValues], const TopkRouting& p, int group) {
  Top top = {-kInfinity, -kInfinity};
#pragma unroll
  for (float x : choice) top.insert(x);
  if (p.log2_lanes >= 1) top.combine<1>();
  if (p.log2_lanes >= 2) top.combine<2>();
  if (p.log2_lanes >= 3) top.combine<4>();
  if (p.log2_lanes >= 4) top.combine<8>();
  const float score = p.bias ? top.first + top.second : top.first;
  int before = 0;
  for (int g = 0; g < p.groups; ++g) {
    const float other = wave::read(score, g << p.log2_lanes);
    before += other > score || (other == score && g < group);
  }
  return before;
}

// Maps floats to unsigned integers in the same order; no float maps to 0.
DEVICE u32 ordered(float x) {
  const u32 bits = __builtin_bit_cast(u32, x);
  return bits ^ (bits >> 31 ? ~0u : 1u << 31);
}

struct Candidate {
  u32 key;
  float score;
  int expert;
};

// Routes a token. `get_bias` fills the lane's biases if there are some, `get_logits` its logits: -inf for NaN, and where
// the lane has no expert.
template <int kValues, class GetBias, class GetLogits>
DEVICE void choose_experts(const TopkRouting& p, const LaneExperts& own, i64 token, int lane, GetBias get_bias,
                           GetLogits get_logits) {
  Biases<kValues> bias;
  get_bias(bias);
  const bool is_padding = p.padding && mem::load<u8>(p.padding + token);
  float choice[kValues], score[kValues];
  get_logits(choice);

  if (p.is_sigmoid) {
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      score[i] = numerics::rcp_approx(1.0f + numerics::exp2_approx(choice[i] * -kLog2E));
  } else {
    const Exponentials<kValues> e(choice, own.count);
    const float inverse = 1.0f / e.sum;
#pragma unroll
    for (int i = 0; i < kValues; ++i) score[i] = e.value[i] * inverse;
  }
  if (p.bias) bias.add(choice, score, p.bias_type);
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    choice[i] = i < own.count ? __builtin_fmaxf(choice[i], kLowest) + 0.0f : -kInfinity;  // + 0: -0 becomes 0
  }
  const bool is_in = p.topk_group == p.groups || groups_before(choice, p, own.group) < p.topk_group;
  u32 key[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) key[i] = is_in && i < own.count ? ordered(choice[i]) : 0;

  // Lane r keeps the result of round r.
  float weight = 0.0f, sum = 0.0f;
  int id = 0;
  for (int round = 0; round < p.topk; ++round) {
    Candidate best[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) best[i] = {key[i], score[i], own.first + i};
#pragma unroll
    for (int step = 1; step < kValues; step *= 2)
#pragma unroll
      for (int i = 0; i + step < kValues; i += 2 * step)
        if (best[i + step].key > best[i].key) best[i] = best[i + step];
    const int winner = wave::first_lane(best[0].key == wave::maximum(best[0].key));
    const float found = wave::read(best[0].score, winner);
    const int expert = wave::read(best[0].expert, winner);
    sum += found;
    if (lane == round) weight = found, id = expert;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (own.first + i == expert) key[i] = 0;
  }
  if (p.renormalize) {
    sum += p.epsilon;
    weight /= sum > 0.0f ? sum : 1.0f;
  }
  if (lane < p.topk) {
    mem::store(p.weights + token * p.topk + lane, weight * p.scale);
    mem::store(p.ids + token * p.topk + lane, is_padding ? -1 : id);
  }
}
