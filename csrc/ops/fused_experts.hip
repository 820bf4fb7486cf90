// The experts of a mixture-of-experts layer for few tokens: weights are streamed from HBM once, as in gemm/skinny.h.
//
//     gate_up:  act[pair] = silu(gate) * up,  gate, up = w1[expert of pair] @ hidden[token of pair]
//     down:     out[token] = sum over the token's pairs of weight * (w2[expert of pair] @ act[pair])
//
// A pair is a token and an expert that it goes to. Bytes: the weights of the experts hit, little else.
//
// Nothing is sorted ahead: every block of gate_up groups the pairs by expert in LDS for itself (gemm/group_pairs.h), which
// takes less time than a launch, and one of them leaves the order for down. An item is an expert with up to kTileTokens of its
// tokens; experts without tokens are no item and cost nothing. A tile is 16 rows of weights: the waves of a block take its K in
// groups of 128 bytes in turns, each lane with weights and tokens in registers, kStages groups in flight. gate_up: a tile has 8
// gate rows and the 8 up rows that belong to them, so that a lane ends with both; blocks take the tiles of all items in turn,
// and the waves meet in LDS at the end of each. down: a block keeps its tile of the output and goes through all items, each
// wave with sums of its own in LDS, which it adds to in the order of the items. Where tiles are too few to fill the chip,
// several blocks share the items of each, and fused_experts_sum adds up what they leave. No block waits for another, nothing is
// added atomically, and the bits are the same every run.
//
// Tokens are quantised by a launch ahead. That blocks quantise them for themselves, on their way to the matrix instruction or,
// few of them, into LDS, saves the launch and was slower even for one token, measured on H200: 31.9 and 31.0 against 29.2 us.
#include "device/scale.h"
#include "device/vec.h"
#include "gemm/group_pairs.h"

struct Experts {
  const u8* tokens;   // [rows, K]; gate_up: hidden, a row per token; down: act, a row per pair, in their order
  const u8* weights;  // [E, N, K]
  void* out;          // gate_up: [pairs, N / 2]; down: [tokens, N]; of out_type
  const u8* scale_a;  // block: [rows, ceil(K / 128)]; row: [rows] or [1]; mx: [rows, K / 32]
  const u8* scale_b;  // block: [E, ceil(N / 128), ceil(K / 128)]; row: [E, N] or [E]; mx: [E, N, K / 32]; of E experts
  const u32* ids;     // [tokens, topk], id_words words each
  const float* router;              // [tokens, topk]: the weights of the pairs
  u32x4* lists;                     // [stays() of Lists]: gate_up writes them, down reads them
  int* present;                     // gate_up: [1], becomes the number of act's rows; or null
  const int* expert_map;            // [mapped], or null
  i64 expert_bytes, expert_scales;  // from an expert to the next: bytes of weights and of scale_b
  int token_bytes, row_bytes;       // from row to row
  int m, n, k, pairs;               // tokens, rows of an expert's weight, bytes of K; pairs of tokens and slots
  int scale_a_row, scale_b_row;     // bytes between scales
  int topk, shared, routed, mapped, id_words;
  int per_slot;  // 2^20 / slots, rounded up
  int out_type;  // 0 bf16, 1 fp16
  int weigh;     // whether results are multiplied by the weight of their pair
  int step;      // gate_up: blocks; down: groups of K that a wave takes at a time, a unit
  int parts;     // down: blocks that share the units of a tile; with more than one, out is fp32 [parts, tokens, N]
  int per_item;  // gate_up: tiles of an item; down: units
  u32 per_item_inverse;
};

constexpr int kSteps = 2, kGroup = kSteps * mma::kDepth, kMxBlock = 32, kSumThreads = 256;
static_assert(kGroup == kScaleBlock);
extern LDS __attribute__((aligned(1024))) u8 dynamic_lds[];

// A scale in a lane's registers.
template <ScaleGranularity>
struct Factor : Fp32Scale {};
#ifdef HAS_BLOCK_SCALED_MMA
template <>
struct Factor<ScaleGranularity::kMx> {
  using Loaded = u8;
  DEVICE static u8 load_or_zero(mem::Buffer from, int lane_offset, int offset, bool inside) {
    return mx::load_scale_or_zero(from, lane_offset, offset, inside);
  }
};
#endif

// What a lane has in registers of a group of K, and how it gets there.
template <class T, ScaleGranularity kScales, bool kPaired, int kStages>
struct Stream {
  static constexpr int kTileOut = kPaired ? mma::kRows / 2 : mma::kRows;
  static constexpr bool kBlock = kScales == ScaleGranularity::kBlock, kMx = kScales == ScaleGranularity::kMx;
  static constexpr int kScalesB = kMx ? 1 : kBlock ? kPaired ? 2 : 1 : 4;

