// The router of an MoE layer in one launch: logits of few tokens, and the topk experts of each.
//
//     logits[m, e]   = T(sum_k x[m, k] * weight[e, k]), T the weight's type: bf16, or float32
//     weights, ids   = topk experts of logits; the formula is in ops/moe_routing.hip
//
// Bytes: weight dominates, 3.7 MB for DeepSeek-V3; flops: 2 * M * E * K. A block multiplies one K slice of 16 experts as
// in gemm/skinny/wave_split_k.h, and stores its sums to HBM. Blocks count once, all on one counter: the last to arrive
// adds the slices of each token in K order, rounds, and routes. Logits of a bf16 weight have the bits of
// unquantized_gemm with the same slices, weights and ids the bits of grouped_topk with these logits.
//
// Groups of up to kTokens tokens have blocks and a counter of their own. They read the weight again from a cache, and their
// last blocks add and route at once: for many tokens that takes longer than the GEMM. gemm/skinny/float_weights.h
// multiplies float32 weights.
//
// A wave of the last block routes a token. Each lane adds and keeps the kValues experts that it routes, so that sums
// need no LDS. Two tokens' sums are loaded at once. Biases are loaded before the GEMM: after it, their latency would show.
#include "device/topk_routing.h"
#include "gemm/skinny/float_weights.h"
#include "gemm/skinny/slice_sums.h"
#include "gemm/skinny/wave_split_k.h"

struct RouterProblem : SkinnyProblem {
  int blocks, group_tokens;
  TopkRouting routing;  // without logits
};

// Four logits as stored, of a weight's type.
template <class Type>
struct LogitsOf {
  using Stored = u32x2;
  using Element = u16;
  DEVICE static Stored rounded(f32x4 x) { return {Type::pack(x.lo), Type::pack(x.hi)}; }
  DEVICE static float value(Stored x, int i) { return Type::unpack(x[i / 2])[i % 2]; }
};
template <>
struct LogitsOf<Bf16Fp32> {
  using Stored = f32x4;
  using Element = float;
  DEVICE static Stored rounded(f32x4 x) { return x; }
  DEVICE static float value(Stored x, int i) { return x[i]; }
};

template <class Type, int kTokens, int kValues>
struct RouterGemm {
  using Rounded = LogitsOf<Type>;
  using Sums = SliceSums<(kTokens + mma::kTileTokens - 1) / mma::kTileTokens, 2 * mma::kWaves>;
  using Gemm = WaveSplitK<Type, kTokens, ScaleGranularity::kNone, Fp32Scale, false, Sums>;
  static_assert(Gemm::kUnitSteps == 2 * mma::kWaves);
  static constexpr int kVecs = kValues / 4, kTokensAtOnce = 2;
  static constexpr int kSlicesAtOnce = 8 / kVecs;  // 16 loads of 16 bytes in flight
  using Logits = f32x4[kVecs];
  const RouterProblem& p;
  const int lane = wave::lane();

  // A lane of a group has kValues experts or none.
  DEVICE LaneExperts own_experts() const {
    const TopkRouting& r = p.routing;
    const int group = lane >> r.log2_lanes, begin = (lane - (group << r.log2_lanes)) * kValues;
    return {group, group * r.group_size + begin, group < r.groups && begin < r.group_size ? kValues : 0};
  }

  // Adds the slices of the tokens `first` and `first` + kWaves, if they exist.
  DEVICE void add_slices(Logits (&logits)[kTokensAtOnce], int first, const LaneExperts& own) const {
    const mem::Buffer sums = mem::buffer(p.partials);
    const int floats = Sums::row_floats(p), slices = p.units_per_tile;
#pragma unroll 1
    for (int slice = 0; slice < slices; slice += kSlicesAtOnce) {
      Logits loaded[kSlicesAtOnce][kTokensAtOnce];
#pragma unroll
      for (int s = 0; s < kSlicesAtOnce; ++s)
#pragma unroll
        for (int t = 0; t < kTokensAtOnce; ++t)
#pragma unroll
          for (int v = 0; v < kVecs; ++v) {
            const int token = first + t * mma::kWaves;
            loaded[s][t][v] =
                mem::load_device_or_zero<f32x4>(sums, (own.first + 4 * v) * 4, ((slice + s) * p.m + token) * floats * 4,
                                                own.count && slice + s < slices && token < p.m);
          }
#pragma unroll
      for (int s = 0; s < kSlicesAtOnce; ++s)
#pragma unroll
        for (int t = 0; t < kTokensAtOnce; ++t)
#pragma unroll
          for (int v = 0; v < kVecs; ++v) logits[t][v] += loaded[s][t][v];
    }
  }

