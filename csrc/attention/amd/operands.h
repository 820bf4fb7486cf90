// What attention needs of matrix instructions and conversions: scores of keys (16 rows of an instruction) and queries (its columns)
// become the operand of the product with values without an exchange of lanes. An instruction leaves lane l the scores of column
// l % 16 and rows 4 * (l / 16) to + 3, and takes for column l % 16 eight elements; with the keys of two tiles in the order below
// both are the same lane's.
#pragma once
#include "device/gpu.h"

namespace numerics {

// a * b, rounded to fp32: no addition fuses with it.
DEVICE float rounded_product(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}

// The two e4m3 in the lower or the upper half of a word.
template <bool kUpper>
DEVICE f32x2 from_e4m3x2(u32 word) {
  return __builtin_amdgcn_cvt_pk_f32_fp8(word, kUpper);
}

}  // namespace numerics

namespace attention {

// Which of 32 keys is this row of tile 0 or 1.
DEVICE int key(int tile, int row) { return row / 4 * 8 + tile * 4 + row % 4; }
// The operand of keys 8 * (l / 16) to + 7, rounded to T, of the scores of two tiles.
template <class T>
DEVICE u32x4 operand(f32x4 tile_0, f32x4 tile_1) {
  return {T::pack(tile_0.lo), T::pack(tile_0.hi), T::pack(tile_1.lo), T::pack(tile_1.hi)};
}
// Combines a value over the lanes that have the same columns.
template <class Combine>
DEVICE float reduce_rows(float value, Combine combine) {
  value = combine(value, wave::from_lane(value, wave::lane() ^ 16));
  return combine(value, wave::from_lane(value, wave::lane() ^ 32));
}

// The sums are computed here: no load below moves above it, where it would need registers of its own, and a copy from there that
// waits for it.
DEVICE void compute_now(f32x4& sum) { asm volatile("" : "+v"(sum)::"memory"); }

// Loads above are issued here, not behind the end of a loop.
DEVICE void issue_now() { asm volatile("" ::: "memory"); }

// What is computed of a loaded value is computed below, where the wait for it is too.
template <class Vec>
DEVICE void use_below(Vec& value) {
  asm volatile("" : "+v"(value));
}

}  // namespace attention
