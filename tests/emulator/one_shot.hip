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
  static constexpr u32 kOwnBlocks = 0;
};

// clang-format off
#define GROUP_ARGUMENTS                                                                                                \
  u64* inbox0, u64* inbox1, u64* inbox2, u64* inbox3, u64* inbox4, u64* inbox5, u64* inbox6, u64* inbox7, u64* mine,   \
  u32* counters, u64* report, u32 capacity, u32 rank, u32 ranks, u32 limit_us, const void* input, i64 input_stride,    \
  u32 rows, u32 row_chunks, u32 parts, u32 row_threads
#define GROUP                                                                                                          \
  const Group group{{inbox0, inbox1, inbox2, inbox3, inbox4, inbox5, inbox6, inbox7},                                  \
                    mine, counters, report, capacity, rank, ranks, limit_us};                                          \
  const RowsOfRanks of_ranks{input, input_stride, row_chunks, parts, row_threads}
#define SUM(name, Protocol, most, chunks)                                                                              \
  KERNEL(512) name##_sum_##most##_x##chunks(GROUP_ARGUMENTS, void* out) {                                              \
    GROUP;                                                                                                             \
    all_reduce<Protocol, Bf16, most, chunks>(group, of_ranks, rows, out);                                              \
  }
#define NORM(name, Protocol, most, chunks)                                                                             \
  KERNEL(512) name##_norm_##most##_x##chunks(                                                                          \
      GROUP_ARGUMENTS, void* residual, i64 residual_stride, const void* weight, int hidden, float inverse_hidden,      \
      float epsilon, int one_plus_weight, void* normed, const void* addend, float addend_factor, const float* scale,   \
      void* out, float* scale_out, i64 scale_row_stride, i64 scale_stride, int group_size) {                           \
    GROUP;                                                                                                             \
    const RowOutput<Bf16, Output::kPlain> output(                                                                      \
        scale, out, scale_out, scale_row_stride, scale_stride, group_size, row_threads);                               \
    all_reduce_norm<Protocol, Bf16, most, chunks>(                                                                     \
        group, of_ranks, rows, {nullptr, residual, weight, hidden, inverse_hidden, epsilon, one_plus_weight != 0},     \
        residual_stride, normed, output);                                                                              \
  }
// clang-format on
#define KERNELS(kind, name, Protocol, chunks) \
  kind(name, Protocol, 2, chunks) kind(name, Protocol, 4, chunks) kind(name, Protocol, 8, chunks)
KERNELS(SUM, right, Right, 1)
KERNELS(SUM, right, Right, 2)
KERNELS(NORM, right, Right, 1)
KERNELS(NORM, right, Right, 2)
#ifdef ALL_RANKS
#define BUG(kind, name, Protocol) KERNELS(kind, name, Protocol, 1)
#else
#define BUG(kind, name, Protocol) kind(name, Protocol, 4, 1)
#endif
BUG(SUM, store_scope, StoreScope)
BUG(SUM, load_scope, LoadScope)
BUG(SUM, torn, Torn)
BUG(SUM, wait, Wait)
BUG(SUM, any_epoch, AnyEpoch)
BUG(SUM, swap, Swap)
BUG(SUM, block_counter, BlockCounter)
BUG(SUM, skip_peer, SkipPeer)
BUG(SUM, narrow_epoch, NarrowEpoch)
BUG(SUM, fresh_memory, FreshMemory)
BUG(NORM, shared_slots, SharedSlots)
