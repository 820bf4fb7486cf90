// Matrix product of MX-FP8 tensors: e4m3fn with a scale 2^(s - 127) per 32 of K, s one e8m0 byte; 255 is NaN.
//
//     out[m, n] = T(sum_k a[m, k] * 2^(scale_a[m, k / 32] - 127) * b[n, k] * 2^(scale_b[n, k / 32] - 127) + bias[n])
//
// The matrix instruction takes the scales (device/amd/mx.h), so they cost their loads; sums are fp32. Bytes: 33/32 * (M + N) * K
// and the results; flops: 2 * M * N * K. Up to 64 tokens the time is that of reading b, from some hundred on that of the flops.
//
// A tile is some rows of b times some tokens over all of K, a unit one pair of instructions, 256 bytes of K, of a tile. The
// units of all tiles, one tile after the other, are divided evenly over the blocks, wherever tiles begin or end. A tile that
// one block has alone it finishes from its registers. Of a shared tile, each block leaves its sums in HBM, and the last to
// arrive adds them up in the order of K: the same bits every run.
//
// Static, on gfx950: the streams for 16, 32 and 64 tokens have 144, 160 and 202 registers, so 3, 3 and 2 waves per SIMD; the
// tiles of 64 and 128 have 118 and 240, so 4 and 2. Emulated: when a wave that streams waits, 14 KB of b are in flight for it on
// average, 16 KB at most; no LDS access meets a bank conflict.
#include "device/arrive.h"
#include "device/tile.h"
#include "device/vec.h"

#ifdef HAS_BLOCK_SCALED_MMA

struct Product {
  const u8* a;        // [M, K] e4m3fn, rows a_stride bytes apart
  const u8* b;        // [N, K] e4m3fn, rows b_stride bytes apart
  void* out;          // [M, N] of out_type
  f32x4* partials;    // [blocks, 2, quads of a lane, threads]; null if no tile is shared
  u32* counters;      // [tiles], 0; null if no tile is shared
  const u8* scale_a;  // [M, K / 32] e8m0, rows scale_a_stride bytes apart
  const u8* scale_b;  // [ceil(N / 2^scale_b_shift), K / 32] e8m0, rows scale_b_stride bytes apart
  const void* bias;   // [N] of out_type, or null
  int a_stride, b_stride, scale_a_stride, scale_b_stride, scale_b_shift;
  int m, n, k;
  int out_type;               // 0 bf16, 1 fp16, 2 fp32
  int blocks, units, longer;  // units of a block; the first `longer` blocks have one more
};

constexpr int kWaves = 4, kThreads = kWaves * wave::kLanes;
constexpr int kOutside = 1 << 31;  // an offset at which every buffer reads as zeros, as any number further on

DEVICE int units_of_tile(const Product& p) { return (p.k + mx::kPair - 1) / mx::kPair; }
DEVICE int first_unit(const Product& p, int block) { return block * p.units + (block < p.longer ? block : p.longer); }
DEVICE int block_of(const Product& p, int unit) {
  const int in_longer = p.longer * (p.units + 1);
  return unit < in_longer ? unit / (p.units + 1) : p.longer + (unit - in_longer) / p.units;
}

template <class T>
struct Output {
  DEVICE static float load(const void* row, i64 at) { return load_element<T>(row, at); }
  DEVICE static void store(void* row, i64 at, float x) { store_element<T>(row, at, x); }
  DEVICE static void store_four(void* row, i64 at, f32x4 x) {
    mem::store((u16*)row + at, u32x2{T::pack(x.lo), T::pack(x.hi)});
  }
};
template <>
struct Output<float> {
  DEVICE static float load(const void* row, i64 at) { return mem::load<float>((const float*)row + at); }
  DEVICE static void store(void* row, i64 at, float x) { mem::store((float*)row + at, x); }
  DEVICE static void store_four(void* row, i64 at, f32x4 x) { mem::store((float*)row + at, x); }
};

