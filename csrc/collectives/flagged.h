// All-reduce of more rows than one_shot.h's, in one stage or in two: a block stores its values, the payload, and then
// one flag per peer.
//
// A block works with the same block of the other ranks, on the same part of the same rows.
//   two stages: it stores slice p of its part, of every row, into rank p's inbox and raises a flag there. Once all flags
//               are up it sums its own slice over the ranks, stores the sum as T into every inbox and raises another
//               flag. Once these are up it has all slices of its part: reduce-scatter, then all-gather.
//   one stage:  it stores its whole part into every inbox. Two ranks send the same bytes as in two stages, in one trip.
// Kernels of two ranks have one stage, of four either, of eight two, as a second way doubles the code.
// Slices are of columns, so any number of rows suits any number of ranks.
//
// A flag holds its epoch. A device that sees the flag also sees the payload of its block (device/flags.h), whose stores
// become visible in any order. Flags and payload alternate between two buffers with the epoch's lowest bit. Two
// suffice, as in one_shot.h: a block ends only after a flag of this epoch from every peer, which proves that the peer's
// launch of the previous epoch has ended, and with it its loads. So nobody still reads epoch e when a block stores epoch
// e + 2, and a flag of e + 2 replaces one that was seen.
//
// These launches have their own epoch counter, as a launch of one_shot.h orders nothing but its own words. Both share
// the inbox, its error and the time limit.
#pragma once
#include "all_reduce.h"
#include "device/divisor.h"
#include "device/flags.h"
#include "wire.h"

constexpr u32 kStages = 2;
constexpr u32 kFlagBlocks = 512;    // blocks of a launch, at most
constexpr u32 kExchangeRows = 256;  // rows that several blocks share, at most

// Offsets within a buffer of the inbox: words of one_shot.h for the row's blocks, flags, payload.
constexpr u32 kExchangeBytes = kExchangeRows * kExchanges * kMaxWaves * 8;
constexpr u32 kFlagBytes = kStages * kMaxRanks * kFlagBlocks * 4;

struct FlaggedRows : RowsOfRanks {
  u32 rows;
  u32 row_blocks;     // blocks are [row_blocks, parts]; each has its part of every row_blocks-th row
  u32 stages;         // 1 or 2; read by kernels of four ranks
  u32 slot;           // vectors per slot, where a rank stores its values of one row's part in the first stage
  u32 first, buffer;  // bytes before the first buffer in an inbox, and bytes of a buffer
  Divisor by_ranks;
};

// The protocol's steps as separate functions, so that tests can replace one.
struct Flagged : OneShot {
  template <class Protocol, class T>
  using Wire = PlainWire<Protocol, T>;
  template <class V>
  DEVICE static void put(u64* inbox, u32 at, V value) {
    mem::store_payload(inbox, at, value);
  }
  template <class V>
  DEVICE static V get(const u64* inbox, u32 at, bool inside) {
    return mem::load_payload_or_zero<V>(inbox, at, inside);
  }
  DEVICE static void complete() { mem::complete_payload(); }
  DEVICE static void raise(u64* inbox, u32 at, u32 epoch) { mem::release_flag((u32*)slot(inbox, at), epoch); }
  DEVICE static u32 look(u64* inbox, u32 at) { return mem::acquire_flag((u32*)slot(inbox, at)); }
  DEVICE static bool is_up(u32 found, u32 epoch) { return found == epoch; }
  DEVICE static u32 slice_end(u32 first, u32 slice, u32 count) { return first + slice < count ? first + slice : count; }
};
// As Flagged, with e4m3 on the wire in both stages.
struct FlaggedE4m3 : Flagged {
  template <class Protocol, class T>
  using Wire = E4m3Wire<Protocol, T>;
};

// A block of the launch, and its part of its rows.
template <class Protocol, class Wire, class T, u32 kRanks, u32 kChunks>
struct FlaggedBlock {
  using Payload = typename Wire::Payload;
  // Chunks loaded at once, from all ranks: bounds registers.
  static constexpr u32 kMaxAtOnce = kRanks == 2 ? 4 : kRanks == 4 ? 2 : 1;
  static constexpr u32 kAtOnce = kMaxAtOnce < kChunks ? kMaxAtOnce : kChunks;

  const Group& group;
  const FlaggedRows& rows;
  u32* absent;  // [stages, kMaxRanks] in LDS: 1 if a rank's flag did not come
  u32 epoch, threads, first_thread, part;
  u32 count;   // vectors of the part
  u32 slice;   // vectors of the part that each rank sums; the last ranks may have fewer
  u32 buffer;  // offset of the epoch's buffer
  u64 limit;
  bool is_complete = false;  // true once the last stage's flags were awaited

