// GEMM with operands of any type, strides and sizes: the kernels of ops/gemm.hip and ops/standalone/gemm_blocks.hip.
#pragma once
#include "gemm/tiled/element_loader.h"
#include "gemm/tiled/main_loop.h"
#include "gemm/tiled/output.h"
#include "gemm/tiled/rasterize.h"
#include "gemm/tiled/split_k.h"

struct GemmProblem {
  Elements a, b;         // [M, K] and [N, K]
  void* out;             // [M, N], out_type
  float* partials;       // [tiles, split_k, values per thread / 4, threads, 4]; null without split-K
  u32* counters;         // [tiles], zeros; null without split-K
  const float* scale_a;  // [M] or [1], or null; blocks: [M, ceil(K / 128)]
  const float* scale_b;  // [N] or [1], or null; blocks: [ceil(K / 128), ceil(N / 128)]
  const void* bias;      // out_type, strides bias_row and bias_column in elements; or null
  int m, n, k;
  int scale_a_row, scale_b_row, bias_row, bias_column;  // element strides, or 0
  int scale_a_k, scale_b_k;                             // blocks: element strides between K blocks
  int out_type;                                         // 0 bf16, 1 fp16, 2 fp32, 3 int32, 4 int8
  int unscaled;                                         // int32 sums are stored unscaled
  float slope;                                          // activation slope below 0
  int tiles_m, tiles_n, tiles, split_k;                 // as in TiledProblem of scaled_mm_tiled.hip, as are the next
  int panels_per_slice, remainder;
  Divisor tiles_divisor, group_divisor, last_group_divisor;
};

using tile::BlockTile, tile::Accumulators;

struct AddWhole {
  DEVICE f32x4 operator()(f32x4 a, f32x4 b) const { return add_whole(a, b); }
};

// Rounds a float to int32 or int8: to nearest even, saturated, NaN as 0.
DEVICE int to_int(float x, bool byte) {
  const float low = byte ? -128.0f : -2147483648.0f, high = byte ? 127.0f : 2147483520.0f;
  const float nearest = __builtin_rintf(__builtin_fminf(__builtin_fmaxf(x, low), high));
  return x == x ? int(nearest) : 0;
}

struct ResultOf {
  const GemmProblem& p;
  DEVICE float scale_a(int m) const { return p.scale_a ? mem::load<float>(p.scale_a + i64(m) * p.scale_a_row) : 1.0f; }
  DEVICE float scale_b(int n) const { return p.scale_b ? mem::load<float>(p.scale_b + i64(n) * p.scale_b_row) : 1.0f; }
  DEVICE float operator()(float sum, float scale_a, float scale_b, int m, int n) const {
    float x = sum * scale_a * scale_b;
    if (p.bias) x += load_output(p.bias, i64(m) * p.bias_row + i64(n) * p.bias_column, p.out_type);
    return x < 0.0f ? x * p.slope : x;
  }
  DEVICE void store_int(i64 at, int value) const {
    if (p.out_type == 4) mem::store<u8>((u8*)p.out + at, u8(value));
    else mem::store((int*)p.out + at, value);
  }
};

// kInts: results may be integers. Then the sums are integers, too, except with kBlocks.
template <class Tile, bool kInts, bool kBlocks>
DEVICE void store_results(const Accumulators<Tile>& sums, const GemmProblem& p, int first_m, int first_n) {
  constexpr bool kWhole = kInts && !kBlocks;
  const ResultOf finish{p};
#pragma unroll
  for (int j = 0; j < Tile::kAccumulatorsN; ++j) {
    const int n = first_n + j * tile::kAccumulatorRows + tile::accumulator_row(wave::lane()), count = p.n - n;
    float scale_b[kChunk];
#pragma unroll
    for (int r = 0; r < kChunk; ++r) scale_b[r] = kBlocks ? 1.0f : r < count ? finish.scale_b(n + r) : 0.0f;
#pragma unroll
    for (int i = 0; i < Tile::kAccumulatorsM * tile::kLaneTokens; ++i) {
      const int accumulator = i / tile::kLaneTokens, token = i % tile::kLaneTokens, m = first_m + Tile::token(i);
      if (m >= p.m) continue;
      const float scale_a = kBlocks ? 1.0f : finish.scale_a(m);
      const i64 at = i64(m) * p.n + n;
      Chunk x;
#pragma unroll
      for (int r = 0; r < kChunk; ++r) {
        const float sum = sums[accumulator][j].get(token, r);
        const int whole = __builtin_bit_cast(int, sum);
        float result = 0.0f;
        if (r < count) result = finish(kWhole ? float(whole) : sum, scale_a, scale_b[r], m, n + r);
        if (kInts && p.out_type > 2 && r < count)
          finish.store_int(at + r, kWhole && p.unscaled ? whole : to_int(result, p.out_type == 4));
        x.pair[r / 2][r % 2] = result;
      }
      if (p.out_type <= 2) store_outputs(p.out, at, x, count, p.n % kChunk == 0, p.out_type);
    }
  }
}

