// All-reduce of rows, fused with their epilogue: the sum is stored, or normalized and quantized.
//
//     x = T(sum of the ranks' input, in rank order)       bit-identical on all ranks
//     out = x, or RMSNorm of x with every option of device/norm_row.h
//
// `parts` blocks share a row. Each pushes its part of this rank's row to all ranks, waits for the same part from them
// and sums it. With one block, the row is then complete. With more, they hand their sums to the first block, which
// normalizes the row: one more trip through memory, but each block reads only a part of what 8 ranks sent. A block
// reads about 50 GB/s, so a row of 7168 takes 4.8 us in one block, and 0.6 us + 1.5 us + 0.6 us in eight and the first.
// Rows are independent: five tokens use five times as many blocks.
#pragma once
#include "device/norm_row.h"
#include "one_shot.h"

constexpr u32 kMaxThreads = 512;  // per block

// The rows [rows, hidden] of a launch.
struct RowsOfRanks {
  const void* input;  // T, rows input_stride elements apart, 16-byte aligned
  i64 input_stride;
  u32 chunks;  // per row
  u32 parts, part_chunks;
};

// One row of the launch, from its blocks' view.
template <class Protocol, class T, u32 kRanks>
struct RankRow {
  // The number of chunks awaited at once: keeps the loads in flight constant across rank counts.
  static constexpr u32 kAtOnce = kRanks == 2 ? 4 : kRanks == 4 ? 2 : 1;

  const Group& group;
  const u16* input;
  u32 epoch, parts;
  Planes planes;
  u64 limit;

  DEVICE u32x4 own(u32 chunk) const { return mem::load<u32x4>((const u32x4*)input + chunk); }

  DEVICE void push_part(u32 first, u32 end, u32 threads) const {
    const u32 slots = slots_of<Protocol>(group, group.rank, epoch);
    for (u32 chunk = first + wave::thread_id(); chunk < end; chunk += threads)
      push<Protocol, kRanks>(group, epoch, slots, planes, chunk, own(chunk));
  }

  // Sums at most kAtOnce chunks over the ranks.
  template <u32 kChunks>
  DEVICE void sum(const u32 (&chunk)[kChunks], u32x4 (&sums)[kChunks]) const {
    u32x4 mine[kChunks], values[kRanks][kChunks];
#pragma unroll
    for (u32 i = 0; i < kChunks; ++i) mine[i] = own(chunk[i]);
    const u32 slots = slots_of<Protocol>(group, 0, epoch);
    await<Protocol, kRanks>(group, epoch, Protocol::others(group), slots, group.capacity * 8, planes, chunk, limit,
                            values);
#pragma unroll
    for (u32 i = 0; i < kChunks; ++i) {
      Chunk total;
#pragma unroll
      for (u32 peer = 0; peer < kRanks; ++peer) {
        if (peer >= group.ranks) continue;
        // bug: skip_peer
        const Chunk x = unpack<T>(peer == group.rank ? mine[i] : values[peer][i]);
        for (int j = 0; j < kChunk / 2; ++j) total.pair[j] = peer == 0 ? x.pair[j] : total.pair[j] + x.pair[j];
      }
      sums[i] = pack<T>(total);
    }
  }

  // Hands a part's sums to the row's first block.
  DEVICE void hand_part(u32 first, u32 end, u32 threads) const {
    const u32 slots = slots_of<Protocol>(group, Protocol::kHanded, epoch);
#pragma nounroll
    for (u32 base = first; base < end; base += kAtOnce * threads) {
      u32 chunk[kAtOnce];
      u32x4 sums[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        const u32 index = base + wave::thread_id() + i * threads;
        chunk[i] = index < end ? index : end - 1;  // past the end, the last one again
      }
      sum(chunk, sums);
#pragma unroll
      for (u32 i = 0; i < kAtOnce; ++i) {
        if (base + wave::thread_id() + i * threads >= end) continue;
#pragma unroll
        for (u32 j = 0; j < kPlanes; ++j)
          Protocol::store(slot(group.mine, slots + planes.at(chunk[i], j)), sums[i][j], epoch);
      }
    }
  }

