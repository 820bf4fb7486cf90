// The two router losses, z loss and load balancing loss; their kernels are in the code object of ops/moe_routing.hip.
//
//     router_z_loss       = scale * sum over tokens of logsumexp(logits)^2
//     load_balancing_loss = scale * sum over experts of sum(softmax(logits)) * the expert's count in ids
//
// For a loss, tokens are assigned to all waves round-robin. The waves' sums are reduced in LDS, the blocks' in HBM,
// where the last block to arrive adds them: always in the same order, so the same input gives the same bits.
#pragma once
#include "device/arrive.h"
#include "device/topk_routing.h"

constexpr int kLossWaves = 4;  // per block
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
  DEVICE i64 first_token() const { return i64(wave::block_id_x()) * kLossWaves + wave::index(); }
  DEVICE i64 tokens_apart() const { return i64(blocks) * kLossWaves; }
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
  sum = reduce_block(wave::lane() == 0 ? sum : 0.0f, 0.0f, parts, kLossWaves, Add{});
  const mem::Buffer sums = mem::buffer(p.sums);
  if (thread == 0) mem::store_device(sums, 0, wave::block_id_x() * 4, sum);
  if (!is_last_block(p.counter, p.blocks)) return;
  float total = 0.0f;
  for (int block = thread; block < p.blocks; block += kLossWaves * wave::kLanes)
    total += mem::load_device_or_zero<float>(sums, block * 4, 0, true);
  total = reduce_block(total, 0.0f, totals, kLossWaves, Add{});
  if (thread == 0) mem::store(p.loss, total * p.scale);
}

template <class T, int kExperts>
DEVICE void load_balancing_loss(const Loss& p) {
  constexpr int kValues = kExperts / wave::kLanes;
  LDS static float probabilities[kLossWaves][kExperts], totals[kMaxWaves];
  LDS static u32 counts[kLossWaves][kExperts];
  constexpr int kThreads = kLossWaves * wave::kLanes;
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
    for (int w = 0; w < kLossWaves; ++w) sum += probabilities[w][expert], number += counts[w][expert];
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
  total = reduce_block(total, 0.0f, totals, kLossWaves, Add{});
  if (thread == 0) mem::store(p.loss, total * p.scale);
}
