// Rotary rotation of element pairs, 8 pairs per thread, in fp32; ops/rope_and_cache.hip defines the pairs.
#pragma once
#include "attention/operands.h"
#include "device/vec.h"

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

// Loads the angles of 8 pairs: T, or fp32 by cos_sin_type. All loads are issued before the first is waited for.
template <class T, class Problem>
DEVICE Angles angles(const Problem& p, i64 position, int vec) {
  const int half = p.rotary_vecs * kChunk;
  const i64 at = position * 2 * half + vec * kChunk;
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
  if (is_neox) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const f32x2 pair =
          rotate(x.pair[i / 2][i % 2], y.pair[i / 2][i % 2], by.cos.pair[i / 2][i % 2], by.sin.pair[i / 2][i % 2]);
      rotated[0].pair[i / 2][i % 2] = pair.x;
      rotated[1].pair[i / 2][i % 2] = pair.y;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const f32x2 pair = (i < kChunk / 2 ? x : y).pair[i % (kChunk / 2)];
    rotated[i / (kChunk / 2)].pair[i % (kChunk / 2)] =
        rotate(pair.x, pair.y, by.cos.pair[i / 2][i % 2], by.sin.pair[i / 2][i % 2]);
  }
}
