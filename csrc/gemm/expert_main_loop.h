// The main loop of ops/fused_experts.hip, which defines the terms: a wave loads K slices to registers and multiplies them.
#pragma once
#include "gemm/expert_operands.h"
#include "gemm/quantized_rows.h"
#include "gemm/swiglu.h"

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

// A wave's main loop. With kInLds it reads QuantizedRows; with kBiased each K slice has the rows' biases, for its tile's end.
template <class T, ScaleGranularity kScales, bool kGated, int kStages, bool kInLds = false, bool kBiased = false>
struct ExpertMainLoop {
  static constexpr int kTileOut = kGated ? mma::kRows / 2 : mma::kRows;
  static constexpr bool kBlock = kScales == ScaleGranularity::kBlock, kMx = kScales == ScaleGranularity::kMx;
  static constexpr bool kScalesInLds = kInLds && kScales != ScaleGranularity::kRow;
  using Operands = ExpertOperands<T>;
  static constexpr bool kPacked = Operands::kPacked;
  static constexpr int kTokenVecs = Operands::kTokenVecs, kValueTokens = Operands::kValueTokens;
  static constexpr int kScalesB = kPacked ? Operands::kValueRows : kMx ? 1 : kBlock ? kGated ? 2 : 1 : 4;
  static constexpr int kBiases = kGated ? 2 : 4 / kValueTokens;  // gated: one gate row and its up row

  using Loaded = typename ScaleRegister<kScales>::Loaded;

  struct KSlice {
    typename Operands::Weights weights = {};
    u32x4 tokens[kTokenVecs];
    typename Operands::Scales scales;  // with kPacked
    Loaded scale_a[kValueTokens], scale_b[kScalesB];
    int tokens_at, scale_a_at[kValueTokens];  // in LDS, with kInLds: byte offsets
    u32 biases[kBiases];                      // with kBiased: 16 bits each
  };
  struct TileRows {  // byte offsets of a tile's rows in an expert's weights and scales
    int weights[mma::kLoads], scale_b[kScalesB], biases[kBiases];
  };
  struct ItemTile {  // one tile of one item
    mem::Cursor weights[mma::kLoads];
    mem::Buffer scales_b, biases;
    int scale_b[kScalesB], bias[kBiases];  // bytes
    int token;                             // byte offset of the lane's token; -1 for none
    int scale_a[kValueTokens];             // byte offsets; -1 for none
  };

  const Experts& p;
  const PairLists& lists;
  const u8 *lds_rows, *lds_scales;  // with kInLds
  const SwiGlu swiglu = {};         // with kBiased
  const int lane = wave::lane();

  DEVICE int row_of(int tile, int row) const {  // in the weight
    if (kGated && kBiased) row = swiglu.row(tile * kTileOut + mma::half_row(row), mma::half(row), p.n);
    else if (kGated) row = mma::half(row) * (p.n / 2) + tile * kTileOut + mma::half_row(row);
    else row += tile * kTileOut;
    return row < p.n ? row : p.n - 1;
  }
  // Byte stride per byte of K, in steps of 16.
  DEVICE int spread() const { return mem::kExpertFragments && !kPacked ? p.spread : 1; }

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

  // Where the lane's bytes of a token begin in a slice.
  DEVICE int token_depth() const {
    if constexpr (kPacked) return 2 * Operands::depth(lane, 0);
    else return mma::depth(lane);
  }
  // The same of a weight's row.
  DEVICE int weight_depth() const {
    if constexpr (kPacked) return Operands::weight_bytes(lane);
    else return mma::depth(lane) * spread();
  }

  DEVICE TileRows tile_rows(int tile) const {
    TileRows rows;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      const int row = row_of(tile, mma::row(lane, l));
      const int in_rows =
          mem::kExpertFragments ? row / mma::kRows * p.tile_bytes + row % mma::kRows * p.row_bytes : row * p.row_bytes;
      rows.weights[l] = in_rows + weight_depth();
      wave::in_lanes(rows.weights[l]);
    }
#pragma unroll
    for (int i = 0; i < kScalesB; ++i) {
      const int value = kPacked || kBlock ? 2 * i : i;
      const int row = row_of(tile, kMx ? mma::row(lane, i) : Operands::value_row(kBlock ? 0 : lane, value));
      rows.scale_b[i] = (kBlock ? row / kScaleBlock : row) * p.scale_b_row + mx_block();
    }
    if constexpr (kBiased) {
#pragma unroll
      for (int i = 0; i < kBiases; ++i) {
        const int row =
            kGated ? mma::value_row(lane, wave::index() % 2 + 2 * i) : Operands::value_row(lane, i * kValueTokens);
        rows.biases[i] = row_of(tile, row) * 2;
      }
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
    if constexpr (kBiased) {
      item_tile.biases = mem::buffer((const u16*)swiglu.bias + i64(item.expert) * p.n);
#pragma unroll
      for (int i = 0; i < kBiases; ++i) item_tile.bias[i] = rows.biases[i];
    }
    // In LDS, lanes without a token read the item's last one. Their results are not used.
    const u32 last = item.end - 1;
    auto offset = [&](int token, int row_bytes, int in_row) {
      const u32 place = item.first + token;
      u32 of_row = token_row(place < last ? place : last) * row_bytes;
      wave::in_lanes(of_row);  // A 64-bit multiply-add would read an undefined register, and wait for a load to it.
      return kInLds || place <= last ? int(of_row) + in_row : -1;
    };
    item_tile.token = offset(mma::tile_token(lane), p.token_bytes, token_depth());
    if constexpr (kPacked) return item_tile;
#pragma unroll
    for (int i = 0; i < kValueTokens; ++i)
      item_tile.scale_a[i] = offset(Operands::value_token(lane, i), p.scale_a_row, mx_block());
    return item_tile;
  }

