// Groups (token, expert) pairs by expert: one block, in its LDS.
#pragma once
#include "device/expert_id.h"

constexpr int kThreads = mma::kWaves * wave::kLanes;
constexpr int kNoExpert = 0x7fff, kBeginsItem = 0x8000, kFewPairs = 128;

// Pairs sorted by expert, in LDS. A place is an index in this order. `sorting` and everything after it is scratch.
struct PairLists {
  int* count;         // [4]: items, and zeros
  u32* items;         // [items + 1]: expert << 16 | first pair's place
  float* router;      // [pairs]: router weights
  u16* pairs;         // [places]
  u16* sorting;       // [places]
  u32* keys;          // [pairs]: expert << 16 | pair
  u32* expert_pairs;  // [experts]: pairs, then pairs << 16 | first place
  int padded;         // pairs + 1, rounded up
  DEVICE PairLists(u8* lds, int pairs_) {
    padded = (pairs_ + 8) / 8 * 8;
    count = (int*)lds, items = (u32*)(count + 4), router = (float*)(items + padded), pairs = (u16*)(router + padded);
    sorting = pairs + padded, keys = (u32*)(sorting + padded), expert_pairs = keys + padded;
  }
  DEVICE int kept_vectors() const { return 1 + padded / 8 * 5; }  // u32x4 up to the end of `pairs`
};

struct Item {
  int expert, first, end;  // places of its pairs
  DEVICE Item(u32 item, u32 next) : expert(wave::uniform(item >> 16)), first(item & 0xffff), end(next & 0xffff) {}
  DEVICE Item(const PairLists& lists, int index) : Item(lists.items[index], lists.items[index + 1]) {}
};

// What a wave has in registers: the number of items, and the item that it begins with, if it exists.
struct Grouped {
  int items;
  Item first;
};

// Returns the index of an expert among the weights, or kNoExpert.
template <class Problem>
DEVICE int local_expert(const Problem& p, int id) {
  int expert = id;
  if (p.expert_map) expert = id >= 0 && id < p.mapped ? mem::load<int>(p.expert_map + id) : kNoExpert;
  return expert < 0 || expert >= p.routed ? kNoExpert : expert;
}

// The first token's routing, a pair per lane.
struct TokenRouting {
  int id;
  float weight;
  template <class Problem>
  DEVICE TokenRouting(const Problem& p) {
    const int at = wave::lane() < p.topk ? wave::lane() : 0;
    id = load_expert_id(p.ids, p.id_words, at), weight = mem::load<float>(p.router + at);
  }
};

// For one token: each pair with an expert is an item. Every wave sorts them in registers, and the first stores them.
template <class Problem>
DEVICE Grouped group_one_token(const Problem& p, const PairLists& lists, const TokenRouting& token, int index) {
  const int lane = wave::lane();
  const bool present = lane < p.pairs, routed = lane < p.topk;
  const int expert = routed ? local_expert(p, token.id) : p.routed + lane - p.topk;
  const u32 key = present ? u32(expert) << 16 | lane : ~0u;
  const bool valid = present && expert != kNoExpert;
  int place = 0;
#pragma unroll 1
  for (int base = 0; base < p.pairs; base += 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) place += wave::read(key, base + i) < key;
  }
  const int items = wave::count(valid);
  const u32 expert_of_first = wave::read(key, wave::first_lane(valid && place == index)) >> 16;
  const Grouped grouped{items, {expert_of_first << 16 | u32(index), u32(index + 1)}};
  if (wave::index() != 0) return grouped;
  if (lane < lists.padded) {
    lists.router[lane] = routed ? token.weight : 1.0f;
    lists.pairs[present ? place : lane] = present ? lane : 0;
    if (valid) lists.items[place] = u32(expert) << 16 | place;
    if (lane >= items) lists.items[lane] = lane == items ? items : 0;
  }
  if (lane < 4) lists.count[lane] = lane == 0 ? items : 0;
  return grouped;
}

// Writes each pair's expert to its key. If a token has several pairs with one expert, the first gets the sum of their
// weights.
template <class Problem>
DEVICE void find_experts(const Problem& p, const PairLists& lists, int pairs) {
  const int slots = p.topk + p.shared;
  u32* ids = lists.items;  // scratch until there are items
  for (int pair = wave::thread_id(); pair < lists.padded; pair += kThreads) {
    const int token = pair * p.per_slot >> 20, slot = pair - token * slots, at = token * p.topk + slot;
    const bool routed = pair < pairs && slot < p.topk;
    ids[pair] = routed ? load_expert_id(p.ids, p.id_words, at) : 0;
    lists.router[pair] = routed ? mem::load<float>(p.router + at) : 1.0f;
    lists.pairs[pair] = 0;  // down also reads places without a pair
  }
  if (wave::thread_id() < 4) lists.count[wave::thread_id()] = 0;
  block_barrier();  // hazard: ids are read before all are written
  for (int pair = wave::thread_id(); pair < pairs; pair += kThreads) {
    const int token = pair * p.per_slot >> 20, first = token * slots, slot = pair - first;
    int expert = p.routed + slot - p.topk;
    if (slot < p.topk) {
      const int id = ids[pair];
      expert = local_expert(p, id);
      for (int other = 0; other < p.topk; ++other)
        if (other != slot && int(ids[first + other]) == id) {
          if (other < slot) expert = kNoExpert;
          else if (expert != kNoExpert) lists.router[pair] += lists.router[first + other];
        }
    }
    lists.keys[pair] = u32(expert) << 16 | pair;
  }
}

