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
#include "device/topk_routing.h"

constexpr int kWaves = 4;  // per block

template <class T>
DEVICE const void* row_of(const void* rows, i64 row, i64 stride) {
  return (const typename Element<T>::Bits*)rows + row * stride;
}

template <class T, int kValues>
DEVICE void route(const TopkRouting& p) {
  // Spare waves of the last block repeat the last token.
  const i64 place = i64(wave::block_id_x()) * kWaves + wave::index();
  const i64 token = place < p.tokens ? place : p.tokens - 1;
  const int lane = wave::lane();
  const LaneExperts own = lane_experts(lane, p.groups, p.group_size, p.log2_lanes);
  Elements<T, kValues> logits;
  logits.load(row_of<T>(p.logits, token, p.stride), own, p.experts);
  choose_experts<kValues>(
      p, own, token, lane,
      [&](Biases<kValues>& bias) __attribute__((always_inline)) {
        if (p.bias) bias.load(p.bias, p.bias_type, own, p.experts);
      },
      [&](float (&x)[kValues]) __attribute__((always_inline)) { logits.logits(x, own); });
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
