// FP8 matrix product for many tokens: the output in tiles, their operands through LDS.
//
//     rows:    out[m, n] = T(scale_a[m] * scale_b[n] * sum_k a[m, k] * b[n, k] + bias[n])
//     blocks:  out[m, n] = T(sum_j scale_a[m, j] * scale_b[n / 128, j] * sum_{k in block j of 128} a[m, k] * b[n, k] + bias[n])
//
// a and b are e4m3 of the arch's format, scales and sums fp32. Flops: 2 * M * N * K; bytes: M * K + N * K + M * N * sizeof(T),
// and out of the caches (1 / kTileM + 1 / kTileN) / 2 per flop.
//
// A block owns a tile of the output, or a slice of K of one: then each block leaves its sums in HBM, and the last to arrive
// adds them up in the order of K, so that the same inputs give the same bits. Its waves divide the tile among them: each has
// kWaveTokens of its rows, and all columns or a share of them. Panels, 128 bytes of K of all rows, go from HBM to LDS while the
// panel before is multiplied (device/panel.h, device/*/lds_async.h); from there each wave reads its fragments once.
//
// Two blocks of 64 x 128 or 128 x 128 share a compute unit: while one waits for a panel or at a barrier, the other multiplies.
// 256 x 256, for which gfx950 has the LDS, halves what a product reads out of the caches but leaves a compute unit one block. So
// its eight waves, two on each SIMD, take turns: four read fragments while the other four multiply.
//
// Per panel, emulated:        gfx942  64 x 128   128 x 128   gfx950  64 x 128   128 x 128   256 x 256
//   matrix cycles of a SIMD           512        1024                256        512         2048
//   other issue cycles, rows          258        314                 234        290         756
//                       blocks        382        532                 400        588         1728
//   LDS cycles                        576        768                 192        256         768
//   LDS bank conflicts                0          0                   0          0           0
#include "device/arrive.h"
#include "device/tile.h"
#include "device/vec.h"

struct Product {
  const u8* a;           // [M, K], rows a_stride bytes apart
  const u8* b;           // [N, K], at b_tile, b_row, b_piece and b_step: see tile::Layout
  void* out;             // [M, N] of out_type
  float* partials;       // [tiles, slices, values of a thread / 4, threads, 4]; null with one slice
  u32* counters;         // [tiles], 0; null with one slice
  const float* scale_a;  // rows: [M] or [1]; blocks: [M, ceil(K / 128)]
  const float* scale_b;  // rows: [N] or [1]; blocks: [ceil(N / 128), ceil(K / 128)]
  const void* bias;      // [N] of out_type, or null
  i64 a_stride, b_tile;
  int b_row, b_piece, b_step;
  int m, n, k;
  int scale_a_row, scale_a_k,
      scale_b_row;  // elements from scale to scale: of rows or blocks of rows, and of a's blocks of K
  int out_type;     // 0 bf16, 1 fp16, 2 fp32
  int tiles_m, tiles_n, slices, group;  // of the output and of K; group: see tile::Position
};

constexpr int kScaleBlock = 128;  // of K, and of weight rows
extern LDS
__attribute__((aligned(1024))) u8 dynamic_lds[];  // [kBuffers][tokens, then weight rows of a panel]: device/panel.h

// What is whose: a block's tile, and its waves' shares of it.
template <int kM, int kN, int kBlockThreads>
struct Division {
  static constexpr int kTileM = kM, kTileN = kN, kThreads = kBlockThreads;
  static constexpr int kWaveM = tile::kWaveTokens, kWavesM = kM / kWaveM;
  static constexpr int kWavesN = kThreads / wave::kLanes / kWavesM, kWaveN = kN / kWavesN;
  static constexpr int kPatchesM = kWaveM / tile::kPatchTokens, kPatchesN = kWaveN / tile::kPatchRows;
  static constexpr bool kTurns = kThreads > 256;
  static_assert(kScaleBlock % kWaveN == 0, "a wave needs one weight scale at a time");
  DEVICE static int wave_m() { return wave::index() % kWavesM * kWaveM; }
  DEVICE static int wave_n() { return wave::index() / kWavesM * kWaveN; }
};
template <class D>
using Sums = tile::Patch[D::kPatchesM][D::kPatchesN];

// Leaves a slice's sums in HBM. In the last block of the tile to arrive, makes them the sums of all slices and returns true.
template <class D>
DEVICE bool add_slices(Sums<D>& sums, const Product& p, int tile_index, int slice) {
  constexpr int kVectors = sizeof(tile::Patch) / sizeof(f32x4);
  auto partial = [&](int of_slice, int i, int j, int v) __attribute__((always_inline)) {
    const i64 patches = (i64(tile_index) * p.slices + of_slice) * (D::kPatchesM * D::kPatchesN) + i * D::kPatchesN + j;
    return p.partials + ((patches * kVectors + v) * D::kThreads + wave::thread()) * 4;
  };
  auto for_all = [&](auto what) __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < D::kPatchesM; ++i)