// out[m, n .. n + 3], as far as there are so many rows of b.
template <class T>
DEVICE void store_outputs(const Product& p, int m, int n, f32x4 x) {
  const i64 at = i64(m) * p.n + n;
  if (p.bias)
    for (int i = 0; i < 4; ++i)
      if (n + i < p.n) x[i] += Output<T>::load(p.bias, n + i);
  if (p.n % 4 == 0) Output<T>::store_four(p.out, at, x);
  else
    for (int i = 0; i < 4; ++i)
      if (n + i < p.n) Output<T>::store(p.out, at + i, x[i]);
}

// What block `mine` has of a tile is summed up: it is finished here, or with the other blocks' sums by the last to arrive. A lane
// has kQuads results of 4 neighbouring rows of b each: sum[q] are those of token m[q], rows n[q] on.
template <int kQuads>
DEVICE void finish(const Product& p, int mine, int tile, f32x4 (&sum)[kQuads], const int (&m)[kQuads],
                   const int (&n)[kQuads]) {
  const int begin = tile * units_of_tile(p), end = begin + units_of_tile(p);
  const int from = block_of(p, begin), to = block_of(p, end - 1);
  if (from != to) {
    // A block has sums of at most two tiles that it shares: the one it starts in, and the one it ends in.
    auto quads = [&](int block) __attribute__((always_inline)) {
      const int place = block * 2 + (first_unit(p, block) < begin);
      return p.partials + i64(place) * kQuads * kThreads + wave::thread();
    };
    f32x4* ours = quads(mine);
#pragma unroll
    for (int q = 0; q < kQuads; ++q)
      if (m[q] < p.m) mem::store(ours + q * kThreads, sum[q]);
    if (!is_last_block(p.counters + tile, to - from + 1)) return;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) sum[q] = f32x4{};
    constexpr int kAtOnce = kQuads <= 4 ? 4 : 1;  // blocks whose sums are loaded together
#pragma unroll kAtOnce
    for (int block = from; block <= to; ++block) {
      const f32x4* theirs = quads(block);
#pragma unroll
      for (int q = 0; q < kQuads; ++q)
        if (m[q] < p.m) sum[q] += mem::load<f32x4>(theirs + q * kThreads);
    }
  }
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    if (m[q] >= p.m || n[q] >= p.n) continue;
    if (p.out_type == 0) store_outputs<Bf16>(p, m[q], n[q], sum[q]);
    else if (p.out_type == 1) store_outputs<F16>(p, m[q], n[q], sum[q]);
    else store_outputs<float>(p, m[q], n[q], sum[q]);
  }
}