  DEVICE FlaggedBlock(const Group& group, const FlaggedRows& rows, u32 epoch, u32* absent)
      : group(group),
        rows(rows),
        absent(absent),
        epoch(epoch),
        threads(rows.threads >> __builtin_ctz(rows.parts)),
        first_thread(wave::block_id_y() * threads),
        part(wave::block_id_y()),
        buffer(rows.first + Protocol::buffer(epoch) * rows.buffer),
        limit(u64(group.limit_us) * wave::kTicksPerMicrosecond) {
    count = 0;
    for (u32 i = 0; i < kChunks; ++i) {
      const u32 first = first_thread + i * rows.threads, left = first < rows.chunks ? rows.chunks - first : 0;
      count += left < threads ? left : threads;
    }
    slice = (count + group.ranks - 1) / rows.by_ranks;
    if constexpr (Wire::kGroup > 1) slice = (slice + Wire::kGroup - 1) & ~(Wire::kGroup - 1);
  }

  // A compile-time constant except in kernels of four ranks.
  DEVICE bool is_one_stage() const { return kRanks == 2 || (kRanks == 4 && rows.stages == 1); }

  DEVICE u32 flag_at(u32 stage, u32 sender) const {
    const u32 block = wave::block_id_x() * rows.parts + part;
    return buffer + kExchangeBytes + ((stage * kMaxRanks + sender) * kFlagBlocks + block) * 4;
  }
  // The index in the row of the part's vector `index`.
  DEVICE u32 column(u32 index) const {
    const u32 chunk = index >> __builtin_ctz(threads);
    return first_thread + chunk * rows.threads + (index & (threads - 1));
  }
  // Byte offsets in an inbox: a sender's slot for a row's part, of the first stage, and the part's sums, of the second.
  DEVICE u32 sent_at(u32 row, u32 sender) const {
    const u32 slots = (row * rows.parts + part) * group.ranks + sender;
    return buffer + kExchangeBytes + kFlagBytes + slots * rows.slot * 16;
  }
  DEVICE u32 sums_at(u32 row) const {
    const u32 first = rows.rows * rows.parts * group.ranks * rows.slot;
    return buffer + kExchangeBytes + kFlagBytes + (first + (row * rows.parts + part) * threads * kChunks) * 16;
  }

  // This rank's vector of a row, plus the addend.
  DEVICE u32x4 own(u32 row, u32 index, bool inside) const {
    const u32 at = column(inside ? index : 0);
    u32x4 x = mem::load<u32x4>((const u32x4*)((const u16*)rows.input + i64(row) * rows.input_stride) + at);
    if (rows.addend) {
      const u32x4* const addend = (const u32x4*)((const u16*)rows.addend + i64(row) * rows.input_stride);
      x = rounded_sum<T>(x, mem::load<u32x4>(addend + at), rows.addend_factor);
    }
    return x;
  }

  // First stage: stores the part of all rows into the inboxes of the ranks that sum it.
  DEVICE void send() const {
    for (u32 row = wave::block_id_x(); row < rows.rows; row += rows.row_blocks) {
      Payload mine[kChunks];
#pragma unroll
      for (u32 i = 0; i < kChunks; ++i) {
        const u32 index = i * threads + wave::thread_id();
        mine[i] = Wire::encode(own(row, index, index < count), index < count);
      }
      const u32 at = sent_at(row, group.rank);
#pragma unroll
      for (u32 peer = 0; peer < kRanks; ++peer) {
        if (peer >= group.ranks || peer == group.rank) continue;
        const bool all = is_one_stage();
        const u32 first = all ? 0 : peer * slice, end = all ? count : Protocol::slice_end(first, slice, count);
#pragma unroll
        for (u32 i = 0; i < kChunks; ++i) {
          const u32 index = i * threads + wave::thread_id();
          if (index >= first && index < end) Wire::put(group.inbox[peer], at, rows.slot, index - first, mine[i]);
        }
      }
    }
  }

  // Tells all other ranks that the block has stored its payload of a stage.
  DEVICE void raise(u32 stage) const {
    Protocol::complete();
    block_barrier();  // hazard: the flag is raised before all waves have stored their payload
    const u32 waves = threads / wave::kLanes;
#pragma unroll
    for (u32 peer = 0; peer < kRanks; ++peer) {
      if (peer >= group.ranks || peer == group.rank || (peer & (waves - 1)) != u32(wave::index())) continue;
      if (wave::lane() == 0) Protocol::raise(group.inbox[peer], flag_at(stage, group.rank), epoch);
    }
  }

