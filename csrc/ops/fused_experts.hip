// The experts of a mixture-of-experts layer for few tokens: weights are streamed from HBM once, as in device/skinny.h.
//
//     gate_up:  act[pair] = silu(gate) * up,  gate, up = w1[expert of pair] @ hidden[token of pair]
//     down:     out[token] = sum over the token's pairs of weight * (w2[expert of pair] @ act[pair])
//
// A pair is a token and an expert that it goes to. Bytes: the weights of the experts hit, little else.
//
// Nothing is sorted ahead: every block groups the pairs by expert in LDS for itself, which takes less time than a launch.
// An item is an expert with up to kItem of its tokens; experts without tokens are no item and cost nothing. A tile is 16 rows
// of weights: the waves of a block take its K in groups of 128 bytes in turns, each lane with weights and tokens in
// registers, kRing groups in flight. gate_up: a tile has 8 gate rows and the 8 up rows that belong to them, so that a lane ends
// with both; blocks take the tiles of all items in turn, and the waves meet in LDS at the end of each. down: a
// block keeps its tile of the output and goes through all items, each wave with sums of its own in LDS, which it adds to in the
// order of the items; so no block waits for another, nothing is added atomically, and the bits are the same every run.
//
// Tokens that come as bf16 are quantised on their way to the matrix instruction, a group of 128 being just one step of a wave.
#include "device/float8.h"
#include "device/reduce.h"
#include "device/skinny.h"

struct Experts {
  const u8* tokens;       // [rows, K]; gate_up: hidden, a row per token; down: act, a row per pair, in their order
  const u8* weights;      // [experts, N, K]
  void* out;              // gate_up: [pairs, N / 2]; down: [tokens, N]; of out_type
  const float* scale_a;   // block: [rows, ceil(K / 128)]; row: [rows] or [1]
  const float* scale_b;   // block: [experts, ceil(N / 128), ceil(K / 128)]; row: [experts, N] or [experts]
  const u32* ids;         // [tokens, topk], id_words words each
  const float* router;    // [tokens, topk]: the weights of the pairs
  int* present;           // gate_up: [1], becomes the number of act's rows; or null
  const int* expert_map;  // [mapped], or null
  i64 expert_bytes, expert_scales;  // from an expert to the next: bytes of weights, elements of scale_b
  int token_bytes, row_bytes;       // from row to row
  int m, n, k;                      // tokens, rows of an expert's weight, bytes of K
  int scale_a_row, scale_b_row;     // elements between scales
  int topk, shared, routed, mapped, id_words;
  int per_slot;  // 2^20 / slots, rounded up
  int out_type;  // 0 bf16, 1 fp16
  int weigh;     // whether results are multiplied by the weight of their pair
  int step;      // gate_up: blocks; down: groups of K that a wave takes at a time
};

constexpr int kSteps = 2, kGroup = kSteps * mma::kDepth, kNone = 0x7fff, kFirst = 0x8000;
static_assert(kGroup == kScaleBlock);
extern LDS __attribute__((aligned(16))) u8 dynamic_lds[];

// The pairs in the order of their experts, in LDS.
struct Lists {
  u32* keys;      // [pairs]: expert << 16 | pair
  float* router;  // [pairs]
  u16* pairs;     // [pairs], sorted
  u16* experts;   // [pairs] of the sorted: expert, and kFirst where an item begins
  u16* firsts;    // [items + 1]: where items begin in `pairs`
  int* items;
  DEVICE Lists(u8* lds, int count) {
    const int padded = (count + 3) / 4 * 4;
    keys = (u32*)lds, router = (float*)(keys + padded), pairs = (u16*)(router + padded);
    experts = pairs + padded, firsts = experts + padded, items = (int*)(firsts + padded + 4);
  }
  DEVICE int expert(int item) const { return wave::uniform(experts[firsts[item]] & kNone); }
};