  // Loads the K slice from byte k on, weights first; zeros if not `more`.
  DEVICE void load(KSlice& k_slice, const ItemTile& item_tile, int k, bool more) const {
    const int bytes = more ? p.k - k - mma::depth(lane) : 0, left = more ? p.k - k : 0;  // left: with kPacked
    if constexpr (kPacked) {
      Operands::refill(k_slice.weights, item_tile.weights, lane, k, left);
#pragma unroll
      for (int i = 0; i < Operands::kValueRows; ++i)
#pragma unroll
        for (int g = 0; g < Operands::kGroups; ++g) {
          // Past the last group, where products are zero, its scale: that is a multiplication by no other row's NaN.
          const int group = k / T::kGroup + Operands::group(lane, g), last = p.k / T::kGroup - 1;
          k_slice.scales[i][g] = T::Scale::load_or_zero(item_tile.scales_b, item_tile.scale_b[i],
                                                        (group < last ? group : last) * T::Scale::kBytes, true);
        }
    } else {
#pragma unroll
      for (int u = 0; u < kSliceSteps; ++u)
#pragma unroll
        for (int l = 0; l < mma::kLoads; ++l)
          mem::refill(k_slice.weights[u].load[l], item_tile.weights[l], (k + u * mma::kDepth) * spread(),
                      u * mma::kDepth < bytes);
    }
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
    if constexpr (kBiased) {
      const bool is_added = more && swiglu.bias && (kGated ? ends_tile(k) : is_first_unit(k));
#pragma unroll
      for (int i = 0; i < kBiases; ++i)
        k_slice.biases[i] = mem::load_short_or_zero(item_tile.biases, item_tile.bias[i], 0, is_added);
    }
    if constexpr (kInLds) k_slice.tokens_at = item_tile.token + k;
    else if constexpr (kPacked) {
#pragma unroll
      for (int v = 0; v < kTokenVecs; ++v) {
        const bool inside = Operands::depth(lane, v) < left && item_tile.token >= 0;
        k_slice.tokens[v] =
            packed::load_vec<Operands::kOfGroups>(mem::buffer(p.tokens), item_tile.token, v, 2 * k, inside);
      }
    } else
#pragma unroll
      for (int u = 0; u < kSliceSteps; ++u)
        k_slice.tokens[u] = mem::load_or_zero(mem::buffer(p.tokens), item_tile.token + u * mma::kDepth, k,
                                              u * mma::kDepth < bytes && item_tile.token >= 0);
  }

  // True if the wave's K slice from byte k on is its tile's last.
  DEVICE bool ends_tile(int k) const { return k + (mma::kWaves - wave::index()) * kSliceBytes >= p.k; }
  // True if a K slice is in its item's first unit: the one that adds the bias.
  DEVICE bool is_first_unit(int k) const { return k < p.step * kSliceBytes; }

  // Bias i of a tile, given its last K slice.
  DEVICE float bias(const KSlice& last, int i) const { return widened(last.biases[i], p.out_type); }

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
    if constexpr (kPacked) return Operands::multiply(sum, k_slice.weights, k_slice.tokens, k_slice.scales);
    else return multiply_elements(sum, k_slice);
  }
  DEVICE f32x4 multiply_elements(f32x4 sum, const KSlice& k_slice) const {
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
    float value = sum[i];
    if constexpr (kPacked) value *= 1.0f / Operands::unit();
    if constexpr (kScales == ScaleGranularity::kRow) value *= last.scale_a[i % mma::kValueTokens] * last.scale_b[i];
    if constexpr (kBiased && !kGated) value += bias(last, i / kValueTokens);
    return value;
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
