// MX-FP8 GEMM: e4m3fn with a scale 2^(s - 127) per 32 K, s one e8m0 byte; 255 is NaN.
//
//     out[m, n] = T(sum_k a[m, k] * 2^(scale_a[m, k / 32] - 127) * b[n, k] * 2^(scale_b[n, k / 32] - 127) + bias[n])
//
// The matrix instruction applies the scales (device/amd/mx.h), so they cost only their loads; accumulation is fp32.
// Bytes: 33/32 * (M + N) * K and the results; flops: 2 * M * N * K. Up to 64 tokens the bound is reading b, from a few
// hundred on it is compute.
//
// A tile is some rows of b times some tokens over all of K. A unit is one instruction pair, 256 K bytes, of a tile.
// Units are the steps that the stream-K schedule of gemm/skinny divides over the blocks. Tiles end with its epilogue.
//
// Static, on gfx950: the streaming kernels for 16, 32 and 64 tokens use 144, 164 and 198 registers, hence 3, 3 and 2
// waves per SIMD; the 64 and 128 tiles use 116 and 250, hence 4 and 2. Emulated: when a streaming wave waits, it has 14
// KB of b in flight on average, 16 KB at most; no LDS access has a bank conflict.
#include "gemm/skinny.h"
#include "gemm/tiled/rasterize.h"

#ifdef HAS_BLOCK_SCALED_MMA

struct MxProblem : SkinnyProblem {  // a step is a unit, a scale one e8m0 byte per 32 K
  int scale_b_shift;                // 2^scale_b_shift rows of b share their scales
  int blocks;
};

constexpr int kWaves = mma::kWaves, kThreads = kWaves * wave::kLanes;
constexpr int kOutside = 1 << 31;  // an offset at which every buffer reads zeros, also after additions

template <int kLaneTokens, int kLaneQuads>
using Epilogue = TileEpilogue<ScaleGranularity::kMx, kLaneTokens, kLaneQuads, /*kVec=*/4, /*kGroupSteps=*/1, kThreads,
                              /*kFreeFloats=*/16>;

