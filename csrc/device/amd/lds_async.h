// Copies from HBM to LDS, 16 bytes per lane. Where the hardware writes LDS 16 bytes at a time (buffer_load_dwordx4 ... lds;
// CDNA4 ISA, section 9.1.9 "Memory Buffer Load to LDS") the data never passes through registers. CDNA3 has that for 4 bytes
// only, and its LDS has no room for a second buffer: there the copy waits in registers until LDS is free.
#pragma once

namespace lds {

#if defined(__gfx942__)
constexpr int kBuffers = 1;  // of LDS that a loop over K takes turns with
#else
constexpr int kBuffers = 2;
#endif

// Bytes of a matrix in HBM, addressed by 31-bit offsets. An offset with kOutside in it reads zeros: it is beyond the size.
struct Source {
  __amdgpu_buffer_rsrc_t resource;
};
constexpr u32 kOutside = 1u << 31;
DEVICE Source source(const u8* first) {
  constexpr int kRaw =
      0x00027000;  // data format 32, no stride, no swizzle: CDNA3 ISA, table 48 "Buffer Resource Descriptor"
  return {__builtin_amdgcn_make_buffer_rsrc((void*)first, 0, kOutside - 1, kRaw)};
}

struct Copy {  // of 16 bytes per lane, under way
#if defined(__gfx942__)
  u32x4 data;
#endif
};

// Lane l copies the 16 bytes at lane_offset + offset to `to` + 16 * l. `offset` and `to` are the wave's.
DEVICE Copy start_copy(Source from, u32 lane_offset, u32 offset, [[maybe_unused]] Local<u8>* to) {
#if defined(__gfx942__)
  return {__builtin_amdgcn_raw_buffer_load_b128(from.resource, lane_offset, offset, 0)};
#else
  __builtin_amdgcn_raw_ptr_buffer_load_lds(from.resource, to, 16, lane_offset, offset, 0, 0);
  return {};
#endif
}
// The copies that were started before are in LDS, as far as this wave can see.
DEVICE void wait_for_copies() {
#if !defined(__gfx942__)
  __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0)
#endif
}
DEVICE void finish_copy([[maybe_unused]] const Copy& copy, [[maybe_unused]] Local<u8>* to) {
#if defined(__gfx942__)
  ((Local<u32x4>*)to)[wave::lane()] = copy.data;
#endif
}

}  // namespace lds