// For few pairs: each thread compares its pair with all others to find its place.
DEVICE void sort_by_comparing(const PairLists& lists, int pairs) {
  block_barrier();  // hazard: keys are read before all are written
  for (int pair = wave::thread_id(); pair < pairs; pair += kThreads) {
    const u32 key = lists.keys[pair], first_key = key & 0xffff0000u;
    int before = 0, place = 0;  // pairs with lower experts; and all preceding pairs
#pragma unroll 4
    for (int other = 0; other < pairs; ++other) {
      const u32 of_other = lists.keys[other];
      before += of_other < first_key, place += of_other < key;
    }
    const int rank = place - before;
    const bool begins = key >> 16 == kNoExpert ? rank == 0 : rank % mma::kTileTokens == 0;
    lists.pairs[place] = u16(pair);
    lists.sorting[place] = u16(key >> 16 | (begins ? kBeginsItem : 0));
  }
  block_barrier();  // hazard: the order is read before it is written
  if (wave::index() != 0) return;
  int items = 0;
  for (int base = 0; base < pairs; base += wave::kLanes) {
    const int place = base + wave::lane(), expert = place < pairs ? lists.sorting[place] : 0;
    const bool begins = expert & kBeginsItem;
    const int item = items + wave::count_below(begins);
    if (begins) lists.items[item] = u32(expert & kNoExpert) << 16 | place;
    items += wave::count(begins);
  }
  const bool absent = (lists.sorting[pairs - 1] & kNoExpert) == kNoExpert;  // pairs without an expert end the last item
  if (wave::lane() == 0) {
    if (!absent) lists.items[items] = pairs;
    *lists.count = items - absent;
  }
}

// For many pairs: a counting sort.
DEVICE void sort_by_counting(const PairLists& lists, int pairs, int experts) {
  for (int i = wave::thread_id(); i < experts; i += kThreads) lists.expert_pairs[i] = 0;
  block_barrier();  // hazard: a counter is incremented before it is zero; keys are read before all are written
  for (int pair = wave::thread_id(); pair < pairs; pair += kThreads) {
    const int expert = lists.keys[pair] >> 16;
    if (expert == kNoExpert) continue;
    const u32 rank =
        __scoped_atomic_fetch_add(lists.expert_pairs + expert, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    lists.pairs[pair] = u16(rank);
  }
  block_barrier();  // hazard: counts are read before they are complete
  if (wave::index() == 0) {
    const int each = (experts + wave::kLanes - 1) / wave::kLanes,
              lane = wave::lane();  // a lane's consecutive experts
    const int first = lane * each, end = first + each < experts ? first + each : experts;
    u32 lane_sum = 0;  // items << 16 | pairs
    for (int i = first; i < end; ++i)
      lane_sum += lists.expert_pairs[i] + ((lists.expert_pairs[i] + mma::kTileTokens - 1) / mma::kTileTokens << 16);
    u32 sum = lane_sum;
    for (int step = 1; step < wave::kLanes; step *= 2) {
      const u32 below = wave::from_lane(sum, (lane - step) & (wave::kLanes - 1));
      if (lane >= step) sum += below;
    }
    int item = (sum - lane_sum) >> 16, place = (sum - lane_sum) & 0xffff;
    for (int i = first; i < end; ++i) {
      const int count = lists.expert_pairs[i];
      for (int begin = 0; begin < count; begin += mma::kTileTokens)
        lists.items[item++] = u32(i) << 16 | (place + begin);
      lists.expert_pairs[i] = u32(count) << 16 | place;
      place += count;
    }
    if (lane == wave::kLanes - 1) lists.items[item] = place, *lists.count = item;
  }
  block_barrier();  // hazard: places are read before they are written
  for (int pair = wave::thread_id(); pair < pairs; pair += kThreads) {
    const int expert = lists.keys[pair] >> 16;
    if (expert != kNoExpert) lists.sorting[(lists.expert_pairs[expert] & 0xffff) + lists.pairs[pair]] = u16(pair);
  }
  block_barrier();  // hazard: an expert's pairs are read before all are written; ranks are overwritten while they are read
  // Ranks follow the order in which waves counted. Places follow the pair order.
  for (int pair = wave::thread_id(); pair < pairs; pair += kThreads) {
    const int expert = lists.keys[pair] >> 16;
    if (expert == kNoExpert) continue;
    const u32 of = lists.expert_pairs[expert];
    const u16* others = lists.sorting + (of & 0xffff);
    int place = of & 0xffff;
#pragma clang loop unroll(disable) vectorize(disable)  // pairs of u16 would be loaded as words, aligned or not
    for (int i = 0; i < int(of >> 16); ++i) place += others[i] < pair;
    lists.pairs[place] = u16(pair);
  }
}

// Groups the pairs into items of up to kTileTokens tokens, ordered by expert, then pair. A wave begins with item `index`.
// The caller must let the block wait before it reads the lists.
template <class Problem>
DEVICE Grouped group_pairs(const Problem& p, const PairLists& lists, const TokenRouting& first_token, int index) {
  if (p.m == 1 && lists.padded <= wave::kLanes) return group_one_token(p, lists, first_token, index);
  find_experts(p, lists, p.pairs);
  if (p.pairs <= kFewPairs) sort_by_comparing(lists, p.pairs);
  else sort_by_counting(lists, p.pairs, p.routed + p.shared);
  block_barrier();  // hazard: items are read before they are written
  const int items = wave::uniform(*lists.count);
  return {items, {lists, index < items ? index : 0}};
}