// Up to kTokens tokens. A tile has 64 rows. Each wave streams 16 of them from HBM straight to registers. A lane holds
// kStages units in registers: a multiplied unit is replaced by the one kStages further on, which may belong to the next
// tile. So at least kStages - 1 units are in flight. All waves need the same tokens: each wave loads a quarter of a
// unit's tokens with its weights, and stores them to LDS in lane read order. LDS is double-buffered.
template <int kTokens>
DEVICE void stream(const MxProblem& p) {
  constexpr int kStages = 4, kTiles = kTokens / mx::kRows, kRows = kWaves * mx::kRows;
  static_assert(kWaves == mx::kVecs && kTiles <= kWaves, "a wave loads one vector of all tokens, and scales of 16");
  LDS static u32x4 tokens[2][kTiles][mx::kVecs][wave::kLanes];
  LDS static u32 token_scales[2][kWaves][wave::kLanes];  // waves past kTiles store zeros that no one reads
  using PairScales = mx::PairScales</*kWords=*/true>;
  const int lane = wave::lane(), part = wave::index(), row = part * mx::kRows + mx::row(lane);
  wait_for_arguments(p);
  const StreamKSchedule<1> schedule{p};

  struct Stage {
    u32x4 token[kTiles];      // the wave's vector of each 16 tokens
    PairScales token_scales;  // of the wave's 16 tokens
    u32x4 weight[mx::kVecs];
    PairScales weight_scales;
  };
  Stage stages[kStages];
  int token_at[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int m = t * mx::kRows + mx::row(lane);
    token_at[t] = m < p.m ? m * p.a_stride + part * mx::kSpacing + mx::depth(lane) : kOutside;
  }
  const int token_scales_at = row < p.m && part < kTiles ? row * p.scale_a_row : kOutside;
  auto load = [&](Stage& stage, const TileWork& from) __attribute__((always_inline)) {
    const int at = from.step * mx::kPair, scale_at = at >> mx::kLog2Block, bytes = from.end > 0 ? p.k - at : 0;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      stage.token[t] =
          mem::load_or_zero(mem::buffer(p.a), token_at[t], at, part * mx::kSpacing + mx::depth(lane) < bytes);
    stage.token_scales =
        PairScales::load(mem::buffer(p.scale_a), lane, token_scales_at, scale_at, bytes >> mx::kLog2Block);
    mx::schedule_fence();  // tokens are issued first because they are waited for first
    const int n = from.tile * kRows, of_row = n + row < p.n ? bytes : 0;
    const mem::Buffer weights = mem::buffer(p.b + i64(n) * p.b_row);
#pragma unroll
    for (int i = 0; i < mx::kVecs; ++i)
      stage.weight[i] = mem::load_once_or_zero(weights, row * p.b_row + mx::depth(lane), at + i * mx::kSpacing,
                                               i * mx::kSpacing + mx::depth(lane) < of_row);
    const mem::Buffer scales = mem::buffer((const u8*)p.scale_b + i64(n >> p.scale_b_shift) * p.scale_b_row);
    stage.weight_scales =
        PairScales::load(scales, lane, (row >> p.scale_b_shift) * p.scale_b_row, scale_at, of_row >> mx::kLog2Block);
    mx::schedule_fence();  // units' loads stay in order, so waiting for one does not wait for later ones
  };
  auto store_tokens = [&](const Stage& stage, int buffer) __attribute__((always_inline)) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) tokens[buffer][t][part][lane] = stage.token[t];
    token_scales[buffer][part][lane] = stage.token_scales.aligned(lane);
    block_barrier();  // hazard: tokens are read before they are written
  };
  f32x4 sum[kTiles][1] = {};
  auto multiply = [&](const Stage& stage, int buffer) __attribute__((always_inline)) {
    const u32 scales = stage.weight_scales.aligned(lane);
    const u32x4* weight = stage.weight;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const u32x4(&token)[mx::kVecs][wave::kLanes] = tokens[buffer][t];
      const u32 of_tokens = token_scales[buffer][t][lane];
      sum[t][0] =
          mx::multiply_add<0>(sum[t][0], weight[0], weight[2], scales, token[0][lane], token[2][lane], of_tokens);
      sum[t][0] =
          mx::multiply_add<1>(sum[t][0], weight[1], weight[3], scales, token[1][lane], token[3][lane], of_tokens);
    }
  };

  TileWork current = schedule.begin(), prefetch = current;
#pragma unroll
  for (int r = 0; r < kStages; ++r, prefetch = schedule.after(prefetch)) load(stages[r], prefetch);
  store_tokens(stages[0], 0);
  while (current.end > 0) {
#pragma unroll
    for (int r = 0; r < kStages; ++r) {  // units past the last are zeros
      multiply(stages[r], r % 2);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) mx::compute_now(sum[t]);
      mx::schedule_fence();  // a stage is loaded after its last use; any earlier, its loads would use other registers
      load(stages[r], prefetch);
      // Hazard: all waves that came to the last barrier have read the tokens that these overwrite.
      store_tokens(stages[(r + 1) % kStages], (r + 1) % 2);
      prefetch = schedule.after(prefetch);
      const TileWork next = schedule.after(current);
      if (next.tile != current.tile && current.end > 0) {
        Epilogue<kTiles, 1> epilogue{p, schedule};
        epilogue.begin(
            current.tile, [&](int t) __attribute__((always_inline)) { return t * mx::kRows + mx::sum_token(lane); },
            [&](int)
                __attribute__((always_inline)) { return current.tile * kRows + part * mx::kRows + mx::sum_row(lane); });
        epilogue.end(sum);
        mx::wait_for_loads();  // for the compiler, which would otherwise over-wait wherever this path joins
#pragma unroll
        for (int t = 0; t < kTiles; ++t) sum[t][0] = f32x4{};
      }
      current = next;
    }
  }
}

