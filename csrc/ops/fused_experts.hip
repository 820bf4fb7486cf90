// Fused MoE experts for few tokens: weights are streamed from HBM once, as in gemm/skinny.h.
//
//     gate_up:  act[pair] = silu(gate) * up,  gate, up = w1[expert of pair] @ hidden[token of pair]
//     down:     out[token] = sum over the token's pairs of weight * (w2[expert of pair] @ act[pair])
//
// A pair is a token and an expert it is routed to. Bytes: the weights of the activated experts dominate.
//
// No launch sorts the pairs first: every gate_up block groups them by expert in its own LDS (gemm/group_pairs.h), which
// takes less time than a launch, and one block stores the order for down. An item is an expert with up to kTileTokens
// of its tokens. An expert without tokens has no item and costs nothing. A tile is 16 weight rows. A block's waves
// split K (WaveSplitK): each lane holds the weights and tokens of kStages K slices of 128 bytes in registers.
//
// gate_up: a tile has 8 gate rows and their 8 up rows, so a lane has both. Blocks take the tiles of all items
// round-robin. The waves' sums are reduced in LDS at the end of each tile.
//
// down: a block owns one output tile and iterates over all items. Each wave accumulates into its own sums in LDS, in
// item order. If tiles are too few to fill the GPU, split_k blocks divide each tile's units among them, and the last
// one to arrive adds their partial sums in block order. No block waits for another and nothing is added atomically, so
// every run gives the same bits.
//
// The tokens are quantized by a previous launch. Rejected: blocks that quantize tokens themselves, on the way to the
// matrix instruction or, few of them, into LDS, save the launch and were slower even for one token, measured on H200:
// 31.9 and 31.0 us versus 29.2 us.
#include "device/arrive.h"
#include "device/scale.h"
#include "device/vec.h"
#include "gemm/group_pairs.h"

struct Experts {
  const u8* tokens;       // [rows, K]; gate_up: hidden, a row per token; down: act, a row per pair, in pair order
  const u8* weights;      // [E, N, K], or each expert's in fragment order [N / 16, K bytes / 64, 4, 16 rows, 16 bytes]
  void* out;              // gate_up: [pairs, N / 2]; down: [tokens, N]; out_type
  float* partials;        // down with split_k > 1: [tiles, split_k, tokens, 16 rows]
  u32* counters;          // down with split_k > 1: [tiles], zeros
  const u8* scale_a;      // block: [rows, ceil(K / 128)]; row: [rows] or [1]; mx: [rows, K / 32]
  const u8* scale_b;      // block: [E, ceil(N / 128), ceil(K / 128)]; row: [E, N] or [E]; mx: [E, N, K / 32]; E experts
  const u32* ids;         // [tokens, topk], id_words words each
  const float* router;    // [tokens, topk]: pair weights
  u32x4* lists;           // [kept_vectors() of PairLists]: written by gate_up, read by down
  int* num_rows;          // gate_up: [1], receives the row count of act; or null
  const int* expert_map;  // [mapped], or null
  i64 expert_bytes, expert_scales;  // byte strides between experts: of weights and of scale_b
  int token_bytes, row_bytes;       // byte strides between rows; for weights within 16 rows
  int tile_bytes, spread;        // byte strides of weights: between groups of 16 rows, and per byte of K in steps of 16
  int m, n, k, pairs;            // tokens, rows of an expert's weight, bytes of K; token-slot pairs
  int scale_a_row, scale_b_row;  // bytes between scales
  int topk, shared, routed, mapped, id_words;
  int per_slot;       // 2^20 / slots, rounded up
  int out_type;       // 0 bf16, 1 fp16
  int apply_weights;  // 1 if results are multiplied by their pair's weight
  int step;           // gate_up: blocks; down: K slices per unit, which one wave processes
  int split_k;        // down: blocks that share a tile's units
  int work_per_item;  // gate_up: tiles per item; down: units
  u32 work_per_item_inverse;
};