// Type is the multiplied type, Panel the panels' element type: E4m3 for all 8-bit types.
template <class Tile, class Type, class Panel, bool kAny, bool kBlocks = false>
DEVICE void multiply_tiles(const GemmProblem& p) {
  constexpr bool kInts = __is_same(Type, I8);
  constexpr int kBytes = __is_same(Panel, E4m3) ? 1 : 2;
  const int work = tile::remap_to_xcd(wave::block_id_x(), p.tiles * p.split_k);
  const int k_slice = u32(work) / p.tiles_divisor, tile_index = work - k_slice * p.tiles;
  const tile::TileCoord position =
      tile::rasterize(tile_index, p.tiles_m, p.tiles_n, p.group_divisor, p.last_group_divisor);
  const int first_m = position.m * Tile::kTileM, first_n = position.n * Tile::kTileN;
  const int first = k_slice * p.panels_per_slice + (k_slice < p.remainder ? k_slice : p.remainder),
            last = first + p.panels_per_slice + (k_slice < p.remainder);
  auto row_a = [&](int row) { return first_m + row < p.m ? row : tile::kNoRow; };
  auto row_b = [&](int place) {
    const int row =
        place / tile::kAccumulatorRows * tile::kAccumulatorRows + tile::weight_row(place % tile::kAccumulatorRows);
    return first_n + row < p.n ? row : tile::kNoRow;
  };

  Accumulators<Tile> sums = {};
  auto multiply_scaled = [&](auto& loader_a, auto& loader_b, const auto& scaling) __attribute__((always_inline)) {
    tile::multiply_panels<Tile, Type>(sums, loader_a, loader_b, false, scaling, first, last, p.k * kBytes);
  };
  auto multiply = [&](auto& loader_a, auto& loader_b) __attribute__((always_inline)) {
    if constexpr (kBlocks) {
      const int n = first_n + Tile::wave_n(), block_n = (n < p.n ? n : p.n - 1) / kScaleBlock;
      tile::BlockScales<Tile, false, Fp32Scale, kBytes> scales;
      scales.b_k = p.scale_b_k;
      scales.init(p.scale_a + i64(first_m) * p.scale_a_row, p.scale_a_row, p.scale_a_k,
                  p.scale_b + i64(block_n) * p.scale_b_row,
                  [&](int m) { return first_m + m < p.m ? m : p.m - 1 - first_m; });  // rows past the last repeat it
      multiply_scaled(loader_a, loader_b, scales);
    } else multiply_scaled(loader_a, loader_b, tile::Unscaled{});
  };
  if constexpr (kAny) {
    tile::ElementLoader<Panel, Tile::kTileM, Tile::kThreads> loader_a;
    tile::ElementLoader<Panel, Tile::kTileN, Tile::kThreads> loader_b;
    loader_a.init(p.a, first_m, row_a);
    loader_b.init(p.b, first_n, row_b);
    multiply(loader_a, loader_b);
  } else {
    tile::TileLoader<Tile::kTileM, Tile::kThreads> loader_a;
    tile::TileLoader<Tile::kTileN, Tile::kThreads> loader_b;
    auto layout = [](const Elements& of) {
      return tile::Layout{16 * of.row, int(of.row), tile::kVecBytes, 4 * tile::kVecBytes};
    };
    loader_a.init(p.a.data + first_m * p.a.row, layout(p.a), row_a);
    loader_b.init(p.b.data + first_n * p.b.row, layout(p.b), row_b);
    multiply(loader_a, loader_b);
  }

  using Add = decltype([] {
    if constexpr (kInts && !kBlocks) return AddWhole{};
    else return tile::AddFloats{};
  }());
  if (p.split_k > 1 && !tile::reduce_split_k<Tile, Add>(sums, p, tile_index, k_slice)) return;
  store_results<Tile, kInts, kBlocks>(sums, p, first_m + Tile::wave_m(), first_n + Tile::wave_n());
}

// Sum is int for int8 products without kBlocks, else float. 8 int8 products are exact in fp32.
template <class Sum, int kTokens, bool kBlocks = false>
DEVICE void multiply_few(const GemmProblem& p) {
  const int n = wave::block_id_x() * (256 / wave::kLanes) + wave::index();
  if (n >= p.n) return;
  const u8* column = p.b.data + n * p.b.row;
  Sum sums[kTokens] = {};
  for (int k = wave::lane() * kChunk; k < p.k; k += wave::kLanes * kChunk) {
    const Chunk w = load_elements(p.b, column, k, p.k - k);
    const i64 block = k / kScaleBlock;
    float scale_b = 1.0f;
    const i64 scale_a_row = kBlocks ? wave::anew(p.scale_a_row) : 0;
    if (kBlocks) scale_b = mem::load<float>(p.scale_b + n / kScaleBlock * i64(p.scale_b_row) + block * p.scale_b_k);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= p.m) continue;
      const Chunk x = load_elements(p.a, p.a.data + t * p.a.row, k, p.k - k);
      f32x2 dot = {};
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) dot = __builtin_elementwise_fma(x.pair[i], w.pair[i], dot);
      float scale = 1.0f;
      if (kBlocks) scale = scale_b * mem::load<float>(p.scale_a + t * scale_a_row + block * p.scale_a_k);
      sums[t] += Sum((dot.x + dot.y) * scale);
    }
  }
  const ResultOf finish{p};
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t >= p.m) continue;
    const Sum sum =
        wave::reduce(sums[t], Sum(0), [](Sum a, Sum b) __attribute__((always_inline)) { return Sum(a + b); });
    if (wave::lane() != 0) continue;
    const float x = finish(float(sum), kBlocks ? 1.0f : finish.scale_a(t), kBlocks ? 1.0f : finish.scale_b(n), t, n);
    const i64 at = i64(t) * p.n + n;
    if (p.out_type <= 2) store_output(p.out, at, x, p.out_type);
    else finish.store_int(at, p.unscaled ? int(sum) : to_int(x, p.out_type == 4));
  }
}

// Kernels for a tile with this many rows of a, and for at most this many rows.
#define TILES(symbol, tokens, ...)                                     \
  KERNEL(256) symbol##_##tokens##x128(GemmProblem problem) {           \
    multiply_tiles<BlockTile<tokens, 128, 256>, __VA_ARGS__>(problem); \
  }
#define FEW(symbol, ...) \
  KERNEL(256) symbol(GemmProblem problem) { multiply_few<__VA_ARGS__>(problem); }