// Any number of tokens. A tile has kSide rows and kSide tokens. Each wave multiplies a quarter of it, kTiles x kTiles
// instructions wide. Both operands go to LDS, half a unit at a time, in lane read order, free of bank conflicts. LDS is
// double-buffered, and the next two halves are in flight to registers. An XCD has consecutive tiles, for its L2 cache.
template <int kTiles, bool kWords>
DEVICE void multiply_tiles(const MxProblem& p) {
  constexpr int kSide = 2 * kTiles * mx::kRows;
  enum { kTokens, kWeights, kOperands };
  LDS static u32x4 halves[2][kOperands][2 * kTiles][2][wave::kLanes];
  using PairScales = mx::PairScales<kWords>;
  const int lane = wave::lane();
  const StreamKSchedule<1> schedule{p, tile::remap_to_xcd(wave::block_id_x(), p.blocks)};
  const int tiles_m = (p.m + kSide - 1) / kSide, tiles_n = (p.n + kSide - 1) / kSide;
  // The quarter that the wave multiplies, and the rows that it loads: one of two vectors for every other 16 rows of a
  // half unit.
  const int token_rows = wave::index() % 2 * kTiles, weight_rows = wave::index() / 2 * kTiles;
  const int vec = wave::index() % 2, loaded_rows = wave::index() / 2;

  for (TileWork current = schedule.begin(); current.end > 0;
       current = schedule.after({current.tile, current.end, current.end})) {
    const int begin = current.step, end = current.end;
    const tile::TileCoord position = tile::rasterize(current.tile, tiles_m, tiles_n, tile::kGroupM);
    const int m0 = position.m * kSide, n0 = position.n * kSide;
    const mem::Buffer a = mem::buffer(p.a + i64(m0) * p.a_stride), b = mem::buffer(p.b + i64(n0) * p.b_row);
    const mem::Buffer scale_a = mem::buffer((const u8*)p.scale_a + i64(m0) * p.scale_a_row);
    const mem::Buffer scale_b = mem::buffer((const u8*)p.scale_b + i64(n0 >> p.scale_b_shift) * p.scale_b_row);

    // Offsets: the rows that the lane loads to LDS, and the scales for the rows that the wave multiplies.
    int token_at[kTiles], weight_at[kTiles], token_scales_at[kTiles], weight_scales_at[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int row = (loaded_rows + 2 * i) * mx::kRows + mx::row(lane);
      token_at[i] = m0 + row < p.m ? row * p.a_stride + mx::depth(lane) : kOutside;
      weight_at[i] = n0 + row < p.n ? row * p.b_row + mx::depth(lane) : kOutside;
      const int m = (token_rows + i) * mx::kRows + mx::row(lane), n = (weight_rows + i) * mx::kRows + mx::row(lane);
      token_scales_at[i] = m0 + m < p.m ? m * p.scale_a_row : kOutside;
      weight_scales_at[i] = n0 + n < p.n ? (n >> p.scale_b_shift) * p.scale_b_row : kOutside;
    }
    struct Half {
      u32x4 operand[kOperands][kTiles];
    };
    auto load = [&](Half& half, int index, int pair) __attribute__((always_inline)) {
      const int at = pair * mx::kPair + (index + 2 * vec) * mx::kSpacing;
      const bool inside = pair < end && at + mx::depth(lane) < p.k;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        half.operand[kTokens][i] = mem::load_or_zero(a, token_at[i], at, inside);
        half.operand[kWeights][i] = mem::load_or_zero(b, weight_at[i], at, inside);
      }
    };
    struct AllScales {
      PairScales operand[kOperands][kTiles];
    };
    auto load_scales = [&](int pair) __attribute__((always_inline)) {
      AllScales scales;
      const int at = pair * mx::kPair, count = pair < end ? (p.k - at) >> mx::kLog2Block : 0;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        scales.operand[kTokens][i] = PairScales::load(scale_a, lane, token_scales_at[i], at >> mx::kLog2Block, count);
        scales.operand[kWeights][i] = PairScales::load(scale_b, lane, weight_scales_at[i], at >> mx::kLog2Block, count);
      }
      return scales;
    };
    auto store = [&](const Half& half, int buffer) __attribute__((always_inline)) {
#pragma unroll
      for (int o = 0; o < kOperands; ++o)
#pragma unroll
        for (int i = 0; i < kTiles; ++i) halves[buffer][o][loaded_rows + 2 * i][vec][lane] = half.operand[o][i];
    };
    f32x4 sum[kTiles][kTiles] = {};
    auto multiply = [&]<int kIndex>(const u32(&scales)[kOperands][kTiles]) __attribute__((always_inline)) {
      const u32x4(&weights)[2 * kTiles][2][wave::kLanes] = halves[kIndex][kWeights];
      const u32x4(&tokens)[2 * kTiles][2][wave::kLanes] = halves[kIndex][kTokens];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int w = 0; w < kTiles; ++w) {
          const u32x4(&weight)[2][wave::kLanes] = weights[weight_rows + w],
                (&token)[2][wave::kLanes] = tokens[token_rows + t];
          sum[t][w] = mx::multiply_add<kIndex>(sum[t][w], weight[0][lane], weight[1][lane], scales[kWeights][w],
                                               token[0][lane], token[1][lane], scales[kTokens][t]);
        }
    };

    Half half[2];
    AllScales next = load_scales(begin);
    load(half[0], 0, begin);
    load(half[1], 1, begin);
    store(half[0], 0);
    load(half[0], 0, begin + 1);
    block_barrier();  // hazard: a half is read before it is written
    for (int pair = begin; pair < end; ++pair) {
      u32 scales[kOperands][kTiles];
#pragma unroll
      for (int o = 0; o < kOperands; ++o)
#pragma unroll
        for (int i = 0; i < kTiles; ++i) scales[o][i] = next.operand[o][i].aligned(lane);
      next = load_scales(pair + 1);
      // Hazard of both stores: all waves that came to the last barrier have read the half that they overwrite.
      store(half[1], 1);
      load(half[1], 1, pair + 1);
      multiply.template operator()<0>(scales);
      block_barrier();  // hazard: as above
      store(half[0], 0);
      load(half[0], 0, pair + 2);
      multiply.template operator()<1>(scales);
      block_barrier();  // hazard: as above
    }
    Epilogue<kTiles, kTiles> epilogue{p, schedule};
    epilogue.begin(
        current.tile,
        [&](int t) __attribute__((always_inline)) { return m0 + (token_rows + t) * mx::kRows + mx::sum_token(lane); },
        [&](int w) __attribute__((always_inline)) { return n0 + (weight_rows + w) * mx::kRows + mx::sum_row(lane); });
    epilogue.end(sum);
  }
}

KERNEL(kThreads) mxfp8_scaled_mm_stream_16(MxProblem problem) { stream<16>(problem); }
KERNEL(kThreads) mxfp8_scaled_mm_stream_32(MxProblem problem) { stream<32>(problem); }
KERNEL(kThreads) mxfp8_scaled_mm_stream_64(MxProblem problem) { stream<64>(problem); }
KERNEL(kThreads) mxfp8_scaled_mm_tile_128(MxProblem problem) { multiply_tiles<4, /*kWords=*/true>(problem); }
KERNEL(kThreads) mxfp8_scaled_mm_tile_64(MxProblem problem) { multiply_tiles<2, /*kWords=*/true>(problem); }
KERNEL(kThreads) mxfp8_scaled_mm_tile_64_bytes(MxProblem problem) { multiply_tiles<2, /*kWords=*/false>(problem); }
#endif
