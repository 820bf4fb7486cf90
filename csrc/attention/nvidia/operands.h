// Matrix instruction operands and conversions for attention. The scores of keys (an instruction's 16 rows) and queries
// (its columns) become the operand of the PV product. An instruction leaves the scores for rows l / 4 and l / 4 + 8 and
// two columns in lane l, and reads two rows of column l / 4: an 8 x 8 transposition (movmatrix; PTX ISA, section
// 9.7.14.5.17).
#pragma once
#include "device/vec.h"

// Empty: on AMD the compiler limits registers for this many waves per SIMD.
#define WAVES_PER_SIMD(waves)

namespace numerics {

// a * b, rounded to fp32: not contracted into an fma.
DEVICE float rounded_product(float a, float b) { return __nvvm_mul_rn_f(a, b); }

}  // namespace numerics

namespace attention {

// Packs two numbers that bf16 or fp16 represents exactly.
template <class T>
DEVICE u32 pack_exact(float low, float high) {
  if constexpr (__is_same(T, Bf16))
    return __builtin_bit_cast(u32, low) >> 16 | (__builtin_bit_cast(u32, high) & 0xffff0000u);
  else return T::pack({low, high});
}

// Packs the high or the low 16 bits of two words.
DEVICE u32 pair_of(u32 first, u32 second, bool high) {
  return high ? first >> 16 | (second & 0xffff0000u) : (first & 0xffff) | second << 16;
}

// The key, of 32, in this row of tile 0 or 1.
DEVICE int key(int tile, int row) { return row % 8 / 2 * 8 + (2 * tile + row / 8) * 2 + row % 2; }
DEVICE u32 transposed(u32 pair) {
  u32 column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(pair));
  return column;
}
// The operand for keys 8 * (l % 4) to + 7, rounded to T, from the scores of two tiles.
template <class T>
DEVICE u32x4 operand(f32x4 tile_0, f32x4 tile_1) {
  return {transposed(T::pack(tile_0.lo)), transposed(T::pack(tile_0.hi)), transposed(T::pack(tile_1.lo)),
          transposed(T::pack(tile_1.hi))};
}

#define HAS_MLA_IN_LDS 1
#define HAS_DECODE_8 1  // decode of 8 packed-GQA rows, an instruction's columns: one tile instead of two
// MLA: the number of steps whose keys a wave holds.
constexpr int stages(int packed_row_tiles) { return packed_row_tiles == 1 ? 3 : 2; }

// MLA: sums go through LDS to HBM, and a wave of the combining launch loads four splits' at once.
constexpr bool kSumsInRegisters = false;
constexpr int kCombinedAtOnce = 4;
constexpr bool kCombinesInWaves = false;

// Transposes 32 elements of two tiles' keys into two operands of the PV product, whose rows are elements.
template <class T>
DEVICE void transpose(const mma::Weights& tile_0, const mma::Weights& tile_1, mma::Weights (&values)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int l = 0; l < 2; ++l) {
      const int word = half * 2 + l;
      values[half].load[l] = {transposed(tile_0.load[0][word]), transposed(tile_0.load[1][word]),
                              transposed(tile_1.load[0][word]), transposed(tile_1.load[1][word])};
    }
}
// Row of transposed operand `half`: the element's index among the 8 that a lane loaded together, and its quarter of the
// 32.
DEVICE int element(int half, int row) { return (half * 2 + row / 8) * 2 + row % 2; }
DEVICE int quarter(int row) { return row % 8 / 2; }

// Reduces a value over the lanes that share columns.
template <class Combine>
DEVICE float reduce_rows(float value, Combine combine) {
  value = combine(value, wave::other_half<4>(value));
  value = combine(value, wave::other_half<8>(value));
  return combine(value, wave::other_half<16>(value));
}

// Nothing to force: ptxas orders loads.
template <class Vec>
DEVICE void compute_now(Vec&) {}
// Loads above are issued here, not after the end of a loop.
DEVICE void issue_now() { asm volatile("" ::: "memory"); }

// Nothing to force, for the same reason.
template <class Vec>
DEVICE void use_below(Vec&) {}

// A wave's queries are in LDS where there is room, which leaves registers for keys and values in flight. A lane copies
// 16 bytes, and reads only its own copy. Waves share queries through L1: blocks of many splits load the same from L2.
constexpr bool kQueryInLds = true;
DEVICE void copy_query(u8* to, const u16* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(lds::address((lds::Local<u8>*)to) + wave::lane() * 16),
               "l"(mem::global(from))
               : "memory");
}
// Called after the last copy, and before other loads: a wait also covers what was loaded before the end of a group.
DEVICE void end_query() { lds::end_group(); }
DEVICE void wait_for_query() { lds::wait_for_copies<0>(); }
// Loads above are issued above: ptxas moves none across.
DEVICE void issue_here() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// Measured faster on H200, where registers suffice. The last iteration is peeled, and loads nothing: most blocks have
// one iteration.
constexpr bool kPeelLastIter = true;
// A separate mask: unseen keys are masked only in steps that have any, and row ends are computed there, which saves
// registers in the loop.
constexpr bool kSeparateMask = true;

// LDS rows have 128 bytes. 16-byte vector c of row r is stored at c ^ swizzle(r), free of bank conflicts when four
// 16-byte vectors in each of two rows are read at a time, and when 8 rows are written.
DEVICE int swizzle(int row) { return row % 2 * 4 + row / 2 % 4; }

}  // namespace attention
