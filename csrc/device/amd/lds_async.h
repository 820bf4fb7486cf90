// Asynchronous copies from HBM to LDS, 16 bytes per lane. gfx950 copies without registers (buffer_load_dwordx4 ... lds;
// CDNA4 ISA, section 9.1.9 "Memory Buffer Load to LDS"). gfx942 copies only 4 bytes per lane that way, at four times
// the instructions, and its LDS holds one tile buffer instead of two. There a copy stays in registers until the buffer
// is free.
#pragma once
#include "buffer.h"
#include "wave.h"

namespace lds {

template <class T>
using Local = __attribute__((address_space(3))) T;

#if defined(__gfx942__)

constexpr int kBuffers = 1;  // LDS buffers, filled round-robin

struct Copy {  // in flight
  u32x4 data;
};
// Lane l copies 16 bytes from `from` + lane_offset + offset to `to` + 16 * l. If not `inside`, or if lane_offset is -1,
// it writes zeros. `offset` and `to` are uniform.
DEVICE Copy start_copy(mem::Buffer from, int lane_offset, int offset, bool inside, Local<u8>* /*to*/) {
  return {mem::load_or_zero(from, lane_offset, offset, inside)};
}
// Ends a group: the copies started since the previous group ended.
DEVICE void end_group() {}
// Waits until at most kGroups of this wave's groups are in flight. The other copies are in LDS once finish_copy has
// been called for each.
template <int kGroups>
DEVICE void wait_for_copies() {}
DEVICE void finish_copy(const Copy& copy, Local<u8>* to) { ((Local<u32x4>*)to)[wave::lane()] = copy.data; }

#else

constexpr int kBuffers = 2;

struct Copy {};
// Inline assembly, because compilers differ in their support for this instruction and in the waits they insert. M0,
// unused elsewhere here, holds the LDS address and needs a wait state (CDNA4 ISA, section 4.5 "Manually inserted wait
// states").
DEVICE Copy start_copy(mem::Buffer from, int lane_offset, int offset, bool inside, Local<u8>* to) {
  asm volatile("s_mov_b32 m0, %0\n\ts_nop 0\n\tbuffer_load_dwordx4 %1, %2, %3 offen lds" ::"s"(u32(i64(to))),
               "v"(inside ? lane_offset : -1), "s"(from), "s"(offset)
               : "memory");
  return {};
}
DEVICE void end_group() {}
template <int kGroups>
DEVICE void wait_for_copies() {
  static_assert(kGroups == 0, "other loads are counted with the copies");
  __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0): CDNA4 ISA, section 4.4
}
DEVICE void finish_copy(const Copy&, Local<u8>*) {}

#endif

// Makes this thread's LDS stores visible to the matrix cores after the next barrier.
DEVICE void publish() {}

// LDS rows have 8 chunks of 16 bytes. Chunk c of row r is stored at c ^ swizzle(r).
#if defined(__gfx942__)
// 32 banks span one row. The 8 lanes of one ds_write_b128 phase write one row; the 8 lanes of one ds_read_b128 phase
// read eight rows, half of them one chunk further on (composable_kernel, "Understanding AMD GPU LDS and Bank
// Conflicts").
DEVICE int swizzle(int row) { return row % 8; }
#else
// 64 banks span two rows. The 16 lanes of one ds_read_b128 phase read 16 rows at one chunk or, as HipKittens found
// (analysis/paper_experiments/phases), rows 4 to 11 at the neighboring chunk. Neither conflicts.
DEVICE int swizzle(int row) { return row / 2 % 8; }
#endif
// Rows per fragment: in fragment order, the rows of one read are stored chunk by chunk.
constexpr int kFragmentRows = 16;

}  // namespace lds
