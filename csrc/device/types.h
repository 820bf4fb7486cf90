// Numbers, vectors of them, and what functions and variables on the device are declared with.
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
using f32x2 = float __attribute__((ext_vector_type(2)));
using f32x4 = float __attribute__((ext_vector_type(4)));

struct E4m3;  // element types: the arch's e4m3, and those of vec.h
struct Bf16;
struct F16;
