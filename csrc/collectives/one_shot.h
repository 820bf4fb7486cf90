// The one-shot all-reduce protocol. Each rank pushes its values to all other ranks as 64-bit words, each a 32-bit value
// with a 32-bit epoch, as NCCL's LL protocol does.
//
// A rank stores its words into every peer's inbox, and waits until its own inbox holds the words of this epoch. A word
// is data and flag at once: nothing is zeroed, and no barrier opens or closes an epoch. Buffers alternate with the
// epoch's lowest bit. Two buffers suffice, because a rank stores epoch e + 2 only after each peer has read epoch e:
//   1. Every rank waits for at least one word from every peer in every epoch. A peer's word for epoch e + 1 proves that
//      the peer's launch of epoch e has ended. A call without rows is not a launch, on any rank.
//   2. One stream per rank orders its collectives, so a launch starts after the reads of the previous launch.
//   3. A group has one epoch counter, advanced by the last block. With a counter per block, grids of different sizes
//      diverge.
//   4. Epochs have 32 bits. With fewer, a word from an old epoch could look new. Epoch 0 is the content of fresh
//      memory: a group starts at epoch 1, and 2 follows 2^32 - 1, so that buffers still alternate.
//   5. A row's blocks also exchange partial reductions as words, in separate slots.
//   6. All blocks are resident: a block that waits for a peer's block occupies a slot until that block has run.
//
// A rank that waits longer than its limit gives up: it stores an error in every rank's inbox. Each rank that sees an
// error ends its launch with NaN for the missing values, and reports it to its host. The error is sticky: all later
// launches end the same way.
#pragma once
#include "device/vec.h"

constexpr u32 kMaxRanks = 8;
constexpr u32 kPlanes = kChunk / 2;  // words per chunk
constexpr u32 kHeaderBytes = 128;    // inbox header: its error, 0 for none
// Two values of a missing rank: NaN in bf16 and in fp16.
constexpr u32 kMissing = 0x7fff7fff;

// A rank's view of its group. An inbox has a header, and words [2 buffers, kMaxRanks + 1 slots, capacity]: a slot per
// sending rank, and one for the reductions of the inbox's own rank.
struct Group {
  u64* inbox[kMaxRanks];  // per rank
  u64* mine;              // this rank's inbox
  u32* counters;          // [2]: ended blocks, and the previous launch's epoch
  u64* report;            // in host memory: an error (error_of), and above it the epoch that saw it
  u32 capacity;           // words of a slot
  u32 rank, ranks;
  u32 limit_us;
};

// The protocol's steps as separate functions, so that tests can replace one.
struct OneShot {
  DEVICE static void store(u64* slot, u32 value, u32 epoch) { mem::store_system(slot, value | u64(epoch) << 32); }
  DEVICE static u64 load(const u64* slot) { return mem::load_system<u64>(slot); }
  DEVICE static u32 differs(u32 found, u32 epoch) { return found ^ epoch; }
  DEVICE static u32 buffer(u32 epoch) { return epoch & 1; }
  static constexpr u32 kOwnBlocks = kMaxRanks;  // the slot in which a rank's own blocks exchange reductions
  DEVICE static u32 next(u32 epoch) { return epoch == ~0u ? 2 : epoch + 1; }
  // The ranks to wait for, as a bit mask.
  DEVICE static u32 others(const Group& group) { return ((1u << group.ranks) - 1) & ~(1u << group.rank); }
  DEVICE static u32* counter(const Group& group) { return group.counters + 1; }
  DEVICE static void advance(const Group& group, u32 epoch, u32 blocks) {
    // bug: two_streams
    if (block_count(group.counters, blocks) == blocks - 1) *mem::global(counter(group)) = epoch;
  }
};

// Encodes an error: the missing ranks as a bit mask, the rank that waited for them, and the epoch's lowest bits.
DEVICE u32 error_of(u32 missing, u32 rank, u32 epoch) {
  return 1u << 31 | missing | rank << 8 | (epoch & 0xfffff) << 11;
}

