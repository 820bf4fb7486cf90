// Chooses the vendor's headers. amd/ and nvidia/ export the same names with the same meanings; kernels include this file and what
// is built on it (vec.h, reduce.h, float8.h), never a vendor header.
#pragma once
#include "mem.h"
#include "types.h"

// KERNEL(threads[, blocks]): a kernel entry point that is launched with at most `threads` threads per block; where the compiler
// can be asked for it, with registers for so many blocks at once.
#if defined(__AMDGCN__)
#define KERNEL(threads, ...) extern "C" __attribute__((global, amdgpu_flat_work_group_size(1, threads))) void
#include "amd/buffer.h"
#include "amd/lds_async.h"
#include "amd/mma.h"
#include "amd/mx.h"
#include "amd/numerics.h"
#include "amd/sync.h"
#include "amd/wave.h"
#elif defined(__NVPTX__)
#define KERNEL(threads, ...) extern "C" __attribute__((global, launch_bounds(threads __VA_OPT__(, ) __VA_ARGS__))) void
#include "nvidia/buffer.h"
#include "nvidia/lds_async.h"
#include "nvidia/mma.h"
#include "nvidia/mx.h"
#include "nvidia/numerics.h"
#include "nvidia/sync.h"
#include "nvidia/wave.h"
#endif
