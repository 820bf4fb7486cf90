// The all-reduce of csrc/collectives with its own protocol, and with protocols that have one thing wrong each. Lines marked "bug:", here and
// in csrc/collectives/all_reduce.h, are where the emulator points to.
#include "collectives/all_reduce.h"

struct Right : OneShot {};
struct StoreScope : OneShot {
  DEVICE static void store(u64* slot, u32 value, u32 epoch) {
    // bug: store_scope
    __scoped_atomic_store_n(mem::global(slot), value | u64(epoch) << 32, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  }
};
struct LoadScope : OneShot {
  DEVICE static u64 load(const u64* slot) {
    // bug: load_scope
    return __scoped_atomic_load_n(mem::global((u64*)slot), __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  }
};
struct Torn : OneShot {
  DEVICE static void store(u64* slot, u32 value, u32 epoch) {
    // bug: torn
    mem::store_system((u32*)slot, value);
    mem::store_system((u32*)slot + 1, epoch);
  }
};
struct Wait : OneShot {
  DEVICE static u32 differs(u32, u32) { return 0; }
};
struct AnyEpoch : OneShot {
  DEVICE static u32 differs(u32 found, u32) { return found == 0; }
};
struct Swap : OneShot {
  DEVICE static u32 buffer(u32) { return 0; }
};
struct BlockCounter : OneShot {
  DEVICE static u32* counter(const Group& group) { return group.counters + 1 + wave::block_id_x(); }
  DEVICE static void advance(const Group& group, u32 epoch, u32) { *mem::global(counter(group)) = epoch; }
};
struct SkipPeer : OneShot {
  DEVICE static u32 others(const Group& group) {
    const u32 all = OneShot::others(group);
    return group.rank == 0 ? all & ~(1u << (group.ranks - 1)) : all;
  }
};
struct NarrowEpoch : OneShot {
  DEVICE static u32 next(u32 epoch) { return (epoch + 1) & 3; }
};
struct FreshMemory : OneShot {
  DEVICE static u32 next(u32 epoch) { return epoch + 1; }
};
struct SharedSlots : OneShot {
  static constexpr u32 kHanded = 0;
};

#define KERNEL_OF(name, Protocol, ranks, chunks)                                                                      \
  KERNEL(512)                                                                                                         \
  name##_##ranks##_x##chunks(u64* inbox0, u64* inbox1, u64* inbox2, u64* inbox3, u64* inbox4, u64* inbox5,            \
                             u64* inbox6, u64* inbox7, u64* mine, u32* counters, u64* report, u32 capacity, u32 rank, \
                             u32 ranks_, u32 limit_us, const void* input, i64 input_stride, u32 rows, u32 row_chunks, \
                             u32 parts, u32 part_chunks, u32 threads_per_block, void* out) {                          \
    const Group group{{inbox0, inbox1, inbox2, inbox3, inbox4, inbox5, inbox6, inbox7},                               \
                      mine,                                                                                           \
                      counters,                                                                                       \
                      report,                                                                                         \
                      capacity,                                                                                       \
                      rank,                                                                                           \
                      ranks_,                                                                                         \
                      limit_us};                                                                                      \
    all_reduce<Protocol, Bf16, ranks, chunks>(group, {input, input_stride, row_chunks, parts, part_chunks}, rows,     \
                                              threads_per_block, out);                                                \
  }
#define KERNELS(name, Protocol, chunks) \
  KERNEL_OF(name, Protocol, 2, chunks) KERNEL_OF(name, Protocol, 4, chunks) KERNEL_OF(name, Protocol, 8, chunks)
KERNELS(right, Right, 2)
KERNELS(right, Right, 4)
KERNELS(store_scope, StoreScope, 2)
KERNELS(load_scope, LoadScope, 2)
KERNELS(torn, Torn, 2)
KERNELS(wait, Wait, 2)
KERNELS(any_epoch, AnyEpoch, 2)
KERNELS(swap, Swap, 2)
KERNELS(block_counter, BlockCounter, 2)
KERNELS(skip_peer, SkipPeer, 2)
KERNELS(narrow_epoch, NarrowEpoch, 2)
KERNELS(fresh_memory, FreshMemory, 2)
KERNELS(shared_slots, SharedSlots, 2)
