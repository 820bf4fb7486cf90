// Asynchronous copies from HBM to LDS, 16 bytes per lane. gfx950 copies to LDS without registers (buffer_load_dwordx4 ... lds;
// CDNA4 ISA, section 9.1.9 "Memory Buffer Load to LDS"). gfx942 has such copies of 4 bytes only, which would be four times the
// instructions, and LDS for one buffer of a tile instead of two: there a copy stays in registers until the buffer is free.
#pragma once
#include "buffer.h"
#include "wave.h"

namespace lds {

template <class T>
using Local = __attribute__((address_space(3))) T;

#if defined(__gfx942__)

constexpr int kBuffers = 1;  // buffers in LDS that a loop copies to round-robin

struct Copy {  // in flight
  u32x4 data;
};
// Lane l copies 16 bytes from `from` + lane_offset + offset to `to` + 16 * l. If not inside, or for lane_offset -1, it writes
// zeros. `offset` and `to` are the same in all lanes.
DEVICE Copy start_copy(mem::Buffer from, int lane_offset, int offset, bool inside, Local<u8>* /*to*/) {
  return {mem::load_or_zero(from, lane_offset, offset, inside)};
}
// Ends a group of copies: those that were started since the last group ended.
DEVICE void end_group() {}
// Waits for this wave's copies except for the last kGroups groups. They are in LDS once finish_copy was called for each.
template <int kGroups>
DEVICE void wait_for_copies() {}
DEVICE void finish_copy(const Copy& copy, Local<u8>* to) { ((Local<u32x4>*)to)[wave::lane()] = copy.data; }

#else

constexpr int kBuffers = 2;

struct Copy {};
// In assembler, because compilers differ in their support of this instruction and in how long they wait for it. M0, which no
// other instruction here uses, is the LDS address. It needs a wait state (CDNA4 ISA, section 4.5 "Manually inserted wait
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

// What this thread stored to LDS itself, the matrix units see after this and a barrier.
DEVICE void publish() {}

// Rows of 8 chunks of 16 bytes lie in LDS one after the other, chunk c of row r at c ^ swizzle(r).
#if defined(__gfx942__)
// 32 banks are one row. The 8 lanes that ds_write_b128 serves together write one row, those of ds_read_b128 read eight, half of
// them one chunk further on (composable_kernel, "Understanding AMD GPU LDS and Bank Conflicts").
DEVICE int swizzle(int row) { return row % 8; }
#else
// 64 banks are two rows. The 16 lanes that ds_read_b128 serves together read 16 rows, all at one chunk, or as HipKittens found
// (analysis/paper_experiments/phases) rows 4 to 11 at its neighbour: no conflict either way.
DEVICE int swizzle(int row) { return row / 2 % 8; }
#endif
// Operands in fragment order have so many rows together, chunk by chunk: those of one read.
constexpr int kFragmentRows = 16;

}  // namespace lds
