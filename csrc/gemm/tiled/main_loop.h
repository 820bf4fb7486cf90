// Tiled GEMM main loop: a block multiplies a token tile with a tile of weight rows along K.
//
// The waves partition the tile: each has kWaveTokens tokens, and all weight rows or a share of them. Panels, 128 K
// bytes of all rows, are copied from HBM to LDS while the previous panel is multiplied (loader.h,
// device/*/lds_async.h). Each wave reads its fragments from there once (device/*/tile_mma.h).
#pragma once
#include "device/scale.h"
#include "device/tile_mma.h"
#include "gemm/tiled/loader.h"

extern LDS __attribute__((aligned(1024))) u8 dynamic_lds[];  // [kBuffers][a panel's tokens, then weight rows]

namespace tile {

// A block's tile, and each wave's share.
template <int kM, int kN, int kBlockThreads>
struct BlockTile {
  static constexpr int kTileM = kM, kTileN = kN, kThreads = kBlockThreads;
  static constexpr int kWaveM = kWaveTokens, kWavesM = kM / kWaveM;
  static constexpr int kWavesN = kThreads / wave::kLanes / kWavesM, kWaveN = kN / kWavesN;
  static constexpr int kAccumulatorsM = kWaveM / kAccumulatorTokens, kAccumulatorsN = kWaveN / kAccumulatorRows;
  static constexpr bool kPingPong = kThreads > 256;
  static_assert(kScaleBlock % kWaveN == 0, "a wave needs one weight scale at a time");
  DEVICE static int wave_m() { return wave::index() % kWavesM * kWaveM; }
  DEVICE static int wave_n() { return wave::index() / kWavesM * kWaveN; }
  // The token of a lane's `token`-th sums, relative to the wave's first token across its accumulator tiles.
  DEVICE static int token(int token) {
    return token / kLaneTokens * kAccumulatorTokens + accumulator_token(wave::lane(), token % kLaneTokens);
  }
};
template <class Tile>
using Accumulators = AccumulatorTile[Tile::kAccumulatorsM][Tile::kAccumulatorsN];
// A panel's scale factors, for the lower and the upper half of a lane's weight rows.
template <class Tile>
using ScaleFactors = float[Tile::kAccumulatorsN][2][Tile::kAccumulatorsM][kLaneTokens];

struct Unscaled {
  static constexpr bool kScaled = false;
  struct Panel {};
  DEVICE Panel load(int /*panel*/) const { return {}; }
  template <class ScaleFactors>
  DEVICE void multiply(const Panel&, ScaleFactors&) const {}
};

// Block scales of tokens and weight rows, each covering kPanels panels of K. The lower half of a lane's weight rows
// uses b's first scale. The upper half uses it, too, or with kHalves a separate scale per accumulator tile.
template <class Tile, bool kHalves, class Scale = Fp32Scale, int kPanels = 1>
struct BlockScales {
  static constexpr bool kScaled = true;
  static constexpr int kWeights = kHalves ? 1 + Tile::kAccumulatorsN : 1;
  struct Panel {
    typename Scale::Loaded a[Tile::kAccumulatorsM][kLaneTokens], b[kWeights];
  };
  mem::Buffer a, b;
  int a_at[Tile::kAccumulatorsM][kLaneTokens], b_at[kWeights];  // bytes
  int a_k, b_k = 1;                                             // element strides between K blocks

