// The pairs of a token and an expert that it goes to, in the order of the experts, grouped by one block in its LDS.
#pragma once
#include "device/expert_id.h"

constexpr int kThreads = mma::kWaves * wave::kLanes;
constexpr int kNone = 0x7fff, kBegins = 0x8000, kFewPairs = 128;

// The pairs in the order of their experts, in LDS. What comes after `pairs` is only there while they are grouped.
struct Lists {
  int* count;     // [4]: items, and zeros
  u32* items;     // [items + 1]: expert << 16 | place of the first pair
  float* router;  // [pairs]: their weights
  u16* pairs;     // [places]
  u16* sorting;   // [places]
  u32* keys;      // [pairs]: expert << 16 | pair
  u32* of;        // [experts]: pairs, then pairs << 16 | place of the first
  int padded;     // pairs and one more, rounded up
  DEVICE Lists(u8* lds, int pairs_) {
    padded = (pairs_ + 8) / 8 * 8;
    count = (int*)lds, items = (u32*)(count + 4), router = (float*)(items + padded), pairs = (u16*)(router + padded);
    sorting = pairs + padded, keys = (u32*)(sorting + padded), of = keys + padded;
  }
  DEVICE int stays() const { return 1 + padded / 8 * 5; }  // u32x4 up to the end of `pairs`
};

struct Item {
  int expert, first, end;  // places of its pairs
  DEVICE Item(const Lists& lists, int index) {
    const u32 item = lists.items[index];
    expert = wave::uniform(item >> 16), first = item & 0xffff, end = lists.items[index + 1] & 0xffff;
  }
};

// The expert of each pair into its key. Of pairs of one token with one expert the first has the weight of all.
template <class Problem>
DEVICE void find_experts(const Problem& p, const Lists& lists, int pairs) {
  const int slots = p.topk + p.shared;
  u32* ids = lists.items;  // until there are items
  for (int pair = wave::thread(); pair < lists.padded; pair += kThreads) {
    const int token = pair * p.per_slot >> 20, slot = pair - token * slots, at = token * p.topk + slot;
    const bool routed = pair < pairs && slot < p.topk;
    ids[pair] = routed ? load_expert_id(p.ids, p.id_words, at) : 0;
    lists.router[pair] = routed ? mem::load<float>(p.router + at) : 1.0f;
    lists.pairs[pair] = 0;  // down gets places without a pair, too
  }
  if (wave::thread() < 4) lists.count[wave::thread()] = 0;
  block_barrier();  // hazard: ids are read before all are written
  for (int pair = wave::thread(); pair < pairs; pair += kThreads) {
    const int token = pair * p.per_slot >> 20, first = token * slots, slot = pair - first;
    int expert = p.routed + slot - p.topk;
    if (slot < p.topk) {
      const int id = ids[pair];
      expert = id;
      if (p.expert_map) expert = id >= 0 && id < p.mapped ? mem::load<int>(p.expert_map + id) : kNone;
      if (expert < 0 || expert >= p.routed) expert = kNone;
      for (int other = 0; other < p.topk; ++other)
        if (other != slot && int(ids[first + other]) == id) {
          if (other < slot) expert = kNone;
          else if (expert != kNone) lists.router[pair] += lists.router[first + other];
        }
    }
    lists.keys[pair] = u32(expert) << 16 | pair;
  }
}

// Few pairs: each counts those that come before it.
DEVICE void sort_by_comparing(const Lists& lists, int pairs) {
  block_barrier();  // hazard: keys are read before all are written
  for (int pair = wave::thread(); pair < pairs; pair += kThreads) {
    const u32 key = lists.keys[pair], first_key = key & 0xffff0000u;
    int before = 0, place = 0;  // pairs of lower experts; and those of this one that come first
#pragma unroll 4
    for (int other = 0; other < pairs; ++other) {
      const u32 of_other = lists.keys[other];
      before += of_other < first_key, place += of_other < key;
    }
    const int rank = place - before;
    const bool begins = key >> 16 == kNone ? rank == 0 : rank % mma::kTileTokens == 0;
    lists.pairs[place] = u16(pair);
    lists.sorting[place] = u16(key >> 16 | (begins ? kBegins : 0));
  }
  block_barrier();  // hazard: the order is read before it is written
  if (wave::index() != 0) return;
  int items = 0;
  for (int base = 0; base < pairs; base += wave::kLanes) {
    const int place = base + wave::lane(), expert = place < pairs ? lists.sorting[place] : 0;
    const bool begins = expert & kBegins;
    const int item = items + wave::count_below(begins);
    if (begins) lists.items[item] = u32(expert & kNone) << 16 | place;
    items += wave::count(begins);
  }
  const bool absent = (lists.sorting[pairs - 1] & kNone) == kNone;  // those end the last item
  if (wave::lane() == 0) {
    if (!absent) lists.items[items] = pairs;
    *lists.count = items - absent;
  }
}