  struct Group {
    mma::Weights weights[kSteps] = {};
    u32x4 tokens[kSteps];
    typename Factor<kScales>::Loaded scale_a[mma::kValueTokens], scale_b[kScalesB];
  };
  struct Run {  // an item's tile
    mem::Cursor weights[mma::kLoads];
    mem::Buffer scales_b;
    int scale_b[kScalesB];           // bytes
    int token;                       // bytes to the lane's token; -1 for none
    int scale_a[mma::kValueTokens];  // bytes; -1 for none
  };

  const Experts& p;
  const Lists& lists;
  const int lane = wave::lane();

  DEVICE int row_of(int tile, int row) const {  // of the weight
    if (kPaired) row = mma::half(row) * (p.n / 2) + tile * kTileOut + mma::half_row(row);
    else row += tile * kTileOut;
    return row < p.n ? row : p.n - 1;
  }
  // The block of 32 of a group whose scale this lane has.
  DEVICE int mx_block() const { return kMx ? mma::depth(lane) / 16 : 0; }
  // The row of tokens and of scale_a that belongs to a place in the order of the pairs.
  DEVICE int token_row(int place) const { return kPaired ? lists.pairs[place] * p.per_slot >> 20 : place; }

  DEVICE Run run(int index, int tile) const {
    Run run;
    const Item item(lists, index);
    const u8* weights = p.weights + item.expert * p.expert_bytes;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l)
      run.weights[l] = mem::cursor(weights, row_of(tile, mma::row(lane, l)) * p.row_bytes + mma::depth(lane));
    run.scales_b = mem::buffer(p.scale_b + item.expert * p.expert_scales);
#pragma unroll
    for (int i = 0; i < kScalesB; ++i) {
      const int row = row_of(tile, kMx ? mma::row(lane, i) : mma::value_row(kBlock ? 0 : lane, kBlock ? 2 * i : i));
      run.scale_b[i] = (kBlock ? row / kScaleBlock : row) * p.scale_b_row + mx_block();
    }
    const int place = item.first + mma::tile_token(lane);
    run.token = place < item.end ? token_row(place) * p.token_bytes + mma::depth(lane) : -1;
#pragma unroll
    for (int i = 0; i < mma::kValueTokens; ++i) {
      const int of_value = item.first + mma::value_token(lane, i);
      run.scale_a[i] = of_value < item.end ? token_row(of_value) * p.scale_a_row + mx_block() : -1;
    }
    return run;
  }

  // From byte k of K on.
  DEVICE void load(Group& group, const Run& run, int k, bool more) const {
    const int bytes = more ? p.k - k - mma::depth(lane) : 0;
    const mem::Buffer tokens = mem::buffer(p.tokens);
    if constexpr (kScales != ScaleGranularity::kNone) {
      const int block = kMx ? k / kMxBlock : kBlock ? k / kScaleBlock * 4 : 0;
      const bool there = more && (kScales == ScaleGranularity::kRow || k + mx_block() * kMxBlock < p.k);
#pragma unroll
      for (int i = 0; i < kScalesB; ++i)
        group.scale_b[i] = Factor<kScales>::load_or_zero(run.scales_b, run.scale_b[i], block, there);
      const mem::Buffer scales = mem::buffer(p.scale_a);
#pragma unroll
      for (int i = 0; i < mma::kValueTokens; ++i)
        group.scale_a[i] = Factor<kScales>::load_or_zero(scales, run.scale_a[i], block, there && run.scale_a[i] >= 0);
    }
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const bool inside = u * mma::kDepth < bytes;
#pragma unroll
      for (int l = 0; l < mma::kLoads; ++l)
        mem::refill(group.weights[u].load[l], run.weights[l], k + u * mma::kDepth, inside);
      group.tokens[u] = mem::load_or_zero(tokens, run.token + u * mma::kDepth, k, inside && run.token >= 0);
    }
  }

  DEVICE f32x4 multiply(f32x4 sum, const Group& group) const {
#ifdef HAS_BLOCK_SCALED_MMA
    if constexpr (kMx) {
      static_assert(kSteps == 2 && mma::kLoads == 1);
      const u32x4 low = group.weights[0].load[0], high = group.weights[1].load[0];
      return mx::multiply_add<0>(sum, low, high, group.scale_b[0], group.tokens[0], group.tokens[1], group.scale_a[0]);
    }
#endif
    f32x4 part = kBlock ? f32x4{} : sum;
#pragma unroll
    for (int u = 0; u < kSteps; ++u) part = mma::multiply_tile<T>(part, group.weights[u], group.tokens[u]);
    if (!kBlock) return part;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sum[i] += part[i] * (group.scale_a[i % mma::kValueTokens] * group.scale_b[kPaired ? i / 2 : 0]);
    return sum;
  }

  // At the end of a run, with its last group.
  DEVICE float result(const f32x4& sum, const Group& last, int i) const {
    if constexpr (kScales != ScaleGranularity::kRow) return sum[i];
    else return sum[i] * (last.scale_a[i % mma::kValueTokens] * last.scale_b[i]);
  }

  // Goes through all groups that `walk` gives, and calls end(walk, sum, last group) with the last of each run.
  template <class Walk, class End>
  DEVICE void go(Walk walk, End end) const {
    if (!walk.more()) return;
    Walk ahead = walk;
    Run reading = {};
    Group stages[kStages];
    auto load_next = [&](Group& group) __attribute__((always_inline)) {
      load(group, reading, ahead.k(), ahead.more());
      if (ahead.next() && ahead.more()) reading = run(ahead.item(), ahead.tile());
    };
    reading = run(ahead.item(), ahead.tile());
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load_next(stages[i]);
    f32x4 sum = {};
    auto multiply_next = [&](Group& group) __attribute__((always_inline)) {
      sum = multiply(sum, group);
      const Walk done = walk;
      if (walk.next()) {
        end(done, sum, group);
        sum = f32x4{};
      }
    };
    // Loads are in no branch, so that on every path as many are in flight; past the end they bring nothing.
    while (walk.more()) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        load_next(stages[(i + kStages - 1) % kStages]);
        if (walk.more()) multiply_next(stages[i]);
      }
    }
  }
};

