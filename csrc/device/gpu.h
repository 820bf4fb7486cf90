// The only place that asks which vendor compiles this. amd/ and nvidia/ export the same names with the same meanings;
// kernels include this file and what is built on it (vec.h, reduce.h, float8.h), never a vendor header.
#pragma once

#define DEVICE __attribute__((device, always_inline)) inline
#define LDS __attribute__((shared))
// KERNEL(threads[, blocks]): a kernel entry point that is launched with at most `threads` threads per block; where the compiler
// can be asked for it, with registers for so many blocks at once.

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

#include "mem.h"
#if defined(__AMDGCN__)
#define KERNEL(threads, ...) extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, threads))) void
#define WIDE_HEADER "amd/wide.h"  // for skinny.h
#include "amd/buffer.h"
#include "amd/lds_async.h"
#include "amd/mma.h"
#include "amd/mx.h"
#include "amd/numerics.h"
#include "amd/sync.h"
#include "amd/tile_mma.h"
#include "amd/wave.h"
#elif defined(__NVPTX__)
#define KERNEL(threads, ...) extern "C" __attribute__((global, launch_bounds(threads __VA_OPT__(, ) __VA_ARGS__))) void
#define WIDE_HEADER "nvidia/wide.h"
#include "nvidia/buffer.h"
#include "nvidia/lds_async.h"
#include "nvidia/mma.h"
#include "nvidia/mx.h"
#include "nvidia/numerics.h"
#include "nvidia/sync.h"
#include "nvidia/tile_mma.h"
#include "nvidia/wave.h"
#endif
