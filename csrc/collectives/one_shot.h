// The protocol of one-shot collectives: each rank pushes 64-bit words, a value of 32 bits and an epoch of 32 bits, to all other ranks.
//
// A rank stores its values into every peer's inbox, and waits until its own inbox has the words of this epoch. A word is data and flag
// at once: nothing is zeroed, and no barrier opens or closes an epoch. Buffers alternate with the epoch's lowest bit. Two buffers are
// enough, because a rank stores epoch e + 2 only after each peer has read epoch e:
//   1. Every rank waits for at least one word of every peer in every epoch. A word of epoch e + 1 from a peer says that the peer's
//      launch of epoch e has ended. A call without rows is no launch, on no rank.
//   2. One stream per rank orders its collectives, so that a launch starts after the reads of the launch before it.
//   3. A group has one epoch counter, advanced by the last block. With a counter per block, grids of different sizes diverge.
//   4. Epochs have 32 bits. With fewer bits a word of an old epoch looks new. Epoch 0 is what fresh memory holds: a group starts at
//      epoch 1, and 2 follows 2^32 - 1, so that buffers still alternate.
//   5. Blocks of a row pass partial reductions to each other as words too, in slots of their own.
//   6. All blocks are resident: a block that waits for a peer's block holds a slot until that has run.
//
// A rank that waits longer than its limit gives up: it stores an error in every rank's inbox, and each rank that sees one ends its
// launch with NaN in place of what has not come, and says so to its host. The error stays: all launches to come end the same way.
#pragma once
#include "device/vec.h"

constexpr u32 kMostRanks = 8;
constexpr u32 kPlanes = kChunk / 2;  // words of a chunk
constexpr u32 kHeaderBytes = 128;    // of an inbox: its error, 0 for none
// Values in place of those that did not come: NaN in bf16 and in fp16.
constexpr u32 kNotThere = 0x7fff7fff;

// A rank's view of its group. An inbox has a header, and slots [2 buffers, kMostRanks + 1, capacity]: by the rank that stores there, and
// one more for the sums of the rank's own blocks.
struct Group {
  u64* inbox[kMostRanks];  // of each rank
  u64* mine;               // that of this rank
  u32* counters;           // how many blocks have ended, and the epoch of the launch before
  u64* report;             // in the host's memory: the epoch that saw an error, and the error
  u32 capacity;            // words
  u32 rank, ranks;
  u32 limit_us;
};

// Each part of the protocol by itself, so that tests may replace one.
struct OneShot {
  DEVICE static void store(u64* slot, u32 value, u32 epoch) { mem::store_system(slot, value | u64(epoch) << 32); }
  DEVICE static u64 load(const u64* slot) { return mem::load_system<u64>(slot); }
  DEVICE static u32 differs(u32 found, u32 epoch) { return found ^ epoch; }
  DEVICE static u32 buffer(u32 epoch) { return epoch & 1; }
  static constexpr u32 kOwnBlocks = kMostRanks;  // whose slots a rank's own blocks pass partial reductions in
  DEVICE static u32 next(u32 epoch) { return epoch == ~0u ? 2 : epoch + 1; }
  // Ranks to wait for, a bit each.
  DEVICE static u32 others(const Group& group) { return ((1u << group.ranks) - 1) & ~(1u << group.rank); }
  DEVICE static u32* counter(const Group& group) { return group.counters + 1; }
  DEVICE static void advance(const Group& group, u32 epoch, u32 blocks) {
    // bug: two_streams
    if (block_count(group.counters, blocks) == blocks - 1) *mem::global(counter(group)) = epoch;
  }
};

// What went wrong: the ranks that did not come, a bit each, the one that waited for them, and the lowest bits of the epoch.
DEVICE u32 error_of(u32 missing, u32 rank, u32 epoch) {
  return 1u << 31 | missing | rank << 8 | (epoch & 0xfffff) << 11;
}

template <class Protocol>
DEVICE u32 epoch_of(const Group& group) {
  const u32 before =
      __scoped_atomic_load_n(mem::global(Protocol::counter(group)), __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  return wave::uniform(Protocol::next(wave::uniform(before)));
}

// Called by all threads of each of a launch's blocks, once.
template <class Protocol>
DEVICE void end_block(const Group& group, u32 epoch, u32 blocks) {
  block_barrier();  // hazard: the epoch advances before all waves have read it
  if (wave::thread_id() == 0) Protocol::advance(group, epoch, blocks);
}

// Bytes from an inbox's start to the slots of a rank that stores there.
template <class Protocol>
DEVICE u32 slots_of(const Group& group, u32 rank, u32 epoch) {
  return kHeaderBytes + (Protocol::buffer(epoch) * (kMostRanks + 1) + rank) * group.capacity * 8;
}
DEVICE u64* slot(u64* inbox, u32 bytes) { return (u64*)((u8*)inbox + bytes); }

// A row's words: `columns` is the distance of its planes and `first` where they begin, both in bytes. Word j of chunk c is in plane j, so
// that neighbouring lanes store and load neighbouring words.
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

// Says that words of these ranks (a bit each) have not come, or passes on what another rank said.
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

// Waits for the words of kSources sources of `missing`, a bit each, and returns their values: kWords of each chunk `chunk`, in slots that
// begin `slots` bytes into the inbox, `step` apart. The wave goes on as one.
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
          wave::in_lanes(offset);  // 32 bits of it are kept, and no address of 64
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
    // A rank that comes late finds all words, and fails as those do that waited for it.
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
        values[source][i][j] = missing >> source & 1 ? kNotThere : u32(words[source][i][j]);
    }
  }
}
