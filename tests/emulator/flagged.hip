// The all-reduce of csrc/collectives/flagged.h with its own protocol, and with protocols that have one thing wrong each.
#include "collectives/flagged.h"

struct Right : Flagged {};
struct FlagFirst : Flagged {
  DEVICE static void complete() {}
};
struct StoreScope : Flagged {
  template <class V>
  DEVICE static void put(u64* inbox, u32 at, V value) {
    mem::store_device(mem::buffer(inbox), at, 0, value);
  }
};
struct LoadScope : Flagged {
  template <class V>
  DEVICE static V get(const u64* inbox, u32 at, bool inside) {
    return mem::load_device_or_zero<V>(mem::buffer(inbox), at, 0, inside);
  }
};
struct NoRelease : Flagged {
  DEVICE static void raise(u64* inbox, u32 at, u32 epoch) {
    __scoped_atomic_store_n(mem::global((u32*)slot(inbox, at)), epoch, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  }
};
struct NoAcquire : Flagged {
  DEVICE static u32 look(u64* inbox, u32 at) {
    return __scoped_atomic_load_n(mem::global((u32*)slot(inbox, at)), __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  }
};
struct NoWait : Flagged {
  DEVICE static bool is_up(u32, u32) { return true; }
};
struct AnyEpoch : Flagged {
  DEVICE static bool is_up(u32 found, u32) { return found != 0; }
};
struct Swap : Flagged {
  DEVICE static u32 buffer(u32) { return 0; }
};
struct SkipPeer : Flagged {
  DEVICE static u32 others(const Group& group) {
    const u32 all = Flagged::others(group);
    return group.rank == 0 ? all & ~(1u << (group.ranks - 1)) : all;
  }
};
struct NarrowEpoch : Flagged {
  DEVICE static u32 next(u32 epoch) { return 1 + (epoch & 1); }
};
struct FreshMemory : Flagged {
  DEVICE static u32 next(u32 epoch) { return epoch + 1; }
};
struct Dropped : Flagged {
  DEVICE static u32 slice_end(u32 first, u32 slice, u32 count) { return Flagged::slice_end(first, slice, count) - 1; }
};
struct Boundary : Flagged {
  DEVICE static u32 slice_end(u32 first, u32 slice, u32 count) { return Flagged::slice_end(first, slice + 1, count); }
};

struct Fp8 : FlaggedE4m3 {};
struct Fp8FlagFirst : FlaggedE4m3 {
  DEVICE static void complete() {}
};
struct Fp8ScaleScope : FlaggedE4m3 {
  template <class V>
  DEVICE static void put(u64* inbox, u32 at, V value) {
    if constexpr (sizeof(V) == 4) mem::store_device(mem::buffer(inbox), at, 0, value);
    else FlaggedE4m3::put(inbox, at, value);
  }
};
struct Fp8HalfGroups : FlaggedE4m3 {
  template <class Protocol, class T>
  struct Wire : E4m3Wire<Protocol, T> {
    static constexpr u32 kGroup = 8;  // of slices
  };
};

#define SUM(name, Protocol, most, chunks)                                                                            \
  KERNEL(512)                                                                                                        \
  name##_##most(u64* inbox0, u64* inbox1, u64* inbox2, u64* inbox3, u64* inbox4, u64* inbox5, u64* inbox6,           \
                u64* inbox7, u64* mine, u32* counters, u64* report, u32 capacity, u32 rank, u32 ranks, u32 limit_us, \
                const void* input, i64 input_stride, u32 rows, u32 row_chunks, u32 parts, u32 row_threads,           \
                u32 row_blocks, u32 stages, u32 slot, u32 first, u32 buffer, u32 inverse, int shift, void* out) {    \
    const Group group{{inbox0, inbox1, inbox2, inbox3, inbox4, inbox5, inbox6, inbox7},                              \
                      mine,                                                                                          \
                      counters,                                                                                      \
                      report,                                                                                        \
                      capacity,                                                                                      \
                      rank,                                                                                          \
                      ranks,                                                                                         \
                      limit_us};                                                                                     \
    flagged_all_reduce<Protocol, Bf16, most, chunks>(group,                                                          \
                                                     {{input, input_stride, row_chunks, parts, row_threads},         \
                                                      rows,                                                          \
                                                      row_blocks,                                                    \
                                                      stages,                                                        \
                                                      slot,                                                          \
                                                      first,                                                         \
                                                      buffer,                                                        \
                                                      {inverse, shift}},                                             \
                                                     out);                                                           \
  }
SUM(right, Right, 2, 1)
SUM(right, Right, 4, 1)
SUM(right, Right, 8, 1)
SUM(flag_first, FlagFirst, 4, 1)
SUM(store_scope, StoreScope, 4, 1)
SUM(load_scope, LoadScope, 4, 1)
SUM(no_release, NoRelease, 4, 1)
SUM(no_acquire, NoAcquire, 4, 1)
SUM(no_wait, NoWait, 4, 1)
SUM(any_epoch, AnyEpoch, 4, 1)
SUM(swap, Swap, 4, 1)
SUM(skip_peer, SkipPeer, 4, 1)
SUM(narrow_epoch, NarrowEpoch, 4, 1)
SUM(fresh_memory, FreshMemory, 4, 1)
SUM(dropped, Dropped, 4, 1)
SUM(boundary, Boundary, 4, 1)
SUM(fp8, Fp8, 2, 4)
SUM(fp8, Fp8, 8, 4)
SUM(fp8_flag_first, Fp8FlagFirst, 8, 4)
SUM(fp8_scale_scope, Fp8ScaleScope, 8, 4)
SUM(fp8_half_groups, Fp8HalfGroups, 8, 4)
