// Skinny FP8 matrix product: few tokens times a weight that is streamed from HBM once.
//
//     out[m, n] = T(sum_k a[m, k] * b[n, k] * scale_a[m] * scale_b[n] + bias[n])
//
// a and b are e4m3 with K innermost, scales are fp32, one or one per row; sums are fp32. Bytes: N * K of weight, little else;
// flops: 2 * M * N * K. Up to 64 tokens the time is that of reading the weight, so all that counts is to keep enough
// loads in flight on every compute unit until the end.
//
// The grid is (tiles of N, slices of K). A block owns kRowTiles * 16 weight rows and one slice of K; its waves take turns at
// runs of kUnroll * 64 bytes of the slice, each loading the next run before it multiplies the one at hand. Weights go from
// HBM to registers, 16 bytes per lane; tokens come the same way, out of the cache. The waves' sums meet in LDS. With one
// slice they are the result; else each block leaves its sums in HBM and the last block of a tile to arrive adds the slices
// up in order, so that the same inputs give the same bits.
#include "device/arrive.h"
#include "device/vec.h"

struct Product {
  const u8* a;           // [M, K] e4m3, rows a_stride bytes apart
  const u8* b;           // [N, K] e4m3, rows b_stride bytes apart
  void* out;             // [M, N] of out_type
  float* partials;       // [slices, M, N]; null with one slice
  u32* counters;         // [tiles of N], 0; null with one slice
  const float* scale_a;  // [M] or [1]
  const float* scale_b;  // [N] or [1]
  const void* bias;      // [N] of out_type, or null
  i64 a_stride, b_stride;
  int m, n, k;
  int scale_a_step, scale_b_step;  // 1, or 0 for one scale
  int out_type;                    // 0 bf16, 1 fp16, 2 fp32
  int slices, slice;               // slices of K, and the bytes of one: a multiple of 64
  int threads;
};

DEVICE float load_output_type(const void* row, i64 column, int type) {
  if (type == 0) return load_element<Bf16>(row, column);
  if (type == 1) return load_element<F16>(row, column);
  return mem::load<float>((const float*)row + column);
}
DEVICE void store_output_type(void* row, i64 column, float x, int type) {
  if (type == 0) store_element<Bf16>(row, column, x);
  else if (type == 1) store_element<F16>(row, column, x);
  else mem::store((float*)row + column, x);
}

DEVICE void finish(const Product& p, int m, int n, float sum) {
  float x = sum * mem::load<float>(p.scale_a + m * p.scale_a_step) * mem::load<float>(p.scale_b + n * p.scale_b_step);
  if (p.bias) x += load_output_type(p.bias, n, p.out_type);
  store_output_type(p.out, i64(m) * p.n + n, x, p.out_type);
}

template <int kRowTiles, int kTokenTiles, int kUnroll>
struct Run {  // what one wave loads at a time
  mma::Weights weights[kUnroll][kRowTiles];
  u32x4 tokens[kUnroll][kTokenTiles];
};

