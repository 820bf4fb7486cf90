// MoE top-k routing: experts and weights per token; and the two router losses, z loss and load balancing loss.
//
//     scores  = softmax(logits) or sigmoid(logits)
//     choice  = logits, or scores + bias with a bias
//     groups:   the topk_group groups with the largest max(choice), or with a bias, sum of the two largest choices
//     ids     = the topk experts of these groups with the largest choice, in that order
//     weights = scores[ids], or scores[ids] / (sum(scores[ids]) + epsilon); times scale
//     ids of a padding token = -1
//
//     router_z_loss       = scale * sum over tokens of logsumexp(logits)^2
//     load_balancing_loss = scale * sum over experts of sum(softmax(logits)) * the expert's count in ids
//
// Ties go to the smaller index. A NaN logit is -inf, a choice of NaN or -inf the lowest finite number, so every row has
// topk experts. Logits order experts as their scores do, but do not become equal by rounding.
//
// Bytes: the logits, negligible next to a launch; flops: about 20 per expert. The time is one token's latency. A wave
// routes a token, with all experts in registers, and needs no barrier. The lanes are divided evenly among the groups.
// Each lane of a group has up to kValues consecutive experts, so lower lanes have smaller indices. The wave finds the
// largest choice topk times and reads score and index from the first lane that has it.
//
// For a loss, tokens are assigned to all waves round-robin. The waves' sums are reduced in LDS, the blocks' in HBM,
// where the last block to arrive adds them: always in the same order, so the same input gives the same bits.
#include "device/arrive.h"
#include "device/reduce.h"

constexpr float kInfinity = __builtin_inff(), kLowest = -__FLT_MAX__;
constexpr int kWaves = 4;  // per block
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