#pragma unroll
      for (int j = 0; j < D::kPatchesN; ++j)
#pragma unroll
        for (int v = 0; v < kVectors; ++v) what(sums[i][j].sum[v], i, j, v);
  };
  for_all([&](f32x4& sum, int i, int j, int v)
              __attribute__((always_inline)) { mem::store(partial(slice, i, j, v), sum); });
  if (!is_last_block(p.counters + tile_index, p.slices, *(u32*)dynamic_lds)) return false;
  for_all([&](f32x4& sum, int i, int j, int v)
              __attribute__((always_inline)) { sum = mem::load<f32x4>(partial(0, i, j, v)); });
  for (int s = 1; s < p.slices; ++s)
    for_all([&](f32x4& sum, int i, int j, int v)
                __attribute__((always_inline)) { sum += mem::load<f32x4>(partial(s, i, j, v)); });
  return true;
}

// The first `count` of 8 neighbouring results; 16 bytes at a time if `aligned`.
DEVICE void store_outputs(void* out, i64 at, const Chunk& x, int count, bool aligned, int type) {
  const bool whole = aligned && count >= kChunk;
  if (type == 2) {
    float* to = (float*)out + at;
    if (whole) {
      mem::store(to, f32x4{x.pair[0].x, x.pair[0].y, x.pair[1].x, x.pair[1].y});
      mem::store(to + 4, f32x4{x.pair[2].x, x.pair[2].y, x.pair[3].x, x.pair[3].y});
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (!whole && i < count) mem::store(to + i, x.pair[i / 2][i % 2]);
  } else {
    u16* to = (u16*)out + at;
    const u32x4 packed = type == 0 ? pack<Bf16>(x) : pack<F16>(x);
    if (whole) mem::store(to, packed);
#pragma unroll
    for (int i = 0; i < kChunk; ++i)
      if (!whole && i < count) mem::store<u16>(to + i, u16(packed[i / 2] >> i % 2 * 16));
  }
}

// A wave's sums, whose first is that of token first_m and weight row first_n.
template <class D, bool kBlockScales>
DEVICE void store_results(const Sums<D>& sums, const Product& p, int first_m, int first_n) {
#pragma unroll
  for (int j = 0; j < D::kPatchesN; ++j) {
    const int n = first_n + j * tile::kPatchRows + tile::patch_row(wave::lane()), count = p.n - n;
    Chunk scale_b, bias = {};
#pragma unroll
    for (int r = 0; r < kChunk; ++r) {
      const int row = r < count ? n + r : p.n - 1;
      if (!kBlockScales) scale_b.pair[r / 2][r % 2] = mem::load<float>(p.scale_b + i64(row) * p.scale_b_row);
      if (p.bias) bias.pair[r / 2][r % 2] = load_output(p.bias, row, p.out_type);
    }
#pragma unroll
    for (int i = 0; i < D::kPatchesM * tile::kLaneTokens; ++i) {
      const int patch = i / tile::kLaneTokens, token = i % tile::kLaneTokens;
      const int m = first_m + patch * tile::kPatchTokens + tile::patch_token(wave::lane(), token);
      if (m >= p.m) continue;
      const float scale_a = kBlockScales ? 1.0f : mem::load<float>(p.scale_a + i64(m) * p.scale_a_row);
      Chunk x;
#pragma unroll
      for (int r = 0; r < kChunk / 2; ++r) {
        x.pair[r] = {sums[patch][j].get(token, 2 * r), sums[patch][j].get(token, 2 * r + 1)};
        if (!kBlockScales) x.pair[r] = x.pair[r] * scale_a * scale_b.pair[r];
        x.pair[r] += bias.pair[r];
      }
      store_outputs(p.out, i64(m) * p.n + n, x, count, p.n % kChunk == 0, p.out_type);
    }
  }
}

template <class D, bool kBlockScales>
DEVICE void multiply_tiled(const Product& p) {
  constexpr int kPanelA = D::kTileM * tile::kDepth, kBuffer = kPanelA + D::kTileN * tile::kDepth;
  const int tiles = p.tiles_m * p.tiles_n, work = tile::work_of(wave::block_x(), tiles * p.slices);
  const int slice = work / tiles, tile_index = work % tiles;
  const tile::Position position(tile_index, p.tiles_m, p.tiles_n, p.group);
  const int first_m = position.m * D::kTileM, first_n = position.n * D::kTileN;
  const int panels = (p.k + tile::kDepth - 1) / tile::kDepth, per_slice = panels / p.slices, longer = panels % p.slices;
  const int first = slice * per_slice + (slice < longer ? slice : longer), last = first + per_slice + (slice < longer);

  tile::Filler<D::kTileM, D::kThreads> fill_a;
  tile::Filler<D::kTileN, D::kThreads> fill_b;
  const tile::Layout a_layout{16 * p.a_stride, int(p.a_stride), tile::kPiece, 4 * tile::kPiece};
  const tile::Layout b_layout{p.b_tile, p.b_row, p.b_piece, p.b_step};
  fill_a.init(p.a + first_m * p.a_stride, a_layout, p.m - first_m, [](int row) { return row; });
  fill_b.init(p.b + first_n / 16 * p.b_tile, b_layout, p.n - first_n, [](int row) {
    return row / tile::kPatchRows * tile::kPatchRows + tile::weight_row(row % tile::kPatchRows);
  });

  struct Scales {  // of a panel's kScaleBlock of K
    float a[D::kPatchesM][tile::kLaneTokens], b;
  };
  mem::Buffer scales_a, scales_b;
  int scale_at[D::kPatchesM][tile::kLaneTokens];  // bytes; of tokens past the last those of the last
  if constexpr (kBlockScales) {
    static_assert(kScaleBlock == tile::kDepth);
    const int n = first_n + D::wave_n(), block_n = (n < p.n ? n : p.n - 1) / kScaleBlock;
    scales_a = mem::buffer(p.scale_a + i64(first_m) * p.scale_a_row);
    scales_b = mem::buffer(p.scale_b + i64(block_n) * p.scale_b_row);
#pragma unroll
    for (int i = 0; i < D::kPatchesM; ++i)
#pragma unroll
      for (int t = 0; t < tile::kLaneTokens; ++t) {
        const int m = D::wave_m() + i * tile::kPatchTokens + tile::patch_token(wave::lane(), t);
        scale_at[i][t] = (first_m + m < p.m ? m : p.m - 1 - first_m) * p.scale_a_row * 4;
      }
  }
  auto* lds = (lds::Local<u8>*)dynamic_lds;
  auto start = [&](int panel, int buffer, Scales& scales) __attribute__((always_inline)) {
    fill_a.start(panel, p.k, lds + buffer * kBuffer);
    fill_b.start(panel, p.k, lds + buffer * kBuffer + kPanelA);
    if constexpr (kBlockScales) {
      scales.b = mem::load_float_or_zero(scales_b, 0, panel * 4, true);
#pragma unroll
      for (int i = 0; i < D::kPatchesM; ++i)
#pragma unroll
        for (int t = 0; t < tile::kLaneTokens; ++t)
          scales.a[i][t] = mem::load_float_or_zero(scales_a, scale_at[i][t], panel * p.scale_a_k * 4, true);
    }
  };

  // While a panel is multiplied, the next kAhead are under way.
  constexpr int kAhead = lds::kBuffers > 1 ? lds::kBuffers - 1 : 1;
  const tile::Multiplier<D::kPatchesM, D::kPatchesN, D::kTurns> multiplier(D::wave_m(), D::wave_n(),
                                                                           b_layout.by_piece());
  Sums<D> sums = {};
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
    float scale[D::kPatchesM][tile::kLaneTokens];
    if constexpr (kBlockScales) {
#pragma unroll
      for (int j = 0; j < D::kPatchesM; ++j)
#pragma unroll
        for (int t = 0; t < tile::kLaneTokens; ++t) scale[j][t] = scales[i].a[j][t] * scales[i].b;
    }
    multiplier.template multiply_add<kBlockScales>(sums, here, here + kPanelA, scale);
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

  if (p.slices > 1 && !add_slices<D>(sums, p, tile_index, slice)) return;
  store_results<D, kBlockScales>(sums, p, first_m + D::wave_m(), first_n + D::wave_n());
}

// clang-format off
#define INSTANCE(symbol, threads, tile_m, tile_n, block_scales)                    \
  KERNEL(threads) symbol(Product product) {                                        \
    multiply_tiled<Division<tile_m, tile_n, threads>, block_scales>(product);      \
  }

INSTANCE(scaled_mm_tiled_row_64x128,    256, 64,  128, false)
INSTANCE(scaled_mm_tiled_row_128x128,   256, 128, 128, false)
INSTANCE(scaled_mm_tiled_block_64x128,  256, 64,  128, true)
INSTANCE(scaled_mm_tiled_block_128x128, 256, 128, 128, true)
#ifdef HAS_LARGE_TILES
INSTANCE(scaled_mm_tiled_row_256x256,   512, 256, 256, false)
INSTANCE(scaled_mm_tiled_block_256x256, 512, 256, 256, true)
#endif
// clang-format on