// Up to kTokens tokens: tiles of 64 rows, each wave 16 of its own, which it streams from HBM straight to registers. A lane keeps
// a ring of kRing units: once one is multiplied, the one kRing further on is loaded into its place, past the end of a tile the
// next tile's, so that at least kRing - 1 are in flight always. All waves need the same tokens: each loads a quarter of a
// unit's, along with its weights, and they meet in LDS, double-buffered, in the order in which lanes read them.
template <int kTokens>
DEVICE void stream(const Product& p) {
  constexpr int kRing = 4, kTiles = kTokens / mx::kRows, kRows = kWaves * mx::kRows;
  static_assert(kWaves == mx::kPieces && kTiles <= kWaves, "a wave brings one piece of all tokens, and scales of 16");
  LDS static u32x4 tokens[2][kTiles][mx::kPieces][wave::kLanes];
  LDS static u32 token_scales[2][kWaves][wave::kLanes];  // those of waves past kTiles are zero and of no use
  using Scales = mx::Scales</*kWords=*/true>;
  const int lane = wave::lane(), part = wave::index(), row = part * mx::kRows + mx::row(lane);
  const int block = wave::block_x(), first = first_unit(p, block), last = first_unit(p, block + 1);
  const int pairs = units_of_tile(p);

  struct Place {
    int tile, pair;
  };
  auto following = [&](Place now) __attribute__((always_inline)) {
    const bool ends = now.pair + 1 == pairs;
    return Place{now.tile + ends, ends ? 0 : now.pair + 1};
  };

  struct Slot {
    u32x4 token[kTiles];  // the wave's piece of each 16 tokens
    Scales token_scales;  // of the wave's 16 tokens
    u32x4 weight[mx::kPieces];
    Scales weight_scales;
  };
  Slot ring[kRing];
  int token_at[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int m = t * mx::kRows + mx::row(lane);
    token_at[t] = m < p.m ? m * p.a_stride + part * mx::kSpacing + mx::depth(lane) : kOutside;
  }
  const int token_scales_at = row < p.m && part < kTiles ? row * p.scale_a_stride : kOutside;
  auto load = [&](Slot& slot, Place from, bool exists) __attribute__((always_inline)) {
    const int at = from.pair * mx::kPair, scale_at = at >> mx::kLog2Block, bytes = exists ? p.k - at : 0;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      slot.token[t] =
          mem::load_or_zero(mem::buffer(p.a), token_at[t], at, part * mx::kSpacing + mx::depth(lane) < bytes);
    slot.token_scales = Scales::load(mem::buffer(p.scale_a), lane, token_scales_at, scale_at, bytes >> mx::kLog2Block);
    const int n = from.tile * kRows, of_row = n + row < p.n ? bytes : 0;
    const mem::Buffer weights = mem::buffer(p.b + i64(n) * p.b_stride);
#pragma unroll
    for (int i = 0; i < mx::kPieces; ++i)
      slot.weight[i] = mem::load_once_or_zero(weights, row * p.b_stride + mx::depth(lane), at + i * mx::kSpacing,
                                              i * mx::kSpacing + mx::depth(lane) < of_row);
    const mem::Buffer scales = mem::buffer(p.scale_b + i64(n >> p.scale_b_shift) * p.scale_b_stride);
    slot.weight_scales =
        Scales::load(scales, lane, (row >> p.scale_b_shift) * p.scale_b_stride, scale_at, of_row >> mx::kLog2Block);
    mx::schedule_fence();  // units' loads stay in order, so that waiting for one is not waiting for later ones
  };
  auto store_tokens = [&](const Slot& slot, int buffer) __attribute__((always_inline)) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) tokens[buffer][t][part][lane] = slot.token[t];
    token_scales[buffer][part][lane] = slot.token_scales.aligned(lane);
    block_barrier();  // hazard: tokens are read before they are written
  };
  f32x4 sum[kTiles] = {};
  auto multiply = [&](const Slot& slot, int buffer) __attribute__((always_inline)) {
    const u32 scales = slot.weight_scales.aligned(lane);
    const u32x4* weight = slot.weight;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const u32x4(&token)[mx::kPieces][wave::kLanes] = tokens[buffer][t];
      const u32 of_tokens = token_scales[buffer][t][lane];
      sum[t] = mx::multiply_add<0>(sum[t], weight[0], weight[2], scales, token[0][lane], token[2][lane], of_tokens);
      sum[t] = mx::multiply_add<1>(sum[t], weight[1], weight[3], scales, token[1][lane], token[3][lane], of_tokens);
    }
  };

  Place now{first / pairs, first % pairs}, ahead = now;
