// All-reduce of rows, fused with their epilogue: the sum is stored, or normalized and quantized.
//
//     x = T(sum of the ranks' input, in rank order)       bit-identical on all ranks; with an addend, a rank sends
//                                                         T(input + addend_factor * addend)
//     out = x, or RMSNorm of x with every option of device/norm_row.h
//
// The threads of a row are divided among `parts` blocks. Each thread pushes its chunks to all ranks, waits for the same
// chunks from them and sums them. A reduction over the row, of squares or absolute values, exchanges one word per wave
// between the row's blocks. No block reads another block's columns: to read the words of a whole row of 16384
// columns from one peer takes 4 us (16 KB/us, H200), an exchange 1.5 us for any number of columns. Rows are
// independent: five tokens use five times the blocks.
//
// Results do not depend on `parts`: the row's waves are combined in the same order.
#pragma once
#include "device/norm_row.h"
#include "one_shot.h"

// The rows [rows, hidden] of a launch.
struct RowsOfRanks {
  const void* input;  // T, rows input_stride elements apart, 16-byte aligned
  i64 input_stride;
  u32 chunks;                    // per row
  u32 parts;                     // blocks per row, a power of two
  u32 threads;                   // per row
  const void* addend = nullptr;  // as input, or null
  float addend_factor = 1.0f;
};

template <class Combine>
constexpr u32 kExchange = 0;  // index of a reduction in its row: sums first
template <>
constexpr u32 kExchange<Max> = 1;
constexpr u32 kExchanges = 2;

// Reduces the waves' values over all blocks of a row. This block's threads begin at `first_thread` of the row. The words
// of the row's waves begin `slots` bytes into this rank's inbox.
template <class Protocol, u32 kRanks, class Combine>
DEVICE float reduce_blocks(const Group& group, u32 epoch, u32 slots, u32 first_thread, u64 limit, float value,
                           float identity, int waves, Combine combine) {
  const u32 number = first_thread / wave::kLanes + wave::index();
  if (wave::lane() == 0) Protocol::store(slot(group.mine, slots + number * 8), __builtin_bit_cast(u32, value), epoch);
  const int from = wave::lane() % kMaxWaves;
  const u32 index[1] = {u32(from < waves ? from : waves - 1)};
  u32 found[1][1][1];
  await<Protocol, kRanks>(group, epoch, 1, slots, 0, {0, 0}, index, 2 * limit, found);
  const float other = __builtin_bit_cast(float, found[0][0][0]);
  return wave::reduce_group<kMaxWaves>(from < waves ? other : identity, identity, combine);
}

// Adds a rank's values to the sum of those before it: ranks are added in their order.
DEVICE void add_rank(Chunk& total, u32 rank, const Chunk& x) {
  for (int j = 0; j < kChunk / 2; ++j) total.pair[j] = rank == 0 ? x.pair[j] : total.pair[j] + x.pair[j];
}

// One block's part of a row: the base of the row sources (device/norm_row.h) here. Row::words() is the byte offset of
// the blocks' exchanged words, for all rows, in this rank's inbox.
template <class Row, class Protocol, u32 kRanks>
struct BlockRow {
  static constexpr bool kLoads = false, kAdds = false;
  const Group& group;
  const RowsOfRanks& rows;
  u16* normed;  // [hidden] T: the norm before quantization, or null
  u32 epoch, row, first_thread;
  u64 limit;

  DEVICE u32 thread() const { return first_thread + wave::thread_id(); }
  DEVICE void keep(int index, bool in_bounds, u32x4 y) const {
    if (in_bounds && normed) mem::store((u32x4*)normed + index, y);
  }
  // reduce_block over the waves of all blocks of the row.
  template <class Combine>
  DEVICE float reduce(float value, float identity, float* partials, int waves, Combine combine) const {
    if (rows.parts == 1) return reduce_block(value, identity, partials, waves, combine);
    value = wave::reduce(value, identity, combine);
    const u32 exchange = row * kExchanges + kExchange<Combine>;
    const u32 slots = ((const Row*)this)->words() + exchange * kMaxWaves * 8;
    return reduce_blocks<Protocol, kRanks>(group, epoch, slots, first_thread, limit, value, identity, waves, combine);
  }
};

// One block's part of a row in one shot.
template <class Protocol, class T, u32 kRanks, u32 kChunks>
struct RankRow : BlockRow<RankRow<Protocol, T, kRanks, kChunks>, Protocol, kRanks> {
  using Base = BlockRow<RankRow, Protocol, kRanks>;
  using Base::epoch, Base::first_thread, Base::group, Base::limit, Base::row, Base::rows, Base::thread;
  // Chunks awaited at once. Loads in flight are the same for all numbers of ranks.
  static constexpr u32 kMaxAtOnce = kRanks == 2 ? 4 : kRanks == 4 ? 2 : 1;
  static constexpr u32 kAtOnce = kMaxAtOnce < kChunks ? kMaxAtOnce : kChunks;

  Planes planes;
  u32x4 own[kChunks] = {};

