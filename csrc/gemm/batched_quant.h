// Batched skinny GEMM whose output is quantized to e4m3 with a scale per token and head, as o_proj with scales per 1x128
// wants it from MLA's W_UV:
//
//     y[m, h, n] = T(sum_k a[m, h, k] * b[h, k, n]), n < 128
//     scale[m, h] = max(absmax_n(y[m, h]) / kE4m3Max, kMinScale);  out[m, h, n] = e4m3(y[m, h, n] / scale[m, h])
//
// Bytes: b dominates, as in batched.h; the products of a head, 512 bytes per token, go through L2 or HBM once.
#pragma once
#include "device/float8.h"
#include "device/reduce.h"
#include "gemm/batched.h"

// With a scale per token and head: out is e4m3. A head has kHeadColumns columns in kHeadTiles blocks.
constexpr int kHeadColumns = 128, kHeadTiles = kHeadColumns / mma::kRows;
struct HeadProblem : SkinnyProblem {  // partials: [tokens of the kernel's tiles, kHeadColumns] fp32; counters: [1]
  i64 out_stride;                     // bytes between tokens
  float* scales;
  i64 scales_stride;  // elements between tokens
};
struct BatchedQuantProblem : BatchedProblem {
  i64 out_stride;
  float* scales;
  i64 scales_stride, scales_head_stride;  // elements

  DEVICE HeadProblem of_head(int head, int products) const {
    HeadProblem p{BatchedProblem::of_head(head), out_stride, scales + head * scales_head_stride, scales_stride};
    p.partials += i64(head) * products;
    p.counters += head;
    return p;
  }
};

// Rounds the products of a block's only tile to T, and stores them for the last of the head's blocks, which quantizes
// all. One block for a head needs no arrival, but its compute unit would load the head's whole weight, 128 KB for MLA.
template <class T, int kTiles>
struct HeadEpilogue {
  static constexpr int kThreads = mma::kWaves * wave::kLanes, kTokens = kTiles * mma::kTileTokens;
  static constexpr int kTokenLanes = kHeadColumns / kChunk, kTokensAtOnce = kThreads / kTokenLanes;
  static constexpr int kPasses = (kTokens + kTokensAtOnce - 1) / kTokensAtOnce;
  static constexpr int kProducts = kTokens * kHeadColumns;
  const HeadProblem& p;
  int column = 0, token[kTiles] = {};

  template <class Schedule>
  DEVICE HeadEpilogue(const SkinnyProblem& p, const Schedule&) : p(static_cast<const HeadProblem&>(p)) {}
  template <class RowOf, class TokenOf>
  DEVICE void begin(int, TokenOf token_of, RowOf row_of) {
    column = row_of(0);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) token[t] = token_of(t);
  }
  DEVICE void end(const FloatVec<1> (&products)[kTiles][1]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      mem::store_device(mem::buffer(p.partials), (token[t] * kHeadColumns + column) * 4, 0,
                        round_to<T>(products[t][0][0]));
  }
  // Called after the product.
  DEVICE static void quantize_head(const HeadProblem& p) {
    if (!is_last_block(p.counters, kHeadTiles)) return;
    const mem::Buffer stored = mem::buffer(p.partials);
    const int chunk = wave::thread_id() % kTokenLanes, first = wave::thread_id() / kTokenLanes;
    f32x4 half[kPasses][2];
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + i * kTokensAtOnce;
        half[i][h] =
            mem::load_device_or_zero<f32x4>(stored, (row * kHeadColumns + chunk * kChunk + h * 4) * 4, 0, row < p.m);
      }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = first + i * kTokensAtOnce;
      const Chunk y = {half[i][0].lo, half[i][0].hi, half[i][1].lo, half[i][1].hi};
      const float scale = absmax_to_scale(wave::reduce_group<kTokenLanes>(max_abs(0.0f, y), 0.0f, Max{}));
      if (row >= p.m) continue;
      if (chunk == 0) mem::store(p.scales + row * p.scales_stride, scale);
      mem::store((u8*)p.out + row * p.out_stride + chunk * kChunk, quantize(y, Scale(scale)));
    }
  }
};
