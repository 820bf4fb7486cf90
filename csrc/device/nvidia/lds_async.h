// Asynchronous copies from HBM to LDS (shared memory), 16 bytes per lane, without registers (cp.async; PTX ISA, section
// 9.7.9.25.3 "Non-bulk copy").
#pragma once
#include "buffer.h"
#include "wave.h"

namespace lds {

template <class T>
using Local = __attribute__((address_space(3))) T;

constexpr int kBuffers = 3;  // LDS buffers, filled round-robin

DEVICE u32 address(const Local<u8>* place) { return u32(i64(place)); }

struct Copy {};  // in flight
// Lane l copies 16 bytes from `from` + lane_offset + offset to `to` + 16 * l. If not `inside`, or if lane_offset is -1,
// it writes zeros. `offset` and `to` are uniform.
DEVICE Copy start_copy(mem::Buffer from, int lane_offset, int offset, bool inside, Local<u8>* to) {
  const int bytes = inside && lane_offset >= 0 ? 16 : 0;  // bytes read; the rest are zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to) + wave::lane() * 16),
               "l"(mem::global(from + lane_offset + offset)), "r"(bytes)
               : "memory");
  return {};
}
// The same from one address, predicated: fewer instructions, more registers.
DEVICE void start_copy(const u8* from, bool inside, Local<u8>* to) {
  asm volatile("{.reg .pred p; setp.eq.b32 p, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, p;}" ::"r"(
                   address(to) + wave::lane() * 16),
               "l"(mem::global(from)), "r"(int(inside))
               : "memory");
}
// Each lane copies the word at `from`, or zeros.
DEVICE void start_word(const void* from, bool inside, u32* to) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address((Local<u8>*)to)), "l"(mem::global(from)),
               "r"(inside ? 4 : 0)
               : "memory");
}
// Ends a group: the copies started since the previous group ended.
DEVICE void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kGroups of this wave's groups are in flight. The other copies are in LDS once finish_copy has
// been called for each. The tensor cores see them without an async-proxy fence, which would wait for all copies in
// flight.
template <int kGroups>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}
DEVICE void finish_copy(const Copy&, Local<u8>*) {}
// Makes this thread's LDS stores visible to the tensor cores after the next barrier.
DEVICE void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// LDS rows have 8 chunks of 16 bytes. Chunk c of row r is stored at c ^ swizzle(r): the tensor cores' 128-byte swizzle
// (PTX ISA, section 9.7.15.5.1 "Shared memory matrix layout").
DEVICE int swizzle(int row) { return row % 8; }
// Rows per fragment: in fragment order, the rows of a core matrix are stored chunk by chunk.
constexpr int kFragmentRows = 8;

}  // namespace lds