// Groups the pairs, in items of up to kItem tokens. Of pairs of one token with one expert the first has the weight of all.
template <int kItem>
DEVICE int group_pairs(const Experts& p, const Lists& lists) {
  constexpr int kThreads = mma::kWaves * wave::kLanes;
  const int slots = p.topk + p.shared, pairs = p.m * slots, padded = (pairs + 3) / 4 * 4;
  for (int pair = wave::thread(); pair < padded; pair += kThreads) {
    const int token = pair * p.per_slot >> 20, slot = pair - token * slots;
    int expert = pair < pairs ? p.routed + slot - p.topk : kNone;
    float weight = 1.0f;
    if (pair < pairs && slot < p.topk) {
      const int id = mem::load<int>(p.ids + (token * p.topk + slot) * p.id_words);
      weight = mem::load<float>(p.router + token * p.topk + slot);
      expert = p.expert_map ? kNone : id;
      if (p.expert_map && id >= 0 && id < p.mapped) expert = mem::load<int>(p.expert_map + id);
      if (expert < 0 || expert >= p.routed) expert = kNone;
      for (int other = 0; other < p.topk; ++other) {
        if (other == slot || mem::load<int>(p.ids + (token * p.topk + other) * p.id_words) != id) continue;
        if (other < slot) expert = kNone;
        else weight += mem::load<float>(p.router + token * p.topk + other);
      }
    }
    lists.keys[pair] = u32(expert) << 16 | pair;
    lists.router[pair] = weight;
  }
  block_barrier();  // hazard: keys are read before all are written
  for (int pair = wave::thread(); pair < pairs; pair += kThreads) {
    const u32 key = lists.keys[pair], first_key = key & 0xffff0000u;
    int before = 0, place = 0;  // pairs of lower experts; and those of this one that come first
    for (int other = 0; other < padded; other += 4) {
      const u32x4 keys = *(const u32x4*)(lists.keys + other);
#pragma unroll
      for (int i = 0; i < 4; ++i) before += keys[i] < first_key, place += keys[i] < key;
    }
    const int expert = key >> 16, rank = place - before;
    const bool first = expert == kNone ? rank == 0 : rank % kItem == 0;
    lists.pairs[place] = u16(pair);
    lists.experts[place] = u16(expert | (first ? kFirst : 0));
  }
  block_barrier();  // hazard: the order is read before it is written
  if (wave::index() == 0) {
    int items = 0;
    for (int base = 0; base < pairs; base += wave::kLanes) {
      const int place = base + wave::lane();
      const bool first = place < pairs && lists.experts[place] & kFirst;
      if (first) lists.firsts[items + wave::count_below(first)] = u16(place);
      items += wave::count(first);
    }
    const bool absent = pairs > 0 && (lists.experts[pairs - 1] & kNone) == kNone;  // those end the last item
    if (wave::lane() == 0) {
      if (!absent) lists.firsts[items] = u16(pairs);
      *lists.items = items - absent;
    }
  }
  block_barrier();  // hazard: items are read before they are written
  return wave::uniform(*lists.items);
}

// What a lane has in registers of a group of K, and how it gets there.
template <class T, Scales kScales, bool kQuantize, bool kPaired, int kTiles>
struct Stream {
  static constexpr int kItem = kTiles * mma::kTileTokens, kPlanes = kQuantize ? 2 : 1;
  static constexpr int kScalesB = kScales == Scales::kBlock ? kPaired ? 2 : 1 : 4;
  static constexpr bool kScaled = kScales != Scales::kNone;
  static constexpr int kTileOut = kPaired ? mma::kRows / 2 : mma::kRows;

  struct Group {
    mma::Weights weights[kSteps] = {};
    u32x4 tokens[kSteps][kTiles][kPlanes];
    float scale_a[kTiles][mma::kValueTokens], scale_b[kScalesB];
  };
  struct Run {  // an item's tile
    mem::Cursor weights[mma::kLoads];
    mem::Buffer scales_b;
    int token[kTiles];                       // bytes from p.tokens on; -1 for none
    int scale_a[kTiles][mma::kValueTokens];  // bytes; -1 for none
    int scale_b[kScalesB];
  };

  const Experts& p;
  const Lists& lists;
  const int lane = wave::lane();

  DEVICE int row_of(int tile, int row) const {  // of the weight
    if (!kPaired) return tile * mma::kRows + row;
    return mma::half(row) * (p.n / 2) + tile * kTileOut + mma::half_row(row);
  }
  // The row of tokens and of scale_a that belongs to a place in the order of the pairs.
  DEVICE int token_row(int place) const { return kPaired ? lists.pairs[place] * p.per_slot >> 20 : place; }