  DEVICE RankRow(const Group& group, const RowsOfRanks& rows, u32 epoch, u16* normed)
      : Base{group,
             rows,
             normed,
             epoch,
             u32(wave::block_id_x()),
             wave::block_id_y() * (rows.threads >> __builtin_ctz(rows.parts)),
             u64(group.limit_us) * wave::kTicksPerMicrosecond},
        planes{row * rows.chunks * 8 * kPlanes, rows.chunks * 8} {}

  DEVICE u32 chunk(u32 i) const { return thread() + i * rows.threads; }

  DEVICE void push_own() {
    const u32x4* const input = (const u32x4*)((const u16*)rows.input + i64(row) * rows.input_stride);
    const u32x4* const addend = (const u32x4*)((const u16*)rows.addend + i64(row) * rows.input_stride);
    const u32 slots = slots_of<Protocol>(group, group.rank, epoch);
#pragma unroll
    for (u32 i = 0; i < kChunks; ++i) {
      const u32 index = chunk(i);
      if (index >= rows.chunks) continue;
      own[i] = mem::load<u32x4>(input + index);
      if (rows.addend) own[i] = rounded_sum<T>(own[i], mem::load<u32x4>(addend + index), rows.addend_factor);
      push<Protocol, kRanks>(group, epoch, slots, planes, index, own[i]);
    }
  }

  // Sums this thread's chunks over the ranks.
  DEVICE void sum(u32x4 (&sums)[kChunks]) const {
    const u32 slots = slots_of<Protocol>(group, 0, epoch);
#pragma unroll
    for (u32 first = 0; first < kChunks; first += kAtOnce) {
      u32 index[kAtOnce], values[kRanks][kAtOnce][kPlanes];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 at = chunk(first + i);
        index[i] = at < rows.chunks ? at : rows.chunks - 1;  // past the end, the last one again
      }
      await<Protocol, kRanks>(group, epoch, Protocol::others(group), slots, group.capacity * 8, planes, index, limit,
                              values);
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        Chunk total;
#pragma unroll
        for (u32 peer = 0; peer < kRanks; ++peer) {
          if (peer >= group.ranks) continue;
          const u32(&word)[kPlanes] = values[peer][i];
          // bug: skip_peer
          const u32x4 x = peer == group.rank ? own[first + i] : u32x4{word[0], word[1], word[2], word[3]};
          add_rank(total, peer, unpack<T>(x));
        }
        sums[first + i] = pack<T>(total);
      }
    }
  }

  // device/norm_row.h

  DEVICE void fill(RowChunks<int(kChunks), u32x4> of, u32x4 (&input)[kChunks]) const {
    u32x4 sums[kChunks];
    sum(sums);
#pragma unroll
    for (u32 i = 0; i < kChunks; ++i) input[i] = of.in_bounds[i] ? sums[i] : u32x4{};
  }
  DEVICE u32 words() const { return slots_of<Protocol>(group, Protocol::kOwnBlocks, epoch); }
};

// Blocks are [rows, parts]. Calls use(row) after the block has pushed its part of the row.
template <class Protocol, class T, u32 kRanks, u32 kChunks, class Use>
DEVICE void for_rows(const Group& group, const RowsOfRanks& rows, u32 row_count, u16* normed, Use use) {
  const u32 epoch = epoch_of<Protocol>(group);
  RankRow<Protocol, T, kRanks, kChunks> row(group, rows, epoch, normed);
  row.push_own();
  use(row);
  end_block<Protocol>(group, epoch, row_count * rows.parts);
}

// All-reduce only.
template <class Protocol, class T, u32 kRanks, int kChunks>
DEVICE void all_reduce(const Group& group, const RowsOfRanks& rows, u32 row_count, void* out) {
  auto store_row = [&](const auto& row) __attribute__((always_inline)) {
    u32x4 sums[u32(kChunks)];
    row.sum(sums);
    u32x4* const to = (u32x4*)out + i64(row.row) * rows.chunks;
#pragma unroll
    for (u32 i = 0; i < u32(kChunks); ++i)
      if (row.chunk(i) < rows.chunks) mem::store(to + row.chunk(i), sums[i]);
  };
  for_rows<Protocol, T, kRanks, u32(kChunks)>(group, rows, row_count, nullptr, store_row);
}

// The FP8 result beside a norm that is also stored as T: rounded as by PlainAndPerBlock of ops/rms_norm.hip.
template <class T>
struct BesideNorm : RowOutput<T, Output::kPerBlock, ScaleBound::kNone, 128> {
  using RowOutput<T, Output::kPerBlock, ScaleBound::kNone, 128>::RowOutput;
};

// All-reduce and RMSNorm, stored or quantized.
template <class Protocol, class T, u32 kRanks, int kChunks, class RowOut>
DEVICE void all_reduce_norm(const Group& group, const RowsOfRanks& rows, u32 row_count, NormRow norm,
                            i64 residual_stride, void* normed, RowOut output) {
  const i64 index = u32(wave::block_id_x());
  if (norm.residual) norm.residual = (u16*)norm.residual + index * residual_stride;
  u16* const copy = normed ? (u16*)normed + index * norm.hidden : nullptr;
  auto norm_row = [&](const auto& row) __attribute__((always_inline)) {
    rms_norm_vector<T, true, Factor::kEither, kChunks>(norm, output, row);
  };
  for_rows<Protocol, T, kRanks, u32(kChunks)>(group, rows, row_count, copy, norm_row);
}
