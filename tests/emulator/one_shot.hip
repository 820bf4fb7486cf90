// An all-reduce of few words as a test of protocols: one-shot push of 64-bit words (value | epoch << 32), double-buffered.
//
// Each rank stores its values into every peer's inbox, and waits until its own inbox has the words of this epoch. A word is data
// and flag at once: nothing is zeroed, and no barrier opens or closes an epoch. Buffers alternate with the epoch's lowest bit.
// Two buffers are enough, because a rank stores epoch e + 2 only after each peer has read epoch e:
//   1. Every rank waits for at least one word of every peer in every epoch, whatever the size. A word of epoch e + 1 from a peer
//      says that the peer's launch of epoch e has ended. An empty launch exchanges one word.
//   2. One stream per rank orders its collectives, so that a launch starts after the reads of the launch before it.
//   3. A group has one epoch counter, advanced by the last block. With a counter per block, grids of different sizes diverge.
//   4. Epochs have 32 bits. With fewer bits a word of an old epoch looks new. Epoch 0 is what fresh memory holds: a group starts
//      at epoch 1, and must not come round to 0 with a buffer that no store has reached.
//   5. Each phase of a launch has slots of its own, since phases of one epoch have the same buffer.
//   6. All blocks are resident: a block that waits for a peer's block holds a slot until that has run.
// Each Bug violates one of these, or leaves out one part of the exchange. Lines marked "bug:" are where the emulator points to.
#include "device/gpu.h"

enum Bug {
  kRight,
  kStoreScope,
  kLoadScope,
  kWait,
  kAnyEpoch,
  kSwap,
  kBlockCounter,
  kSkipPeer,
  kSkipEmpty,
  kNarrowEpoch,
  kSharedPhase,
  kTorn
};
constexpr u32 kRanks = 8, kPhases = 2;

struct Group {
  u64* inbox[kRanks];  // of each rank: [2 buffers, kPhases, ranks, capacity]
};