  DEVICE Run run(int item, int tile) const {
    Run run;
    const int expert = lists.expert(item), first = lists.firsts[item], end = lists.firsts[item + 1];
    const u8* weights = p.weights + expert * p.expert_bytes;
#pragma unroll
    for (int l = 0; l < mma::kLoads; ++l) {
      int row = row_of(tile, mma::row(lane, l));
      if (row >= p.n) row = p.n - 1;
      run.weights[l] = mem::cursor(weights, row * p.row_bytes + mma::depth(lane));
    }
    run.scales_b = mem::buffer(p.scale_b + expert * p.expert_scales);
#pragma unroll
    for (int i = 0; i < kScalesB; ++i) {
      int row =
          kScales == Scales::kBlock ? row_of(tile, mma::value_row(0, 2 * i)) : row_of(tile, mma::value_row(lane, i));
      if (row >= p.n) row = p.n - 1;
      run.scale_b[i] = (kScales == Scales::kBlock ? row / kScaleBlock : row) * p.scale_b_row * 4;
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int place = first + t * mma::kTileTokens + mma::tile_token(lane);
      run.token[t] = place < end ? token_row(place) * p.token_bytes + mma::depth(lane) * kPlanes : -1;
#pragma unroll
      for (int i = 0; i < mma::kValueTokens; ++i) {
        const int of_value = first + t * mma::kTileTokens + mma::value_token(lane, i);
        run.scale_a[t][i] = of_value < end ? token_row(of_value) * p.scale_a_row * 4 : -1;
      }
    }
    return run;
  }

  // From byte k of K on.
  DEVICE void load(Group& group, const Run& run, int k, bool more) const {
    const int bytes = more ? p.k - k - mma::depth(lane) : 0;
    const mem::Buffer tokens = mem::buffer(p.tokens);
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const bool inside = u * mma::kDepth < bytes;
#pragma unroll
      for (int l = 0; l < mma::kLoads; ++l)
        mem::refill(group.weights[u].load[l], run.weights[l], k + u * mma::kDepth, inside);
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int half = 0; half < kPlanes; ++half) {
          const int at = run.token[t] + u * mma::kDepth * kPlanes + half * 16;
          group.tokens[u][t][half] = mem::load_or_zero(tokens, at, k * kPlanes, inside && run.token[t] >= 0);
        }
    }
    if constexpr (kScaled) {
      const bool is_block = kScales == Scales::kBlock;
      const int block = is_block ? k / kScaleBlock : 0;
      const bool there = more && (!is_block || k < p.k);
#pragma unroll
      for (int i = 0; i < kScalesB; ++i)
        group.scale_b[i] = mem::load_float_or_zero(run.scales_b, run.scale_b[i], block * 4, there);
      if constexpr (!kQuantize) {
        const mem::Buffer scales = mem::buffer(p.scale_a);
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int i = 0; i < mma::kValueTokens; ++i)
            group.scale_a[t][i] =
                mem::load_float_or_zero(scales, run.scale_a[t][i], block * 4, there && run.scale_a[t][i] >= 0);
      }
    }
  }

  DEVICE void multiply(f32x4 (&sum)[kTiles], const Group& group) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      u32x4 tokens[kSteps];
      float scale = 1.0f;
      if constexpr (kQuantize) {
        Chunk x[kSteps][2];
        float bound = 0.0f;
#pragma unroll
        for (int u = 0; u < kSteps; ++u)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            x[u][half] = unpack<Bf16>(group.tokens[u][t][half]);
            bound = max_abs(bound, x[u][half]);
          }
        const Scale of(absmax_to_scale(mma::reduce_tile_token(bound, Max())));
        scale = of.value;
#pragma unroll
        for (int u = 0; u < kSteps; ++u) {
          const u32x2 low = quantize(x[u][0], of.inverse), high = quantize(x[u][1], of.inverse);
          tokens[u] = {low.x, low.y, high.x, high.y};
        }
      } else {
#pragma unroll
        for (int u = 0; u < kSteps; ++u) tokens[u] = group.tokens[u][t][0];
      }
      f32x4 part = {};
      if (kScales != Scales::kBlock) part = sum[t];
