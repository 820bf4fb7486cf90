// MoE top-k routing: experts and weights per token. Its code object also has the kernels of ops/standalone/router_loss.h.
//
//     scores  = softmax(logits) or sigmoid(logits)
//     choice  = logits, or scores + bias with a bias
//     groups:   the topk_group groups with the largest max(choice), or with a bias, sum of the two largest choices
//     ids     = the topk experts of these groups with the largest choice, in that order
//     weights = scores[ids], or scores[ids] / (sum(scores[ids]) + epsilon); times scale
//     ids of a padding token = -1
//
// Ties go to the smaller index. A NaN logit is -inf, a choice of NaN or -inf the lowest finite number, so every row has
// topk experts. Logits order experts as their scores do, but do not become equal by rounding.
//
// Bytes: the logits, negligible next to a launch; flops: about 20 per expert. The time is one token's latency. A wave
// routes a token, with all experts in registers, and needs no barrier. The lanes are divided evenly among the groups.
// Each lane of a group has up to kValues consecutive experts, so lower lanes have smaller indices. The wave finds the
// largest choice topk times and reads score and index from the first lane that has it.
#include "device/topk_routing.h"
#include "ops/standalone/router_loss.h"

constexpr int kWaves = 4;  // per block

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
