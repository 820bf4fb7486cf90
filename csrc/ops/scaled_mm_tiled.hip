// FP8 tiled GEMM for many tokens, operands through LDS.
//
//     rows:    out[m, n] = T(scale_a[m] * scale_b[n] * sum_k a[m, k] * b[n, k] + bias[n])
//     blocks:  out[m, n] = T(sum_j scale_a[m, j] * scale_b[n / 128, j] * sum_{k in block j of 128} a[m, k] * b[n, k] + bias[n])
//
// a and b are e4m3 in the arch's format; accumulation is fp32; scales are fp32, block scales also e8m0. Flops: 2 * M *
// N * K; bytes: M * K + N * K + M * N * sizeof(T), and from the caches (1 / kTileM + 1 / kTileN) / 2 per flop.
//
// A block computes an output tile (gemm/tiled/main_loop.h), or with split-K a K slice of a tile: then each block stores
// its partial sums to HBM, and the last to arrive adds them in K order. The same inputs give the same bits.
//
// Two blocks of 64 x 128 or 128 x 128 share a compute unit: while one waits for a panel or at a barrier, the other
// multiplies. gfx950's LDS fits 256 x 256, which halves the bytes read from the caches but leaves one block per compute
// unit. So its eight waves, two per SIMD, alternate: four read fragments while the other four multiply.
//
// Per panel, emulated:        gfx942  64 x 128   128 x 128   gfx950  64 x 128   128 x 128   256 x 256
//   matrix cycles per SIMD            512        1024                256        512         2048
//   other issue cycles, rows          258        316                 230        286         748
//                       blocks        394        546                 388        584         1720
//                       blocks, e8m0  462        626                 416        648         1848
//   LDS cycles                        576        768                 192        256         768
//   LDS bank conflicts                0          0                   0          0           0
#include "gemm/tiled/main_loop.h"
#include "gemm/tiled/output.h"
#include "gemm/tiled/rasterize.h"
#include "gemm/tiled/split_k.h"

struct TiledProblem {
  const u8* a;           // [M, K], rows a_stride bytes apart
  const u8* b;           // [N, K], at b_tile, b_row, b_vec and b_step: see tile::Layout
  void* out;             // [M, N], out_type
  float* partials;       // [tiles, split_k, values per thread / 4, threads, 4]; null without split-K
  u32* counters;         // [tiles], zeros; null without split-K
  const float* scale_a;  // rows: [M] or [1]; blocks: [M, ceil(K / 128)], a device/scale.h type
  const float* scale_b;  // rows: [N] or [1]; blocks: [ceil(N / 128), ceil(K / 128)]
  const void* bias;      // [N], out_type, or null
  i64 a_stride, b_tile;
  int b_row, b_vec, b_step;
  int m, n, k;
  int scale_a_row, scale_a_k,
      scale_b_row;  // element strides of scales: between rows or row blocks, and between a's K blocks
  int out_type;     // 0 bf16, 1 fp16, 2 fp32
  int tiles_m, tiles_n, tiles, split_k;                      // of the output; split_k: K slices
  int panels_per_slice, remainder;                           // per K slice; the first `remainder` slices have one more
  Divisor tiles_divisor, group_divisor, last_group_divisor;  // tiles_divisor: all tiles; others: tile::rasterize
};

using tile::BlockTile, tile::Accumulators;

// Stores a wave's sums; first_m and first_n are its first token and weight row.
template <class Tile, bool kBlockScales>
DEVICE void store_results(const Accumulators<Tile>& sums, const TiledProblem& p, int first_m, int first_n) {
#pragma unroll
  for (int j = 0; j < Tile::kAccumulatorsN; ++j) {
    const int n = first_n + j * tile::kAccumulatorRows + tile::accumulator_row(wave::lane()), count = p.n - n;
    Chunk scale_b, bias = {};
#pragma unroll
    for (int r = 0; r < kChunk; ++r) {
      const int row = r < count ? n + r : p.n - 1;
      if (!kBlockScales) scale_b.pair[r / 2][r % 2] = mem::load<float>(p.scale_b + i64(row) * p.scale_b_row);
      if (p.bias) bias.pair[r / 2][r % 2] = load_output(p.bias, row, p.out_type);
    }
#pragma unroll
    for (int i = 0; i < Tile::kAccumulatorsM * tile::kLaneTokens; ++i) {
      const int accumulator = i / tile::kLaneTokens, token = i % tile::kLaneTokens, m = first_m + Tile::token(i);
      if (m >= p.m) continue;
      const float scale_a = kBlockScales ? 1.0f : mem::load<float>(p.scale_a + i64(m) * p.scale_a_row);
      Chunk x;
#pragma unroll
      for (int r = 0; r < kChunk / 2; ++r) {
        x.pair[r] = {sums[accumulator][j].get(token, 2 * r), sums[accumulator][j].get(token, 2 * r + 1)};
        if (!kBlockScales) x.pair[r] = x.pair[r] * scale_a * scale_b.pair[r];
        x.pair[r] += bias.pair[r];
      }
      store_outputs(p.out, i64(m) * p.n + n, x, count, p.n % kChunk == 0, p.out_type);
    }
  }
}