constexpr int kSliceSteps = 2, kSliceBytes = kSliceSteps * mma::kDepth, kMxBlock = 32;
static_assert(kSliceBytes == kScaleBlock);
extern LDS __attribute__((aligned(1024))) u8 dynamic_lds[];

// The type of a scale in a lane's registers.
template <ScaleGranularity>
struct ScaleRegister : Fp32Scale {};
#ifdef HAS_BLOCK_SCALED_MMA
template <>
struct ScaleRegister<ScaleGranularity::kMx> {
  using Loaded = u8;
  DEVICE static u8 load_or_zero(mem::Buffer from, int lane_offset, int offset, bool inside) {
    return mx::load_scale_or_zero(from, lane_offset, offset, inside);
  }
};
#endif

// A wave's main loop: loads K slices to registers and multiplies them.
template <class T, ScaleGranularity kScales, bool kGated, int kStages>
struct ExpertMainLoop {
  static constexpr int kTileOut = kGated ? mma::kRows / 2 : mma::kRows;
  static constexpr bool kBlock = kScales == ScaleGranularity::kBlock, kMx = kScales == ScaleGranularity::kMx;
  static constexpr int kScalesB = kMx ? 1 : kBlock ? kGated ? 2 : 1 : 4;

  struct KSlice {
    mma::Weights weights[kSliceSteps] = {};
    u32x4 tokens[kSliceSteps];
    typename ScaleRegister<kScales>::Loaded scale_a[mma::kValueTokens], scale_b[kScalesB];
  };
  struct ItemTile {  // one tile of one item
    mem::Cursor weights[mma::kLoads];
    mem::Buffer scales_b;
    int scale_b[kScalesB];           // bytes
    int token;                       // byte offset of the lane's token; -1 for none
    int scale_a[mma::kValueTokens];  // byte offsets; -1 for none
  };

  const Experts& p;
  const PairLists& lists;
  const int lane = wave::lane();

  DEVICE int row_of(int tile, int row) const {  // in the weight
    if (kGated) row = mma::half(row) * (p.n / 2) + tile * kTileOut + mma::half_row(row);
    else row += tile * kTileOut;
    return row < p.n ? row : p.n - 1;
  }
  // Byte stride per byte of K, in steps of 16.
  DEVICE int spread() const { return mem::kExpertFragments ? p.spread : 1; }

  // The 32-element block of a K slice whose scale this lane holds.
  DEVICE int mx_block() const { return kMx ? mma::depth(lane) / 16 : 0; }
  // The row of tokens and scale_a for a place in the pair order.
  DEVICE int token_row(int place) const { return kGated ? lists.pairs[place] * p.per_slot >> 20 : place; }

