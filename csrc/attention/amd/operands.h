// Matrix instruction operands and conversions for attention. The scores of keys (an instruction's 16 rows) and queries
// (its columns) become the operand of the PV product without lane exchange. An instruction leaves the scores for column
// l % 16 and rows 4 * (l / 16) to + 3 in lane l, and reads eight elements for column l % 16. With the keys of two tiles
// in the order below, both are in the same lane.
#pragma once
#include "device/vec.h"

// The compiler limits registers for this many waves per SIMD.
#define WAVES_PER_SIMD(waves) __attribute__((amdgpu_waves_per_eu(waves)))

namespace numerics {

// a * b, rounded to fp32: not contracted into an fma.
DEVICE float rounded_product(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}

}  // namespace numerics

namespace attention {

// Packs two numbers that bf16 or fp16 represents exactly.
template <class T>
DEVICE u32 pack_exact(float low, float high) {
  if constexpr (__is_same(T, Bf16))
    return __builtin_amdgcn_perm(__builtin_bit_cast(u32, high), __builtin_bit_cast(u32, low), 0x07060302);
  else return __builtin_bit_cast(u32, __builtin_amdgcn_cvt_pkrtz(low, high));
}

// Packs the high or the low 16 bits of two words.
DEVICE u32 pair_of(u32 first, u32 second, bool high) {
  return __builtin_amdgcn_perm(second, first, high ? 0x07060302 : 0x05040100);
}

// The key, of 32, in this row of tile 0 or 1.
DEVICE int key(int tile, int row) { return row / 4 * 8 + tile * 4 + row % 4; }
// The operand for keys 8 * (l / 16) to + 7, rounded to T, from the scores of two tiles.
template <class T>
DEVICE u32x4 operand(f32x4 tile_0, f32x4 tile_1) {
  return {T::pack(tile_0.lo), T::pack(tile_0.hi), T::pack(tile_1.lo), T::pack(tile_1.hi)};
}

#define HAS_MLA_64 1  // MLA through LDS, 64 columns per block
// MLA: the number of steps whose keys a wave holds.
constexpr int stages(int /*packed_row_tiles*/) { return 3; }

// MLA: sums of up to 32 columns go from registers to HBM. Through LDS, as on NVIDIA, rows of results are written whole,
// but the sums pass four barriers.
constexpr bool kSumsInRegisters = true;
constexpr int kCombinedAtOnce = 8;       // splits whose sums a wave of the combining launch loads at once
constexpr bool kCombinesInWaves = true;  // such a wave adds more than eight splits where its own elements are enough

// sum + a b over 16 keys, four per lane in its row of a and column of b.
template <class T>
DEVICE f32x4 multiply_16_keys(f32x4 sum, u32x2 a, u32x2 b) {
  if constexpr (__is_same(T, Bf16)) {
    using Short4 = short __attribute__((ext_vector_type(4)));
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Short4, a), __builtin_bit_cast(Short4, b), sum,
                                                     0, 0, 0);
  } else {
    using Half4 = _Float16 __attribute__((ext_vector_type(4)));
    return __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Half4, a), __builtin_bit_cast(Half4, b), sum, 0, 0,
                                                 0);
  }
}

// Transposes 32 elements of two tiles' keys into two operands of the PV product, whose rows are elements: a product
// with the identity leaves element l % 16 of keys 4 * (l / 16) to + 3 in lane l.
template <class T>
DEVICE f32x4 times_identity(u32x2 keys) {
  const int element = wave::lane() % 16;
  const u32 one = (__is_same(T, Bf16) ? 0x3f80 : 0x3c00) << element % 2 * 16;
  const bool is_here = element / 4 == wave::lane() / 16;
  const u32x2 identity = {is_here && element / 2 % 2 == 0 ? one : 0, is_here && element / 2 % 2 == 1 ? one : 0};
  return multiply_16_keys<T>(f32x4{}, keys, identity);
}
template <class T>
DEVICE void transpose(const mma::Weights& tile_0, const mma::Weights& tile_1, mma::Weights (&values)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const f32x4 a = times_identity<T>(half ? tile_0.load[0].hi : tile_0.load[0].lo);
    const f32x4 b = times_identity<T>(half ? tile_1.load[0].hi : tile_1.load[0].lo);
    values[half].load[0] = {pack_exact<T>(a.x, a.y), pack_exact<T>(a.z, a.w), pack_exact<T>(b.x, b.y),
                            pack_exact<T>(b.z, b.w)};
  }
}
// Row of transposed operand `half`: the element's index among the 8 that a lane loaded together, and its quarter of the
// 32.
DEVICE int element(int half, int row) { return half * 4 + row % 4; }
DEVICE int quarter(int row) { return row / 4; }

// Reduces a value over the lanes that share columns.
template <class Combine>
DEVICE float reduce_rows(float value, Combine combine) {
  value = combine(value, wave::from_lane(value, wave::lane() ^ 16));
  return combine(value, wave::from_lane(value, wave::lane() ^ 32));
}

// Forces the value to be computed here. A later load that moved above would need its own registers, and a copy that
// waits for the load.
template <class Vec>
DEVICE void compute_now(Vec& value) {
  asm volatile("" : "+v"(value)::"memory");
}

// Loads above are issued here, not after the end of a loop.
DEVICE void issue_now() { asm volatile("" ::: "memory"); }

// Values computed from a loaded value are computed below, where the wait is, too.
template <class Vec>
DEVICE void use_below(Vec& value) {
  asm volatile("" : "+v"(value));
}

// No instruction moves across.
DEVICE void schedule_fence() { __builtin_amdgcn_sched_barrier(0); }

// Issues this many matrix instructions, each followed by two of the vector ALU, which run beside it.
template <int kProducts>
DEVICE void take_turns() {
  constexpr int kMatrix = 0x8, kValu = 0x2;  // of the builtin
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    __builtin_amdgcn_sched_group_barrier(kMatrix, 1, 0);
    __builtin_amdgcn_sched_group_barrier(kValu, 2, 0);
  }
}

// Gives this wave priority on its SIMD.
DEVICE void go_first() { __builtin_amdgcn_s_setprio(1); }

// A wave's queries stay in registers.
constexpr bool kQueryInLds = false;
DEVICE void copy_query(u8*, const u16*) {}
DEVICE void end_query() {}
DEVICE void wait_for_query() {}
// Nothing to order: the compiler does not move loads after the products that follow.
DEVICE void issue_here() {}

// Faster on NVIDIA (nvidia/operands.h), but not predicted to be on MI300X: peeling the last iteration takes 336
// registers instead of 195 and up to 13 % longer, a separate mask up to 3 %.
constexpr bool kPeelLastIter = false, kSeparateMask = false;

// LDS rows have 128 bytes. 16-byte vector c of row r is stored at c ^ swizzle(r), free of bank conflicts when 16 rows
// are read at a time, and when 8 are written.
DEVICE int swizzle(int row) { return lds::swizzle(row); }

}  // namespace attention