#pragma unroll
  for (int r = 0; r < kRing; ++r, ahead = following(ahead)) load(ring[r], ahead, first + r < last);
  store_tokens(ring[0], 0);
  for (int unit = first; unit < last;) {
#pragma unroll
    for (int r = 0; r < kRing; ++r) {  // units past the last are zeros
      multiply(ring[r], r % 2);
      mx::compute_now(sum);
      mx::schedule_fence();  // loads into the ring come after what reads it, not before and into other registers
      load(ring[r], ahead, unit + kRing < last);
      // Hazard: the tokens that these overwrite have been read by all waves that came to the last barrier.
      store_tokens(ring[(r + 1) % kRing], (r + 1) % 2);
      ahead = following(ahead);
      ++unit, ++now.pair;
      if (unit == last || (now.pair == pairs && unit < last)) {
        int m[kTiles], n[kTiles];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          m[t] = t * mx::kRows + mx::sum_token(lane);
          n[t] = now.tile * kRows + part * mx::kRows + mx::sum_row(lane);
        }
        finish(p, block, now.tile, sum, m, n);
        mx::wait_for_loads();  // for the compiler, which would else wait for more than it must wherever this path joins
#pragma unroll
        for (int t = 0; t < kTiles; ++t) sum[t] = f32x4{};
        now = {now.tile + 1, 0};
      }
    }
  }
}