  DEVICE ItemTile item_tile(int index, int tile) const {
    ItemTile item_tile;
    const Item item(lists, index);
    const u8* weights = p.weights + item.expert * p.expert_bytes;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      const int row = row_of(tile, mma::row(lane, l));
      const int in_rows =
          mem::kExpertFragments ? row / mma::kRows * p.tile_bytes + row % mma::kRows * p.row_bytes : row * p.row_bytes;
      item_tile.weights[l] = mem::cursor(weights, in_rows + mma::depth(lane) * spread());
    }
    item_tile.scales_b = mem::buffer(p.scale_b + item.expert * p.expert_scales);
#pragma unroll
    for (int i = 0; i < kScalesB; ++i) {
      const int row = row_of(tile, kMx ? mma::row(lane, i) : mma::value_row(kBlock ? 0 : lane, kBlock ? 2 * i : i));
      item_tile.scale_b[i] = (kBlock ? row / kScaleBlock : row) * p.scale_b_row + mx_block();
    }
    const int place = item.first + mma::tile_token(lane);
    item_tile.token = place < item.end ? token_row(place) * p.token_bytes + mma::depth(lane) : -1;
#pragma unroll
    for (int i = 0; i < mma::kValueTokens; ++i) {
      const int of_value = item.first + mma::value_token(lane, i);
      item_tile.scale_a[i] = of_value < item.end ? token_row(of_value) * p.scale_a_row + mx_block() : -1;
    }
    return item_tile;
  }

  // Loads the K slice from byte k on; zeros if not `more`.
  DEVICE void load(KSlice& k_slice, const ItemTile& item_tile, int k, bool more) const {
    const int bytes = more ? p.k - k - mma::depth(lane) : 0;
    const mem::Buffer tokens = mem::buffer(p.tokens);
    if constexpr (kScales != ScaleGranularity::kNone) {
      const int block = kMx ? k / kMxBlock : kBlock ? k / kScaleBlock * 4 : 0;
      const bool there = more && (kScales == ScaleGranularity::kRow || k + mx_block() * kMxBlock < p.k);
#pragma unroll
      for (int i = 0; i < kScalesB; ++i)
        k_slice.scale_b[i] =
            ScaleRegister<kScales>::load_or_zero(item_tile.scales_b, item_tile.scale_b[i], block, there);
      const mem::Buffer scales = mem::buffer(p.scale_a);
#pragma unroll
      for (int i = 0; i < mma::kValueTokens; ++i)
        k_slice.scale_a[i] = ScaleRegister<kScales>::load_or_zero(scales, item_tile.scale_a[i], block,
                                                                  there && item_tile.scale_a[i] >= 0);
    }
#pragma unroll
    for (int u = 0; u < kSliceSteps; ++u) {
      const bool inside = u * mma::kDepth < bytes;
#pragma unroll
      for (int l = 0; l < mma::kLoads; ++l)
        mem::refill(k_slice.weights[u].load[l], item_tile.weights[l], (k + u * mma::kDepth) * spread(), inside);
      k_slice.tokens[u] =
          mem::load_or_zero(tokens, item_tile.token + u * mma::kDepth, k, inside && item_tile.token >= 0);
    }
  }

  DEVICE f32x4 multiply(f32x4 sum, const KSlice& k_slice) const {
#ifdef HAS_BLOCK_SCALED_MMA
    if constexpr (kMx) {
      static_assert(kSliceSteps == 2 && mma::kLoads == 1);
      const u32x4 low = k_slice.weights[0].load[0], high = k_slice.weights[1].load[0];
      return mx::multiply_add<0>(sum, low, high, k_slice.scale_b[0], k_slice.tokens[0], k_slice.tokens[1],
                                 k_slice.scale_a[0]);
    }
#endif
    f32x4 product = kBlock ? f32x4{} : sum;
#pragma unroll
    for (int u = 0; u < kSliceSteps; ++u)
      product = mma::multiply_tile<T>(product, k_slice.weights[u], k_slice.tokens[u]);
    if (!kBlock) return product;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum[i] += product[i] * (k_slice.scale_a[i % mma::kValueTokens] * k_slice.scale_b[kGated ? i / 2 : 0]);
    return sum;
  }

  // Value i of a tile, once its last K slice, `last`, has been multiplied.
  DEVICE float result(const f32x4& sum, const KSlice& last, int i) const {
    if constexpr (kScales != ScaleGranularity::kRow) return sum[i];
    else return sum[i] * (last.scale_a[i % mma::kValueTokens] * last.scale_b[i]);
  }

  // Multiplies all K slices of `walk`, and calls end(walk, sum, last K slice) at the end of each tile.
  template <class Walk, class End>
  DEVICE void multiply_all(Walk walk, End end) const {
    if (!walk.more()) return;
    Walk prefetch = walk;
    ItemTile prefetch_tile = {};
    KSlice stages[kStages];
    auto load_next = [&](KSlice& k_slice) __attribute__((always_inline)) {
      load(k_slice, prefetch_tile, prefetch.k(), prefetch.more());
      if (prefetch.next() && prefetch.more()) prefetch_tile = item_tile(prefetch.item(), prefetch.tile());
    };
    prefetch_tile = item_tile(prefetch.item(), prefetch.tile());
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load_next(stages[i]);
    f32x4 sum = {};
    auto multiply_next = [&](KSlice& k_slice) __attribute__((always_inline)) {
      sum = multiply(sum, k_slice);
      const Walk done = walk;
      if (walk.next()) {
        end(done, sum, k_slice);
        sum = f32x4{};
      }
    };
    // Loads are branch-free, so every path has the same number in flight. Past the end they load zeros.
    while (walk.more()) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        load_next(stages[(i + kStages - 1) % kStages]);
        if (walk.more()) multiply_next(stages[i]);
      }
    }
  }
};