  // `row_of` maps a tile's token to its row of `tokens`.
  template <class RowOf>
  DEVICE void init(const typename Scale::Type* tokens, int row, int k, const typename Scale::Type* weights,
                   RowOf row_of) {
    a = mem::buffer(tokens), b = mem::buffer(weights), a_k = k;
    b_at[0] = 0;
#pragma unroll
    for (int i = 0; i < Tile::kAccumulatorsM; ++i)
#pragma unroll
      for (int t = 0; t < kLaneTokens; ++t)
        a_at[i][t] = row_of(Tile::wave_m() + Tile::token(i * kLaneTokens + t)) * row * Scale::kBytes;
  }
  DEVICE Panel load(int panel) const {
    const int block = u32(panel) / kPanels;
    Panel scales;
#pragma unroll
    for (int j = 0; j < kWeights; ++j)
      scales.b[j] = Scale::load_or_zero(b, b_at[j], block * (b_k * Scale::kBytes), true);
#pragma unroll
    for (int i = 0; i < Tile::kAccumulatorsM; ++i)
#pragma unroll
      for (int t = 0; t < kLaneTokens; ++t)
        scales.a[i][t] = Scale::load_or_zero(a, a_at[i][t], block * a_k * Scale::kBytes, true);
    return scales;
  }
  DEVICE void multiply(const Panel& scales, ScaleFactors<Tile>& factors) const {
#pragma unroll
    for (int j = 0; j < Tile::kAccumulatorsN; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < Tile::kAccumulatorsM; ++i)
#pragma unroll
          for (int t = 0; t < kLaneTokens; ++t)
            factors[j][half][i][t] = Scale::value(scales.a[i][t]) * Scale::value(scales.b[kHalves && half ? 1 + j : 0]);
  }
};

// A block's tiles if it has one: all its panels belong together.
struct OneTile {
  static constexpr bool kMore = false;
};

// A block's tiles if it has several; multiply_panels says when it calls what.
template <class Begin, class End>
struct Run {
  static constexpr bool kMore = true;
  int tiles;
  Begin begin;
  End end;
};

// Adds the products of panels [first, last), at least one. Rows have k bytes. The loaders provide TileLoader's `start`
// and `finish`. A block with more tiles has run.tiles of them, whose panels follow each other without a pause:
// run.begin(tile) lets the loaders and `scaling` load another tile, run.end(tile) stores the sums of one.
template <class Tile, class Type, class LoaderA, class LoaderB, class Scaling, class Run = OneTile>
DEVICE void multiply_panels(Accumulators<Tile>& sums, LoaderA& loader_a, LoaderB& loader_b, bool b_in_fragment_order,
                            const Scaling& scaling, int first, int last, int k, const Run& run = {}) {
  constexpr int kPanelA = Tile::kTileM * kDepth, kBuffer = kPanelA + Tile::kTileN * kDepth;
  auto* lds = (lds::Local<u8>*)dynamic_lds;
  using PanelScales = typename Scaling::Panel;
  auto load = [&](int panel, int buffer, PanelScales& scales) __attribute__((always_inline)) {
    scales = scaling.load(panel);  // first: they are used first, and loads are waited for in order
    loader_a.start(panel, k, lds + buffer * kBuffer);
    loader_b.start(panel, k, lds + buffer * kBuffer + kPanelA);
  };
  int next_panel = first, next_tile = 0;  // with more tiles
  auto start = [&](int panel, int buffer, PanelScales& scales) __attribute__((always_inline)) {
    if constexpr (!Run::kMore) {
      if (panel < last) load(panel, buffer, scales);
    } else if (next_tile < run.tiles) {
      load(next_panel, buffer, scales);
      if (++next_panel < last) return;
      next_panel = first;
      if (++next_tile < run.tiles) run.begin(next_tile);
    }
  };

  // While a panel is multiplied, the next kPrefetch are in flight.
  constexpr int kPrefetch = lds::kBuffers > 1 ? lds::kBuffers - 1 : 1;
  const Multiplier<Type, Tile::kAccumulatorsM, Tile::kAccumulatorsN, Tile::kPingPong> multiplier(
      Tile::wave_m(), Tile::wave_n(), b_in_fragment_order);
  PanelScales scales[kPrefetch + 1];
  int panel = first, tile = 0;
  auto step = [&](int i) __attribute__((always_inline)) {  // i is the number of panels before, % (kPrefetch + 1)
    const int buffer = i % lds::kBuffers, next = (i + kPrefetch) % (kPrefetch + 1);
    auto* here = lds + buffer * kBuffer;
    if constexpr (!Tile::kPingPong) {
      if (lds::kBuffers == 1 && (panel != first || tile != 0))
        block_barrier();  // hazard: filled while other waves still read the previous panel
      lds::wait_for_copies<kPrefetch - 1>();
      loader_a.finish(here);
      loader_b.finish(here + kPanelA);
      block_barrier();  // hazard: read before all waves have filled it; the next one filled while other waves still read it
    }
    start(panel + kPrefetch, next % lds::kBuffers, scales[next]);
    lds::end_group();
    ScaleFactors<Tile> factors;
    scaling.multiply(scales[i], factors);
    multiplier.template multiply_add<Scaling::kScaled>(sums, here, here + kPanelA, factors);
    if (++panel < last) return true;
    if constexpr (Run::kMore) {
      run.end(tile);
#pragma unroll
      for (auto& of_tokens : sums)
#pragma unroll
        for (auto& sum : of_tokens) sum = {};
      panel = first;
      return ++tile < run.tiles;
    }
    return false;
  };
#pragma unroll
  for (int i = 0; i < kPrefetch; ++i) {
    start(first + i, i % lds::kBuffers, scales[i]);
    lds::end_group();
  }
  const bool is_late = wave::thread_id() >= Tile::kThreads / 2;
  if constexpr (Tile::kPingPong) {
    lds::wait_for_copies<0>();
    block_barrier();  // hazard: the first panel is read before all waves have filled it
    if (is_late) multiplier.ping_pong_barrier();
  }
  for (bool more = true; more;)
#pragma unroll
    for (int i = 0; more && i <= kPrefetch; ++i) more = step(i);
  if (Tile::kPingPong && !is_late) multiplier.ping_pong_barrier();
}

}  // namespace tile
