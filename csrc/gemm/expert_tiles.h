// Grouped GEMM over experts. A gate_up or down block computes one tile of fused_experts_tiled.hip, which defines the
// terms.
#pragma once
#include "gemm/swiglu.h"
#include "gemm/tiled/main_loop.h"
#include "gemm/tiled/rasterize.h"
#include "gemm/tiled/widening_loader.h"

using tile::BlockTile, tile::Accumulators;

struct GroupedProblem {
  const u8* a;           // gate_up: [tokens, K], rows a_stride bytes apart; down: [positions, K]
  const u8* b;           // [experts, N, K], b_expert bytes apart; an expert's b_tile, b_row, b_vec: see tile::Layout
  void* out;             // gate_up: [positions, N / 2], out_type; down: [pairs, N] fp32
  const int* sorted;     // [positions]
  const i32x4* tiles;    // [1 + tiles]: as in Sort
  const float* scale_a;  // row: [rows of a] or [1]; block: [rows of a, ceil(K / 128)]; or null
  const float* scale_b;  // row: [experts, N] or [experts]; block: [experts, ceil(N / 128), ceil(K / 128)]; or null
  const float* router;   // gate_up: [tokens, topk] factors of the sums; null for ones
  i64 a_stride, b_expert, b_tile, scale_b_expert;
  int b_row, b_vec, n, k;
  int scale_a_row, scale_a_k,
      scale_b_row;            // element strides of scales: between rows or row blocks, and between a's K blocks
  int slots, topk, out_type;  // 0 bf16, 1 fp16
  int tiles_n, run;           // along weight rows; that a block computes, one after the other: 1 unless kRuns
};

// A tile: one expert's pairs, from position `first` on.
struct ExpertTile {
  int expert, first, count;
};

// Stores a wave's activations; first_n is its first gate row.
template <class Tile, ScaleGranularity kScales, bool kTokensScaled, bool kClamped>
DEVICE void store_activations(const Accumulators<Tile>& sums, const GroupedProblem& p, const ExpertTile& expert_tile,
                              int first_n, const SwiGlu& swiglu) {
  constexpr int kRows = kChunk / 2;
  const int inner = p.n / 2;
  const float* scales_b = p.scale_b + expert_tile.expert * p.scale_b_expert;
#pragma unroll
  for (int j = 0; j < Tile::kAccumulatorsN; ++j) {
    const int n = first_n + (j * tile::kAccumulatorRows + tile::accumulator_row(wave::lane())) / 2;
    if (n >= inner) continue;
    float of_gate[kRows], of_up[kRows], gate_bias[kRows], up_bias[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int gate_row = kClamped ? swiglu.row(n + r, 0, p.n) : n + r;
      const int up_row = kClamped ? swiglu.row(n + r, 1, p.n) : inner + n + r;
      if constexpr (kScales == ScaleGranularity::kRow) {
        of_gate[r] = mem::load<float>(scales_b + gate_row * p.scale_b_row);
        of_up[r] = mem::load<float>(scales_b + up_row * p.scale_b_row);
      }
      if constexpr (kClamped) {
        const u16* biases = (const u16*)swiglu.bias + i64(expert_tile.expert) * p.n;
        gate_bias[r] = swiglu.bias ? widened(mem::load<u16>(biases + gate_row), p.out_type) : 0.0f;
        up_bias[r] = swiglu.bias ? widened(mem::load<u16>(biases + up_row), p.out_type) : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kAccumulatorsM * tile::kLaneTokens; ++i) {
      const int m = Tile::wave_m() + Tile::token(i);
      if (m >= expert_tile.count) continue;
      const int pair = mem::load<int>(p.sorted + expert_tile.first + m), token = u32(pair) / p.slots,
                slot = pair - token * p.slots;
      const float scale_a = kTokensScaled ? mem::load<float>(p.scale_a + i64(token) * p.scale_a_row) : 1.0f;
      const float weight = p.router && slot < p.topk ? mem::load<float>(p.router + i64(token) * p.topk + slot) : 1.0f;
      float y[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const tile::AccumulatorTile& accumulator = sums[i / tile::kLaneTokens][j];
        float gate = accumulator.get(i % tile::kLaneTokens, r), up = accumulator.get(i % tile::kLaneTokens, kRows + r);
        if constexpr (kScales == ScaleGranularity::kRow)
          gate = gate * scale_a * of_gate[r], up = up * scale_a * of_up[r];
        if constexpr (kClamped) y[r] = swiglu.activation(gate * weight + gate_bias[r], up * weight + up_bias[r]);
        else y[r] = silu(gate * weight) * (up * weight);
      }
      const f32x2 low = {y[0], y[1]}, high = {y[2], y[3]};
      const u32x2 packed =
          p.out_type == 0 ? u32x2{Bf16::pack(low), Bf16::pack(high)} : u32x2{F16::pack(low), F16::pack(high)};
      mem::store((u16*)p.out + i64(expert_tile.first + m) * inner + n, packed);
    }
  }
}

// Stores a wave's sums; first_n is its first weight row.
template <class Tile, ScaleGranularity kScales, bool kTokensScaled>
DEVICE void store_results(const Accumulators<Tile>& sums, const GroupedProblem& p, const ExpertTile& expert_tile,
                          int first_n) {
  const float* scales_b = p.scale_b + expert_tile.expert * p.scale_b_expert;
#pragma unroll
  for (int j = 0; j < Tile::kAccumulatorsN; ++j) {
    const int n = first_n + j * tile::kAccumulatorRows + tile::accumulator_row(wave::lane());
    if (n >= p.n) continue;
    float scale_b[kChunk];
#pragma unroll
    for (int r = 0; r < kChunk; ++r)
      scale_b[r] = kScales == ScaleGranularity::kRow ? mem::load<float>(scales_b + (n + r) * p.scale_b_row) : 1.0f;
#pragma unroll
    for (int i = 0; i < Tile::kAccumulatorsM * tile::kLaneTokens; ++i) {
      const int m = Tile::wave_m() + Tile::token(i);
      if (m >= expert_tile.count) continue;
      const i64 pair = mem::load<int>(p.sorted + expert_tile.first + m), row = expert_tile.first + m;
      const float scale_a = kTokensScaled ? mem::load<float>(p.scale_a + row * p.scale_a_row) : 1.0f;
#pragma unroll
      for (int v = 0; v < kChunk / 4; ++v) {
        f32x4 x;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          x[r] = sums[i / tile::kLaneTokens][j].get(i % tile::kLaneTokens, v * 4 + r);
          if constexpr (kScales == ScaleGranularity::kRow) x[r] = x[r] * scale_a * scale_b[v * 4 + r];
        }
        mem::store((float*)p.out + pair * p.n + n + v * 4, x);
      }
    }
  }
}

