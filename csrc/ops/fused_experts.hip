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
// A previous launch quantizes the tokens, or each block of down quantizes act into its LDS (QuantizedRows) while its first
// weights are in flight. Measured on H100, one token of DeepSeek-V3 at TP8: 28.3 us with the launch, 27.0 us without.
// Rejected: blocks of gate_up that quantize hidden, 28.9 us.
#include "device/arrive.h"
#include "gemm/quantized_rows.h"

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

// A wave's main loop: loads K slices to registers and multiplies them. With kInLds it reads QuantizedRows.
template <class T, ScaleGranularity kScales, bool kGated, int kStages, bool kInLds = false>
struct ExpertMainLoop {
  static constexpr int kTileOut = kGated ? mma::kRows / 2 : mma::kRows;
  static constexpr bool kBlock = kScales == ScaleGranularity::kBlock, kMx = kScales == ScaleGranularity::kMx;
  static constexpr bool kScalesInLds = kInLds && kScales != ScaleGranularity::kRow;
  static constexpr int kScalesB = kMx ? 1 : kBlock ? kGated ? 2 : 1 : 4;

  using Loaded = typename ScaleRegister<kScales>::Loaded;

  struct KSlice {
    mma::Weights weights[kSliceSteps] = {};
    u32x4 tokens[kSliceSteps];
    Loaded scale_a[mma::kValueTokens], scale_b[kScalesB];
    int tokens_at, scale_a_at[mma::kValueTokens];  // in LDS, with kInLds: byte offsets
  };
  struct TileRows {  // byte offsets of a tile's rows in an expert's weights and scales
    int weights[mma::kLoads], scale_b[kScalesB];
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
  const u8 *lds_rows, *lds_scales;  // with kInLds
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
  DEVICE u32 token_row(u32 place) const {
    if (!kGated) return place;
    // One token's lists may not be in LDS yet. With a branch per row, NVIDIA's reads would wait for each other.
    if (!mem::kPredicates && p.m == 1) return 0;
    const u32 row = u32(lists.pairs[place] * p.per_slot) >> 20;
    return p.m == 1 ? 0 : row;
  }

  DEVICE TileRows tile_rows(int tile) const {
    TileRows rows;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      const int row = row_of(tile, mma::row(lane, l));
      const int in_rows =
          mem::kExpertFragments ? row / mma::kRows * p.tile_bytes + row % mma::kRows * p.row_bytes : row * p.row_bytes;
      rows.weights[l] = in_rows + mma::depth(lane) * spread();
      wave::in_lanes(rows.weights[l]);
    }
#pragma unroll
    for (int i = 0; i < kScalesB; ++i) {
      const int row = row_of(tile, kMx ? mma::row(lane, i) : mma::value_row(kBlock ? 0 : lane, kBlock ? 2 * i : i));
      rows.scale_b[i] = (kBlock ? row / kScaleBlock : row) * p.scale_b_row + mx_block();
    }
    return rows;
  }

