// Elements with types known at run time.
#pragma once
#include "device/vec.h"

enum ElementType : int { kI8, kE4m3, kE5m2, kBf16, kF16 };

// Unpacks the two elements in a word's lower or upper half; 16-bit types have one element per half.
template <bool kUpper>
DEVICE f32x2 unpack_bytes(u32 word, int type) {
  constexpr int kShift = kUpper ? 16 : 0;
  if (type == kE4m3) return numerics::from_e4m3x2<kUpper>(word);
  if (type == kE5m2) return numerics::from_e5m2x2<kUpper>(word);
  return {float((signed char)(word >> kShift)), float((signed char)(word >> (kShift + 8)))};
}
DEVICE f32x2 unpack_halves(u32 word, int type) { return type == kBf16 ? Bf16::unpack(word) : F16::unpack(word); }

// Unpacks one element from its bits.
DEVICE float unpack_element(u32 bits, int type) {
  return type < kBf16 ? unpack_bytes<false>(bits, type).x : unpack_halves(bits, type).x;
}

// A matrix as rows along K.
struct Elements {
  const u8* data;  // the first element
  i64 row, step;   // byte strides between rows, and between elements along K
  int type;        // ElementType
  int vectors;     // 1 if 16 bytes along K are contiguous and aligned, and may be loaded together
};

// Loads 8 elements of a row from `at` on; elements from `count` on are zeros.
DEVICE Chunk load_elements(const Elements& from, const u8* row, int at, int count) {
  Chunk x;
  const int type = from.type;
  if (from.vectors && count >= kChunk) {
    if (type < kBf16) {
      const u32x2 bytes = mem::load<u32x2>(row + at);
      return {unpack_bytes<false>(bytes.x, type), unpack_bytes<true>(bytes.x, type), unpack_bytes<false>(bytes.y, type),
              unpack_bytes<true>(bytes.y, type)};
    }
    const u32x4 halves = mem::load<u32x4>(row + i64(at) * 2);
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) x.pair[i] = unpack_halves(halves[i], type);
    return x;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    u32 bits = 0;
    const u8* element = row + i64(at + i) * from.step;
    if (i < count) bits = type < kBf16 ? mem::load<u8>(element) : mem::load<u16>(element);
    x.pair[i / 2][i % 2] = unpack_element(bits, type);
  }
  return x;
}
