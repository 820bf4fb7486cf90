// For few tokens and small weights: a tile has 16 rows of b and is shared by fewer blocks. The waves take K in turns of
// kTurn steps, each lane with weights and tokens of kRing turns in registers, and meet in LDS at the end of a tile.
//
// Up to 8 tokens the sparse instruction (v_smfmac_f32_16x16x64_fp8_fp8, a token over two rows, each with two of every four
// bytes) does what two dense ones do. Built and emulated on gfx942, 8 x 64 x 2048, it halves matrix cycles per byte of weight from
// 0.031 to 0.016 and adds 0.7 % to issue cycles, 0.304 to 0.306. HBM at its full rate leaves 0.48 cycles per byte: what it
// saves nobody waits for, so the dense one stays.
#pragma once
#include "gemm/skinny/epilogue.h"
#include "gemm/skinny/weights.h"

template <class Type, int kTokens, Scales kScales, class Scale = Fp32Scale>
struct Narrow {
  static constexpr int kTiles = (kTokens + mma::kTileTokens - 1) / mma::kTileTokens, kTurn = 2, kRing = mma::kRing;
  static constexpr int kThreads = mma::kWaves * wave::kLanes, kUnit = kTurn * mma::kWaves;
  static constexpr bool kScaled = kScales == Scales::kBlock;
  static_assert(!kScaled || kTurn * mma::kDepth == kScaleBlock);
  using Tile = Finish<kScales, kTiles, 1, 1, kUnit, kThreads, 8>;
  struct Buffer {
    float sum[2][mma::kWaves][kTiles][4]
             [wave::kLanes];  // of this tile and of the last, which a slow wave may still read
  };

  const Product& p;
  Buffer& buffer;  // in LDS
  const Share<kUnit> share{p};
  const int lane = wave::lane();

  using Stream = ScaledTileWeights<Scale>;
  DEVICE Stream stream(int tile) const { return scaled_tile_weights<Scale>(p, tile * mma::kRows, 0); }

  struct Turn {
    mma::Weights weights[kTurn] = {};
    u32x4 tokens[kTurn][kTiles];
    typename Scale::Loaded scale_a[kTiles][mma::kValueTokens] = {}, scale_b = 0;  // of kBlock
  };
  DEVICE void load(Turn& turn, const Stream& stream, const Group& group) const {
    const int first = group.step + wave::index() * kTurn, bytes = share.bytes_left(group, first) - mma::depth(lane);
    if constexpr (kScaled) load_scales(turn, stream.scales, u32(first) / kTurn, share.bytes_left(group, first) > 0);
#pragma unroll
    for (int u = 0; u < kTurn; ++u) {
      const int step = first + u;
      const bool inside = u * mma::kDepth < bytes;
#pragma unroll
      for (int l = 0; l < mma::kLoads; ++l)
        mem::refill(turn.weights[u].load[l], stream.weights[l], step * p.b_step, inside);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int token = t * mma::kTileTokens + mma::tile_token(lane);
        turn.tokens[u][t] = mem::load_or_zero(mem::buffer(p.a), token * p.a_stride + mma::depth(lane) + u * mma::kDepth,
                                              first * mma::kDepth, inside && token < p.m);
      }
    }
  }

  DEVICE void load_scales(Turn& turn, const typename Scale::Type* scales_b, int block, bool inside) const {
    turn.scale_b = Scale::load_or_zero(mem::buffer(scales_b), 0, block * Scale::kBytes, inside);
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int v = 0; v < mma::kValueTokens; ++v) {
        const int token = t * mma::kTileTokens + mma::value_token(lane, v);
        turn.scale_a[t][v] = Scale::load_or_zero(mem::buffer(p.scale_a), token * p.scale_a_row * Scale::kBytes,
                                                 block * p.scale_a_k * Scale::kBytes, inside && token < p.m);
      }
  }

  // A turn is multiplied while the next kRing - 1 are under way. All turns of a round load, past the block's last one zeros: were
  // a path with fewer loads in flight to join the others, the compiler would wait for more than it must on all of them. Where
  // loads take predicates, hardware counts them itself, and the others are left out.
  DEVICE void multiply() const {
    Group now = share.begin(), ahead = now;
    Stream streaming = stream(ahead.tile);
    Turn ring[kRing];
    auto load_next = [&](Turn& turn) __attribute__((always_inline)) {
      load(turn, streaming, ahead);
      const int tile = ahead.tile;
      ahead = share.after(ahead);
      if (ahead.tile != tile) streaming = stream(ahead.tile);
    };
#pragma unroll
    for (int i = 0; i < kRing - 1; ++i) load_next(ring[i]);
    f32x4 sum[kTiles] = {};
    int parity = 0;
    Tile tile{p, share};
    begin_tile(tile, now.tile);
    auto multiply_turn = [&](const Turn& turn) __attribute__((always_inline)) {
      const float scale_b = kScaled ? Scale::value(turn.scale_b) : 1.0f;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        f32x4 product = kScaled ? f32x4{} : sum[t];
#pragma unroll
        for (int u = 0; u < kTurn; ++u) product = mma::multiply_tile<Type>(product, turn.weights[u], turn.tokens[u][t]);
        if constexpr (!kScaled) sum[t] = product;
        else
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sum[t][i] += product[i] * (Scale::value(turn.scale_a[t][i % mma::kValueTokens]) * scale_b);
      }
      const Group next = share.after(now);
      if (next.tile != now.tile) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int value = 0; value < 4; ++value) buffer.sum[parity][wave::index()][t][value][lane] = sum[t][value];
          sum[t] = f32x4{};
        }
        block_barrier();  // hazard: the waves' sums are read before they are written
        end_tile(tile, parity);
        parity ^= 1;
        if (next.end > 0) begin_tile(tile, next.tile);
      }
      now = next;
      return next.end > 0;
    };
    for (bool more = true; more;)
#pragma unroll
      for (int i = 0; i < kRing; ++i) {
        if (mem::kPredicates && !more) continue;
        load_next(ring[(i + kRing - 1) % kRing]);
        if (more) more = multiply_turn(ring[i]);
      }
  }

  // Each wave ends with one of the four values that the lanes of all waves have of a tile.
  DEVICE void begin_tile(Tile& tile, int index) const {
    const int value = wave::index();
    tile.begin(
        index,
        [&](int t) __attribute__((always_inline)) { return t * mma::kTileTokens + mma::value_token(lane, value); },
        [&](int) __attribute__((always_inline)) { return index * mma::kRows + mma::value_row(lane, value); });
  }
  DEVICE void end_tile(const Tile& tile, int parity) const {
    Run<1> values[kTiles][1] = {};
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int w = 0; w < mma::kWaves; ++w) values[t][0] += buffer.sum[parity][w][t][wave::index()][lane];
    tile.end(values);
  }
};