  DEVICE void route(const Logits& sums, const Biases<kValues>& biases, int token, const LaneExperts& own) const {
    typename Rounded::Stored rounded[kVecs];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      rounded[v] = Rounded::rounded(sums[v]);
      if (own.count) mem::store((typename Rounded::Element*)p.out + token * p.n + own.first + 4 * v, rounded[v]);
    }
    choose_experts<kValues>(
        p.routing, own, token, lane, [&](Biases<kValues>& bias) __attribute__((always_inline)) { bias = biases; },
        [&](float (&x)[kValues]) __attribute__((always_inline)) {
#pragma unroll
          for (int i = 0; i < kValues; ++i) {
            x[i] = Rounded::value(rounded[i / 4], i % 4);
            if (!own.count || x[i] != x[i]) x[i] = -kInfinity;
          }
        });
  }

  DEVICE void run() const {
    LDS static typename Gemm::Buffer buffer;
    const LaneExperts own = own_experts();
    const TopkRouting& r = p.routing;
    Biases<kValues> biases = {};
    if (r.bias) biases.load(r.bias, r.bias_type, own, r.experts);  // in flight together with the first weights
    const Gemm gemm{p, buffer};
    gemm.multiply();
    if (!is_last_block(p.counters, p.blocks)) return;
#pragma unroll 1
    for (int first = wave::index(); first < p.m; first += kTokensAtOnce * mma::kWaves) {
      Logits logits[kTokensAtOnce] = {};
      add_slices(logits, first, own);
#pragma unroll 1
      for (int t = 0; t < kTokensAtOnce && first + t * mma::kWaves < p.m; ++t) {
        Logits of_token;
#pragma unroll
        for (int v = 0; v < kVecs; ++v) of_token[v] = t == 0 ? logits[0][v] : logits[1][v];
        route(of_token, biases, first + t * mma::kWaves, own);
      }
    }
  }
};

// The problem of a block's group of tokens.
DEVICE RouterProblem of_group(RouterProblem p, int most_tokens, int logit_bytes) {
  const int group = wave::block_id_y(), first = group * p.group_tokens, left = p.m - first;
  TopkRouting& r = p.routing;
  p.a += i64(first) * p.a_stride;
  p.out = (u8*)p.out + first * p.n * logit_bytes;
  const int tokens = p.group_tokens < most_tokens ? p.group_tokens : most_tokens;  // so that the bound is known
  p.m = left < tokens ? left : tokens;
  p.partials += group * p.group_partials;
  p.counters += group;
  if (r.padding) r.padding += first;
  r.weights += first * r.topk;
  r.ids += first * r.topk;
  return p;
}

#define ROUTER_GEMM(symbol, Type, tokens, values, waves)                                  \
  KERNEL((RouterGemm<Type, tokens, values>::Gemm::kThreads), waves)                       \
  symbol(RouterProblem problem) {                                                         \
    const RouterProblem own = of_group(problem, tokens, sizeof(LogitsOf<Type>::Element)); \
    RouterGemm<Type, tokens, values>{own}.run();                                          \
  }

ROUTER_GEMM(router_gemm_topk_x4_wave_splitk_8, Bf16, 8, 4, 4)
ROUTER_GEMM(router_gemm_topk_x8_wave_splitk_8, Bf16, 8, 8, 4)
ROUTER_GEMM(router_gemm_topk_x16_wave_splitk_8, Bf16, 8, 16, 4)
ROUTER_GEMM(router_gemm_topk_x4_wave_splitk_16, Bf16, 16, 4, 3)
ROUTER_GEMM(router_gemm_topk_x8_wave_splitk_16, Bf16, 16, 8, 3)
ROUTER_GEMM(router_gemm_topk_x16_wave_splitk_16, Bf16, 16, 16, 3)
ROUTER_GEMM(router_gemm_topk_fp32_x4_wave_splitk_8, Bf16Fp32, 8, 4, 2)
ROUTER_GEMM(router_gemm_topk_fp32_x8_wave_splitk_8, Bf16Fp32, 8, 8, 2)
ROUTER_GEMM(router_gemm_topk_fp32_x16_wave_splitk_8, Bf16Fp32, 8, 16, 2)
ROUTER_GEMM(router_gemm_topk_fp32_x4_wave_splitk_16, Bf16Fp32, 16, 4, 2)
ROUTER_GEMM(router_gemm_topk_fp32_x8_wave_splitk_16, Bf16Fp32, 16, 8, 2)
ROUTER_GEMM(router_gemm_topk_fp32_x16_wave_splitk_16, Bf16Fp32, 16, 16, 2)