  // Waits for the flags of a stage from all other ranks, one wave per flag.
  DEVICE void await_flags(u32 stage) const {
    const u32 waves = threads / wave::kLanes;
    for (u32 peer = wave::index(); peer < group.ranks; peer += waves) {
      bool is_up = !(Protocol::others(group) >> peer & 1);
      const u64 begin = wave::time();
      while (!is_up) {
        const u32 error = wave::uniform(mem::load_system<u32>(group.mine));
        is_up = Protocol::is_up(wave::uniform(Protocol::look(group.mine, flag_at(stage, peer))), epoch);
        const bool fails = error != 0 || (!is_up && wave::time() - begin > limit);
        if (fails) give_up<kRanks>(group, epoch, 1u << peer, error);
        if (fails) break;
        if (!is_up) wave::sleep();
      }
      if (wave::lane() == 0) absent[stage * kMaxRanks + peer] = !is_up;
    }
    block_barrier();  // hazard: a wave loads a payload whose flag another wave still awaits
  }
  DEVICE bool is_absent(u32 stage, u32 rank) const { return wave::uniform(absent[stage * kMaxRanks + rank]) != 0; }

  // Sums vectors of the part over the ranks. Vector `offset` of the part is the first of a slot.
  template <u32 kCount>
  DEVICE void sum(u32 row, const u32 (&index)[kCount], u32 end, u32 offset, u32x4 (&sums)[kCount]) const {
    Payload values[kRanks][kCount];
#pragma unroll
    for (u32 peer = 0; peer < kRanks; ++peer) {
      if (peer >= group.ranks) continue;
#pragma unroll
      for (u32 i = 0; i < kCount; ++i) {
        const bool inside = index[i] < end && !is_absent(0, peer);  // without a flag, it may be written now
        if (peer == group.rank) values[peer][i] = Wire::encode(own(row, index[i], inside), inside);
        else values[peer][i] = Wire::get(group.mine, sent_at(row, peer), rows.slot, index[i] - offset, inside);
      }
    }
#pragma unroll
    for (u32 i = 0; i < kCount; ++i) {
      Chunk total;
#pragma unroll
      for (u32 peer = 0; peer < kRanks; ++peer) {
        if (peer >= group.ranks) continue;
        Payload value = values[peer][i];
        if (is_absent(0, peer)) value = Wire::missing();
        add_rank(total, peer, unpack<T>(Wire::decode(value)));
      }
      sums[i] = pack<T>(total);
    }
  }

  // Second stage: sums this rank's slice of all rows, and stores the sums into all inboxes.
  DEVICE void sum_and_send() const {
    const u32 first = group.rank * slice, end = Protocol::slice_end(first, slice, count);
    for (u32 row = wave::block_id_x(); row < rows.rows; row += rows.row_blocks) {
      for (u32 at = first; at < end; at += threads) {
        const u32 index[1] = {at + wave::thread_id()};
        u32x4 sums[1];
        sum(row, index, end, first, sums);
        const Payload sent = Wire::encode(sums[0], index[0] < end);
        if (index[0] >= end) continue;
#pragma unroll
        for (u32 peer = 0; peer < kRanks; ++peer)
          if (peer < group.ranks) Wire::put(group.inbox[peer], sums_at(row), threads * kChunks, index[0], sent);
      }
    }
  }

  // Runs both stages for the block's part of all rows, except the wait for the last flags, which `load` does.
  DEVICE void exchange() const {
    send();
    raise(0);
    if (is_one_stage()) return;
    await_flags(0);
    sum_and_send();
    raise(1);
  }

  // The summed chunks of this thread in a row.
  DEVICE void load(u32 row, u32x4 (&sums)[kChunks]) {
    if (!is_complete) await_flags(is_one_stage() ? 0 : 1);
    is_complete = true;
    if (is_one_stage()) {
#pragma unroll
      for (u32 first = 0; first < kChunks; first += kAtOnce) {
        u32 index[kAtOnce];
        u32x4 some[kAtOnce];
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) index[i] = (first + i) * threads + wave::thread_id();
        sum(row, index, count, 0, some);
#pragma unroll
        for (u32 i = 0; i < kAtOnce; ++i) sums[first + i] = some[i];
      }
      return;
    }
    bool is_present[kChunks];
#pragma unroll
    for (u32 i = 0; i < kChunks; ++i) {
      const u32 index = i * threads + wave::thread_id();
      is_present[i] = index < count;
#pragma unroll
      for (u32 peer = 0; peer < kRanks; ++peer)
        if (is_absent(1, peer) && index >= peer * slice && index < (peer + 1) * slice) is_present[i] = false;
    }
#pragma unroll
    for (u32 i = 0; i < kChunks; ++i)
      sums[i] = Wire::decode(
          Wire::get(group.mine, sums_at(row), threads * kChunks, i * threads + wave::thread_id(), is_present[i]));
#pragma unroll
    for (u32 i = 0; i < kChunks; ++i)
      if (!is_present[i]) sums[i] = u32x4{kMissing, kMissing, kMissing, kMissing};
  }
};