template <class T, int kValues>
DEVICE void route(const TopkRouting& p) {
  // Spare waves of the last block repeat the last token.
  const i64 place = i64(wave::block_id_x()) * kWaves + wave::index();
  const i64 token = place < p.tokens ? place : p.tokens - 1;
  const int lane = wave::lane();
  const LaneExperts own = lane_experts(lane, p.groups, p.group_size, p.log2_lanes);
  Elements<T, kValues> logits;
  Biases<kValues> bias;
  logits.load(row_of<T>(p.logits, token, p.stride), own, p.experts);
  if (p.bias) bias.load(p.bias, p.bias_type, own, p.experts);
  const bool is_padding = p.padding && mem::load<u8>(p.padding + token);
  float choice[kValues], score[kValues];
  logits.logits(choice, own);

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

constexpr int kLog2Lanes = __builtin_ctz(wave::kLanes);

struct Loss {
  const void* logits;  // [tokens, experts] T, rows stride elements apart
  const int* ids;      // [tokens, topk]; null for the z loss
  float* loss;         // [1]
  float* sums;         // [blocks] of squares, or [blocks, experts] of probabilities
  u32* counts;         // [blocks, experts]; null for the z loss
  u32* counter;        // [1], zero
  i64 stride, tokens;
  int experts, topk, blocks;
  float scale;

  DEVICE LaneExperts lane_experts() const { return ::lane_experts(wave::lane(), 1, experts, kLog2Lanes); }
  DEVICE i64 first_token() const { return i64(wave::block_id_x()) * kWaves + wave::index(); }
  DEVICE i64 tokens_apart() const { return i64(blocks) * kWaves; }
};

template <class T, int kExperts>
DEVICE void router_z_loss(const Loss& p) {
  constexpr int kValues = kExperts / wave::kLanes;
  LDS static float parts[kMaxWaves], totals[kMaxWaves];
  const LaneExperts own = p.lane_experts();
  const int thread = wave::thread_id();
  float sum = 0.0f;
  for (i64 token = p.first_token(); token < p.tokens; token += p.tokens_apart()) {
    Elements<T, kValues> row;
    row.load(row_of<T>(p.logits, token, p.stride), own, p.experts);
    float logits[kValues];
    row.logits(logits, own);
    const Exponentials<kValues> e(logits, own.count);
    const float log_sum = e.maximum + numerics::log2_approx(e.sum) * kLn2;
    sum += log_sum * log_sum;
  }
  sum = reduce_block(wave::lane() == 0 ? sum : 0.0f, 0.0f, parts, kWaves, Add{});
  const mem::Buffer sums = mem::buffer(p.sums);
  if (thread == 0) mem::store_device(sums, 0, wave::block_id_x() * 4, sum);
  if (!is_last_block(p.counter, p.blocks)) return;
  float total = 0.0f;
  for (int block = thread; block < p.blocks; block += kWaves * wave::kLanes)
    total += mem::load_device_or_zero<float>(sums, block * 4, 0, true);
  total = reduce_block(total, 0.0f, totals, kWaves, Add{});
  if (thread == 0) mem::store(p.loss, total * p.scale);
}

template <class T, int kExperts>
DEVICE void load_balancing_loss(const Loss& p) {
  constexpr int kValues = kExperts / wave::kLanes;
  LDS static float probabilities[kWaves][kExperts], totals[kMaxWaves];
  LDS static u32 counts[kWaves][kExperts];
  constexpr int kThreads = kWaves * wave::kLanes;
  const LaneExperts own = p.lane_experts();
  const int thread = wave::thread_id();
  float probability[kValues] = {};
  u32 count[kValues] = {};
  for (i64 token = p.first_token(); token < p.tokens; token += p.tokens_apart()) {
    Elements<T, kValues> row;
    row.load(row_of<T>(p.logits, token, p.stride), own, p.experts);
    float logits[kValues];
    row.logits(logits, own);
    const Exponentials<kValues> e(logits, own.count);
    const float inverse = 1.0f / e.sum;
#pragma unroll
    for (int i = 0; i < kValues; ++i) probability[i] += e.value[i] * inverse;
    for (int slot = 0; slot < p.topk; ++slot) {
      const int place = mem::load<int>(p.ids + token * p.topk + slot) - own.first;
#pragma unroll
      for (int i = 0; i < kValues; ++i) count[i] += place == i;
    }
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i)
    if (i < own.count) {
      probabilities[wave::index()][own.first + i] = probability[i];
      counts[wave::index()][own.first + i] = count[i];
    }
  block_barrier();  // hazard: sums and counts are read before the other waves write them
  const mem::Buffer all_sums = mem::buffer(p.sums), all_counts = mem::buffer(p.counts);
  const int first = wave::block_id_x() * p.experts;
  for (int expert = thread; expert < p.experts; expert += kThreads) {
    float sum = 0.0f;
    u32 number = 0;
#pragma unroll
    for (int w = 0; w < kWaves; ++w) sum += probabilities[w][expert], number += counts[w][expert];
    mem::store_device(all_sums, expert * 4, first * 4, sum);
    mem::store_device(all_counts, expert * 4, first * 4, number);
  }
  if (!is_last_block(p.counter, p.blocks)) return;
  float total = 0.0f;
  for (int expert = thread; expert < p.experts; expert += kThreads) {
    float sum = 0.0f;
    u32 number = 0;
    for (int block = 0; block < p.blocks; ++block) {
      sum += mem::load_device_or_zero<float>(all_sums, expert * 4, block * p.experts * 4, true);
      number += mem::load_device_or_zero<u32>(all_counts, expert * 4, block * p.experts * 4, true);
    }
    total += sum * float(number);
  }
  total = reduce_block(total, 0.0f, totals, kWaves, Add{});
  if (thread == 0) mem::store(p.loss, total * p.scale);
}

// clang-format off
KERNEL(256) moe_topk_bf16_x2(TopkRouting routing) { route<Bf16, 2>(routing); }
KERNEL(256) moe_topk_bf16_x4(TopkRouting routing) { route<Bf16, 4>(routing); }
KERNEL(256) moe_topk_bf16_x8(TopkRouting routing) { route<Bf16, 8>(routing); }
KERNEL(256) moe_topk_bf16_x16(TopkRouting routing) { route<Bf16, 16>(routing); }
KERNEL(256) moe_topk_fp16_x2(TopkRouting routing) { route<F16, 2>(routing); }
KERNEL(256) moe_topk_fp16_x4(TopkRouting routing) { route<F16, 4>(routing); }
KERNEL(256) moe_topk_fp16_x8(TopkRouting routing) { route<F16, 8>(routing); }
KERNEL(256) moe_topk_fp16_x16(TopkRouting routing) { route<F16, 16>(routing); }
KERNEL(256) moe_topk_fp32_x2(TopkRouting routing) { route<float, 2>(routing); }
KERNEL(256) moe_topk_fp32_x4(TopkRouting routing) { route<float, 4>(routing); }
KERNEL(256) moe_topk_fp32_x8(TopkRouting routing) { route<float, 8>(routing); }
KERNEL(256) moe_topk_fp32_x16(TopkRouting routing) { route<float, 16>(routing); }

KERNEL(256) router_z_loss_bf16_256(Loss loss) { router_z_loss<Bf16, 256>(loss); }
KERNEL(256) router_z_loss_bf16_512(Loss loss) { router_z_loss<Bf16, 512>(loss); }
KERNEL(256) router_z_loss_fp16_256(Loss loss) { router_z_loss<F16, 256>(loss); }
KERNEL(256) router_z_loss_fp16_512(Loss loss) { router_z_loss<F16, 512>(loss); }
KERNEL(256) router_z_loss_fp32_256(Loss loss) { router_z_loss<float, 256>(loss); }
KERNEL(256) router_z_loss_fp32_512(Loss loss) { router_z_loss<float, 512>(loss); }

KERNEL(256) load_balancing_loss_bf16_256(Loss loss) { load_balancing_loss<Bf16, 256>(loss); }
KERNEL(256) load_balancing_loss_bf16_512(Loss loss) { load_balancing_loss<Bf16, 512>(loss); }
KERNEL(256) load_balancing_loss_fp16_256(Loss loss) { load_balancing_loss<F16, 256>(loss); }
KERNEL(256) load_balancing_loss_fp16_512(Loss loss) { load_balancing_loss<F16, 512>(loss); }
KERNEL(256) load_balancing_loss_fp32_256(Loss loss) { load_balancing_loss<float, 256>(loss); }
KERNEL(256) load_balancing_loss_fp32_512(Loss loss) { load_balancing_loss<float, 512>(loss); }
// clang-format on