// Returns value / divisor, for values up to 2^31 / divisor, given the inverse: 2^31 / divisor + 1.
DEVICE int divide_by(u32 inverse, int value) { return int(i64(value) * inverse >> 31); }

// A block's tiles, and a wave's K slices in each. All waves have the same number of slices, some without bytes.
struct TileWalk {
  const Experts& p;
  int tiles, work, slice = 0;  // tiles in all items
  DEVICE bool more() const { return work < tiles; }
  DEVICE int item() const { return divide_by(p.work_per_item_inverse, work); }
  DEVICE int tile() const { return work - item() * p.work_per_item; }
  DEVICE int k() const { return (slice * mma::kWaves + wave::index()) * kSliceBytes; }
  DEVICE bool next() {  // true if that begins a tile
    if (++slice * mma::kWaves * kSliceBytes < p.k) return false;
    slice = 0, work += p.step;
    return true;
  }
};

template <class T, ScaleGranularity kScales>
DEVICE void gate_up(const Experts& p) {
  using S = ExpertMainLoop<T, kScales, true, mma::kStages>;
  // Double-buffered: a slow wave may still read the previous tile's sums.
  LDS static float sums[2][mma::kWaves][4][wave::kLanes];
  const PairLists lists(dynamic_lds, p.pairs);
  const int items = group_pairs(p, lists);
  if (wave::block_id_x() == 0) {
#pragma unroll 1
    for (int i = wave::thread_id(); i < lists.kept_vectors(); i += kThreads)
      mem::store(p.lists + i, ((const u32x4*)dynamic_lds)[i]);
    if (p.num_rows && wave::thread_id() == 0) mem::store<int>(p.num_rows, lists.items[items] & 0xffff);
  }
  const S main_loop{p, lists};
  int parity = 0;
  auto end_tile = [&](const TileWalk& walk, const f32x4& sum,
                      const typename S::KSlice& last) __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[parity][wave::index()][i][main_loop.lane] = main_loop.result(sum, last, i);
    block_barrier();  // hazard: the waves' sums are read before they are written
    // Each of the first two waves handles one gate value and one up value per lane.
    const int i = wave::index();
    const Item item(lists, walk.item());
    const int place = item.first + mma::value_token(main_loop.lane, i);
    if (i < 2 && place < item.end) {
      float gate = 0.0f, up = 0.0f;
#pragma unroll
      for (int w = 0; w < mma::kWaves; ++w) {
        gate += sums[parity][w][i][main_loop.lane];
        up += sums[parity][w][i + 2][main_loop.lane];
      }
      const float weight = p.apply_weights ? lists.router[lists.pairs[place]] : 1.0f;
      const int column = walk.tile() * S::kTileOut + mma::half_row(mma::value_row(main_loop.lane, i));
      store_output(p.out, i64(place) * (p.n / 2) + column, silu(gate * weight) * (up * weight), p.out_type);
    }
    parity ^= 1;
  };
  main_loop.multiply_all(TileWalk{p, items * p.work_per_item, wave::block_id_x()}, end_tile);
}

// A wave's units. All waves in a tile's blocks take the units of all items round-robin.
struct UnitWalk {
  const Experts& p;
  int units, unit, slice = 0;  // units in all items
  DEVICE bool more() const { return unit < units; }
  DEVICE int item() const { return divide_by(p.work_per_item_inverse, unit); }
  DEVICE int tile() const { return wave::block_id_x(); }
  DEVICE int k() const { return ((unit - item() * p.work_per_item) * p.step + slice) * kSliceBytes; }
  DEVICE bool next() {  // true if that begins a tile
    if (++slice < p.step && k() < p.k) return false;
    slice = 0, unit += mma::kWaves * p.split_k;
    return true;
  }
};