// value / divisor, for values up to 2^31 / divisor, by the divisor's inverse: 2^31 / divisor + 1.
DEVICE int divide_by(u32 inverse, int value) { return int(i64(value) * inverse >> 31); }

// The tiles of a block, one after the other, and a wave's groups of each: as many as any wave has, with or without bytes.
struct TileWalk {
  const Experts& p;
  int tiles, work, group = 0;  // tiles of all items
  DEVICE bool more() const { return work < tiles; }
  DEVICE int item() const { return divide_by(p.per_item_inverse, work); }
  DEVICE int tile() const { return work - item() * p.per_item; }
  DEVICE int k() const { return (group * mma::kWaves + wave::index()) * kGroup; }
  DEVICE bool next() {  // true if that begins a run
    if (++group * mma::kWaves * kGroup < p.k) return false;
    group = 0, work += p.step;
    return true;
  }
};

template <class T, ScaleGranularity kScales>
DEVICE void gate_up(const Experts& p) {
  using S = Stream<T, kScales, true, mma::kStages>;
  // Of this tile, and of the last, which a slow wave may still read.
  LDS static float sums[2][mma::kWaves][4][wave::kLanes];
  const Lists lists(dynamic_lds, p.pairs);
  const int items = group_pairs(p, lists);
  if (wave::block_x() == 0) {
#pragma unroll 1
    for (int i = wave::thread(); i < lists.stays(); i += kThreads)
      mem::store(p.lists + i, ((const u32x4*)dynamic_lds)[i]);
    if (p.present && wave::thread() == 0) mem::store<int>(p.present, lists.items[items] & 0xffff);
  }
  const S stream{p, lists};
  int parity = 0;
  auto end_tile = [&](const TileWalk& walk, const f32x4& sum,
                      const typename S::Group& last) __attribute__((always_inline)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[parity][wave::index()][i][stream.lane] = stream.result(sum, last, i);
    block_barrier();  // hazard: the waves' sums are read before they are written
    // Each of the first two waves has one gate value and the up value of a lane.
    const int i = wave::index();
    const Item item(lists, walk.item());
    const int place = item.first + mma::value_token(stream.lane, i);
    if (i < 2 && place < item.end) {
      float gate = 0.0f, up = 0.0f;
#pragma unroll
      for (int w = 0; w < mma::kWaves; ++w) {
        gate += sums[parity][w][i][stream.lane];
        up += sums[parity][w][i + 2][stream.lane];
      }
      const float weight = p.weigh ? lists.router[lists.pairs[place]] : 1.0f;
      const int column = walk.tile() * S::kTileOut + mma::half_row(mma::value_row(stream.lane, i));
      store_output(p.out, i64(place) * (p.n / 2) + column, silu(gate * weight) * (up * weight), p.out_type);
    }
    parity ^= 1;
  };
  stream.go(TileWalk{p, items * p.per_item, wave::block_x()}, end_tile);
}

// The units of a wave: of all items, each wave of all blocks of a tile takes them in turns.
struct UnitWalk {
  const Experts& p;
  int units, unit, group = 0;  // units of all items
  DEVICE bool more() const { return unit < units; }
  DEVICE int item() const { return divide_by(p.per_item_inverse, unit); }
  DEVICE int tile() const { return wave::block_x(); }
  DEVICE int k() const { return ((unit - item() * p.per_item) * p.step + group) * kGroup; }
  DEVICE bool next() {  // true if that begins a run
    if (++group < p.step && k() < p.k) return false;
    group = 0, unit += mma::kWaves * p.parts;
    return true;
  }
};