template <int kRowTiles, int kMaxTokens>
DEVICE void scaled_mm_skinny(const Product& p) {
  constexpr int kTokenTiles = (kMaxTokens + mma::kTokens - 1) / mma::kTokens;
  constexpr int kUnroll = kTokenTiles <= 2 ? 4 : kTokenTiles == 4 ? 2 : 1;
  constexpr int kRunBytes = kUnroll * mma::kDepth;
  constexpr int kRows = kRowTiles * mma::kRows, kTokens = kTokenTiles * mma::kTokens;
  LDS extern float sums[];  // [waves, kTokens, kRows]
  const int lane = wave::lane(), waves = p.threads / wave::kLanes;
  const int first_row = wave::block_x() * kRows;
  const int begin = wave::block_y() * p.slice, end = begin + p.slice < p.k ? begin + p.slice : p.k;

  // Rows past the last read the last one, whose sums are then dropped; tokens past the last are zero.
  const u8* weight[kRowTiles][mma::kWeightLoads];
  const u8* token[kTokenTiles];
  bool is_token[kTokenTiles];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int l = 0; l < mma::kWeightLoads; ++l) {
      int row = first_row + r * mma::kRows + mma::weight_row(lane, l);
      weight[r][l] = p.b + i64(row < p.n ? row : p.n - 1) * p.b_stride + mma::depth(lane);
    }
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    int index = t * mma::kTokens + mma::token(lane);
    is_token[t] = index < p.m;
    token[t] = p.a + i64(is_token[t] ? index : 0) * p.a_stride + mma::depth(lane);
  }

  using Run = Run<kRowTiles, kTokenTiles, kUnroll>;
  auto load = [&](Run& run, int at) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = at + u * mma::kDepth;
      const bool inside = k + mma::depth(lane) < end;  // K is a multiple of 16
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int l = 0; l < mma::kWeightLoads; ++l)
          run.weights[u][r].load[l] = inside ? mem::load_once<u32x4>(weight[r][l] + k) : u32x4{};
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t)
        run.tokens[u][t] = inside && is_token[t] ? mem::load<u32x4>(token[t] + k) : u32x4{};
    }
  };
  mma::Accumulator accumulator[kRowTiles][kTokenTiles] = {};
  auto multiply = [&](const Run& run) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) mma::multiply_add(accumulator[r][t], run.weights[u][r], run.tokens[u][t]);
  };
  const int step = waves * kRunBytes;
  Run now, next;
  int at = begin + wave::index() * kRunBytes;
  if (at < end) load(now, at);
  for (; at < end; at += 2 * step) {
    if (at + step < end) load(next, at + step);
    multiply(now);
    if (at + 2 * step < end) load(now, at + 2 * step);
    if (at + step < end) multiply(next);
  }

  float* mine = sums + wave::index() * kRows * kTokens;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int row = r * mma::kRows + mma::Accumulator::row(lane, i);
        mine[(t * mma::kTokens + mma::Accumulator::token(lane, i)) * kRows + row] = accumulator[r][t].sum[i];
      }
  block_barrier();  // hazard: a wave's sums are read before it has written them

  auto for_each_result = [&](auto action) {
    for (int index = wave::thread(); index < kRows * kTokens; index += p.threads) {
      const int n = first_row + index % kRows, m = index / kRows;
      if (n < p.n && m < p.m) action(index, m, n);
    }
  };
  for_each_result([&](int index, int m, int n) {
    float sum = 0.0f;
    for (int w = 0; w < waves; ++w) sum += sums[w * kRows * kTokens + index];
    if (p.slices == 1) finish(p, m, n, sum);
    else mem::store(p.partials + (i64(wave::block_y()) * p.m + m) * p.n + n, sum);
  });
  if (p.slices == 1 || !is_last_block(p.counters + wave::block_x(), p.slices)) return;
  for_each_result([&](int, int m, int n) {
    float sum = 0.0f;
    for (int s = 0; s < p.slices; ++s) sum += mem::load<float>(p.partials + (i64(s) * p.m + m) * p.n + n);
    finish(p, m, n, sum);
  });
}

// clang-format off
#define INSTANCE(symbol, rows, tokens)                                                                                \
  KERNEL(256) symbol(const u8* a, const u8* b, void* out, float* partials, u32* counters, const float* scale_a,       \
                     const float* scale_b, const void* bias, i64 a_stride, i64 b_stride, int m, int n, int k,         \
                     int scale_a_step, int scale_b_step, int out_type, int slices, int slice, int threads) {          \
    scaled_mm_skinny<rows / mma::kRows, tokens>(Product{a, b, out, partials, counters, scale_a, scale_b, bias,        \
        a_stride, b_stride, m, n, k, scale_a_step, scale_b_step, out_type, slices, slice, threads});                  \
  }

INSTANCE(scaled_mm_skinny_16x8, 16, 8)
INSTANCE(scaled_mm_skinny_16x16, 16, 16)
INSTANCE(scaled_mm_skinny_16x32, 16, 32)
INSTANCE(scaled_mm_skinny_16x64, 16, 64)
INSTANCE(scaled_mm_skinny_32x8, 32, 8)
INSTANCE(scaled_mm_skinny_32x16, 32, 16)
// clang-format on