template <class T, ScaleGranularity kScales>
DEVICE void down(const Experts& p) {
  using S = ExpertMainLoop<T, kScales, false, mma::kStages - 1>;
  const int of_wave = p.m * mma::kRows;
  u8* behind = dynamic_lds + mma::kWaves * of_wave * 4;
  const PairLists lists(behind, p.pairs);
#pragma unroll 1
  for (int i = wave::thread_id(); i < lists.kept_vectors(); i += kThreads)
    ((u32x4*)behind)[i] = mem::load<u32x4>(p.lists + i);
  float* sums = (float*)dynamic_lds;  // [waves, tokens, rows]
  float* wave_sums = sums + wave::index() * of_wave;
  for (int i = wave::lane(); i < of_wave; i += wave::kLanes) wave_sums[i] = 0.0f;
  block_barrier();  // hazard: lists are read before they are written
  const int items = wave::uniform(*lists.count);
  const S main_loop{p, lists};
  auto end_unit = [&](const UnitWalk& walk, const f32x4& sum, const typename S::KSlice& last)
                      __attribute__((always_inline)) {
                        const Item item(lists, walk.item());
#pragma unroll
                        for (int v = 0; v < mma::kValueTokens; ++v) {
                          const int place = item.first + mma::value_token(main_loop.lane, v);
                          if (place >= item.end) continue;
                          const int pair = lists.pairs[place];
                          const float weight = p.apply_weights ? lists.router[pair] : 1.0f;
                          float* of_token = wave_sums + (pair * p.per_slot >> 20) * mma::kRows;
#pragma unroll
                          for (int i = v; i < 4; i += mma::kValueTokens)
                            of_token[mma::value_row(main_loop.lane, i)] += weight * main_loop.result(sum, last, i);
                        }
                      };
  main_loop.multiply_all(UnitWalk{p, items * p.work_per_item, wave::block_id_y() * mma::kWaves + wave::index()},
                         end_unit);
  block_barrier();  // hazard: the waves' sums are read before they are written
  const mem::Buffer partials = mem::buffer(p.partials + i64(wave::block_id_x()) * p.split_k * of_wave);
  auto store = [&](int i, float total) {
    const int token = i / mma::kRows, row = wave::block_id_x() * mma::kRows + i % mma::kRows;
    if (row < p.n) store_output(p.out, i64(token) * p.n + row, total, p.out_type);
  };
#pragma unroll 1
  for (int i = wave::thread_id(); i < of_wave; i += kThreads) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < mma::kWaves; ++w) total += sums[w * of_wave + i];
    if (p.split_k == 1) store(i, total);
    else mem::store_device(partials, i * 4, wave::block_id_y() * of_wave * 4, total);
  }
  if (p.split_k == 1 || !is_last_block(p.counters + wave::block_id_x(), p.split_k, *(u32*)dynamic_lds)) return;
#pragma unroll 1
  for (int i = wave::thread_id(); i < of_wave; i += kThreads) {
    float total = 0.0f;
#pragma unroll 8
    for (int y = 0; y < p.split_k; ++y)
      total += mem::load_device_or_zero<float>(partials, i * 4, y * of_wave * 4, true);
    store(i, total);
  }
}

// clang-format off
#define INSTANCES(kind, ...)                                                                                   \
  KERNEL((kThreads), 3) fused_experts_gate_up_##kind(Experts experts) { gate_up<__VA_ARGS__>(experts); }       \
  KERNEL((kThreads), 4) fused_experts_down_##kind(Experts experts) { down<__VA_ARGS__>(experts); }

INSTANCES(block, E4m3, ScaleGranularity::kBlock)
INSTANCES(row,   E4m3, ScaleGranularity::kRow)
INSTANCES(bf16,  Bf16, ScaleGranularity::kNone)
INSTANCES(fp16,  F16,  ScaleGranularity::kNone)
#ifdef HAS_BLOCK_SCALED_MMA
INSTANCES(mx,    E4m3, ScaleGranularity::kMx)
#endif
// clang-format on