template <class T, ScaleGranularity kScales>
DEVICE void down(const Experts& p) {
  using S = Stream<T, kScales, false, mma::kStages - 1>;
  const int of_wave = p.m * mma::kRows;
  u8* behind = dynamic_lds + mma::kWaves * of_wave * 4;
  const Lists lists(behind, p.pairs);
#pragma unroll 1
  for (int i = wave::thread(); i < lists.stays(); i += kThreads) ((u32x4*)behind)[i] = mem::load<u32x4>(p.lists + i);
  float* sums = (float*)dynamic_lds;  // [waves, tokens, rows]
  float* mine = sums + wave::index() * of_wave;
  for (int i = wave::lane(); i < of_wave; i += wave::kLanes) mine[i] = 0.0f;
  block_barrier();  // hazard: lists are read before they are written
  const int items = wave::uniform(*lists.count);
  const S stream{p, lists};
  auto end_unit = [&](const UnitWalk& walk, const f32x4& sum, const typename S::Group& last)
                      __attribute__((always_inline)) {
                        const Item item(lists, walk.item());
#pragma unroll
                        for (int v = 0; v < mma::kValueTokens; ++v) {
                          const int place = item.first + mma::value_token(stream.lane, v);
                          if (place >= item.end) continue;
                          const int pair = lists.pairs[place];
                          const float weight = p.weigh ? lists.router[pair] : 1.0f;
                          float* of_token = mine + (pair * p.per_slot >> 20) * mma::kRows;
#pragma unroll
                          for (int i = v; i < 4; i += mma::kValueTokens)
                            of_token[mma::value_row(stream.lane, i)] += weight * stream.result(sum, last, i);
                        }
                      };
  stream.go(UnitWalk{p, items * p.per_item, wave::block_y() * mma::kWaves + wave::index()}, end_unit);
  block_barrier();  // hazard: the waves' sums are read before they are written
  for (int i = wave::thread(); i < of_wave; i += kThreads) {
    const int token = i / mma::kRows, row = wave::block_x() * mma::kRows + i % mma::kRows;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < mma::kWaves; ++w) total += sums[w * of_wave + i];
    if (row >= p.n) continue;
    if (p.parts == 1) store_output(p.out, i64(token) * p.n + row, total, p.out_type);
    else mem::store((float*)p.out + (i64(wave::block_y()) * p.m + token) * p.n + row, total);
  }
}

struct Sum {
  const float* parts;  // [count, elements]
  u16* out;            // [elements]
  int count, elements;
};

// out = the sum of the parts, in their order. Elements are a multiple of kChunk, of which a thread has one.
template <class T>
DEVICE void sum_parts(const Sum& p) {
  const int at = (wave::block_x() * kSumThreads + wave::thread()) * kChunk;
  if (at >= p.elements) return;
  const mem::Buffer parts = mem::buffer(p.parts);
  f32x4 low = {}, high = {};
#pragma unroll 4
  for (int i = 0; i < p.count; ++i) {
    const int part = i * p.elements * 4;
    low += __builtin_bit_cast(f32x4, mem::load_or_zero(parts, at * 4, part, true));
    high += __builtin_bit_cast(f32x4, mem::load_or_zero(parts, at * 4 + 16, part, true));
  }
  mem::store(p.out + at, pack<T>(Chunk{{low.lo, low.hi, high.lo, high.hi}}));
}

// clang-format off
#define INSTANCES(kind, ...)                                                                                   \
  KERNEL((kThreads), 3) fused_experts_gate_up_##kind(Experts experts) { gate_up<__VA_ARGS__>(experts); }       \
  KERNEL((kThreads), 4) fused_experts_down_##kind(Experts experts) { down<__VA_ARGS__>(experts); }

INSTANCES(block, E4m3, ScaleGranularity::kBlock)
INSTANCES(row,   E4m3, ScaleGranularity::kRow)
INSTANCES(bf16,  Bf16, ScaleGranularity::kNone)
INSTANCES(fp16,  F16,  ScaleGranularity::kNone)
KERNEL(kSumThreads) fused_experts_sum_bf16(Sum sum) { sum_parts<Bf16>(sum); }
KERNEL(kSumThreads) fused_experts_sum_fp16(Sum sum) { sum_parts<F16>(sum); }
#ifdef HAS_BLOCK_SCALED_MMA
INSTANCES(mx,    E4m3, ScaleGranularity::kMx)
#endif
// clang-format on
