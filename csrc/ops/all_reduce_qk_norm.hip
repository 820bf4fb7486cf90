// QK norm over the heads of all ranks, RoPE and cache write in one launch; see attention/rope_and_cache.h.
//
// Each rank has some of the heads. A token's queries have one block, its keys another. Each pushes its sum of squares to
// all ranks as one word, waits for theirs, and adds them in rank order: bit-equal on all ranks. No block waits for
// another block of its rank. Blocks of values send nothing.
#include "attention/rope_and_cache.h"
#include "collectives/instances.h"

constexpr u32 kNorms = 2;  // words per token: of queries, and of keys

template <class Protocol, u32 kRanks>
struct RanksOfGroup {
  const Group& group;
  u32 epoch;

  DEVICE int ranks() const { return int(group.ranks); }
  DEVICE float sum(float squares, int token, int part) const {
    const u32 index[1] = {u32(token) * kNorms + u32(part)};
    const u32 own = slots_of<Protocol>(group, group.rank, epoch) + index[0] * 8;
    if (wave::thread_id() == 0) {
#pragma unroll
      for (u32 peer = 0; peer < kRanks; ++peer)
        if (peer < group.ranks && peer != group.rank)
          Protocol::store(slot(group.inbox[peer], own), __builtin_bit_cast(u32, squares), epoch);
    }
    u32 found[kRanks][1][1];
    await<Protocol, kRanks>(group, epoch, Protocol::others(group), slots_of<Protocol>(group, 0, epoch),
                            group.capacity * 8, {0, 0}, index, u64(group.limit_us) * wave::kTicksPerMicrosecond, found);
    float total = 0.0f;
#pragma unroll
    for (u32 peer = 0; peer < kRanks; ++peer) {
      if (peer >= group.ranks) continue;
      const float of_peer = peer == group.rank ? squares : __builtin_bit_cast(float, found[peer][0][0]);
      total = peer == 0 ? of_peer : total + of_peer;
    }
    return total;
  }
};

#define RANKS_INSTANCE(symbol, Cache, most)                                                                    \
  KERNEL(1024)                                                                                                 \
  symbol##_##most(GROUP_ARGUMENTS, const AllHeadsQkNormRopeAndCacheProblem problem, int threads, u32 blocks) { \
    GROUP;                                                                                                     \
    const int item = wave::block_id_y() * threads + wave::thread_id();                                         \
    const RanksOfGroup<OneShot, most> of{group, epoch_of<OneShot>(group)};                                     \
    qk_norm_rope_and_cache<Bf16, Cache, 8>(problem, item, threads, of);                                        \
    end_block<OneShot>(group, of.epoch, blocks);                                                               \
  }
#define RANKS_INSTANCES(symbol, Cache) \
  RANKS_INSTANCE(symbol, Cache, 2)     \
  RANKS_INSTANCE(symbol, Cache, 4)     \
  RANKS_INSTANCE(symbol, Cache, 8)

RANKS_INSTANCES(all_reduce_qk_norm_rope_and_cache_bf16, Bf16)
RANKS_INSTANCES(all_reduce_qk_norm_rope_and_cache_bf16_fp8, E4m3)
