// Copies from HBM to LDS, 16 bytes per lane. gfx950 writes them to LDS past the registers, while the wave goes on
// (buffer_load_dwordx4 ... lds; CDNA4 ISA, section 9.1.9 "Memory Buffer Load to LDS"). gfx942 has that for 4 bytes only, four
// times the instructions, and LDS for one buffer of a tile instead of two: there a copy waits in registers until its place
// in LDS is free.
#pragma once

namespace lds {

template <class T>
using Local = __attribute__((address_space(3))) T;

#if defined(__gfx942__)

constexpr int kBuffers = 1;  // places in LDS that the copies of a loop take in turn

struct Copy {  // under way
  u32x4 data;
};
// Lane l copies the 16 bytes at from + lane_offset + offset, or zeros, to `to` + 16 * l; `offset` and `to` are the wave's.
DEVICE Copy start_copy(mem::Buffer from, int lane_offset, int offset, bool inside, Local<u8>* /*to*/) {
  return {mem::load_or_zero(from, lane_offset, offset, inside)};
}
// All copies of this wave that were started before are in LDS, once finish_copy was called for each.
DEVICE void wait_for_copies() {}
DEVICE void finish_copy(const Copy& copy, Local<u8>* to) { ((Local<u32x4>*)to)[wave::lane()] = copy.data; }

#else

constexpr int kBuffers = 2;

struct Copy {};
DEVICE Copy start_copy(mem::Buffer from, int lane_offset, int offset, bool inside, Local<u8>* to) {
  __builtin_amdgcn_raw_ptr_buffer_load_lds(from, to, 16, inside ? lane_offset : -1, offset, 0, 0);
  return {};
}
DEVICE void wait_for_copies() { __builtin_amdgcn_s_waitcnt(0x0f70); }  // vmcnt(0): CDNA4 ISA, section 4.4
DEVICE void finish_copy(const Copy&, Local<u8>*) {}

#endif

}  // namespace lds
