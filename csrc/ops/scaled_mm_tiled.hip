// FP8 matrix product for many tokens: the output in tiles, their operands through LDS.
//
//     rows:    out[m, n] = T(scale_a[m] * scale_b[n] * sum_k a[m, k] * b[n, k] + bias[n])
//     blocks:  out[m, n] = T(sum_j scale_a[m, j] * scale_b[n / 128, j] * sum_{k in block j of 128} a[m, k] * b[n, k] + bias[n])
//
// a and b are e4m3 of the arch's format, sums fp32, scales fp32, those of blocks also e8m0. Flops: 2 * M * N * K; bytes:
// M * K + N * K + M * N * sizeof(T), and out of the caches (1 / kTileM + 1 / kTileN) / 2 per flop.
//
// A block owns a tile of the output, or a slice of K of one: then each block leaves its sums in HBM, and the last to arrive
// adds them up in the order of K, so that the same inputs give the same bits. gemm/tiled/main_loop.h multiplies.
//
// Two blocks of 64 x 128 or 128 x 128 share a compute unit: while one waits for a panel or at a barrier, the other multiplies.
// 256 x 256, for which gfx950 has the LDS, halves what a product reads out of the caches but leaves a compute unit one block. So
// its eight waves, two on each SIMD, take turns: four read fragments while the other four multiply.
//
// Per panel, emulated:        gfx942  64 x 128   128 x 128   gfx950  64 x 128   128 x 128   256 x 256
//   matrix cycles of a SIMD           512        1024                256        512         2048
//   other issue cycles, rows          258        316                 230        286         748
//                       blocks        394        546                 388        584         1720
//                       blocks, e8m0  462        626                 416        648         1848
//   LDS cycles                        576        768                 192        256         768
//   LDS bank conflicts                0          0                   0          0           0
#include "device/vec.h"
#include "gemm/tiled/main_loop.h"
#include "gemm/tiled/rasterize.h"
#include "gemm/tiled/split_k.h"

struct Product {
  const u8* a;           // [M, K], rows a_stride bytes apart
  const u8* b;           // [N, K], at b_tile, b_row, b_piece and b_step: see tile::Layout
  void* out;             // [M, N] of out_type
  float* partials;       // [tiles, slices, values of a thread / 4, threads, 4]; null with one slice
  u32* counters;         // [tiles], 0; null with one slice
  const float* scale_a;  // rows: [M] or [1]; blocks: [M, ceil(K / 128)], of a type of device/scale.h
  const float* scale_b;  // rows: [N] or [1]; blocks: [ceil(N / 128), ceil(K / 128)]
  const void* bias;      // [N] of out_type, or null
  i64 a_stride, b_tile;
  int b_row, b_piece, b_step;
  int m, n, k;
  int scale_a_row, scale_a_k,
      scale_b_row;  // elements from scale to scale: of rows or blocks of rows, and of a's blocks of K
  int out_type;     // 0 bf16, 1 fp16, 2 fp32
  int tiles_m, tiles_n, tiles, slices;  // of the output and of K
  int panels, longer;                   // of a slice; the first `longer` slices have one more
  Divisor by_tiles, by_group, by_last;  // tiles of the output; the others: see tile::Position
};

using tile::Division, tile::Sums;

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
      const int patch = i / tile::kLaneTokens, token = i % tile::kLaneTokens, m = first_m + D::token(i);
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

template <class D, bool kBlockScales, class Scale = Fp32Scale>
DEVICE void multiply_tiled(const Product& p) {
  mem::wait_for_scalars(p.by_tiles.inverse, p.by_tiles.shift, p.by_group.inverse, p.by_group.shift, p.by_last.inverse,
                        p.by_last.shift, p.tiles_m, p.tiles_n, p.tiles, p.slices, p.panels, p.longer, p.a, p.b,
                        p.a_stride, p.b_tile, p.b_row, p.b_piece, p.b_step, p.m, p.n, p.k);
  const int work = tile::work_of(wave::block_x(), p.tiles * p.slices);
  const int slice = u32(work) / p.by_tiles, tile_index = work - slice * p.tiles;
  const auto position = tile::Position::of(tile_index, p.tiles_m, p.tiles_n, p.by_group, p.by_last);
  const int first_m = position.m * D::kTileM, first_n = position.n * D::kTileN;
  const int first = slice * p.panels + (slice < p.longer ? slice : p.longer),
            last = first + p.panels + (slice < p.longer);

  tile::Filler<D::kTileM, D::kThreads> fill_a;
  tile::Filler<D::kTileN, D::kThreads> fill_b;
  const tile::Layout a_layout{16 * p.a_stride, int(p.a_stride), tile::kPiece, 4 * tile::kPiece};
  const tile::Layout b_layout{p.b_tile, p.b_row, p.b_piece, p.b_step};
  fill_a.init(p.a + first_m * p.a_stride, a_layout, [&](int row) { return first_m + row < p.m ? row : tile::kNoRow; });
  fill_b.init(p.b + first_n / 16 * p.b_tile, b_layout, [&](int place) {
    const int row = place / tile::kPatchRows * tile::kPatchRows + tile::weight_row(place % tile::kPatchRows);
    return first_n + row < p.n ? row : tile::kNoRow;
  });

  Sums<D> sums = {};
  auto multiply = [&](const auto& scaling) __attribute__((always_inline)) {
    tile::multiply_panels<D, E4m3>(sums, fill_a, fill_b, b_layout.by_piece(), scaling, first, last, p.k);
  };
  if constexpr (kBlockScales) {
    const int n = first_n + D::wave_n(), block_n = (n < p.n ? n : p.n - 1) / kScaleBlock;
    using Type = typename Scale::Type;
    tile::BlockScales<D, false, Scale> scales;
    scales.init((const Type*)p.scale_a + i64(first_m) * p.scale_a_row, p.scale_a_row, p.scale_a_k,
                (const Type*)p.scale_b + i64(block_n) * p.scale_b_row,
                [&](int m) { return first_m + m < p.m ? m : p.m - 1 - first_m; });  // past the last the last
    multiply(scales);
  } else {
    multiply(tile::Unscaled{});
  }

  if (p.slices > 1 && !tile::add_slices<D>(sums, p, tile_index, slice)) return;
  store_results<D, kBlockScales>(sums, p, first_m + D::wave_m(), first_n + D::wave_n());
}

// clang-format off
#define INSTANCE(symbol, threads, tile_m, tile_n, ...)                       \
  KERNEL(threads) symbol(Product product) {                                  \
    multiply_tiled<Division<tile_m, tile_n, threads>, __VA_ARGS__>(product); \
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