  // Gets the sums of the first block's chunks that belong to this thread, by its index and `threads`; chunks past the
  // row repeat the last one. They pass through LDS, from a thread to itself: the loop is not unrolled, as its body has
  // dozens of loads.
  template <u32 kChunks>
  DEVICE void take(u32 chunks, u32 threads, u32x4 (&sums)[kChunks]) const {
    constexpr u32 kStep = kAtOnce < kChunks ? kAtOnce : kChunks;
    LDS static u32x4 taken[kChunks * kMaxThreads];
    u32x4* const own_taken = taken + wave::thread_id();
#pragma nounroll
    for (u32 first = 0; first < kChunks; first += kStep) {
      u32 chunk[kStep];
      u32x4 found[kStep], handed[1][kStep];
#pragma unroll
      for (u32 i = 0; i < kStep; ++i) {
        const u32 index = wave::thread_id() + (first + i) * threads;
        chunk[i] = index < chunks ? index : chunks - 1;
      }
      if (parts == 1) {
        sum(chunk, found);
      } else {
        const u32 slots = slots_of<Protocol>(group, Protocol::kHanded, epoch);
        await<Protocol, kRanks>(group, epoch, 1, slots, 0, planes, chunk, 2 * limit, handed);
#pragma unroll
        for (u32 i = 0; i < kStep; ++i) found[i] = handed[0][i];
      }
#pragma unroll
      for (u32 i = 0; i < kStep; ++i) own_taken[(first + i) * kMaxThreads] = found[i];
    }
#pragma unroll
    for (u32 i = 0; i < kChunks; ++i) sums[i] = own_taken[i * kMaxThreads];
  }
};

// The row source of rms_norm_vector, with a copy of the result before quantization.
template <class Row>
struct FromRanks {
  static constexpr bool kLoads = false;
  Row row;
  u32 chunks, threads;
  void* normed;  // the row's, or null

  template <int kChunks>
  DEVICE void fill(RowChunks<kChunks, u32x4> of, u32x4 (&sums)[kChunks]) const {
    u32x4 taken[u32(kChunks)];
    row.template take<u32(kChunks)>(chunks, threads, taken);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) sums[i] = of.in_bounds[i] ? taken[i] : u32x4{};
  }
  DEVICE void keep(int index, bool in_bounds, u32x4 y) const {
    if (in_bounds && normed) mem::store((u32x4*)normed + index, y);
  }
};

// Blocks are [rows, parts]: use(row) is called in each row's first block, once its part has been pushed.
template <class Protocol, class T, u32 kRanks, class Use>
DEVICE void for_rows(const Group& group, const RowsOfRanks& rows, u32 row_count, u32 threads, Use use) {
  const u32 index = wave::block_id_x(), part = wave::block_id_y();
  const u32 epoch = epoch_of<Protocol>(group), columns = rows.chunks * 8;
  const u16* input = (const u16*)rows.input + index * rows.input_stride;
  const RankRow<Protocol, T, kRanks> row{group,
                                         input,
                                         epoch,
                                         rows.parts,
                                         {index * columns * kPlanes, columns},
                                         u64(group.limit_us) * wave::kTicksPerMicrosecond};
  const u32 first = part * rows.part_chunks, end = first + rows.part_chunks;
  const u32 last = end < rows.chunks ? end : rows.chunks;
  row.push_part(first, last, threads);
  if (rows.parts > 1) row.hand_part(first, last, threads);
  if (part == 0) use(row);
  end_block<Protocol>(group, epoch, row_count * rows.parts);
}

// All-reduce only.
template <class Protocol, class T, u32 kRanks, int kChunks>
DEVICE void all_reduce(const Group& group, const RowsOfRanks& rows, u32 row_count, u32 threads, void* out) {
  for_rows<Protocol, T, kRanks>(group, rows, row_count, threads, [&](auto row) __attribute__((always_inline)) {
    u32x4 sums[u32(kChunks)];
    row.template take<u32(kChunks)>(rows.chunks, threads, sums);
    u32x4* const to = (u32x4*)out + i64(u32(wave::block_id_x())) * rows.chunks;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const u32 chunk = wave::thread_id() + i * threads;
      if (chunk < rows.chunks) mem::store(to + chunk, sums[i]);
    }
  });
}

// All-reduce and RMSNorm, stored or quantized.
template <class Protocol, class T, u32 kRanks, int kChunks, Output kOutput>
DEVICE void all_reduce_norm(const Group& group, const RowsOfRanks& rows, u32 row_count, u32 threads, NormRow norm,
                            i64 residual_stride, void* normed, RowOutput<T, kOutput> output) {
  const i64 index = u32(wave::block_id_x());
  if (norm.residual) norm.residual = (u16*)norm.residual + index * residual_stride;
  if (normed) normed = (u16*)normed + index * norm.hidden;
  for_rows<Protocol, T, kRanks>(group, rows, row_count, threads, [&](auto row) __attribute__((always_inline)) {
    const FromRanks<decltype(row)> source{row, rows.chunks, threads, normed};
    rms_norm_vector<T, true, Factor::kEither, kChunks>(norm, output, source);
  });
}
