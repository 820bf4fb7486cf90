// Tiles of 64 rows, streamed through LDS: a ring of panels, 128 bytes of K of the tile's rows and of all tokens, that four waves
// fill, past the registers, and multiply. Registers hold enough loads for some 86 % of HBM's bandwidth, LDS for 93 % (measured on
// H200, 13312 x 16384). Past the end of a tile the next tile's panels follow, so that kStages - 1 are always in flight.
#pragma once
#include "mma.h"

extern LDS __attribute__((aligned(1024))) u8 dynamic_lds[];  // [kStages][weight rows, then tokens of a panel]

template <class Type, int kTokens, Scales kScales, class Scale = Fp32Scale>
struct Wide {
  static constexpr int kThreads = mma::kWaves * wave::kLanes, kGroup = tile::kDepth / mma::kDepth;
  static constexpr int kWeightBytes = kTileRows * tile::kDepth, kStageBytes = kWeightBytes + kTokens * tile::kDepth;
  static constexpr int kStages = kTokens == 16   ? 6
                                 : kTokens == 32 ? 5
                                                 : 4,
                       kResident = 3;  // blocks; gemm.py knows both
  static constexpr int kLaneTokens = kTokens / 4, kLaneRows = 2, kSums = kLaneTokens * kLaneRows;
  static constexpr bool kScaled = kScales == Scales::kBlock;
  using Tile = Finish<kScales, kLaneTokens, kLaneRows, kGroup, 64>;
  using Weights = tile::Filler<kTileRows, kThreads>;
  using ScaleType = typename Scale::Type;

  const Product& p;
  f32x2 (&scales_a)[2][kTokens / 2];  // in LDS, of this panel and of the last, which a slow wave may still read
  const Share<kGroup> share{p};
  const int lane = wave::lane();

  DEVICE void begin_stream(Weights& weights, int tile) const {
    const int first = tile * kTileRows;
    weights.init(p.b + first / mma::kRows * p.b_tile, tile::Layout{p.b_tile, p.b_row, p.b_step / 4, p.b_step},
                 [&](int row) { return first + row < p.n ? row : tile::kNoRow; });
  }

  struct Scaling {
    typename Scale::Loaded a = {}, b = {};
  };
  // Those of the group's panel: the weights', and the one of the token that the thread puts in LDS.
  DEVICE Scaling load_scales(const Group& group) const {
    if constexpr (!kScaled) return {};
    const int token = wave::thread() % kTokens, block = group.step / kGroup;
    const ScaleType* b = (const ScaleType*)p.scale_b + i64(group.tile * kTileRows / kScaleBlock) * p.scale_b_row;
    const int at = token * p.scale_a_row * Scale::kBytes, from = block * p.scale_a_k * Scale::kBytes;
    return {Scale::load_or_zero(mem::buffer(p.scale_a), at, from, group.end > 0 && token < p.m),
            Scale::load_or_zero(mem::buffer(b), 0, block * Scale::kBytes, group.end > 0)};
  }

  DEVICE void multiply() const {
    auto* lds = (lds::Local<u8>*)dynamic_lds;
    Group now = share.begin(), ahead = now;
    tile::Filler<kTokens, kThreads> tokens;
    tokens.init(p.a, tile::Layout{16 * i64(p.a_stride), p.a_stride, tile::kPiece, 4 * tile::kPiece},
                [&](int token) { return token < p.m ? token : tile::kNoRow; });
    Weights weights;
    begin_stream(weights, ahead.tile);
    auto start_next = [&](int stage) __attribute__((always_inline)) {
      if (ahead.end > 0) {
        const int bytes = share.bytes_left(ahead, ahead.step), tile = ahead.tile;
        auto* to = lds + stage * kStageBytes;
        weights.start_at(ahead.step * p.b_step, bytes, to);
        tokens.start_at(ahead.step * mma::kDepth, bytes, to + kWeightBytes);
        ahead = share.after(ahead);
        if (ahead.tile != tile && ahead.end > 0) begin_stream(weights, ahead.tile);
      }
      lds::end_group();
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) start_next(stage);

    const mma::Panel weights_at(0, p.b_step != mma::kDepth), tokens_at(0, false);
    Scaling scaling = load_scales(now);
    float sum[kSums] = {};
    Tile tile{p, share};
    begin_tile(tile, now.tile);
    for (int stage = 0, parity = 0;; parity ^= 1) {
      if (kScaled && wave::thread() < kTokens) ((float*)scales_a[parity])[wave::thread()] = Scale::value(scaling.a);
      const float scale_b = Scale::value(scaling.b);
      const Group next = share.after(now);
      lds::wait_for_copies<kStages - 2>();
      block_barrier();  // hazard: read before all waves have filled it; the last stage filled while others still read there
      start_next(stage == 0 ? kStages - 1 : stage - 1);
      scaling = load_scales(next);
      auto* here = lds + stage * kStageBytes;
      // The matrix units sum up e4m3 with some 14 bits, so that their sums are of one panel only.
      float product[kSums];
      mma::multiply_panels<Type>(product, weights_at, here, tokens_at, here + kWeightBytes);
#pragma unroll
      for (int i = 0; i < kSums / 4; ++i) {
        const f32x2 scale = kScaled ? scales_a[parity][i * 4 + lane % 4] * scale_b : f32x2{1.0f, 1.0f};
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i * 4 + j] += product[i * 4 + j] * scale[j % 2];
      }
      if (next.tile != now.tile) {
        end_tile(tile, sum);
        for (float& value : sum) value = 0.0f;
        if (next.end > 0) begin_tile(tile, next.tile);
      }
      if (next.end <= 0) return;
      now = next;
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
  }

  // Of a thread's sums, [kTokens / 8][kLaneRows][2 tokens].
  DEVICE void begin_tile(Tile& tile, int index) const {
    const int first_row = index * kTileRows + wave::index() * mma::kRows;
    tile.begin(
        index, [&](int i) __attribute__((always_inline)) { return i / 2 * 8 + lane % 4 * 2 + i % 2; },
        [&](int j) __attribute__((always_inline)) { return first_row + lane / 4 + j * 8; });
  }
  DEVICE void end_tile(const Tile& tile, const float (&sum)[kSums]) const {
    float values[kLaneTokens][kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneTokens; ++i)
#pragma unroll
      for (int j = 0; j < kLaneRows; ++j) values[i][j] = sum[i / 2 * 4 + j * 2 + i % 2];
    tile.end(values);
  }

  DEVICE static void run(const Product& product) {
    LDS static f32x2 scales_a[2][kTokens / 2];
    Wide{product, scales_a}.multiply();
  }
};
