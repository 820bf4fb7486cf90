// What attention needs of matrix instructions and conversions: scores of keys (16 rows of an instruction) and queries (its columns)
// become the operand of the product with values. An instruction leaves lane l the scores of rows l / 4 and l / 4 + 8 and of two
// columns, and takes two rows of column l / 4: a transposition of 8 x 8 (movmatrix; PTX ISA, section 9.7.14.5.17).
#pragma once
#include "device/vec.h"

// Nothing: on AMD the compiler leaves registers for so many waves of a SIMD.
#define WAVES_PER_SIMD(waves)

namespace numerics {

// a * b, rounded to fp32: no addition fuses with it.
DEVICE float rounded_product(float a, float b) { return __nvvm_mul_rn_f(a, b); }

}  // namespace numerics

namespace attention {

// A bf16 or fp16 pair of numbers that it has exactly.
template <class T>
DEVICE u32 pack_exact(float low, float high) {
  if constexpr (__is_same(T, Bf16))
    return __builtin_bit_cast(u32, low) >> 16 | (__builtin_bit_cast(u32, high) & 0xffff0000u);
  else return T::pack({low, high});
}

// 16 bits of two words each: of both the high or the low ones.
DEVICE u32 pair_of(u32 first, u32 second, bool high) {
  return high ? first >> 16 | (second & 0xffff0000u) : (first & 0xffff) | second << 16;
}

// Which of 32 keys is this row of tile 0 or 1.
DEVICE int key(int tile, int row) { return row % 8 / 2 * 8 + (2 * tile + row / 8) * 2 + row % 2; }
DEVICE u32 transposed(u32 pair) {
  u32 column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column) : "r"(pair));
  return column;
}
// The operand of keys 8 * (l % 4) to + 7, rounded to T, of the scores of two tiles.
template <class T>
DEVICE u32x4 operand(f32x4 tile_0, f32x4 tile_1) {
  return {transposed(T::pack(tile_0.lo)), transposed(T::pack(tile_0.hi)), transposed(T::pack(tile_1.lo)),
          transposed(T::pack(tile_1.hi))};
}

#define HAS_MLA_IN_LDS 1
// Of MLA: the steps whose keys a wave has.
constexpr int stages(int column_tiles) { return column_tiles == 1 ? 3 : 2; }

// Transposes 32 elements of the keys of two tiles to two operands of the product with values, whose rows are elements.
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
// Row of transposed operand `half`: which of the 8 elements that a lane loaded together, and of which quarter of the 32.
DEVICE int element(int half, int row) { return (half * 2 + row / 8) * 2 + row % 2; }
DEVICE int quarter(int row) { return row % 8 / 2; }

// Combines a value over the lanes that have the same columns.
template <class Combine>
DEVICE float reduce_rows(float value, Combine combine) {
  value = combine(value, wave::other_half<4>(value));
  value = combine(value, wave::other_half<8>(value));
  return combine(value, wave::other_half<16>(value));
}

// Nothing: ptxas orders loads.
template <class Vec>
DEVICE void compute_now(Vec&) {}
// Loads above are issued here, not behind the end of a loop.
DEVICE void issue_now() { asm volatile("" ::: "memory"); }

// Nothing, for the same reason.
template <class Vec>
DEVICE void use_below(Vec&) {}

// A wave's queries lie in LDS where there is room, which leaves registers for keys and values on their way. A lane copies 16
// bytes, and reads what it copied itself. Waves share what L1 has of them: blocks of many parts load the same from L2.
constexpr bool kQueryInLds = true;
DEVICE void copy_query(u8* to, const u16* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(lds::address((lds::Local<u8>*)to) + wave::lane() * 16),
               "l"(mem::global(from))
               : "memory");
}
// Behind the last copy, and above other loads: a wait is also for what was loaded before the end of a group.
DEVICE void end_query() { lds::end_group(); }
DEVICE void wait_for_query() { lds::wait_for_copies<0>(); }
// Loads above are issued above: ptxas moves none over this.
DEVICE void issue_here() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// What was faster on an H200, where registers suffice for it. The last turn of the loop has code of its own, which loads nothing:
// most blocks have one turn.
constexpr bool kLastTurnApart = true;
// Keys that a row does not see are masked where a step has any, and the rows' ends are found there: fewer registers in the loop.
constexpr bool kMasksApart = true;

// Rows of 128 bytes lie in LDS one after the other, 16 bytes c of row r at c ^ swizzle(r): without bank conflicts where 4 times 16
// bytes of two rows are read at a time, and where 8 rows are written.
DEVICE int swizzle(int row) { return row % 2 * 4 + row / 2 % 4; }

}  // namespace attention
