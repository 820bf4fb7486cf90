// Rotary rotation of element pairs, 8 pairs per thread, in fp32; ops/rope_and_cache.hip defines the pairs.
#pragma once
#include "attention/operands.h"
#include "device/vec.h"

DEVICE Chunk load_8(const void* row, i64 column, int type) {
  if (type == 0) return unpack<Bf16>(mem::load<u32x4>((const u16*)row + column));
  if (type == 1) return unpack<F16>(mem::load<u32x4>((const u16*)row + column));
  const f32x4 low = mem::load<f32x4>((const float*)row + column),
              high = mem::load<f32x4>((const float*)row + column + 4);
  return {low.lo, low.hi, high.lo, high.hi};
}

struct Rotation {  // of tokens
  const i64* positions;
  const void* cos_sin;  // [positions, 16 * rotary_vecs], cos_sin_type: 0 bf16, 1 fp16, 2 fp32
  int rotary_vecs;      // 16 elements each
  int cos_sin_type;
  int is_neox;
};

struct Angles {  // for 8 pairs
  Chunk cos, sin;
};

// Loads the angles of 8 pairs. A problem has cos_sin [positions, 16 * rotary_vecs] of cos_sin_type: 0 bf16, 1 fp16, 2
// fp32.
template <class Problem>
DEVICE Angles angles(const Problem& p, i64 position, int vec) {
  const int half = p.rotary_vecs * kChunk;
  const i64 row = position * 2 * half;
  const Chunk cos = load_8(p.cos_sin, row + vec * kChunk, p.cos_sin_type);
  const Chunk sin = load_8(p.cos_sin, row + half + vec * kChunk, p.cos_sin_type);
  return {cos, sin};
}

// The same, where 16-bit angles are of type T: all loads are issued before the first is waited for.
template <class T>
DEVICE Angles angles_at_once(const Rotation& p, i64 position, int vec) {
  const i64 at = position * 2 * p.rotary_vecs * kChunk + vec * kChunk;
  const int half = p.rotary_vecs * kChunk;
  if (p.cos_sin_type == 2) {
    const float* from = (const float*)p.cos_sin + at;
    const f32x4 loads[4] = {mem::load<f32x4>(from), mem::load<f32x4>(from + 4), mem::load<f32x4>(from + half),
                            mem::load<f32x4>(from + half + 4)};
    return {{loads[0].lo, loads[0].hi, loads[1].lo, loads[1].hi}, {loads[2].lo, loads[2].hi, loads[3].lo, loads[3].hi}};
  }
  const u16* from = (const u16*)p.cos_sin + at;
  const u32x4 cos = mem::load<u32x4>(from), sin = mem::load<u32x4>(from + half);
  return {unpack<T>(cos), unpack<T>(sin)};
}

// Rotates one pair.
DEVICE f32x2 rotate(float x, float y, float cos, float sin) {
  using numerics::rounded_product;
  return {rounded_product(x, cos) - rounded_product(y, sin), rounded_product(y, cos) + rounded_product(x, sin)};
}

// Rotates 8 pairs, with elements in memory order.
DEVICE void rotate(const Chunk& x, const Chunk& y, const Angles& by, bool is_neox, Chunk (&rotated)[2]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float c = by.cos.pair[i / 2][i % 2], s = by.sin.pair[i / 2][i % 2];
    if (is_neox) {
      const f32x2 pair = rotate(x.pair[i / 2][i % 2], y.pair[i / 2][i % 2], c, s);
      rotated[0].pair[i / 2][i % 2] = pair.x;
      rotated[1].pair[i / 2][i % 2] = pair.y;
    } else {
      const f32x2 pair = (i < kChunk / 2 ? x : y).pair[i % (kChunk / 2)];
      rotated[i / (kChunk / 2)].pair[i % (kChunk / 2)] = rotate(pair.x, pair.y, c, s);
    }
  }
}
