// Scalar and vector types, and device declaration macros.
#pragma once

#define DEVICE __attribute__((device, always_inline)) inline
#define LDS __attribute__((shared))

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using u32x2 = u32 __attribute__((ext_vector_type(2)));
using u32x4 = u32 __attribute__((ext_vector_type(4)));
using i32x4 = int __attribute__((ext_vector_type(4)));
using f32x2 = float __attribute__((ext_vector_type(2)));
using f32x4 = float __attribute__((ext_vector_type(4)));

struct E4m3;  // element types: the arch's e4m3 and e5m2, vec.h's types, and int8
struct E5m2;
struct Bf16;
struct F16;
struct I8;
struct E4m3E5m2;  // tokens and weights, in this order
struct E5m2E4m3;

// Integer addition of int8 product sums, stored as bits in float registers.
DEVICE f32x4 add_whole(f32x4 a, f32x4 b) {
  return __builtin_bit_cast(f32x4, __builtin_bit_cast(i32x4, a) + __builtin_bit_cast(i32x4, b));
}
// Converts sums of Type products to floats.
template <class Type>
DEVICE f32x4 float_sums(f32x4 sums) {
  if constexpr (__is_same(Type, I8)) return __builtin_convertvector(__builtin_bit_cast(i32x4, sums), f32x4);
  else return sums;
}