// Many pairs: their experts are counted.
DEVICE void sort_by_counting(const Lists& lists, int pairs, int experts) {
  for (int i = wave::thread(); i < experts; i += kThreads) lists.of[i] = 0;
  block_barrier();  // hazard: counted on before it is zero; keys are read before all are written
  for (int pair = wave::thread(); pair < pairs; pair += kThreads) {
    const int expert = lists.keys[pair] >> 16;
    if (expert == kNone) continue;
    const u32 rank = __scoped_atomic_fetch_add(lists.of + expert, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    lists.pairs[pair] = u16(rank);
  }
  block_barrier();  // hazard: counts are read before all are counted
  if (wave::index() == 0) {
    const int each = (experts + wave::kLanes - 1) / wave::kLanes,
              lane = wave::lane();  // neighbouring experts of a lane
    const int first = lane * each, end = first + each < experts ? first + each : experts;
    u32 mine = 0;  // items << 16 | pairs
    for (int i = first; i < end; ++i)
      mine += lists.of[i] + ((lists.of[i] + mma::kTileTokens - 1) / mma::kTileTokens << 16);
    u32 sum = mine;
    for (int step = 1; step < wave::kLanes; step *= 2) {
      const u32 below = wave::from_lane(sum, (lane - step) & (wave::kLanes - 1));
      if (lane >= step) sum += below;
    }
    int item = (sum - mine) >> 16, place = (sum - mine) & 0xffff;
    for (int i = first; i < end; ++i) {
      const int count = lists.of[i];
      for (int begin = 0; begin < count; begin += mma::kTileTokens)
        lists.items[item++] = u32(i) << 16 | (place + begin);
      lists.of[i] = u32(count) << 16 | place;
      place += count;
    }
    if (lane == wave::kLanes - 1) lists.items[item] = place, *lists.count = item;
  }
  block_barrier();  // hazard: places are read before they are written
  for (int pair = wave::thread(); pair < pairs; pair += kThreads) {
    const int expert = lists.keys[pair] >> 16;
    if (expert != kNone) lists.sorting[(lists.of[expert] & 0xffff) + lists.pairs[pair]] = u16(pair);
  }
  block_barrier();  // hazard: an expert's pairs are read before all are written; ranks are overwritten while they are read
  // Ranks are in the order in which waves came to count; places are in that of the pairs.
  for (int pair = wave::thread(); pair < pairs; pair += kThreads) {
    const int expert = lists.keys[pair] >> 16;
    if (expert == kNone) continue;
    const u32 of = lists.of[expert];
    const u16* others = lists.sorting + (of & 0xffff);
    int place = of & 0xffff;
#pragma clang loop unroll(disable) vectorize(disable)  // pairs of u16 would be loaded as words, aligned or not
    for (int i = 0; i < int(of >> 16); ++i) place += others[i] < pair;
    lists.pairs[place] = u16(pair);
  }
}

// Groups the pairs in items of up to kTileTokens tokens, in the order of experts and pairs; how many items there are.
template <class Problem>
DEVICE int group_pairs(const Problem& p, const Lists& lists) {
  find_experts(p, lists, p.pairs);
  if (p.pairs <= kFewPairs) sort_by_comparing(lists, p.pairs);
  else sort_by_counting(lists, p.pairs, p.routed + p.shared);
  block_barrier();  // hazard: items are read before they are written
  return wave::uniform(*lists.count);
}