#pragma unroll
      for (int u = 0; u < kSteps; ++u) part = mma::multiply_tile<T>(part, group.weights[u], tokens[u]);
      if (kScales != Scales::kBlock) {
        sum[t] = part;
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = kQuantize ? mma::of_value_token(scale, i) : group.scale_a[t][i % mma::kValueTokens];
        sum[t][i] += part[i] * (a * group.scale_b[kPaired ? i / 2 : 0]);
      }
    }
  }

  // At the end of a run, with its last group.
  DEVICE float result(const f32x4& sum, const Group& last, int t, int i) const {
    if (kScales != Scales::kRow) return sum[i];
    return sum[i] * (last.scale_a[t][i % mma::kValueTokens] * last.scale_b[i]);
  }

  // Goes through all groups that `walk` gives, and calls end(walk, sums, last group) with the last of each run.
  template <class Walk, class End>
  DEVICE void go(Walk walk, End end) const {
    if (!walk.more()) return;
    constexpr int kRing = mma::kRing;
    Walk ahead = walk;
    Run reading = run(ahead.item(), ahead.tile());
    Group ring[kRing];
    auto load_next = [&](Group& group) __attribute__((always_inline)) {
      load(group, reading, ahead.k(), ahead.more());
      if (ahead.next() && ahead.more()) reading = run(ahead.item(), ahead.tile());
    };
#pragma unroll
    for (int i = 0; i < kRing - 1; ++i) load_next(ring[i]);
    f32x4 sum[kTiles] = {};
    auto step = [&](Group& group, Group& free) __attribute__((always_inline)) {
      load_next(free);
      multiply(sum, group);
      const Walk now = walk;
      if (walk.next()) {
        end(now, sum, group);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) sum[t] = f32x4{};
      }
      return walk.more();
    };
    for (bool more = true; more;)
#pragma unroll
      for (int i = 0; i < kRing; ++i)
        if (more) more = step(ring[i], ring[(i + kRing - 1) % kRing]);
  }
};

// The tiles of a block, one after the other, and a wave's groups of each: as many as any wave has, with or without bytes.
struct TileWalk {
  const Experts& p;
  int tiles, per_item, work, group = 0;  // tiles of all items, and of one
  DEVICE bool more() const { return work < tiles; }
  DEVICE int item() const { return work / per_item; }
  DEVICE int tile() const { return work % per_item; }
  DEVICE int k() const { return (group * mma::kWaves + wave::index()) * kGroup; }
  DEVICE bool next() {  // true if that begins a run
    if (++group * mma::kWaves * kGroup < p.k) return false;
    group = 0, work += p.step;
    return true;
  }
};

template <class T, Scales kScales, bool kQuantize, int kTiles>
DEVICE void gate_up(const Experts& p) {
  using S = Stream<T, kScales, kQuantize, true, kTiles>;
  // Of this tile, and of the last, which a slow wave may still read.
  LDS static float sums[2][mma::kWaves][kTiles][4][wave::kLanes];
  const Lists lists(dynamic_lds, p.m * (p.topk + p.shared));
  const int items = group_pairs<S::kItem>(p, lists), per_item = p.n / 2 / S::kTileOut;
  if (p.present && wave::block_x() == 0 && wave::thread() == 0) mem::store<int>(p.present, lists.firsts[items]);
  const S stream{p, lists};
  int parity = 0;
  auto end_tile = [&](const TileWalk& walk, const f32x4(&sum)[kTiles],
                      const typename S::Group& last) __attribute__((always_inline)) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[parity][wave::index()][t][i][stream.lane] = stream.result(sum[t], last, t, i);
    block_barrier();  // hazard: the waves' sums are read before they are written
    // Each of the first waves has one gate value and the up value of a lane.
    const int t = wave::index() / 2, i = wave::index() % 2, item = walk.item();
    const int place = lists.firsts[item] + t * mma::kTileTokens + mma::value_token(stream.lane, i);
    if (t < kTiles && place < lists.firsts[item + 1]) {
      float gate = 0.0f, up = 0.0f;
#pragma unroll
      for (int w = 0; w < mma::kWaves; ++w) {
        gate += sums[parity][w][t][i][stream.lane];
        up += sums[parity][w][t][i + 2][stream.lane];
      }
      const float weight = p.weigh ? lists.router[lists.pairs[place]] : 1.0f;
      const int column = walk.tile() * S::kTileOut + mma::half_row(mma::value_row(stream.lane, i));
      store_output(p.out, i64(place) * (p.n / 2) + column, silu(gate * weight) * (up * weight), p.out_type);
    }
    parity ^= 1;
  };
  stream.go(TileWalk{p, items * per_item, per_item, wave::block_x()}, end_tile);
}

