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
