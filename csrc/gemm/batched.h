// A product for each head, of few tokens and a weight of its own that is read once:
//
//     out[m, h, n] = T(sum_k a[m, h, k] * b[h, k, n])
//
// Bytes: those of b, little else; flops: 2 * M * H * N * K. A head's weight is small, of MLA 128 KB, so that a block has one tile of it
// and there are enough blocks for all compute units. Blocks of a head are as many apart as there are heads: where that is a
// multiple of the XCDs, they share an L2 cache, from which all but the first read the tokens.
// Where K lies side by side, tiles are those of WaveSplitK. Where N does, as a tile of TransposedTile.
#pragma once
#include "gemm/skinny/wave_split_k.h"

struct BatchedProblem {
  SkinnyProblem
      gemm;  // of head 0; n is the step between tokens of out. b_row: bytes between rows along N, or K of TransposedTile
  i64 a_head_stride, b_head_stride, out_head_stride;  // bytes

  DEVICE SkinnyProblem of_head(int head) const {
    SkinnyProblem p = gemm;
    p.a += head * a_head_stride;
    p.b += head * b_head_stride;
    p.out = (u8*)p.out + head * out_head_stride;
    return p;
  }
};

// 64 columns of a weight [K = 128, N] of 16 bits with N side by side. Each of four waves has 32 of K: a lane loads four columns of
// eight k, which pairs of words make operands of four tiles of 16 columns. Column 4 * row + r of the 64 is a row of tile r. All loads
// of a block are in flight at once. The waves' sums meet in LDS, a tile of tokens after the other.
template <class T, int kTokens>
struct TransposedTile {
  static constexpr int kTiles = (kTokens + mma::kTileTokens - 1) / mma::kTileTokens;
  static constexpr int kLaneK = 8, kLaneColumns = 4, kColumns = kLaneColumns * mma::kRows;
  static constexpr int kThreads = mma::kWaves * wave::kLanes;
  struct Buffer {
    f32x4 sum[mma::kWaves][4][wave::kLanes];  // of four neighbouring columns
  };

  // Element r of the words of two k.
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
    const int value = wave::index();  // the one of a lane's four that the wave stores
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t > 0) block_barrier();  // hazard: the last sums are written over before they are read
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