// Any number of tokens: tiles of kSide rows and as many tokens, each wave a quarter, kTiles x kTiles instructions wide. Both
// operands come to LDS, half a unit at a time, double-buffered, in the order in which lanes read them: no bank conflicts. The
// two halves after those in LDS are under way to registers. Neighbouring tiles are the work of one die, for its cache.
template <int kTiles, bool kWords>
DEVICE void multiply_tiles(const Product& p) {
  constexpr int kSide = 2 * kTiles * mx::kRows, kQuads = kTiles * kTiles;
  enum { kTokens, kWeights, kOperands };
  LDS static u32x4 halves[2][kOperands][2 * kTiles][2][wave::kLanes];
  using Scales = mx::Scales<kWords>;
  constexpr int kGroup = 8;  // tiles along M: see tile::Position
  const int lane = wave::lane(), block = tile::work_of(wave::block_x(), p.blocks);
  const int tiles_m = (p.m + kSide - 1) / kSide, tiles_n = (p.n + kSide - 1) / kSide;
  const int last = first_unit(p, block + 1), pairs = units_of_tile(p);
  // The wave's quarter, and what it brings to LDS of each half unit: one of two pieces of every other 16 rows.
  const int token_rows = wave::index() % 2 * kTiles, weight_rows = wave::index() / 2 * kTiles;
  const int piece = wave::index() % 2, bring = wave::index() / 2;

  for (int unit = first_unit(p, block); unit < last;) {
    const int tile = unit / pairs, begin = unit - tile * pairs;
    const int end = last - unit < pairs - begin ? begin + last - unit : pairs;
    const tile::Position position(tile, tiles_m, tiles_n, kGroup);
    const int m0 = position.m * kSide, n0 = position.n * kSide;
    const mem::Buffer a = mem::buffer(p.a + i64(m0) * p.a_stride), b = mem::buffer(p.b + i64(n0) * p.b_stride);
    const mem::Buffer scale_a = mem::buffer(p.scale_a + i64(m0) * p.scale_a_stride);
    const mem::Buffer scale_b = mem::buffer(p.scale_b + i64(n0 >> p.scale_b_shift) * p.scale_b_stride);

    // Where the lane's rows lie: of those that it brings, and of those that the wave multiplies.
    int token_at[kTiles], weight_at[kTiles], token_scales_at[kTiles], weight_scales_at[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int row = (bring + 2 * i) * mx::kRows + mx::row(lane);
      token_at[i] = m0 + row < p.m ? row * p.a_stride + mx::depth(lane) : kOutside;
      weight_at[i] = n0 + row < p.n ? row * p.b_stride + mx::depth(lane) : kOutside;
      const int m = (token_rows + i) * mx::kRows + mx::row(lane), n = (weight_rows + i) * mx::kRows + mx::row(lane);
      token_scales_at[i] = m0 + m < p.m ? m * p.scale_a_stride : kOutside;
      weight_scales_at[i] = n0 + n < p.n ? (n >> p.scale_b_shift) * p.scale_b_stride : kOutside;
    }
    struct Half {
      u32x4 operand[kOperands][kTiles];
    };
    auto load = [&](Half& half, int index, int pair) __attribute__((always_inline)) {
      const int at = pair * mx::kPair + (index + 2 * piece) * mx::kSpacing;
      const bool inside = pair < end && at + mx::depth(lane) < p.k;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        half.operand[kTokens][i] = mem::load_or_zero(a, token_at[i], at, inside);
        half.operand[kWeights][i] = mem::load_or_zero(b, weight_at[i], at, inside);
      }
    };
    struct AllScales {
      Scales operand[kOperands][kTiles];
    };
    auto load_scales = [&](int pair) __attribute__((always_inline)) {
      AllScales scales;
      const int at = pair * mx::kPair, count = pair < end ? (p.k - at) >> mx::kLog2Block : 0;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        scales.operand[kTokens][i] = Scales::load(scale_a, lane, token_scales_at[i], at >> mx::kLog2Block, count);
        scales.operand[kWeights][i] = Scales::load(scale_b, lane, weight_scales_at[i], at >> mx::kLog2Block, count);
      }
      return scales;
    };
    auto store = [&](const Half& half, int buffer) __attribute__((always_inline)) {
#pragma unroll
      for (int o = 0; o < kOperands; ++o)
#pragma unroll
        for (int i = 0; i < kTiles; ++i) halves[buffer][o][bring + 2 * i][piece][lane] = half.operand[o][i];
    };
    f32x4 sum[kQuads] = {};
    auto multiply = [&]<int kIndex>(const u32(&scales)[kOperands][kTiles]) __attribute__((always_inline)) {
      const u32x4(&weights)[2 * kTiles][2][wave::kLanes] = halves[kIndex][kWeights];
      const u32x4(&tokens)[2 * kTiles][2][wave::kLanes] = halves[kIndex][kTokens];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int w = 0; w < kTiles; ++w) {
          const u32x4(&weight)[2][wave::kLanes] = weights[weight_rows + w],
                (&token)[2][wave::kLanes] = tokens[token_rows + t];
          f32x4& quad = sum[t * kTiles + w];
          quad = mx::multiply_add<kIndex>(quad, weight[0][lane], weight[1][lane], scales[kWeights][w], token[0][lane],
                                          token[1][lane], scales[kTokens][t]);
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
      // Hazard of both stores: the half that they overwrite has been read by all waves that came to the last barrier.
      store(half[1], 1);
      load(half[1], 1, pair + 1);
      multiply.template operator()<0>(scales);
      block_barrier();  // hazard: as above
      store(half[0], 0);
      load(half[0], 0, pair + 2);
      multiply.template operator()<1>(scales);
      block_barrier();  // hazard: as above
    }
    int m[kQuads], n[kQuads];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      m[q] = m0 + (token_rows + q / kTiles) * mx::kRows + mx::sum_token(lane);
      n[q] = n0 + (weight_rows + q % kTiles) * mx::kRows + mx::sum_row(lane);
    }
    finish(p, block, tile, sum, m, n);
    unit += end - begin;
  }
}

KERNEL(kThreads) mxfp8_scaled_mm_stream_16(Product product) { stream<16>(product); }
KERNEL(kThreads) mxfp8_scaled_mm_stream_32(Product product) { stream<32>(product); }
KERNEL(kThreads) mxfp8_scaled_mm_stream_64(Product product) { stream<64>(product); }
KERNEL(kThreads) mxfp8_scaled_mm_tile_128(Product product) { multiply_tiles<4, /*kWords=*/true>(product); }
KERNEL(kThreads) mxfp8_scaled_mm_tile_64(Product product) { multiply_tiles<2, /*kWords=*/true>(product); }
KERNEL(kThreads) mxfp8_scaled_mm_tile_64_bytes(Product product) { multiply_tiles<2, /*kWords=*/false>(product); }
#endif