// Converts int8 product sums to float, rounded.
template <int kM, int kN>
DEVICE void to_floats(tile::AccumulatorTile (&sums)[kM][kN]) {
#pragma unroll
  for (int i = 0; i < kM; ++i)
#pragma unroll
    for (int j = 0; j < kN; ++j)
#pragma unroll
      for (f32x4& sum : sums[i][j].sum) sum = __builtin_convertvector(__builtin_bit_cast(i32x4, sum), f32x4);
}

// Weights have the tokens' Type, or another 8-bit type that is widened to it: tokens are then unscaled. With kRuns a block
// computes p.run tiles, else one.
template <class Type, class Weights, class Tile, ScaleGranularity kScales, bool kGated, bool kClamped = false,
          bool kRuns = false>
DEVICE void multiply_experts(const GroupedProblem& p, const SwiGlu& swiglu = {}) {
  const int runs_n = (p.tiles_n + p.run - 1) / p.run;
  const int tiles = mem::load<i32x4>(p.tiles).y, blocks = tiles * runs_n;
  if (wave::block_id_x() >= blocks) return;
  const tile::TileCoord position =
      tile::rasterize(tile::remap_to_xcd(wave::block_id_x(), blocks), tiles, runs_n, tile::kGroupM);
  const i32x4 found = mem::load<i32x4>(p.tiles + 1 + position.m);
  const int count = found.z - found.y < Tile::kTileM ? found.z - found.y : Tile::kTileM;
  const ExpertTile expert_tile = {wave::uniform(found.x), wave::uniform(found.y), wave::uniform(count)};
  constexpr int kRowsN = kGated ? Tile::kTileN / 2 : Tile::kTileN;  // gate rows, for gate_up
  const int rows_n = kGated ? p.n / 2 : p.n, first_tile = wave::uniform(position.n) * p.run;
  const int left = p.tiles_n - first_tile;

  // The row of a for the tile's token m, relative to a or to the tile's first row. Tokens past the last repeat its row.
  auto row_of_a = [&](int m) __attribute__((always_inline)) {
    const int inside = m < expert_tile.count ? m : expert_tile.count - 1;
    return kGated ? int(u32(mem::load<int>(p.sorted + expert_tile.first + inside)) / p.slots) : inside;
  };
  const i64 first_a = kGated ? 0 : expert_tile.first;
  tile::TileLoader<Tile::kTileM, Tile::kThreads> loader_a;
  constexpr bool kWidened = !__is_same(Type, Weights);
  using LoaderB = decltype([] {
    if constexpr (kWidened) return tile::WideningLoader<Type, Weights, Tile::kTileN, Tile::kThreads>{};
    else return tile::TileLoader<Tile::kTileN, Tile::kThreads>{};
  }());
  LoaderB loader_b;
  const tile::Layout a_layout{16 * p.a_stride, int(p.a_stride), tile::kVecBytes, 4 * tile::kVecBytes};
  const int b_vec = mem::kExpertFragments ? p.b_vec : tile::kVecBytes;
  const tile::Layout b_layout{mem::kExpertFragments ? p.b_tile : 16 * i64(p.b_row), p.b_row, b_vec, 4 * b_vec};
  auto first_row = [&](int tile) __attribute__((always_inline)) { return (first_tile + tile) * kRowsN; };
  auto wave_row = [&](int tile) __attribute__((always_inline)) {
    return first_row(tile) + (kGated ? Tile::wave_n() / 2 : Tile::wave_n());
  };
  auto load_weights = [&](int tile) __attribute__((always_inline)) {
    const int first_n = first_row(tile);
    loader_b.init(p.b + expert_tile.expert * p.b_expert, b_layout, [&](int row) {
      const int in_tile =
          row / tile::kAccumulatorRows * tile::kAccumulatorRows + tile::weight_row(row % tile::kAccumulatorRows);
      constexpr int kHalf = kChunk / 2;
      const int n = first_n + (kGated ? in_tile / kChunk * kHalf + in_tile % kHalf : in_tile);
      const bool is_up = kGated && in_tile % kChunk >= kHalf;
      if constexpr (kClamped) return n >= rows_n ? tile::kNoRow : swiglu.row(n, is_up, p.n);
      return n >= rows_n ? tile::kNoRow : n + (is_up ? rows_n : 0);
    });
  };
  loader_a.init(p.a + first_a * p.a_stride, a_layout,
                [&](int m) { return m < expert_tile.count ? row_of_a(m) : tile::kNoRow; });

  Accumulators<Tile> sums = {};
  auto store = [&](int tile) __attribute__((always_inline)) {
    if constexpr (__is_same(Type, I8)) to_floats(sums);
    constexpr bool kTokensScaled = kScales == ScaleGranularity::kRow && !kWidened;
    if constexpr (kGated)
      store_activations<Tile, kScales, kTokensScaled, kClamped>(sums, p, expert_tile, wave_row(tile), swiglu);
    else store_results<Tile, kScales, kTokensScaled>(sums, p, expert_tile, wave_row(tile));
  };
  auto multiply = [&](const auto& scaling, auto load_scales) __attribute__((always_inline)) {
    const int panels = (p.k + tile::kDepth - 1) / tile::kDepth;
    const bool in_fragment_order = !kWidened && b_layout.is_fragment_order();
    auto begin = [&](int tile) __attribute__((always_inline)) {
      load_weights(tile);
      load_scales(tile);
    };
    begin(0);
    if constexpr (!kRuns) {
      tile::multiply_panels<Tile, Type>(sums, loader_a, loader_b, in_fragment_order, scaling, 0, panels, p.k);
      store(0);
    } else {
      const tile::Run run{left < p.run ? left : p.run, begin, store};
      tile::multiply_panels<Tile, Type>(sums, loader_a, loader_b, in_fragment_order, scaling, 0, panels, p.k, run);
    }
  };
  if constexpr (kScales == ScaleGranularity::kBlock) {
    auto block_of = [&](int n) { return (n < p.n ? n : p.n - 1) / kScaleBlock * p.scale_b_row; };
    const float* scales_b = p.scale_b + expert_tile.expert * p.scale_b_expert;
    tile::BlockScales<Tile, kGated> scales;
    scales.init(p.scale_a + first_a * p.scale_a_row, p.scale_a_row, p.scale_a_k, scales_b, row_of_a);
    multiply(scales, [&](int tile) __attribute__((always_inline)) {
      const int wave_n = wave_row(tile);
      if constexpr (kGated) {
        const int gate = wave_n < rows_n ? wave_n : rows_n - 1;
        scales.b_at[0] = block_of(kClamped ? swiglu.row(gate, 0, p.n) : gate) * 4;
#pragma unroll
        for (int j = 0; j < Tile::kAccumulatorsN; ++j) {
          const int up = wave_n + j * tile::kAccumulatorRows / 2;
          scales.b_at[1 + j] = block_of(kClamped ? swiglu.row(up, 1, p.n) : rows_n + up) * 4;
        }
      } else scales.b_at[0] = block_of(wave_n) * 4;
    });
  } else {
    multiply(tile::Unscaled{}, [](int) {});
  }
}

// Defines a kernel.
#define EXPERTS_TILE(symbol, Type, Weights, tile_m, scales, gated)                                          \
  KERNEL(256) symbol(GroupedProblem problem) {                                                              \
    multiply_experts<Type, Weights, BlockTile<tile_m, 128, 256>, ScaleGranularity::scales, gated>(problem); \
  }
// Defines both products' kernels for both tiles.
#define EXPERTS_TILES(name, kind, Type, Weights, scales)                      \
  EXPERTS_TILE(name##_gate_up_##kind##_64, Type, Weights, 64, scales, true)   \
  EXPERTS_TILE(name##_gate_up_##kind##_128, Type, Weights, 128, scales, true) \
  EXPERTS_TILE(name##_down_##kind##_64, Type, Weights, 64, scales, false)     \
  EXPERTS_TILE(name##_down_##kind##_128, Type, Weights, 128, scales, false)