template <class Tile, bool kBlockScales, class Scale = Fp32Scale>
DEVICE void multiply_tiled(const TiledProblem& p) {
  mem::wait_for_scalars(p.tiles_divisor.inverse, p.tiles_divisor.shift, p.group_divisor.inverse, p.group_divisor.shift,
                        p.last_group_divisor.inverse, p.last_group_divisor.shift, p.tiles_m, p.tiles_n, p.tiles,
                        p.split_k, p.panels_per_slice, p.remainder, p.a, p.b, p.a_stride, p.b_tile, p.b_row, p.b_vec,
                        p.b_step, p.m, p.n, p.k);
  const int work = tile::remap_to_xcd(wave::block_id_x(), p.tiles * p.split_k);
  const int k_slice = u32(work) / p.tiles_divisor, tile_index = work - k_slice * p.tiles;
  const tile::TileCoord position =
      tile::rasterize(tile_index, p.tiles_m, p.tiles_n, p.group_divisor, p.last_group_divisor);
  const int first_m = position.m * Tile::kTileM, first_n = position.n * Tile::kTileN;
  const int first = k_slice * p.panels_per_slice + (k_slice < p.remainder ? k_slice : p.remainder),
            last = first + p.panels_per_slice + (k_slice < p.remainder);

  tile::TileLoader<Tile::kTileM, Tile::kThreads> loader_a;
  tile::TileLoader<Tile::kTileN, Tile::kThreads> loader_b;
  const tile::Layout a_layout{16 * p.a_stride, int(p.a_stride), tile::kVecBytes, 4 * tile::kVecBytes};
  const tile::Layout b_layout{p.b_tile, p.b_row, p.b_vec, p.b_step};
  loader_a.init(p.a + first_m * p.a_stride, a_layout,
                [&](int row) { return first_m + row < p.m ? row : tile::kNoRow; });
  loader_b.init(p.b + first_n / 16 * p.b_tile, b_layout, [&](int place) {
    const int row =
        place / tile::kAccumulatorRows * tile::kAccumulatorRows + tile::weight_row(place % tile::kAccumulatorRows);
    return first_n + row < p.n ? row : tile::kNoRow;
  });

  Accumulators<Tile> sums = {};
  auto multiply = [&](const auto& scaling) __attribute__((always_inline)) {
    tile::multiply_panels<Tile, E4m3>(sums, loader_a, loader_b, b_layout.is_fragment_order(), scaling, first, last,
                                      p.k);
  };
  if constexpr (kBlockScales) {
    const int n = first_n + Tile::wave_n(), block_n = (n < p.n ? n : p.n - 1) / kScaleBlock;
    using Type = typename Scale::Type;
    tile::BlockScales<Tile, false, Scale> scales;
    scales.init((const Type*)p.scale_a + i64(first_m) * p.scale_a_row, p.scale_a_row, p.scale_a_k,
                (const Type*)p.scale_b + i64(block_n) * p.scale_b_row,
                [&](int m) { return first_m + m < p.m ? m : p.m - 1 - first_m; });  // rows past the last repeat it
    multiply(scales);
  } else {
    multiply(tile::Unscaled{});
  }

  if (p.split_k > 1 && !tile::reduce_split_k<Tile>(sums, p, tile_index, k_slice)) return;
  store_results<Tile, kBlockScales>(sums, p, first_m + Tile::wave_m(), first_n + Tile::wave_n());
}

// clang-format off
#define INSTANCE(symbol, threads, tile_m, tile_n, ...)                       \
  KERNEL(threads) symbol(TiledProblem problem) {                                  \
    multiply_tiled<BlockTile<tile_m, tile_n, threads>, __VA_ARGS__>(problem); \
  }

INSTANCE(scaled_mm_tiled_row_64x128,         256, 64,  128, false)
INSTANCE(scaled_mm_tiled_row_128x128,        256, 128, 128, false)
INSTANCE(scaled_mm_tiled_block_64x128,       256, 64,  128, true)
INSTANCE(scaled_mm_tiled_block_128x128,      256, 128, 128, true)
INSTANCE(scaled_mm_tiled_block_e8m0_64x128,  256, 64,  128, true, E8m0Scale)
INSTANCE(scaled_mm_tiled_block_e8m0_128x128, 256, 128, 128, true, E8m0Scale)
#ifdef HAS_LARGE_TILES
INSTANCE(scaled_mm_tiled_row_256x256,        512, 256, 256, false)
INSTANCE(scaled_mm_tiled_block_256x256,      512, 256, 256, true)
INSTANCE(scaled_mm_tiled_block_e8m0_256x256, 512, 256, 256, true, E8m0Scale)
#endif
// clang-format on
