// Batched skinny GEMM: one product per head, few tokens times the head's own weight, which is read once.
//
//     out[m, h, n] = T(sum_k a[m, h, k] * b[h, k, n])
//
// Bytes: b dominates; flops: 2 * M * H * N * K. A head's weight is small, 128 KB for MLA, so each block computes one
// tile and there are enough blocks for all compute units. A head's blocks are spaced by the head count: where it is a
// multiple of the XCD count, they share an L2 cache, and all but the first read the tokens from it. K-contiguous
// weights use WaveSplitK tiles, N-contiguous weights a TransposedTile.
#pragma once
#include "gemm/skinny/wave_split_k.h"

struct BatchedProblem {
  SkinnyProblem
      gemm;  // for head 0; n: out's token stride; b_row: byte stride between rows along N, or along K if transposed
  i64 a_head_stride, b_head_stride, out_head_stride;  // bytes

  DEVICE SkinnyProblem of_head(int head) const {
    SkinnyProblem p = gemm;
    p.a += head * a_head_stride;
    p.b += head * b_head_stride;
    p.out = (u8*)p.out + head * out_head_stride;
    return p;
  }
};

// 64 columns of a 16-bit weight [K = 128, N], N contiguous. Each of four waves multiplies 32 K: a lane loads four
// columns for eight k, and pairs of words form operands for four tiles of 16 columns. Column 4 * row + r of the 64 is a
// row of tile r. All of a block's loads are in flight at once. The waves' sums are reduced through LDS, one token tile
// at a time.
template <class T, int kTokens>
struct TransposedTile {
  static constexpr int kTiles = (kTokens + mma::kTileTokens - 1) / mma::kTileTokens;
  static constexpr int kLaneK = 8, kLaneColumns = 4, kColumns = kLaneColumns * mma::kRows;
  static constexpr int kThreads = mma::kWaves * wave::kLanes;
  struct Buffer {
    f32x4 sum[mma::kWaves][4][wave::kLanes];  // for four consecutive columns
  };

  // Element r of two k's words.
  DEVICE static u32 pair(u32x2 first, u32x2 second, int r) {
    const u32 a = first[r / 2], b = second[r / 2];
    return r % 2 ? a >> 16 | (b & 0xffff0000u) : (a & 0xffff) | b << 16;
  }

  DEVICE static void run(const SkinnyProblem& p, int block, Buffer& buffer) {
    const int lane = wave::lane(), first_column = block * kColumns;
    const int first_k = wave::index() * mma::kDepth / 2 + mma::depth(lane) / 2;
    u32x2 loaded[kLaneK][mma::kLoads];
#pragma unroll
    for (int k = 0; k < kLaneK; ++k)
#pragma unroll
      for (int l = 0; l < mma::kLoads; ++l)
        loaded[k][l] = mem::load_once<u32x2>(p.b + i64(first_k + k) * p.b_row +
                                             (first_column + mma::row(lane, l) * kLaneColumns) * 2);
    u32x4 tokens[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int token = t * mma::kTileTokens + mma::tile_token(lane);
      tokens[t] = mem::load_or_zero(mem::buffer(p.a), token * p.a_stride + first_k * 2, 0, token < p.m);
    }
    f32x4 sum[kLaneColumns][kTiles] = {};
#pragma unroll
    for (int r = 0; r < kLaneColumns; ++r) {
      mma::Weights weights;
#pragma unroll
      for (int l = 0; l < mma::kLoads; ++l)
#pragma unroll
        for (int i = 0; i < 4; ++i) weights.load[l][i] = pair(loaded[2 * i][l], loaded[2 * i + 1][l], r);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) sum[r][t] = mma::multiply_tile<T>(sum[r][t], weights, tokens[t]);
    }
    const int value = wave::index();  // which of a lane's four values the wave stores
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t > 0) block_barrier();  // hazard: the previous sums are overwritten before they are read
#pragma unroll
      for (int i = 0; i < 4; ++i)
        buffer.sum[wave::index()][i][lane] = {sum[0][t][i], sum[1][t][i], sum[2][t][i], sum[3][t][i]};
      block_barrier();  // hazard: the waves' sums are read before they are written
      f32x4 total = {};
#pragma unroll
      for (int w = 0; w < mma::kWaves; ++w) total += buffer.sum[w][value][lane];
      const int token = t * mma::kTileTokens + mma::value_token(lane, value);
      const int column = first_column + mma::value_row(lane, value) * kLaneColumns;
      mem::store_if(token < p.m, (u16*)p.out + i64(token) * p.n + column, u32x2{T::pack(total.lo), T::pack(total.hi)});
    }
  }
};
