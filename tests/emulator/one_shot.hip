// An all-reduce of few words as a test of protocols: one-shot push of 64-bit words (value | epoch << 32), double-buffered.
//
// Each rank stores its values into every peer's inbox, and waits until its own inbox has the words of this epoch. A word is data
// and flag at once: nothing is zeroed, and no barrier opens or closes an epoch. Buffers alternate with the epoch's lowest bit.
// Two buffers are enough, because a rank stores epoch e + 2 only after each peer has read epoch e:
//   1. Every rank waits for at least one word of every peer in every epoch, whatever the size. A word of epoch e + 1 from a peer
//      says that the peer's launch of epoch e has ended. An empty launch exchanges one word.
//   2. One stream per rank orders its collectives, so that a launch starts after the reads of the launch before it.
//   3. A group has one epoch counter, advanced by the last block. With a counter per block, grids of different sizes diverge.
//   4. Epochs have 32 bits. With fewer bits a word of an old epoch looks new.
//   5. Each phase of a launch has slots of its own, since phases of one epoch have the same buffer.
//   6. All blocks are resident: a block that waits for a peer's block holds a slot until that has run.
// Each Bug violates one of these, or leaves out one part of the exchange. Lines marked "bug:" are where the emulator points to.
#include "device/gpu.h"

enum Bug {
  kRight,
  kStoreScope,
  kLoadScope,
  kWait,
  kEpoch,
  kSwap,
  kBlockCounter,
  kSkipPeer,
  kSkipEmpty,
  kNarrowEpoch,
  kSharedPhase,
  kTorn
};
constexpr u32 kRanks = 8, kPhases = 2, kThreads = 128;

struct Group {
  u64* inbox[kRanks];  // of each rank: [2 buffers, phases, ranks, capacity]
};

DEVICE u32 load_counter(u32* counter) {
  return __scoped_atomic_load_n(counter, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

template <Bug bug>
DEVICE void push(u64* slot, u32 value, u32 epoch) {
  const u64 word = value | u64(epoch) << 32;
  if constexpr (bug == kStoreScope) {
    __scoped_atomic_store_n(mem::global(slot), word, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);  // bug: store_scope
  } else if constexpr (bug == kTorn) {
    auto* half = (mem::Global<u32>*)mem::global(slot);
    __scoped_atomic_store_n(half, value, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);      // bug: torn
    __scoped_atomic_store_n(half + 1, epoch, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);  // bug: torn
  } else {
    __scoped_atomic_store_n(
        mem::global(slot), word, __ATOMIC_RELAXED,
        __MEMORY_SCOPE_SYSTEM);  // bug: swap skip_peer skip_empty narrow_epoch shared_phase block_counter streams
  }
}

template <Bug bug>
DEVICE u64 look(u64* slot) {
  if constexpr (bug == kLoadScope)
    return __scoped_atomic_load_n(mem::global(slot), __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);  // bug: load_scope
  return __scoped_atomic_load_n(mem::global(slot), __ATOMIC_RELAXED,
                                __MEMORY_SCOPE_SYSTEM);  // bug: wait epoch residency
}

// The values of all ranks, added in the order of ranks. `words` are the inbox's slots of this rank and phase.
template <Bug bug>
DEVICE u32 exchange(const Group& group, u32 value, i64 slots, i64 at, u32 capacity, u32 epoch, u32 rank, u32 ranks) {
  for (u32 peer = 0; peer < ranks; ++peer) push<bug>(group.inbox[peer] + slots + rank * capacity + at, value, epoch);
  u32 sum = 0;
  for (u32 peer = 0; peer < ranks; ++peer) {
    if (bug == kSkipPeer && rank == 0 && peer == ranks - 1) continue;
    u64* slot = group.inbox[rank] + slots + peer * capacity + at;
    u64 word = look<bug>(slot);
    const auto is_there = [&] { return bug == kWait || (bug == kEpoch ? word >> 32 != 0 : word >> 32 == epoch); };
    while (!is_there()) {
      __builtin_amdgcn_s_sleep(1);
      word = look<bug>(slot);
    }
    sum += u32(word);
  }
  return sum;
}

// `values` and `sums` [words]; `counters` are arrivals and the group's epoch, and with kBlockCounter an epoch per block.
template <Bug bug>
DEVICE void one_shot(const Group& group, const u32* values, u32* sums, u32* counters, u32 words, u32 capacity, u32 rank,
                     u32 ranks, u32 phases, u32 blocks) {
  const u32 block = wave::block_id_x();
  u32* counter = counters + 1 + (bug == kBlockCounter ? block : 0);
  u32 epoch = load_counter(counter) + 1;
  if (bug == kNarrowEpoch) epoch &= 3;
  const u32 buffer = bug == kSwap ? 0 : epoch & 1;
  const u32 exchanged = words || bug == kSkipEmpty ? words : 1;
  for (u32 at = block * kThreads + wave::thread_id(); at < exchanged; at += blocks * kThreads) {
    u32 value = at < words ? mem::load<u32>(values + at) : 0;
    for (u32 phase = 0; phase < phases; ++phase) {
      const u32 place = bug == kSharedPhase ? 0 : phase;
      const i64 slots = i64(buffer * kPhases + place) * kRanks * capacity;
      value = exchange<bug>(group, value, slots, at, capacity, epoch, rank, ranks);
    }
    if (at < words) mem::store(sums + at, value);  // bug: used
  }
  block_barrier();
  if (wave::thread_id() != 0) return;
  if constexpr (bug == kBlockCounter) *mem::global(counter) = epoch;
  else if (block_count(counters, blocks) == blocks - 1) *mem::global(counter) = epoch;
}

#define KERNELS(name, bug)                                                                                     \
  KERNEL(128)                                                                                                  \
  name(Group group, const u32* values, u32* sums, u32* counters, u32 words, u32 capacity, u32 rank, u32 ranks, \
       u32 phases, u32 blocks) {                                                                               \
    one_shot<bug>(group, values, sums, counters, words, capacity, rank, ranks, phases, blocks);                \
  }
KERNELS(right, kRight)
KERNELS(store_scope, kStoreScope)
KERNELS(load_scope, kLoadScope)
KERNELS(wait, kWait)
KERNELS(epoch, kEpoch)
KERNELS(swap, kSwap)
KERNELS(block_counter, kBlockCounter)
KERNELS(skip_peer, kSkipPeer)
KERNELS(skip_empty, kSkipEmpty)
KERNELS(narrow_epoch, kNarrowEpoch)
KERNELS(shared_phase, kSharedPhase)
KERNELS(torn, kTorn)