template <class Protocol>
DEVICE u32 epoch_of(const Group& group) {
  const u32 before =
      __scoped_atomic_load_n(mem::global(Protocol::counter(group)), __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  return wave::uniform(Protocol::next(wave::uniform(before)));
}

// Called once by all threads of each block in a launch.
template <class Protocol>
DEVICE void end_block(const Group& group, u32 epoch, u32 blocks) {
  block_barrier();  // hazard: the epoch advances before all waves have read it
  if (wave::thread_id() == 0) Protocol::advance(group, epoch, blocks);
}

// Byte offset of a sending rank's slot in an inbox.
template <class Protocol>
DEVICE u32 slots_of(const Group& group, u32 rank, u32 epoch) {
  return kHeaderBytes + (Protocol::buffer(epoch) * (kMaxRanks + 1) + rank) * group.capacity * 8;
}
DEVICE u64* slot(u64* inbox, u32 bytes) { return (u64*)((u8*)inbox + bytes); }

// Word layout of a row: word j of chunk c is in plane j, so adjacent lanes store and load adjacent words. `first` is the
// byte offset of the planes, `columns` the byte stride between them.
struct Planes {
  u32 first, columns;
  DEVICE u32 at(u32 chunk, u32 plane) const { return first + chunk * 8 + plane * columns; }
};

// Stores a chunk to all other ranks.
template <class Protocol, u32 kRanks>
DEVICE void push(const Group& group, u32 epoch, u32 slots, Planes planes, u32 chunk, u32x4 values) {
#pragma unroll
  for (u32 peer = 0; peer < kRanks; ++peer) {
    if (peer >= group.ranks || peer == group.rank) continue;
    u32 offset = slots + planes.at(chunk, 0);
#pragma unroll
    for (u32 j = 0; j < kPlanes; ++j, offset += planes.columns) {
      wave::in_lanes(offset);
      Protocol::store(slot(group.inbox[peer], offset), values[j], epoch);
    }
  }
}

// Reports that words from these ranks (a bit mask) are missing, or forwards another rank's error.
template <u32 kRanks>
DEVICE void give_up(const Group& group, u32 epoch, u32 missing, u32 error) {
  if (wave::lane() != 0) return;
  if (error == 0) {
    error = error_of(missing, group.rank, epoch);
#pragma unroll
    for (u32 peer = 0; peer < kRanks; ++peer)
      if (peer < group.ranks) mem::store_system(group.inbox[peer], error);
  }
  mem::store_system(group.report, error | u64(epoch) << 32);
}

// Waits for words from the sources (ranks, or blocks of this rank) in `missing`, a bit mask of kSources, and returns
// their values: kWords of each of kChunks chunks. The sources' slots begin `slots` bytes into the inbox, `step` bytes
// apart. All lanes of the wave wait until all have their words.
template <class Protocol, u32 kRanks, u32 kSources, u32 kChunks, u32 kWords>
DEVICE void await(const Group& group, u32 epoch, u32 missing, u32 slots, u32 step, Planes planes,
                  const u32 (&chunk)[kChunks], u64 limit, u32 (&values)[kSources][kChunks][kWords]) {
  u64 words[kSources][kChunks][kWords];
  const u64 begin = wave::time();
  while (true) {
    const u32 error = wave::uniform(mem::load_system<u32>(group.mine));
#pragma unroll
    for (u32 source = 0; source < kSources; ++source) {
      if (!(missing >> source & 1)) continue;
#pragma unroll
      for (u32 i = 0; i < kChunks; ++i) {
        u32 offset = slots + source * step + planes.at(chunk[i], 0);
#pragma unroll
        for (u32 j = 0; j < kWords; ++j, offset += planes.columns) {
          wave::in_lanes(offset);  // keeps the 32-bit offset, not a 64-bit address
          words[source][i][j] = Protocol::load(slot(group.mine, offset));
        }
      }
    }
#pragma unroll
    for (u32 source = 0; source < kSources; ++source) {
      if (!(missing >> source & 1)) continue;
      u32 differ = 0;
#pragma unroll
      for (u32 i = 0; i < kChunks; ++i) {
#pragma unroll
        for (u32 j = 0; j < kWords; ++j) differ |= Protocol::differs(words[source][i][j] >> 32, epoch);
      }
      if (wave::count(differ != 0) == 0) missing &= ~(1u << source);
    }
    // A rank that comes late finds all words, but also the error of the ranks that waited for it, and fails like them.
    const bool fails = error != 0 || (missing != 0 && wave::time() - begin > limit);
    if (fails) give_up<kRanks>(group, epoch, kSources > 1 ? missing : 1u << group.rank, error);
    if (fails || missing == 0) break;
    wave::sleep();
  }
#pragma unroll
  for (u32 source = 0; source < kSources; ++source) {
#pragma unroll
    for (u32 i = 0; i < kChunks; ++i) {
#pragma unroll
      for (u32 j = 0; j < kWords; ++j)
        values[source][i][j] = missing >> source & 1 ? kMissing : u32(words[source][i][j]);
    }
  }
}