template <u32 scope>
DEVICE void store_word(u64* slot, u32 value, u32 epoch) {
  // bug: store_scope swap skip_empty narrow_epoch shared_phase block_counter two_streams
  __scoped_atomic_store_n(mem::global(slot), value | u64(epoch) << 32, __ATOMIC_RELAXED, scope);
}
DEVICE void store_halves(u64* slot, u32 value, u32 epoch) {
  auto* half = (mem::Global<u32>*)mem::global(slot);
  // bug: torn
  __scoped_atomic_store_n(half, value, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
  __scoped_atomic_store_n(half + 1, epoch, __ATOMIC_RELAXED, __MEMORY_SCOPE_SYSTEM);
}
template <u32 scope>
DEVICE u64 load_word(u64* slot) {
  // bug: load_scope wait any_epoch skip_peer swap torn fresh_memory residency
  return __scoped_atomic_load_n(mem::global(slot), __ATOMIC_RELAXED, scope);
}

DEVICE u64* slot(u64* inbox, u32 bytes) { return (u64*)((u8*)inbox + bytes); }

// The sum of all ranks' values, in the order of ranks. `slots` is the place of this epoch and phase in an inbox, `at` the word in
// what a rank stores there.
template <Bug bug, u32 ranks>
DEVICE u32 exchange(const Group& group, u32 value, u32 slots, u32 at, u32 capacity, u32 epoch, u32 rank) {
  constexpr u32 kStored = bug == kStoreScope ? __MEMORY_SCOPE_DEVICE : __MEMORY_SCOPE_SYSTEM;
  constexpr u32 kLoaded = bug == kLoadScope ? __MEMORY_SCOPE_DEVICE : __MEMORY_SCOPE_SYSTEM;
  const u32 step = 8 * capacity, first = 8 * (slots + at);
#pragma unroll
  for (u32 peer = 0; peer < ranks; ++peer) {
    if constexpr (bug == kTorn) store_halves(slot(group.inbox[peer], first + rank * step), value, epoch);
    else store_word<kStored>(slot(group.inbox[peer], first + rank * step), value, epoch);
  }
  u64* const inbox = group.inbox[rank];
  u32 offsets[ranks];
  u32 offset = first;
#pragma unroll
  for (u32 peer = 0; peer < ranks; ++peer, offset += step) {
    asm volatile("" : "+v"(offset));  // added up, not multiplied
    offsets[peer] = offset;
  }
  u64 words[ranks];
  const auto look = [&] {
#pragma unroll
    for (u32 peer = 0; peer < ranks; ++peer) {
      asm volatile("" : "+v"(offsets[peer]));  // 32 bits are kept for each peer, and no address of 64
      words[peer] = load_word<kLoaded>(slot(inbox, offsets[peer]));
    }
  };
  const auto is_there = [&] {
    u32 differ = 0;
#pragma unroll
    for (u32 peer = 0; peer < ranks; ++peer) {
      const u32 found = words[peer] >> 32;
      if (bug == kSkipPeer && rank == 0 && peer == ranks - 1) continue;
      differ |= bug == kAnyEpoch ? found == 0 : found ^ epoch;
    }
    return bug == kWait || differ == 0;
  };
  while (true) {
    look();
    if (wave::count(!is_there()) == 0) break;  // the wave goes on as one
    __builtin_amdgcn_s_sleep(1);
  }
  u32 sum = 0;
#pragma unroll
  for (u32 peer = 0; peer < ranks; ++peer) sum += u32(words[peer]);
  return sum;
}

// Each thread has one word. `values` and `sums` [words, at least 1]; `counters` are arrivals and the epoch of the group, and with
// kBlockCounter an epoch per block.
template <Bug bug, u32 ranks, u32 phases, u32 threads>
DEVICE void one_shot(const Group& group, const u32* values, u32* sums, u32* counters, u32 words, u32 capacity, u32 rank,
                     u32 blocks) {
  const u32 block = wave::block_id_x();
  u32* counter = counters + 1 + (bug == kBlockCounter ? block : 0);
  u32 epoch = __scoped_atomic_load_n(mem::global(counter), __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE) + 1;
  epoch = wave::uniform(epoch);
  if (bug == kNarrowEpoch) epoch &= 3;
  const u32 buffer = bug == kSwap ? 0 : epoch & 1;
  const u32 exchanged = words || bug == kSkipEmpty ? words : 1;
  const u32 at = block * threads + wave::thread_id();
  if (at < exchanged) {
    u32 value = mem::load<u32>(values + at);
#pragma unroll
    for (u32 phase = 0; phase < phases; ++phase) {
      const u32 place = bug == kSharedPhase ? 0 : phase;
      value =
          exchange<bug, ranks>(group, value, (buffer * kPhases + place) * ranks * capacity, at, capacity, epoch, rank);
    }
    if (at < words) mem::store(sums + at, value);  // bug: used
  }
  block_barrier();
  if (wave::thread_id() != 0) return;
  if constexpr (bug == kBlockCounter) *mem::global(counter) = epoch;
  else if (block_count(counters, blocks) == blocks - 1) *mem::global(counter) = epoch;
}

#define KERNEL_OF(name, bug, ranks, phases, threads)                                                          \
  KERNEL(threads)                                                                                             \
  name##_##ranks(Group group, const u32* values, u32* sums, u32* counters, u32 words, u32 capacity, u32 rank, \
                 u32 blocks) {                                                                                \
    one_shot<bug, ranks, phases, threads>(group, values, sums, counters, words, capacity, rank, blocks);      \
  }
#define KERNELS(name, bug, phases, threads) \
  KERNEL_OF(name, bug, 2, phases, threads)  \
  KERNEL_OF(name, bug, 4, phases, threads) KERNEL_OF(name, bug, 8, phases, threads)
KERNELS(two_phases, kRight, 2, 128)
KERNELS(shared_phase, kSharedPhase, 2, 128)
KERNELS(right, kRight, 1, 64)
KERNELS(store_scope, kStoreScope, 1, 64)
KERNELS(load_scope, kLoadScope, 1, 64)
KERNELS(wait, kWait, 1, 64)
KERNELS(any_epoch, kAnyEpoch, 1, 64)
KERNELS(swap, kSwap, 1, 64)
KERNELS(block_counter, kBlockCounter, 1, 64)
KERNELS(skip_peer, kSkipPeer, 1, 64)
KERNELS(skip_empty, kSkipEmpty, 1, 64)
KERNELS(narrow_epoch, kNarrowEpoch, 1, 64)
KERNELS(torn, kTorn, 1, 64)