// The items of a wave, unit by unit.
struct UnitWalk {
  const Experts& p;
  int units, per_item, of_block, unit, group = 0;  // units of all items, and of one
  DEVICE bool more() const { return unit < units; }
  DEVICE int item() const { return unit / per_item; }
  DEVICE int tile() const { return of_block; }
  DEVICE int k() const { return (unit % per_item * p.step + group) * kGroup; }
  DEVICE bool next() {  // true if that begins a run
    if (++group < p.step && k() < p.k) return false;
    group = 0, unit += mma::kWaves;
    return true;
  }
};

template <class T, Scales kScales, bool kQuantize, int kTiles>
DEVICE void down(const Experts& p) {
  using S = Stream<T, kScales, kQuantize, false, kTiles>;
  const int of_wave = p.m * mma::kRows;
  float* sums = (float*)dynamic_lds;  // [waves, tokens, rows]
  const Lists lists(dynamic_lds + mma::kWaves * of_wave * 4, p.m * (p.topk + p.shared));
  float* mine = sums + wave::index() * of_wave;
  for (int i = wave::lane(); i < of_wave; i += wave::kLanes) mine[i] = 0.0f;
  const int items = group_pairs<S::kItem>(p, lists);
  const int per_item = (p.k + p.step * kGroup - 1) / (p.step * kGroup);
  const S stream{p, lists};
  auto end_unit = [&](const UnitWalk& walk, const f32x4(&sum)[kTiles],
                      const typename S::Group& last) __attribute__((always_inline)) {
    const int item = walk.item(), first = lists.firsts[item], end = lists.firsts[item + 1];
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int place = first + t * mma::kTileTokens + mma::value_token(stream.lane, i);
        if (place >= end) continue;
        const int pair = lists.pairs[place], token = pair * p.per_slot >> 20;
        const float weight = p.weigh ? lists.router[pair] : 1.0f;
        mine[token * mma::kRows + mma::value_row(stream.lane, i)] += weight * stream.result(sum[t], last, t, i);
      }
  };
  stream.go(UnitWalk{p, items * per_item, per_item, wave::block_x(), wave::index()}, end_unit);
  block_barrier();  // hazard: the waves' sums are read before they are written
  for (int i = wave::thread(); i < of_wave; i += mma::kWaves * wave::kLanes) {
    const int token = i / mma::kRows, row = wave::block_x() * mma::kRows + i % mma::kRows;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < mma::kWaves; ++w) total += sums[w * of_wave + i];
    if (row < p.n) store_output(p.out, i64(token) * p.n + row, total, p.out_type);
  }
}

// clang-format off
#define INSTANCE(kernel, kind, tiles, ...)                                                             \
  KERNEL((mma::kWaves * wave::kLanes), 3) fused_experts_##kernel##_##kind##_##tiles(Experts experts) { \
    kernel<__VA_ARGS__, tiles>(experts);                                                               \
  }
#define INSTANCES(kind, ...)              \
  INSTANCE(gate_up, kind, 1, __VA_ARGS__) \
  INSTANCE(gate_up, kind, 2, __VA_ARGS__) \
  INSTANCE(down, kind, 1, __VA_ARGS__)    \
  INSTANCE(down, kind, 2, __VA_ARGS__)

INSTANCE(gate_up, block_from_bf16, 1, E4m3, Scales::kBlock, true)
INSTANCE(down,    block_from_bf16, 1, E4m3, Scales::kBlock, true)
INSTANCES(block, E4m3, Scales::kBlock, false)
INSTANCES(row,   E4m3, Scales::kRow,   false)
INSTANCES(bf16,  Bf16, Scales::kNone,  false)
INSTANCES(fp16,  F16,  Scales::kNone,  false)
// clang-format on