  DEVICE ItemTile item_tile(const Item& item, const TileRows& rows) const {
    ItemTile item_tile;
    const u8* weights = p.weights + item.expert * p.expert_bytes;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) item_tile.weights[l] = mem::cursor(weights, rows.weights[l]);
    item_tile.scales_b = mem::buffer(p.scale_b + item.expert * p.expert_scales);
#pragma unroll
    for (int i = 0; i < kScalesB; ++i) item_tile.scale_b[i] = rows.scale_b[i];
    // In LDS, lanes without a token read the item's last one. Their results are not used.
    const u32 last = item.end - 1;
    auto offset = [&](int token, int row_bytes, int in_row) {
      const u32 place = item.first + token;
      u32 of_row = token_row(place < last ? place : last) * row_bytes;
      wave::in_lanes(of_row);  // A 64-bit multiply-add would read an undefined register, and wait for a load to it.
      return kInLds || place <= last ? int(of_row) + in_row : -1;
    };
    item_tile.token = offset(mma::tile_token(lane), p.token_bytes, mma::depth(lane));
#pragma unroll
    for (int i = 0; i < mma::kValueTokens; ++i)
      item_tile.scale_a[i] = offset(mma::value_token(lane, i), p.scale_a_row, mx_block());
    return item_tile;
  }

  // Loads the K slice from byte k on, weights first; zeros if not `more`.
  DEVICE void load(KSlice& k_slice, const ItemTile& item_tile, int k, bool more) const {
    const int bytes = more ? p.k - k - mma::depth(lane) : 0;
#pragma unroll
    for (int u = 0; u < kSliceSteps; ++u)
#pragma unroll
      for (int l = 0; l < mma::kLoads; ++l)
        mem::refill(k_slice.weights[u].load[l], item_tile.weights[l], (k + u * mma::kDepth) * spread(),
                    u * mma::kDepth < bytes);
    if constexpr (kScales != ScaleGranularity::kNone) {
      const int block = kMx ? k / kMxBlock : kBlock ? k / kScaleBlock * 4 : 0;
      const bool there = more && (kScales == ScaleGranularity::kRow || k + mx_block() * kMxBlock < p.k);
#pragma unroll
      for (int i = 0; i < kScalesB; ++i)
        k_slice.scale_b[i] =
            ScaleRegister<kScales>::load_or_zero(item_tile.scales_b, item_tile.scale_b[i], block, there);
      const mem::Buffer scales = mem::buffer(p.scale_a);
#pragma unroll
      for (int i = 0; i < mma::kValueTokens; ++i) {
        if constexpr (kScalesInLds) k_slice.scale_a_at[i] = item_tile.scale_a[i] + block;
        else
          k_slice.scale_a[i] = ScaleRegister<kScales>::load_or_zero(scales, item_tile.scale_a[i], block,
                                                                    there && item_tile.scale_a[i] >= 0);
      }
    }
    if constexpr (kInLds) k_slice.tokens_at = item_tile.token + k;
    else
#pragma unroll
      for (int u = 0; u < kSliceSteps; ++u)
        k_slice.tokens[u] = mem::load_or_zero(mem::buffer(p.tokens), item_tile.token + u * mma::kDepth, k,
                                              u * mma::kDepth < bytes && item_tile.token >= 0);
  }

  // Reads the tokens of a loaded K slice from LDS.
  DEVICE void read_tokens(KSlice& k_slice) const {
#pragma unroll
    for (int u = 0; u < kSliceSteps; ++u)
      k_slice.tokens[u] = *(const u32x4*)(lds_rows + k_slice.tokens_at + u * mma::kDepth);
    if constexpr (kScalesInLds) {
#pragma unroll
      for (int i = 0; i < mma::kValueTokens; ++i)
        k_slice.scale_a[i] = *(const Loaded*)(lds_scales + k_slice.scale_a_at[i]);
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

  // Multiplies all K slices of `walk`, and calls end(walk, sum, last K slice) at the end of each tile. `first` and `rows`
  // are the first tile's. Calls ready(), after which the lists are in LDS, and then begin(), with loads in flight.
  template <class Walk, class Ready, class Begin, class End>
  DEVICE void multiply_all(Walk walk, const Item& first, const TileRows& rows, Ready ready, Begin begin,
                           End end) const {
    if (!walk.more()) {
      ready();
      return begin();
    }
    Walk prefetch = walk;
    ItemTile prefetch_tile = item_tile(first, rows);
    KSlice stages[kStages];
    auto load_this = [&](KSlice& k_slice) __attribute__((always_inline)) {
      load(k_slice, prefetch_tile, prefetch.k(), prefetch.more());
    };
    auto advance = [&]() __attribute__((always_inline)) {
      if (prefetch.next() && prefetch.more())
        prefetch_tile = item_tile(Item(lists, prefetch.item()), tile_rows(prefetch.tile()));
    };
    load_this(stages[0]);
    ready();
    advance();
    auto load_next = [&](KSlice& k_slice) __attribute__((always_inline)) {
      load_this(k_slice);
      advance();
    };
#pragma unroll
    for (int i = 1; i < kStages - 1; ++i) load_next(stages[i]);
    begin();
    f32x4 sum = {};
    auto multiply_next = [&](KSlice& k_slice) __attribute__((always_inline)) {
      if constexpr (kInLds) read_tokens(k_slice);
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

template <class T, ScaleGranularity kScales>
DEVICE void gate_up(const Experts& p) {
  using S = ExpertMainLoop<T, kScales, true, mma::kStages>;
  // Double-buffered: a slow wave may still read the previous tile's sums.
  LDS static float sums[2][mma::kWaves][4][wave::kLanes];
  mem::wait_for_scalars(p.weights, p.expert_bytes, p.tokens, p.scale_b, p.expert_scales);  // before ids are there
  const PairLists lists(dynamic_lds, p.pairs);
  const TokenRouting first_token(p);  // in flight while rows are computed
  const S main_loop{p, lists, nullptr, nullptr};
  const TileWalk of_block{p, 0, wave::block_id_x()};
  const typename S::TileRows rows = main_loop.tile_rows(of_block.tile());
  const Grouped grouped = group_pairs(p, lists, first_token, of_block.item());
  auto ready = [&]() __attribute__((always_inline)) {
    block_barrier();  // hazard: lists are read before they are sorted
    if (wave::block_id_x() != 0 || wave::index() != mma::kWaves - 1) return;
#pragma unroll 1
    for (int i = wave::lane(); i < lists.kept_vectors(); i += wave::kLanes)
      mem::store(p.lists + i, ((const u32x4*)dynamic_lds)[i]);
    if (p.num_rows && wave::lane() == 0) mem::store<int>(p.num_rows, lists.items[grouped.items] & 0xffff);
  };
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
    if (walk.is_last()) wave::may_end();  // without the loads past the end
  };
  main_loop.multiply_all(
      TileWalk{p, grouped.items * p.work_per_item, wave::block_id_x()}, grouped.first, rows, ready, [] {}, end_tile);
}

// Act is the type of act if the block quantizes it, else void.
template <class T, ScaleGranularity kScales, class Act = void>
DEVICE void down(const Experts& p) {
  constexpr bool kQuantizes = !__is_same(Act, void);
  // On AMD, registers that tokens in LDS leave free hold another stage.
  constexpr int kStages = kQuantizes && !mem::kPredicates ? mma::kStages : mma::kStages - 1;
  using S = ExpertMainLoop<T, kScales, false, kStages, kQuantizes>;
  const int of_wave = p.m * mma::kRows;
  u8* behind = dynamic_lds + mma::kWaves * of_wave * 4;
  const PairLists lists(behind, p.pairs);
  // The first item is loaded by itself, so that its weights do not wait for the lists to be in LDS.
  const UnitWalk of_wave_units{p, 0, wave::block_id_y() * mma::kWaves + wave::index()};
  const int index = of_wave_units.item() < p.pairs ? of_wave_units.item() : 0;
  const PairLists stored((u8*)p.lists, p.pairs);
  const int count = mem::load<int>(stored.count);
  const u32 item = mem::load<u32>(stored.items + index), next = mem::load<u32>(stored.items + index + 1);
  const int vectors = lists.kept_vectors();
  const u32x4 first_vector = mem::load_vector_or_zero(p.lists, wave::thread_id(), wave::thread_id() < vectors);
  QuantizedRows<Act, kScales> quantized(p, behind + vectors * 16);
  if constexpr (kQuantizes) quantized.load();
  const S main_loop{p, lists, quantized.rows, quantized.scales};
  const typename S::TileRows rows = main_loop.tile_rows(wave::block_id_x());
  float* sums = (float*)dynamic_lds;  // [waves, tokens, rows]
  float* wave_sums = sums + wave::index() * of_wave;
  auto ready = [&]() __attribute__((always_inline)) {
    for (int i = wave::lane(); i < of_wave; i += wave::kLanes) wave_sums[i] = 0.0f;
    if (wave::thread_id() < vectors) ((u32x4*)behind)[wave::thread_id()] = first_vector;
#pragma unroll 1
    for (int i = wave::thread_id() + kThreads; i < vectors; i += kThreads)
      ((u32x4*)behind)[i] = mem::load<u32x4>(p.lists + i);
    block_barrier();  // hazard: lists are read before they are copied
  };
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
  const int units = wave::uniform(count) * p.work_per_item;
  main_loop.multiply_all(
      UnitWalk{p, units, of_wave_units.unit}, Item(item, next), rows, ready,
      [&]() __attribute__((always_inline)) { quantized.finish(); }, end_unit);
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
#define QUANTIZING(kind, scales)                                                                               \
  KERNEL((kThreads), 4) fused_experts_down_quant_##kind##_bf16(Experts experts) { down<E4m3, scales, Bf16>(experts); } \
  KERNEL((kThreads), 4) fused_experts_down_quant_##kind##_fp16(Experts experts) { down<E4m3, scales, F16>(experts); }

INSTANCES(block, E4m3, ScaleGranularity::kBlock)
INSTANCES(row,   E4m3, ScaleGranularity::kRow)
INSTANCES(bf16,  Bf16, ScaleGranularity::kNone)
INSTANCES(fp16,  F16,  ScaleGranularity::kNone)
QUANTIZING(block,  ScaleGranularity::kBlock)
QUANTIZING(static, ScaleGranularity::kRow)
#ifdef HAS_BLOCK_SCALED_MMA
INSTANCES(mx,    E4m3, ScaleGranularity::kMx)
QUANTIZING(mx,     ScaleGranularity::kMx)
#endif
// clang-format on
