// Products of a tile of tokens with a tile of weight rows, by a block, along K.
//
// The waves divide the tile among them: each has kWaveTokens of its tokens, and all weight rows or a share of them. Panels, 128
// bytes of K of all rows, go from HBM to LDS while the panel before is multiplied (loader.h, device/*/lds_async.h); from there
// each wave reads its fragments once (device/*/tile_mma.h).
#pragma once
#include "device/scale.h"
#include "device/tile_mma.h"
#include "gemm/tiled/loader.h"

extern LDS __attribute__((aligned(1024))) u8 dynamic_lds[];  // [kBuffers][tokens, then weight rows of a panel]

namespace tile {

// A block's tile, and its waves' shares of it.
template <int kM, int kN, int kBlockThreads>
struct Division {
  static constexpr int kTileM = kM, kTileN = kN, kThreads = kBlockThreads;
  static constexpr int kWaveM = kWaveTokens, kWavesM = kM / kWaveM;
  static constexpr int kWavesN = kThreads / wave::kLanes / kWavesM, kWaveN = kN / kWavesN;
  static constexpr int kPatchesM = kWaveM / kPatchTokens, kPatchesN = kWaveN / kPatchRows;
  static constexpr bool kTurns = kThreads > 256;
  static_assert(kScaleBlock % kWaveN == 0, "a wave needs one weight scale at a time");
  DEVICE static int wave_m() { return wave::index() % kWavesM * kWaveM; }
  DEVICE static int wave_n() { return wave::index() / kWavesM * kWaveN; }
  // Of a wave's share, the token of a lane's `token`-th sums, counted over its patches.
  DEVICE static int token(int token) {
    return token / kLaneTokens * kPatchTokens + patch_token(wave::lane(), token % kLaneTokens);
  }
};
template <class D>
using Sums = Patch[D::kPatchesM][D::kPatchesN];
// The factors of a panel's products: of the lower and the upper half of a lane's weight rows.
template <class D>
using Factors = float[D::kPatchesN][2][D::kPatchesM][kLaneTokens];

struct Unscaled {
  static constexpr bool kScaled = false;
  struct Panel {};
  DEVICE Panel load(int /*panel*/) const { return {}; }
  template <class Factors>
  DEVICE void multiply(const Panel&, Factors&) const {}
};

// Scales of each kScaleBlock of K: of tokens and of weight rows. The lower halves of a lane's rows have the first scale of the
// weights; the upper ones too, or with kHalves one for each patch.
template <class D, bool kHalves, class Scale = Fp32Scale>
struct BlockScales {
  static_assert(kScaleBlock == kDepth);
  static constexpr bool kScaled = true;
  static constexpr int kWeights = kHalves ? 1 + D::kPatchesN : 1;
  struct Panel {
    typename Scale::Loaded a[D::kPatchesM][kLaneTokens], b[kWeights];
  };
  mem::Buffer a, b;
  int a_at[D::kPatchesM][kLaneTokens], b_at[kWeights];  // bytes
  int a_k;                                              // elements from block to block of K

  // `row_of` gives the row of `tokens` that a token of the tile has.
  template <class RowOf>
  DEVICE void init(const typename Scale::Type* tokens, int row, int k, const typename Scale::Type* weights,
                   RowOf row_of) {
    a = mem::buffer(tokens), b = mem::buffer(weights), a_k = k;
    b_at[0] = 0;
#pragma unroll
    for (int i = 0; i < D::kPatchesM; ++i)
#pragma unroll
      for (int t = 0; t < kLaneTokens; ++t)
        a_at[i][t] = row_of(D::wave_m() + D::token(i * kLaneTokens + t)) * row * Scale::kBytes;
  }
  DEVICE Panel load(int panel) const {
    Panel scales;
#pragma unroll
    for (int j = 0; j < kWeights; ++j) scales.b[j] = Scale::load_or_zero(b, b_at[j], panel * Scale::kBytes, true);
#pragma unroll
    for (int i = 0; i < D::kPatchesM; ++i)
#pragma unroll
      for (int t = 0; t < kLaneTokens; ++t)
        scales.a[i][t] = Scale::load_or_zero(a, a_at[i][t], panel * a_k * Scale::kBytes, true);
    return scales;
  }
  DEVICE void multiply(const Panel& scales, Factors<D>& factors) const {
#pragma unroll
    for (int j = 0; j < D::kPatchesN; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < D::kPatchesM; ++i)
#pragma unroll
          for (int t = 0; t < kLaneTokens; ++t)
            factors[j][half][i][t] = Scale::value(scales.a[i][t]) * Scale::value(scales.b[kHalves && half ? 1 + j : 0]);
  }
};

// Adds the products of the panels from `first` to before `last`, one at least, of rows of k bytes.
template <class D, class Type, class Scaling>
DEVICE void multiply_panels(Sums<D>& sums, Filler<D::kTileM, D::kThreads>& fill_a,
                            Filler<D::kTileN, D::kThreads>& fill_b, bool b_by_piece, const Scaling& scaling, int first,
                            int last, int k) {
  constexpr int kPanelA = D::kTileM * kDepth, kBuffer = kPanelA + D::kTileN * kDepth;
  auto* lds = (lds::Local<u8>*)dynamic_lds;
  using Scales = typename Scaling::Panel;
  auto start = [&](int panel, int buffer, Scales& scales) __attribute__((always_inline)) {
    scales = scaling.load(panel);  // first, as they are needed first: loads are waited for in order
    fill_a.start(panel, k, lds + buffer * kBuffer);
    fill_b.start(panel, k, lds + buffer * kBuffer + kPanelA);
  };

  // While a panel is multiplied, the next kAhead are under way.
  constexpr int kAhead = lds::kBuffers > 1 ? lds::kBuffers - 1 : 1;
  const Multiplier<Type, D::kPatchesM, D::kPatchesN, D::kTurns> multiplier(D::wave_m(), D::wave_n(), b_by_piece);
  Scales scales[kAhead + 1];
  int panel = first;
  auto step = [&](int i) __attribute__((always_inline)) {  // i is (panel - first) % (kAhead + 1)
    const int buffer = i % lds::kBuffers, next = (i + kAhead) % (kAhead + 1);
    auto* here = lds + buffer * kBuffer;
    if constexpr (!D::kTurns) {
      if (lds::kBuffers == 1 && panel != first)
        block_barrier();  // hazard: filled while others still read the last panel
      lds::wait_for_copies<kAhead - 1>();
      fill_a.finish(here);
      fill_b.finish(here + kPanelA);
      block_barrier();  // hazard: read before all waves have filled it; the next one filled while others still read there
    }
    if (panel + kAhead < last) start(panel + kAhead, next % lds::kBuffers, scales[next]);
    lds::end_group();
    Factors<D> factors;
    scaling.multiply(scales[i], factors);
    multiplier.template multiply_add<Scaling::kScaled>(sums, here, here + kPanelA, factors);
    return ++panel < last;
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (first + i < last) start(first + i, i % lds::kBuffers, scales[i]);
    lds::end_group();
  }
  const bool is_late = wave::thread() >= D::kThreads / 2;
  if constexpr (D::kTurns) {
    lds::wait_for_copies<0>();
    block_barrier();  // hazard: the first panel is read before all waves have filled it
    if (is_late) multiplier.change_turns();
  }
  for (bool more = true; more;)
#pragma unroll
    for (int i = 0; more && i <= kAhead; ++i) more = step(i);
  if (D::kTurns && !is_late) multiplier.change_turns();
}

}  // namespace tile
