// 16-bit element types, and chunks: vectors of 8 elements, 16 bytes, a lane's widest access.
#pragma once
#include "gpu.h"

struct Bf16 {
  DEVICE static f32x2 unpack(u32 pair) {
    return {__builtin_bit_cast(float, pair << 16), __builtin_bit_cast(float, pair & 0xffff0000u)};
  }
  DEVICE static u32 pack(f32x2 x) { return numerics::to_bf16x2(x); }
};

struct F16 {
  using Pair = _Float16 __attribute__((ext_vector_type(2)));
  DEVICE static f32x2 unpack(u32 pair) { return __builtin_convertvector(__builtin_bit_cast(Pair, pair), f32x2); }
  DEVICE static u32 pack(f32x2 x) { return __builtin_bit_cast(u32, __builtin_convertvector(x, Pair)); }
};

// Rounds x to T and back.
template <class T>
DEVICE f32x2 round_to(f32x2 x) {
  return T::unpack(T::pack(x));
}
template <class T>
DEVICE float round_to(float x) {
  return round_to<T>(f32x2{x, x}).x;
}

template <class T>
DEVICE float load_element(const void* row, i64 column) {
  if constexpr (__is_same(T, float)) return mem::load<float>((const float*)row + column);
  else return T::unpack(mem::load<u16>((const u16*)row + column)).x;
}
template <class T>
DEVICE void store_element(void* row, i64 column, float x) {
  if constexpr (__is_same(T, float)) mem::store((float*)row + column, x);
  else mem::store<u16>((u16*)row + column, u16(T::pack({x, x})));
}

// Calls use((T*)nullptr) for an element type T known at run time: 0 bf16, 1 fp16, 2 fp32.
template <class Use>
DEVICE auto with_output_type(int type, Use use) {
  if (type == 0) return use((Bf16*)nullptr);
  if (type == 1) return use((F16*)nullptr);
  return use((float*)nullptr);
}
DEVICE float load_output(const void* row, i64 column, int type) {
  return with_output_type(type,
                          [&]<class T>(T*) __attribute__((always_inline)) { return load_element<T>(row, column); });
}
DEVICE void store_output(void* row, i64 column, float x, int type) {
  with_output_type(type, [&]<class T>(T*) __attribute__((always_inline)) { store_element<T>(row, column, x); });
}

constexpr int kChunk = 8;  // elements per u32x4

struct Chunk {  // 8 floats
  f32x2 pair[kChunk / 2];
};

template <class T>
DEVICE Chunk unpack(u32x4 packed) {
  return {T::unpack(packed.x), T::unpack(packed.y), T::unpack(packed.z), T::unpack(packed.w)};
}
template <class T>
DEVICE u32x4 pack(const Chunk& x) {
  return {T::pack(x.pair[0]), T::pack(x.pair[1]), T::pack(x.pair[2]), T::pack(x.pair[3])};
}

DEVICE float max_abs(float bound, f32x2 x) {
  return __builtin_fmaxf(__builtin_fmaxf(bound, __builtin_fabsf(x.x)), __builtin_fabsf(x.y));
}
DEVICE float max_abs(float bound, const Chunk& x) {
  for (f32x2 pair : x.pair) bound = max_abs(bound, pair);
  return bound;
}

// x * sigmoid(x), with exp(-x) as exp2(-x * log2(e)). Below x = -88 the sigmoid is 0 and the result -0.
DEVICE float silu(float x) { return x * numerics::rcp_approx(1.0f + numerics::exp2_approx(x * -1.4426950408889634f)); }