// A row of a block, as a source of device/norm_row.h.
template <class Block, class Protocol, u32 kRanks>
struct FlaggedRow : BlockRow<FlaggedRow<Block, Protocol, kRanks>, Protocol, kRanks> {
  using Base = BlockRow<FlaggedRow, Protocol, kRanks>;
  Block& block;

  DEVICE FlaggedRow(Block& block, u32 row, u16* normed)
      : Base{block.group, block.rows, normed, block.epoch, row, block.first_thread, block.limit}, block(block) {}

  template <int kChunks>
  DEVICE void fill(RowChunks<kChunks, u32x4> of, u32x4 (&input)[kChunks]) const {
    u32x4 sums[u32(kChunks)];
    block.load(this->row, sums);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) input[i] = of.in_bounds[i] ? sums[i] : u32x4{};
  }
  DEVICE u32 words() const { return block.buffer; }
};

template <class RowOut>
constexpr bool kIsMx = false;
template <class T>
constexpr bool kIsMx<RowOutput<T, Output::kMx>> = true;

// A RowOutput for a row other than the block's index, `ahead` rows after it.
template <class RowOut, bool kIs16Bit>
struct OutputAhead : RowOut {
  i64 ahead;
  DEVICE OutputAhead(RowOut output, u32 row) : RowOut(output), ahead(i64(row) - u32(wave::block_id_x())) {}
  DEVICE void locate(i64 columns) {
    RowOut::locate(columns);
    this->out = (u8*)this->out + ahead * columns * (kIs16Bit ? 2 : 1);
    if (this->scale_out == nullptr) return;
    const bool is_mx = kIsMx<RowOut>;
    this->scale_out = (float*)((u8*)this->scale_out + ahead * this->scale_row_stride * (is_mx ? 1 : 4));
  }
};
template <class RowOut, bool kIs16Bit>
constexpr bool kRoundsSum<OutputAhead<RowOut, kIs16Bit>> = kRoundsSum<RowOut>;

// Calls use(block, row) for each row of the block, after the block has stored all that other ranks wait for.
template <class Protocol, class T, u32 kRanks, u32 kChunks, class Use>
DEVICE void for_flagged_rows(const Group& group, const FlaggedRows& rows, Use use) {
  LDS static u32 absent[kStages * kMaxRanks];
  if (wave::thread_id() < int(kStages * kMaxRanks)) absent[wave::thread_id()] = 0;  // also of ranks that there are not
  const u32 epoch = epoch_of<Protocol>(group);
  FlaggedBlock<Protocol, typename Protocol::template Wire<Protocol, T>, T, kRanks, kChunks> block(group, rows, epoch,
                                                                                                  absent);
  block.exchange();
  for (u32 row = wave::block_id_x(); row < rows.rows; row += rows.row_blocks) {
    if (row >= rows.row_blocks) block_barrier();  // hazard: LDS of the row before is overwritten
    use(block, row);
  }
  end_block<Protocol>(group, epoch, rows.row_blocks * rows.parts);
}

// All-reduce only.
template <class Protocol, class T, u32 kRanks, int kChunks>
DEVICE void flagged_all_reduce(const Group& group, const FlaggedRows& rows, void* out) {
  auto store_row = [&](auto& block, u32 row) __attribute__((always_inline)) {
    u32x4 sums[u32(kChunks)];
    block.load(row, sums);
#pragma unroll
    for (u32 i = 0; i < u32(kChunks); ++i) {
      const u32 column = block.first_thread + wave::thread_id() + i * rows.threads;
      if (column < rows.chunks) mem::store((u32x4*)out + i64(row) * rows.chunks + column, sums[i]);
    }
  };
  for_flagged_rows<Protocol, T, kRanks, u32(kChunks)>(group, rows, store_row);
}

// All-reduce and RMSNorm, stored or quantized.
template <class Protocol, class T, u32 kRanks, int kChunks, bool kIs16Bit, class RowOut>
DEVICE void flagged_all_reduce_norm(const Group& group, const FlaggedRows& rows, NormRow norm, i64 residual_stride,
                                    void* normed, RowOut output) {
  auto norm_row = [&](auto& block, u32 row) __attribute__((always_inline)) {
    NormRow of_row = norm;
    if (norm.residual) of_row.residual = (u16*)norm.residual + i64(row) * residual_stride;
    u16* const copy = normed ? (u16*)normed + i64(row) * norm.hidden : nullptr;
    using Block = __remove_reference_t(decltype(block));
    rms_norm_vector<T, true, Factor::kEither, kChunks>(of_row, OutputAhead<RowOut, kIs16Bit>(output, row),
                                                       FlaggedRow<Block, Protocol, kRanks>(block, row, copy));
  };
  for_flagged_rows<Protocol, T, kRanks, u32(kChunks)>(group, rows, norm_row);
}
