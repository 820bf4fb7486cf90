// Memory bandwidth benchmark: reads, writes or copies memory with a given number of blocks.
//
//     read:  out[block] = sum of the block's 32-bit words
//     write: out = value
//     copy:  out = words
//
// Bytes per word: 4, or 8 for copy. Thread t of block b processes the 16-byte vectors from b * 256 + t on, strided by
// the total thread count, with kAhead loads in flight.
#include "device/reduce.h"

constexpr int kThreads = 256, kAhead = 8;

// Iterates over the thread's vectors in groups of kAhead: load(i, at) is called for a whole group before use(i, at).
template <class Load, class Use>
DEVICE void for_vectors(i64 vectors, int blocks, Load load, Use use) {
  const i64 step = i64(blocks) * kThreads;
  i64 first = i64(u32(wave::block_id_x())) * kThreads + wave::thread_id();
  for (; first + (kAhead - 1) * step < vectors; first += kAhead * step) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i, first + i * step);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) use(i, first + i * step);
  }
  for (; first < vectors; first += step) {
    load(0, first);
    use(0, first);
  }
}

KERNEL(kThreads)
stream_memory_read(const void* words,  // [vectors, 4] 32-bit words
                   void* out,          // [blocks] 32-bit words
                   i64 vectors, int blocks) {
  LDS static u32 sums[kThreads];
  u32x4 loaded[kAhead], sum = {0, 0, 0, 0};
  for_vectors(
      vectors, blocks, [&](int i, i64 at) { loaded[i] = mem::load<u32x4>((const u32x4*)words + at); },
      [&](int i, i64) { sum += loaded[i]; });
  const int thread = wave::thread_id();
  sums[thread] = sum.x + sum.y + sum.z + sum.w;
  block_barrier();  // hazard: thread 0 reads the sums that the others write
  if (thread > 0) return;
  u32 total = 0;
  for (int i = 0; i < kThreads; ++i) total += sums[i];
  mem::store((u32*)out + u32(wave::block_id_x()), total);
}

KERNEL(kThreads)
stream_memory_write(void* out,  // [vectors, 4] 32-bit words
                    i64 vectors, int blocks, int value) {
  const u32x4 vector = {u32(value), u32(value), u32(value), u32(value)};
  for_vectors(vectors, blocks, [](int, i64) {}, [&](int, i64 at) { mem::store((u32x4*)out + at, vector); });
}

KERNEL(kThreads)
stream_memory_copy(const void* words,  // [vectors, 4] 32-bit words
                   void* out,          // [vectors, 4] 32-bit words
                   i64 vectors, int blocks) {
  u32x4 loaded[kAhead];
  for_vectors(
      vectors, blocks, [&](int i, i64 at) { loaded[i] = mem::load<u32x4>((const u32x4*)words + at); },
      [&](int i, i64 at) { mem::store((u32x4*)out + at, loaded[i]); });
}
